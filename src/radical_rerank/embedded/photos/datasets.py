"""Data sets of photographs for experiments: lists with random candidates, and a gallery to search."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from radical_rerank.backbones import Backbone
from radical_rerank.embedded.photos.embedder import PhotoEmbedder
from radical_rerank.embedded.photos.pictures import ASKED, sample_pictures
from radical_rerank.errors import InputError
from radical_rerank.lab.caption_sets import flickr8k
from radical_rerank.lab.datasets import Dataset, LazySequence, Task
from radical_rerank.lab.first_stage import retrieve
from radical_rerank.lab.paper import CANDIDATES
from radical_rerank.lab.testbed import Testbed

ABOUT = {
    "photos": "lists of 20 photographs with one match; --data names the folder of Flickr8k",
    "photos-gallery": "its 1,000 dev photographs; a first stage finds the candidates; --data as photos",
}
"""what each data set is"""
HELD_OUT = 500
"""the last photographs of the train split, which nothing is trained on"""


def photo_gallery(folder: str | Path | None, *, split: str = "dev", captions: str = "first") -> Dataset:
    """Return a split of Flickr8k. Captions are queries over all its photographs.

    Args:
        folder: of the corpus: captions, splits and images
        split: "train", "dev", or "validation": the last photographs of "train", which nothing is trained on
        captions: which of a photograph's captions are queries, "first" or "all"
    """
    if folder is None:
        raise InputError("the photographs need --data, the folder of Flickr8k")
    folder = Path(folder)
    names = folder / f"Flickr_8k.{'train' if split == 'validation' else split}Images.txt"
    if not names.is_file():
        raise InputError(f"{folder} is not Flickr8k: it has no {names.name}")
    data = flickr8k(folder / "Flickr8k.token.txt", folder / "images", split_file=names, captions=captions)
    if split != "validation":
        return data
    gallery = data.gallery[-HELD_OUT:]
    held_out = set(gallery)
    tasks = [task for task in data.tasks if held_out & set(task.relevant)]
    return replace(data, tasks=tasks, gallery=gallery)


def photo_lists(
    folder: str | Path | None,
    *,
    lists: int | None = None,
    count: int = CANDIDATES,
    seed: int = 0,
    split: str = "dev",
    similarity: float | None = None,
) -> Dataset:
    """Return lists of a caption's photograph among others of the split, drawn at random.

    Args:
        folder: of the corpus
        lists: how many lists, in the order of the captions; by default one per caption
        count: candidates per list
        seed: draws the candidates
        split: "train", "dev" or "validation"
        similarity: not used; photographs are as alike as they are
    """
    gallery = photo_gallery(folder, split=split)
    total = len(gallery.tasks) if lists is None else min(lists, len(gallery.tasks))
    if count > len(gallery.gallery):
        raise InputError(f"lists of {count} need as many photographs; {split} has {len(gallery.gallery)}")

    def task(number: int) -> Task:
        asked = gallery.tasks[number]
        own = next(iter(asked.relevant))
        rng = random.Random(f"{seed} {asked.id}")
        others = rng.sample([name for name in gallery.gallery if name != own], count - 1)
        others.insert(rng.randrange(count), own)
        return Task(str(number), asked.text, asked.relevant, candidates=tuple(others))

    return Dataset("photos", LazySequence(total, task), gallery.picture)


def photo_pools(
    folder: str | Path | None,
    *,
    lists: int | None = None,
    count: int = CANDIDATES,
    seed: int = 0,
    similarity: float | None = None,
) -> Dataset:
    """Return lists of what the first stage finds for a caption of the dev split, best first.

    Only captions whose photograph is found are asked.

    Args:
        folder: of the corpus
        lists: how many lists at most, in the order of the captions
        count: candidates per list
        seed, similarity: not used; the first stage decides
    """
    gallery = photo_gallery(folder)
    pools = {name: found[:count] for name, found in _found(Path(str(folder)), max(count, CANDIDATES)).items()}
    asked = [task for task in gallery.tasks if set(task.relevant) & set(pools[task.id])][:lists]
    tasks = [
        Task(str(number), task.text, task.relevant, candidates=tuple(pools[task.id]))
        for number, task in enumerate(asked)
    ]
    return Dataset("photos-pools", tasks, gallery.picture)


def found_by(backbone: Backbone, folder: str | Path, depth: int = CANDIDATES) -> dict[str, list[str]]:
    """Return what a model's first stage finds for each caption of the dev split, best first."""
    nearest = retrieve(photo_gallery(folder), PhotoEmbedder(backbone), depth)
    return {task: [name for name, _ in found] for task, found in nearest.items()}


@lru_cache(maxsize=4)
def _found(folder: Path, depth: int) -> dict[str, list[str]]:
    """Return what the first stage of the model that ships finds."""
    return found_by(Backbone.from_pretrained("photos"), folder, depth)


def sample_gallery() -> Dataset:
    """Return scikit-image's sample pictures as a small gallery, with a plain query for each."""
    files = {file.name: file for file in sample_pictures()}
    tasks = [Task(str(number), query, {name: 1}) for number, (query, name) in enumerate(ASKED.items())]
    return Dataset("sample-pictures", tasks, files.__getitem__, list(files))


def testbed(folder: str | Path | None) -> Testbed:
    """Return the experiments' data. folder: of Flickr8k; without it there is only the first stage"""
    return Testbed(
        name="photos",
        lists=partial(photo_lists, folder),
        gallery=partial(photo_gallery, folder),
        embedder=PhotoEmbedder,
        about=ABOUT,
        pool_lists=partial(photo_pools, folder),
    )
