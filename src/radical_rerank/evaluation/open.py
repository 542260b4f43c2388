"""Data sets by name, and the first stage's pools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor
from torch.nn.functional import normalize

from radical_rerank.backbones import Backbone
from radical_rerank.errors import InputError
from radical_rerank.evaluation.caption_sets import fashioniq, flickr8k, karpathy
from radical_rerank.evaluation.datasets import Dataset
from radical_rerank.evaluation.records import digest_of
from radical_rerank.evaluation.scene_sets import (
    scenes,
    scenes_composed,
    scenes_composed_gallery,
    scenes_gallery,
)
from radical_rerank.files import EMBEDDED
from radical_rerank.retrieval import Embedder, embedder_of, nearest, read_run, write_run

ABOUT = {
    "scenes": "generated lists of 20 with one match; nothing needed",
    "scenes-composed": "generated references with a change in words; nothing needed",
    "scenes-composed-gallery": "references and changes over a gallery of 1,000; a first stage is needed",
    "scenes-gallery": "a generated gallery of 1,000; a first stage finds the candidates",
    "flickr30k": "--annotations dataset_flickr30k.json --images DIR; the first caption of each picture, or "
    "--captions all",
    "mscoco": "--annotations dataset_coco.json --images DIR; captions as flickr30k",
    "flickr8k": "--annotations Flickr8k.token.txt --images DIR --split Flickr_8k.testImages.txt; captions as "
    "flickr30k; graded with --expert ExpertAnnotations.txt, --crowd CrowdFlowerAnnotations.txt",
    "fashioniq-dress": "--annotations cap.dress.val.json --split split.dress.val.json --images DIR",
    "fashioniq-shirt": "--annotations cap.shirt.val.json --split split.shirt.val.json --images DIR",
    "fashioniq-toptee": "--annotations cap.toptee.val.json --split split.toptee.val.json --images DIR",
}

CAPTIONED = ("flickr30k", "mscoco", "flickr8k")
"""data sets with several captions of a picture"""


def open_dataset(
    name: str,
    *,
    lists: int | None = None,
    annotations: str | None = None,
    images: str | None = None,
    split: str = "test",
    expert: str | None = None,
    crowd: str | None = None,
    captions: str | None = None,
    caption_seed: int = 42,
) -> Dataset:
    """lists: how many of the generated data sets' queries to draw; expert, crowd: Flickr8k's judgements.

    captions: of a picture with several, "first" (the default, the paper's 1,000 queries over 1,000 pictures),
        "all", or "random", one drawn by `caption_seed`
    """
    if name not in ABOUT:
        raise InputError(f"unknown data set {name!r}; there are: {', '.join(ABOUT)}")
    if captions is not None and name not in CAPTIONED:
        raise InputError(f"{name} has no captions to choose from; {', '.join(CAPTIONED)} have")
    if (expert or crowd) and name != "flickr8k":
        raise InputError(f"judgements belong to flickr8k, not to {name}")
    if name == "scenes":
        return scenes(lists=lists or 1000)
    if name == "scenes-composed":
        return scenes_composed(lists=lists or 1000)
    if name == "scenes-gallery":
        return scenes_gallery()
    if name == "scenes-composed-gallery":
        return scenes_composed_gallery()
    if annotations is None or images is None:
        raise InputError(f"{name} needs {ABOUT[name]}")
    if name == "flickr8k":
        chosen = None if split == "test" else split
        return flickr8k(
            annotations,
            images,
            split_file=chosen,
            expert=expert,
            crowd=crowd,
            captions=captions or "first",
            caption_seed=caption_seed,
        )
    if name.startswith("fashioniq-"):
        return fashioniq(annotations, split, images, category=name.removeprefix("fashioniq-"))
    return karpathy(
        annotations, images, name=name, split=split, captions=captions or "first", caption_seed=caption_seed
    )


def pools_of(
    data: Dataset,
    backbone: Backbone,
    run: str | None,
    depth: int,
    path: Path,
    *,
    embedder: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, list[str]] | None:
    """Candidates per query: the data set's own lists (None), a run file's, or a first stage's.

    embedder: its name; by default the embedded model's own, where that is the model
    What the first stage finds is kept beside `path`, under a name that stands for the data set, the depth and
    the embedder (pool.run as pool-0123456789abcdef.run), and read from there the next time.
    """
    if run is not None:
        found = read_run(run, known=set(data.gallery) or None, depth=depth)
        missing = next((task.id for task in data.tasks if task.id not in found), None)
        if missing is not None:
            raise InputError(f"the run {run} has no candidates for query {missing}")
        return found
    if data.tasks[0].candidates is not None:
        return None
    if embedder is None and backbone.name != EMBEDDED:
        raise InputError(f"{data.name} needs a first stage: pass --embedder, or --pool with a TREC run file")
    name = embedder or EMBEDDED
    asked = [[task.id, task.text, task.reference] for task in data.tasks]
    references = dict.fromkeys(task.reference for task in data.tasks if task.reference)
    shown = [data.contents(data.gallery), data.contents(references)]
    # The embedded embedder is the embedded model; another is known by its name alone until it is loaded.
    own = backbone if backbone.name == EMBEDDED else None
    weights = (own or Backbone.from_pretrained()).fingerprint if name == EMBEDDED else ""
    key = digest_of([data.name, list(data.gallery), asked, shown, depth, name, weights])
    path = path.with_stem(f"{path.stem}-{key}")
    if path.is_file():
        return read_run(path, known=set(data.gallery), depth=depth)
    first = embedder_of(name, own)
    say(f"embedding the {len(data.gallery)} pictures of {data.name} with {first.name}")
    pool = retrieve(data, first, depth)
    write_run(path, pool, first.name)
    return read_run(path, known=set(data.gallery), depth=depth)


def retrieve(
    data: Dataset, embedder: Embedder, depth: int, *, gallery: Tensor | None = None
) -> dict[str, list[tuple[str, float]]]:
    """Per query the `depth` nearest pictures with their scores, best first.

    gallery: the pictures' vectors, where they are known already
    """
    if gallery is None:
        gallery = embedder.embed_images([data.picture(name) for name in data.gallery])
    queries = embedder.embed_queries([task.text for task in data.tasks])
    if any(task.reference for task in data.tasks):
        # What the reference shows and what the words say, added up: the plainest first stage of the kind.
        names = list(dict.fromkeys(task.reference for task in data.tasks if task.reference))
        shown = normalize(embedder.embed_images([data.picture(name) for name in names]), dim=-1)
        queries = normalize(queries, dim=-1)
        for row, task in enumerate(data.tasks):
            if task.reference:
                queries[row] += shown[names.index(task.reference)]
        gallery = normalize(gallery, dim=-1)
    scores, numbers = nearest(queries, gallery, depth)
    return {
        task.id: [(data.gallery[n], float(s)) for n, s in zip(row, values, strict=True)]
        for task, row, values in zip(data.tasks, numbers.tolist(), scores.tolist(), strict=True)
    }
