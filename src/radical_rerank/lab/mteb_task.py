"""Data sets of the lab as MTEB tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from datasets import Dataset as Table
from mteb.abstasks import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata

from radical_rerank.errors import InputError
from radical_rerank.lab.datasets import Dataset
from radical_rerank.reranking.encoding import ImageLike, Parts, load_image


def task_of(data: Dataset) -> AbsTaskRetrieval:
    """Turn a data set into an MTEB task that any MTEB model can run.

    If every query has its own list of candidates, these lists are reranked. Otherwise the task is retrieval
    from the gallery; MTEB's `convert_to_reranking` turns a first stage's predictions into lists.

    In MTEB a document or a query has at most one picture. More are an error.

    Args:
        data: the data set

    Returns:
        The task, with its data loaded.
    """
    tasks = list(data.tasks)
    lists = all(task.candidates for task in tasks)
    names = [name for task in tasks for name in task.candidates or ()] if lists else data.gallery
    corpus = list(dict.fromkeys(names))
    documents = [Parts.of(data.document(name), f"document {name}") for name in corpus]
    shown = [tuple(map(data.picture, task.pictures)) for task in tasks]
    queries = {"id": [task.id for task in tasks], **_columns(shown, [task.text for task in tasks])}
    if any(task.instruction for task in tasks):
        queries["instruction"] = [task.instruction or "" for task in tasks]
    rows = {"id": corpus, **_columns([own.images for own in documents], [own.text for own in documents])}
    kinds = ["".join(kind[0] for kind in ("image", "text") if kind in table) for table in (queries, rows)]
    metadata = TaskMetadata(
        name=data.name,
        description=f"{len(tasks)} queries for documents.",
        dataset={"path": data.name, "revision": data.digest()},
        type="Any2AnyRetrieval",
        category=cast(Any, "2".join(kinds)),
        modalities=["text", "image"],
        eval_langs=["eng-Latn"],
        main_score="mrr_at_10",
    )
    made: AbsTaskRetrieval = type(data.name, (AbsTaskRetrieval,), {"metadata": metadata})()
    split: Any = {
        "corpus": Table.from_dict(rows),
        "queries": Table.from_dict(queries),
        "relevant_docs": {task.id: dict(task.relevant) for task in tasks},
        "top_ranked": {task.id: list(task.candidates or ()) for task in tasks} if lists else None,
    }
    made.dataset, made.data_loaded = {"default": {"test": split}}, True
    return made


def _columns(pictures: Sequence[Sequence[ImageLike]], texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return the columns `image` and `text` of rows; a column that would be empty is left out."""
    if any(len(own) > 1 for own in pictures):
        raise InputError("in MTEB, a document or a query has at most one picture")
    columns: dict[str, list[Any]] = {}
    if any(pictures):
        columns["image"] = [load_image(own[0]) if own else None for own in pictures]
    if any(texts):
        columns["text"] = list(texts)
    return columns
