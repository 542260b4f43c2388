"""Data sets by name, and the first stage's pools."""

from __future__ import annotations

import logging
from pathlib import Path

from torch import Tensor
from torch.nn.functional import normalize

from radical_rerank.backbones import Backbone
from radical_rerank.errors import InputError, unknown_name
from radical_rerank.lab.caption_sets import fashioniq, flickr8k, karpathy
from radical_rerank.lab.datasets import Dataset
from radical_rerank.lab.records import digest_of
from radical_rerank.lab.testbed import Testbed
from radical_rerank.retrieval import Embedder, embedder_of, nearest, read_run, write_run

log = logging.getLogger("radical_rerank")

FILES = {
    "flickr30k": "--annotations dataset_flickr30k.json --images DIR; the first caption of each picture, or "
    "--captions all",
    "mscoco": "--annotations dataset_coco.json --images DIR; captions as flickr30k",
    "flickr8k": "--annotations Flickr8k.token.txt --images DIR --split Flickr_8k.testImages.txt; captions as "
    "flickr30k; graded with --expert ExpertAnnotations.txt, --crowd CrowdFlowerAnnotations.txt",
    "fashioniq-dress": "--annotations cap.dress.val.json --split split.dress.val.json --images DIR",
    "fashioniq-shirt": "--annotations cap.shirt.val.json --split split.shirt.val.json --images DIR",
    "fashioniq-toptee": "--annotations cap.toptee.val.json --split split.toptee.val.json --images DIR",
}
"""data sets that are read from files, and the options that name them"""

CAPTIONED = ("flickr30k", "mscoco", "flickr8k")
"""data sets with several captions per picture"""


def open_dataset(
    name: str,
    *,
    testbed: Testbed,
    lists: int | None = None,
    annotations: str | None = None,
    images: str | None = None,
    split: str = "test",
    expert: str | None = None,
    crowd: str | None = None,
    captions: str | None = None,
    caption_seed: int = 42,
) -> Dataset:
    """Open a data set by its name.

    testbed: its data sets have names, too
    lists: how many queries to draw from a generated data set
    expert, crowd: Flickr8k's judgements
    captions: of a picture with several, "first" (the default: 1,000 queries over 1,000 pictures, as in the
        paper), "all", or "random", one drawn by `caption_seed`
    """
    if name not in (*testbed.about, *FILES):
        raise unknown_name("data set", name, [*testbed.about, *FILES])
    if captions is not None and name not in CAPTIONED:
        raise InputError(f"{name} has no captions to choose from; {', '.join(CAPTIONED)} have")
    if (expert or crowd) and name != "flickr8k":
        raise InputError(f"judgements belong to flickr8k, not to {name}")
    if name in testbed.about:
        return testbed.open(name, lists)
    if annotations is None or images is None:
        raise InputError(f"{name} needs {FILES[name]}")
    if name == "flickr8k":
        return flickr8k(
            annotations,
            images,
            split_file=None if split == "test" else split,
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
    testbed: Testbed,
    embedder: str | None = None,
) -> dict[str, list[str]] | None:
    """Return the candidates of each query: the data set's own lists (None), a run file's, or a first stage's.

    embedder: its name; by default the model's own, if it is the testbed's model
    The first stage's pools are saved beside `path`, under a name that stands for the data set, the depth and
    the embedder (pool.run as pool-0123456789abcdef.run), and read from there the next time.
    """
    if run is not None:
        pools = read_run(run, known=set(data.gallery) or None, depth=depth)
        missing = next((task.id for task in data.tasks if task.id not in pools), None)
        if missing is not None:
            raise InputError(f"the run {run} has no candidates for query {missing}")
        return pools
    if data.tasks[0].candidates is not None:
        return None
    if embedder is None and backbone.name != testbed.name:
        raise InputError(f"{data.name} needs a first stage: pass --embedder, or --pool with a TREC run file")
    name = embedder or testbed.name
    asked = [[task.id, task.text, task.reference] for task in data.tasks]
    references = dict.fromkeys(task.reference for task in data.tasks if task.reference)
    shown = [data.contents(data.gallery), data.contents(references)]
    # The testbed's embedder is its model; another is known by its name alone until it is loaded.
    own = None
    if name == testbed.name:
        own = backbone if backbone.name == name else Backbone.from_pretrained(name)
    weights = "" if own is None else own.fingerprint
    key = digest_of([data.name, list(data.gallery), asked, shown, depth, name, weights])
    path = path.with_stem(f"{path.stem}-{key}")
    if path.is_file():
        return read_run(path, known=set(data.gallery), depth=depth)
    first = embedder_of(name) if own is None else testbed.embedder(own)
    log.info("embedding the %d pictures of %s with %s", len(data.gallery), data.name, first.name)
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
