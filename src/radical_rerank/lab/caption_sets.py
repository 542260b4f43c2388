"""Loaders of caption data sets: Flickr30K and MSCOCO (Karpathy's splits), Flickr8k, FashionIQ.

A loader checks every record and names the first bad one in its error. Pictures are files in a folder. They
must exist, but they are not opened here.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from radical_rerank.errors import InputError
from radical_rerank.lab.datasets import Dataset, Task
from radical_rerank.lab.paper import SEED

GOLD = 3
"""the grade of a caption's own picture in a data set with judgements"""
CAPTIONS = ("first", "all", "random")
"""which of a picture's captions are queries"""


def karpathy(
    annotations: str | Path,
    images: str | Path,
    *,
    name: str,
    split: str = "test",
    captions: str = "all",
    caption_seed: int = SEED,
) -> Dataset:
    """Load Flickr30K or MSCOCO. Captions are queries; only a caption's own picture is relevant.

    Args:
        annotations: Karpathy's JSON file,
            {"images": [{"filename", "filepath"?, "split", "sentences": [{"raw", "sentid"}]}]}
        images: the folder of the pictures
        name: the name of the data set
        split: "train" (with "restval"), "val" or "test"
        captions: "all" captions of a picture, the "first" one (as in the paper) or a "random" one
        caption_seed: seeds the choice of "random"

    Returns:
        The data set. Its gallery holds all pictures of the split.
    """
    _check_captions(captions)
    path, folder = Path(annotations), Path(images)
    data = _json(path)
    entries = data.get("images") if isinstance(data, dict) else None
    if not isinstance(entries, list):
        raise InputError(f"{path} has no list of images")
    files: dict[str, Path] = {}
    tasks: list[Task] = []
    seen: set[str] = set()
    for number, entry in enumerate(entries):
        where = f"{path}, image {number}"
        file, part = _text(entry, "filename", where), _text(entry, "split", where)
        if {"restval": "train"}.get(part, part) != split:
            continue
        if file in files:
            raise InputError(f"{where}: {file} occurs twice")
        files[file] = folder / str(entry.get("filepath") or "") / file
        own = _sentences(entry, file, f"{where} ({file})", seen)
        tasks += _chosen(own, captions, caption_seed, file)
    return _dataset(name, tasks, files, f"{path} has no image of the split {split!r}")


def _sentences(entry: dict[str, Any], file: str, where: str, seen: set[str]) -> list[Task]:
    """Return one query per sentence of an image. Their ids are added to `seen`."""
    sentences = entry.get("sentences")
    if not isinstance(sentences, list) or not sentences:
        raise InputError(f"{where} has no sentences")
    tasks = []
    for place, sentence in enumerate(sentences):
        text = _text(sentence, "raw", f"{where}, a sentence")
        key = str(sentence.get("sentid", f"{file}#{place}"))
        if key in seen:
            raise InputError(f"{where}: sentence {key} occurs twice")
        seen.add(key)
        tasks.append(Task(key, text.strip(), {file: 1}))
    return tasks


def flickr8k(
    tokens: str | Path,
    images: str | Path,
    *,
    split_file: str | Path | None = None,
    expert: str | Path | None = None,
    crowd: str | Path | None = None,
    captions: str = "all",
    caption_seed: int = SEED,
) -> Dataset:
    """Load Flickr8k, with graded relevance if there are judgements.

    A caption's own picture has grade 3, or 1 if there are no judgements.

    Args:
        tokens: the captions, lines of `name.jpg#k<TAB>caption`
        images: the folder of the pictures
        split_file: the names of the pictures to use; by default all
        expert: expert judgements, 1 to 4 by three people per picture and caption; grade = mean − 1, rounded
        crowd: crowd judgements, the share of "yes" per picture and caption; grade = 3 · share, rounded
        captions: "all" captions of a picture, the "first" one or a "random" one
        caption_seed: seeds the choice of "random"

    Returns:
        The data set. Its gallery holds all pictures.
    """
    _check_captions(captions)
    path, folder = Path(tokens), Path(images)
    wanted = None if split_file is None else {line for _, line in numbered_lines(Path(split_file))}
    texts = _flickr8k_captions(path, wanted)
    files = {file: folder / file for file, _ in texts.values()}
    if wanted is not None and wanted - files.keys():
        raise InputError(f"{split_file}: {sorted(wanted - files.keys())[0]} has no caption in {path}")
    own = 1 if expert is None and crowd is None else GOLD
    grades: dict[str, dict[str, int]] = {key: {file: own} for key, (file, _) in texts.items()}
    for source, columns in ((expert, 3), (crowd, 1)):
        for number, file, key, grade in _judgements(source, columns):
            if key in texts and file in files:
                if grade > 0:
                    grades[key][file] = max(grade, grades[key].get(file, 0))
            elif wanted is None:
                raise InputError(f"{source}, line {number}: {key} or {file} is not in {path}")
    queries: dict[str, list[Task]] = {file: [] for file in files}
    for key, (file, text) in texts.items():
        queries[file].append(Task(key, text, grades[key]))
    tasks = [task for file, asked in queries.items() for task in _chosen(asked, captions, caption_seed, file)]
    return _dataset("flickr8k", tasks, files, f"{path} has no caption")


