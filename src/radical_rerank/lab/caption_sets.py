"""Data sets of captions and pictures: Flickr30K and MSCOCO (Karpathy's splits), Flickr8k, FashionIQ.

A loader checks what it reads and names the first bad record. Pictures are files under a folder; none is
opened here, but each must be there.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from radical_rerank.errors import InputError
from radical_rerank.lab.datasets import Dataset, Task

GOLD = 3
"""The grade of a caption's own picture where others are judged too"""
CAPTIONS = ("first", "all", "random")
"""which of a picture's captions are queries"""


def karpathy(
    annotations: str | Path,
    images: str | Path,
    *,
    name: str,
    split: str = "test",
    captions: str = "all",
    caption_seed: int = 42,
) -> Dataset:
    """Flickr30K and MSCOCO: the captions of the split are queries, their picture the only relevant one.

    annotations: {"images": [{"filename", "filepath"?, "split", "sentences": [{"raw", "sentid"}]}]}; the split
    "restval" counts as train
    captions: "all" of a picture, its "first" (the paper has as many queries as pictures), or a "random" one
    """
    path, folder = Path(annotations), Path(images)
    data = _json(path)
    entries = data.get("images") if isinstance(data, dict) else None
    if not isinstance(entries, list):
        raise InputError(f"{path} has no list of images")
    files: dict[str, Path] = {}
    tasks: list[Task] = []
    seen: set[str] = set()
    _check_captions(captions)
    for number, entry in enumerate(entries):
        where = f"{path}, image {number}"
        file, part = _text(entry, "filename", where), _text(entry, "split", where)
        if {"restval": "train"}.get(part, part) != split:
            continue
        if file in files:
            raise InputError(f"{where}: {file} occurs twice")
        files[file] = folder / str(entry.get("filepath") or "") / file
        sentences = entry.get("sentences")
        if not isinstance(sentences, list) or not sentences:
            raise InputError(f"{where} ({file}) has no sentences")
        own = []
        for place, sentence in enumerate(sentences):
            text = _text(sentence, "raw", f"{where} ({file}), a sentence")
            key = str(sentence.get("sentid", f"{file}#{place}"))
            if key in seen:
                raise InputError(f"{where} ({file}): sentence {key} occurs twice")
            seen.add(key)
            own.append(Task(key, text.strip(), {file: 1}))
        tasks += _chosen(own, captions, caption_seed, file)
    return _dataset(name, tasks, files, f"{path} has no image of the split {split!r}")


def flickr8k(
    tokens: str | Path,
    images: str | Path,
    *,
    split_file: str | Path | None = None,
    expert: str | Path | None = None,
    crowd: str | Path | None = None,
    captions: str = "all",
    caption_seed: int = 42,
) -> Dataset:
    """`name.jpg#k<TAB>caption`; only the pictures of `split_file` where there is one.

    expert: three judges' 1 to 4 per picture and caption; grade = mean − 1, rounded: 0 to 3
    crowd: the share of "yes" per picture and caption; grade = 3 · share, rounded
    A caption's own picture has grade 3, or 1 where nothing is judged.
    captions: "all" of a picture, its "first", or a "random" one
    """
    _check_captions(captions)
    path, folder = Path(tokens), Path(images)
    wanted = None if split_file is None else {line for _, line in _lines(Path(split_file))}
    graded = expert is not None or crowd is not None
    texts: dict[str, tuple[str, str]] = {}
    files: dict[str, Path] = {}
    for number, line in _lines(path):
        key, tab, caption = line.partition("\t")
        file, mark, _ = key.partition("#")
        if not (tab and mark and file and caption.strip()):
            raise InputError(f"{path}, line {number}: not `name.jpg#k<TAB>caption`: {line!r}")
        if key in texts:
            raise InputError(f"{path}, line {number}: {key} occurs twice")
        if wanted is not None and file not in wanted:
            continue
        texts[key] = (file, caption.strip())
        files[file] = folder / file
    if wanted is not None and wanted - files.keys():
        raise InputError(f"{split_file}: {sorted(wanted - files.keys())[0]} has no caption in {path}")
    grades: dict[str, dict[str, int]] = {
        key: {file: GOLD if graded else 1} for key, (file, _) in texts.items()
    }
    for source, columns in ((expert, 3), (crowd, 1)):
        if source is None:
            continue
        for number, line in _lines(Path(source)):
            parts = line.split("\t")
            try:
                file, key, values = parts[0], parts[1], [float(v) for v in parts[2 : 2 + columns]]
            except (IndexError, ValueError):
                values = []
            if len(values) < columns or (columns == 3 and not all(1 <= v <= 4 for v in values)):
                raise InputError(f"{source}, line {number}: not a judgement: {line!r}")
            if key not in texts or file not in files:
                if wanted is None:
                    raise InputError(f"{source}, line {number}: {key} or {file} is not in {path}")
                continue
            grade = round(sum(values) / 3 - 1) if columns == 3 else round(3 * values[0])
            if grade > 0:
                grades[key][file] = max(grade, grades[key].get(file, 0))
    own: dict[str, list[Task]] = {file: [] for file in files}
    for key, (file, text) in texts.items():
        own[file].append(Task(key, text, grades[key]))
    tasks = [task for file, of in own.items() for task in _chosen(of, captions, caption_seed, file)]
    return _dataset("flickr8k", tasks, files, f"{path} has no caption")


def fashioniq(
    captions: str | Path, split: str | Path, images: str | Path, *, category: str, suffix: str = ".png"
) -> Dataset:
    """Composed queries: `candidate` is the reference, two captions say how `target` differs.

    captions: [{"target", "candidate", "captions": [a, b]}]; split: the gallery, a flat list of ids
    """
    path, gallery_path, folder = Path(captions), Path(split), Path(images)
    gallery = _json(gallery_path)
    if not (isinstance(gallery, list) and all(isinstance(name, str) for name in gallery)):
        raise InputError(f"{gallery_path} is not a flat list of ids")
    twice = [name for name, count in Counter(gallery).items() if count > 1]
    if twice:
        raise InputError(f"{gallery_path}: {twice[0]} occurs twice")
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


def _check_captions(captions: str) -> None:
    if captions not in CAPTIONS:
        raise InputError(f"captions must be one of {', '.join(CAPTIONS)}, not {captions!r}")


def _chosen(tasks: list[Task], captions: str, seed: int, picture: str) -> list[Task]:
    """Of a picture's queries those that are asked. What is drawn for one picture depends on no other."""
    if captions == "all":
        return tasks
    return [tasks[0] if captions == "first" else random.Random(f"{seed} {picture}").choice(tasks)]


def _dataset(name: str, tasks: list[Task], files: dict[str, Path], empty: str) -> Dataset:
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


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    lines: Iterable[str] = text.splitlines()
    return ((number, line.rstrip("\r\n")) for number, line in enumerate(lines, start=1) if line.strip())


def _text(entry: Any, field: str, where: str) -> str:
    value = entry.get(field) if isinstance(entry, dict) else None
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{where} has no {field}")
    return value
