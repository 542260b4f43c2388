"""Lists of your own: a JSON-lines file with one query per line, its documents, and which are relevant.

    {"id": "q1", "query": "a red mug", "relevant": ["a"], "documents": [
     {"id": "a", "image": "mug.jpg", "text": "Mug, 300 ml"}, {"id": "b", "images": ["x.jpg", "y.jpg"]}]}

(on one line). `query` is a text, or a dict with `text`, `image` or `images`, `reference` and `instruction`.
`relevant` is a list of ids, or a dict from ids to grades. A document has `image` or `images`, `text` or both.
Paths are relative to the folder of the file. An id names one document in the whole file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from radical_rerank.errors import InputError, unknown_name
from radical_rerank.lab.caption_sets import numbered_lines
from radical_rerank.lab.datasets import Dataset, Task
from radical_rerank.reranking.encoding import Document, ImageLike, Parts


def own_lists(file: str | Path, images: str | Path | None = None) -> Dataset:
    """Load lists of your own from a JSON-lines file.

    Args:
        file: the file
        images: the folder that its paths are relative to; by default the file's own

    Returns:
        The data set. It is named after the file.
    """
    path = Path(file)
    reader = _Reader(path.parent if images is None else Path(images))
    tasks: dict[str, Task] = {}
    wheres: dict[str, str] = {}
    for number, line in numbered_lines(path):
        where = f"{path}, line {number}"
        task = reader.task(_record(line, where), str(number), where)
        if task.id in tasks:
            raise InputError(f"{where}: the query {task.id} occurs twice")
        tasks[task.id], wheres[task.id] = task, where
    if not tasks:
        raise InputError(f"{path} has no queries")
    for task in tasks.values():
        unknown = next((name for name in task.relevant if name not in reader.documents), None)
        if unknown is not None:
            raise InputError(f"{wheres[task.id]}: relevant names {unknown!r}, which is no document")
    return Dataset(
        path.stem,
        list(tasks.values()),
        reader.pictures.__getitem__,
        list(reader.documents),
        reader.documents.__getitem__,
    )


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise InputError(f"{where} is not an object with query, documents and relevant")
    known = ("id", "query", "documents", "relevant")
    for name in record:
        if name not in known:
            raise unknown_name("field", name, known, of=where)
    return record


@dataclass
class _Reader:
    """Collects the documents and the pictures of queries, by their ids.

    folder: what paths are relative to
    """

    folder: Path
    documents: dict[str, Document] = field(default_factory=dict)
    pictures: dict[str, ImageLike] = field(default_factory=dict)

    def task(self, record: Mapping[str, Any], number: str, where: str) -> Task:
        """Read one line. number: the id of a query that has none"""
        query, given = record.get("query"), record.get("documents")
        fields = {"text": query} if isinstance(query, str) else query
        if not isinstance(fields, dict):
            raise InputError(f"{where} has no query: a text, or an object with text and images")
        if not isinstance(given, list) or not given:
            raise InputError(f"{where} has no list of documents")
        own = {name: fields[name] for name in fields if name not in ("reference", "instruction")}
        parts = Parts.of(own, f"the query of {where}")
        reference, instruction = fields.get("reference"), fields.get("instruction")
        if reference is not None and (parts.images or not parts.text):
            raise InputError(f"{where}: a query with a reference has a text, and no other pictures")
        if not (instruction is None or isinstance(instruction, str)):
            raise InputError(f"{where}: the instruction is no text")
        for image in (*parts.images, *([] if reference is None else [reference])):
            self.pictures[image] = self._picture(image, where)
        return Task(
            str(record.get("id", number)),
            parts.text.strip(),
            _grades(record.get("relevant"), where),
            reference,
            self._candidates(given, where),
            parts.images,  # type: ignore[arg-type]  # _picture checked that these are strings
            instruction,
        )

    def _candidates(self, given: list[Any], where: str) -> tuple[str, ...]:
        names: list[str] = []
        for place, document in enumerate(given):
            here = f"{where}, document {place}"
            name = document.get("id") if isinstance(document, dict) else None
            if isinstance(name, bool) or not isinstance(name, (str, int)):
                raise InputError(f"{here} has no id")
            name = str(name)
            if name in names:
                raise InputError(f"{here}: {name} occurs twice")
            names.append(name)
            parts = Parts.of({k: v for k, v in document.items() if k != "id"}, here)
            images = [self._picture(image, here) for image in parts.images]
            made: Document = {"images": images, "text": parts.text.strip()}
            if self.documents.setdefault(name, made) != made:
                raise InputError(f"{here}: {name} is another document in an earlier line")
        return tuple(names)

    def _picture(self, given: Any, where: str) -> ImageLike:
        """Return the path of a picture that exists, or its data URI."""
        if not isinstance(given, str):
            raise InputError(f"{where}: a picture is a path or a data URI, not a {type(given).__name__}")
        if given[:5].lower() == "data:":
            return given
        path = self.folder / given
        if not path.is_file():
            raise InputError(f"{where}: the picture {path} is missing")
        return path


def _grades(relevant: Any, where: str) -> dict[str, int]:
    """Return the grades of the relevant documents."""
    grades = dict.fromkeys(map(str, relevant), 1) if isinstance(relevant, list) else relevant
    if not isinstance(grades, dict) or not all(
        type(grade) is int and grade >= 0 for grade in grades.values()
    ):
        raise InputError(
            f"{where}: relevant is no list of ids, and no object with a whole number for each id"
        )
    grades = {name: grade for name, grade in grades.items() if grade}
    if not grades:
        raise InputError(f"{where} has no relevant documents")
    return grades