def _flickr8k_captions(path: Path, wanted: set[str] | None) -> dict[str, tuple[str, str]]:
    """Read (picture, caption) pairs by the caption's id. wanted: the pictures to use; None for all"""
    texts: dict[str, tuple[str, str]] = {}
    for number, line in numbered_lines(path):
        key, tab, caption = line.partition("\t")
        file, mark, _ = key.partition("#")
        if not (tab and mark and file and caption.strip()):
            raise InputError(f"{path}, line {number}: not `name.jpg#k<TAB>caption`: {line!r}")
        if key in texts:
            raise InputError(f"{path}, line {number}: {key} occurs twice")
        if wanted is None or file in wanted:
            texts[key] = (file, caption.strip())
    return texts


def _judgements(path: str | Path | None, columns: int) -> Iterator[tuple[int, str, str, int]]:
    """Yield (line number, picture, caption id, grade). columns: 3 for expert judgements, 1 for crowd"""
    if path is None:
        return
    for number, line in numbered_lines(Path(path)):
        parts = line.split("\t")
        try:
            file, key, values = parts[0], parts[1], [float(v) for v in parts[2 : 2 + columns]]
        except (IndexError, ValueError):
            values = []
        if len(values) < columns or (columns == 3 and not all(1 <= v <= 4 for v in values)):
            raise InputError(f"{path}, line {number}: not a judgement: {line!r}")
        yield number, file, key, round(sum(values) / 3 - 1) if columns == 3 else round(3 * values[0])


def fashioniq(
    captions: str | Path, split: str | Path, images: str | Path, *, category: str, suffix: str = ".png"
) -> Dataset:
    """Load FashionIQ. A query is a reference picture and two captions that say how the target differs.

    Args:
        captions: the queries, [{"target", "candidate", "captions": [a, b]}]; `candidate` is the reference
        split: the gallery, a flat list of ids
        images: the folder of the pictures
        category: "dress", "shirt" or "toptee"
        suffix: the suffix of the picture files
    """
    path, gallery_path, folder = Path(captions), Path(split), Path(images)
    gallery = _gallery(gallery_path)
    entries = _json(path)
    if not isinstance(entries, list):
        raise InputError(f"{path} is not a list of queries")
    known = set(gallery)
    tasks = []
    for number, entry in enumerate(entries):
        where = f"{path}, query {number}"
        if isinstance(entry, dict) and "target" not in entry:
            raise InputError(f"{where} has no target: the test files have none, use the validation files")
        target, reference = _text(entry, "target", where), _text(entry, "candidate", where)
        words = entry.get("captions")
        if not (isinstance(words, list) and words and all(isinstance(w, str) and w.strip() for w in words)):
            raise InputError(f"{where} has no captions")
        for name in (target, reference):
            if name not in known:
                raise InputError(f"{where}: {name} is not in {gallery_path}")
        text = " and ".join(word.strip().rstrip(".") for word in words)
        tasks.append(Task(f"{category}-{number}", text, {target: 1}, reference))
    files = {name: folder / f"{name}{suffix}" for name in gallery}
    return _dataset(f"fashioniq-{category}", tasks, files, f"{path} has no query")


def _gallery(path: Path) -> list[str]:
    gallery = _json(path)
    if not (isinstance(gallery, list) and all(isinstance(name, str) for name in gallery)):
        raise InputError(f"{path} is not a flat list of ids")
    twice = [name for name, count in Counter(gallery).items() if count > 1]
    if twice:
        raise InputError(f"{path}: {twice[0]} occurs twice")
    return gallery


def _check_captions(captions: str) -> None:
    if captions not in CAPTIONS:
        raise InputError(f"captions must be one of {', '.join(CAPTIONS)}, not {captions!r}")


def _chosen(tasks: list[Task], captions: str, seed: int, picture: str) -> list[Task]:
    """Return the queries of one picture that are used. A random choice depends on no other picture."""
    if captions == "all":
        return tasks
    return [tasks[0] if captions == "first" else random.Random(f"{seed} {picture}").choice(tasks)]


def _dataset(name: str, tasks: list[Task], files: dict[str, Path], empty: str) -> Dataset:
    """Make the data set. empty: the error message if there are no queries"""
    if not tasks:
        raise InputError(empty)
    missing = next((file for file in files.values() if not file.is_file()), None)
    if missing is not None:
        raise InputError(f"{name}: the picture {missing} is missing")
    return Dataset(name, tasks, lambda key: files[key], list(files))


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from None


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, line) of the lines that are not blank."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    return ((number, line.rstrip("\r\n")) for number, line in enumerate(lines, start=1) if line.strip())


def _text(entry: Any, field: str, where: str) -> str:
    value = entry.get(field) if isinstance(entry, dict) else None
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{where} has no {field}")
    return value
