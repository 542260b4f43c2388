"""Data sets by name."""

from __future__ import annotations

from radical_rerank.errors import InputError, unknown_name
from radical_rerank.lab.caption_sets import fashioniq, flickr8k, karpathy
from radical_rerank.lab.datasets import Dataset
from radical_rerank.lab.own_lists import own_lists
from radical_rerank.lab.paper import SEED
from radical_rerank.lab.testbed import Testbed

FILES = {
    "flickr30k": "--annotations dataset_flickr30k.json --images DIR; the first caption of each picture, or "
    "--captions all",
    "mscoco": "--annotations dataset_coco.json --images DIR; captions as flickr30k",
    "flickr8k": "--annotations Flickr8k.token.txt --images DIR --split Flickr_8k.testImages.txt; captions as "
    "flickr30k; graded with --expert ExpertAnnotations.txt, --crowd CrowdFlowerAnnotations.txt",
    "fashioniq-dress": "--annotations cap.dress.val.json --split split.dress.val.json --images DIR",
    "fashioniq-shirt": "--annotations cap.shirt.val.json --split split.shirt.val.json --images DIR",
    "fashioniq-toptee": "--annotations cap.toptee.val.json --split split.toptee.val.json --images DIR",
    "FILE.jsonl": "lists of your own, one query per line: documents with pictures, texts or both",
}
"""data sets that are read from files, and the options that name the files"""

LISTS = ".jsonl"
"""how the name of a file with lists of one's own ends"""

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
    caption_seed: int = SEED,
) -> Dataset:
    """Open a data set by its name.

    Args:
        name: one of `FILES`, a JSON-lines file, or one of the testbed's data sets
        testbed: the data sets that need no files
        lists: how many queries to generate, for data sets of the testbed
        annotations: the file of queries
        images: the folder of the pictures; of a JSON-lines file by default its own
        split: the split's name, or its file of ids
        expert, crowd: Flickr8k's files of judgements
        captions: which captions of a picture are queries: "first" (the default and the paper's protocol:
            1,000 queries over 1,000 pictures), "all", or "random"
        caption_seed: seeds the choice of "random"

    Returns:
        The data set.

    Example:
        >>> from radical_rerank.embedded.scenes.datasets import TESTBED
        >>> data = open_dataset("scenes", testbed=TESTBED, lists=3)
        >>> len(data.tasks), len(data.tasks[0].candidates)
        (3, 20)
    """
    own = name.endswith(LISTS)
    if not own and name not in (*testbed.about, *FILES):
        raise unknown_name("data set", name, [*testbed.about, *FILES])
    if captions is not None and name not in CAPTIONED:
        raise InputError(f"{name} has no captions to choose from; {', '.join(CAPTIONED)} have")
    if (expert or crowd) and name != "flickr8k":
        raise InputError(f"judgements belong to flickr8k, not to {name}")
    if name in testbed.about:
        return testbed.open(name, lists)
    if own:
        return own_lists(name, images)
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
