"""The candidates of each query: read from a run file, or retrieved by a first stage."""

from __future__ import annotations

import logging
from pathlib import Path

from torch import Tensor
from torch.nn.functional import normalize

from radical_rerank.backbones import Backbone
from radical_rerank.errors import InputError
from radical_rerank.lab.datasets import Dataset
from radical_rerank.lab.records import digest_of
from radical_rerank.lab.testbed import Testbed
from radical_rerank.retrieval import Embedder, embedder_of, nearest, read_run, write_run

log = logging.getLogger("radical_rerank")


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
    """Return the candidates of each query.

    The pools of a first stage are saved next to `path`. The name of the file identifies the data, the depth
    and the embedder (pool.run becomes pool-0123456789abcdef.run), so that a later call can read it.

    Args:
        data: the data set
        backbone: the model that reranks
        run: a TREC run file to read the candidates from
        depth: candidates per query
        path: where to save pools
        testbed: its embedder is the default first stage of its model
        embedder: the name of a first stage

    Returns:
        Per query the ids of its candidates, best first. None if the data set has lists of its own.
    """
    if run is not None:
        return _pools_of_run(data, run, depth)
    if data.tasks[0].candidates is not None:
        return None
    if embedder is None and backbone.name != testbed.name:
        raise InputError(f"{data.name} needs a first stage: pass --embedder, or --pool with a TREC run file")
    name = embedder or testbed.name
    # The testbed's embedder uses the weights of its model. Any other is identified by its name alone.
    own = None
    if name == testbed.name:
        own = backbone if backbone.name == name else Backbone.from_pretrained(name)
    weights = "" if own is None else own.fingerprint
    path = path.with_stem(f"{path.stem}-{_pool_key(data, depth, name, weights)}")
    if not path.is_file():
        first = embedder_of(name) if own is None else testbed.embedder(own)
        log.info("embedding the %d pictures of %s with %s", len(data.gallery), data.name, first.name)
        write_run(path, retrieve(data, first, depth), first.name)
    return read_run(path, known=set(data.gallery), depth=depth)


def _pools_of_run(data: Dataset, run: str, depth: int) -> dict[str, list[str]]:
    pools = read_run(run, known=set(data.gallery) or None, depth=depth)
    missing = next((task.id for task in data.tasks if task.id not in pools), None)
    if missing is not None:
        raise InputError(f"the run {run} has no candidates for query {missing}")
    return pools


def _pool_key(data: Dataset, depth: int, embedder: str, weights: str) -> str:
    """Return a digest of everything that changes the pools."""
    queries = [[task.id, task.text, task.reference] for task in data.tasks]
    references = dict.fromkeys(task.reference for task in data.tasks if task.reference)
    contents = [data.contents(data.gallery), data.picture_contents(references)]
    return digest_of([data.name, list(data.gallery), queries, contents, depth, embedder, weights])


def retrieve(
    data: Dataset, embedder: Embedder, depth: int, *, gallery: Tensor | None = None
) -> dict[str, list[tuple[str, float]]]:
    """Retrieve the nearest pictures of each query.

    Args:
        data: the data set
        embedder: the first stage
        depth: pictures per query
        gallery: the vectors of the gallery's pictures, if they are already computed

    Returns:
        Per query (id, score) pairs, best first.
    """
    if gallery is None:
        gallery = embedder.embed_images([data.picture(name) for name in data.gallery])
    queries = embedder.embed_queries([task.text for task in data.tasks])
    if any(task.reference for task in data.tasks):
        # The simplest composed first stage: add the vectors of the reference and of the text.
        names = list(dict.fromkeys(task.reference for task in data.tasks if task.reference))
        references = normalize(embedder.embed_images([data.picture(name) for name in names]), dim=-1)
        queries = normalize(queries, dim=-1)
        for row, task in enumerate(data.tasks):
            if task.reference:
                queries[row] += references[names.index(task.reference)]
        gallery = normalize(gallery, dim=-1)
    scores, numbers = nearest(queries, gallery, depth)
    return {
        task.id: [(data.gallery[n], float(s)) for n, s in zip(row, values, strict=True)]
        for task, row, values in zip(data.tasks, numbers.tolist(), scores.tolist(), strict=True)
    }
