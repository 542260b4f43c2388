"""Data sets of the lab as MTEB tasks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from datasets import Dataset as Table
from mteb.abstasks import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata
from PIL import Image

from radical_rerank.lab.datasets import Dataset
from radical_rerank.reranking.encoding import load_image


def task_of(data: Dataset) -> AbsTaskRetrieval:
    """Turn a data set into an MTEB task that any MTEB model can run.

    If every query has its own list of candidates, these lists are reranked. Otherwise the task is retrieval
    from the gallery; MTEB's `convert_to_reranking` turns a first stage's predictions into lists.

    Args:
        data: the data set

    Returns:
        The task, with its data loaded.
    """
    tasks = list(data.tasks)
    lists = all(task.candidates for task in tasks)
    composed = any(task.reference for task in tasks)
    names = [name for task in tasks for name in task.candidates or ()] if lists else data.gallery
    metadata = TaskMetadata(
        name=data.name,
        description=f"{len(tasks)} queries for pictures.",
        dataset={"path": data.name, "revision": data.digest()},
        type="Any2AnyRetrieval",
        category="it2i" if composed else "t2i",
        modalities=["text", "image"],
        eval_langs=["eng-Latn"],
        main_score="mrr_at_10",
    )

    def pictures(wanted: Iterable[str | None]) -> list[Image.Image | None]:
        return [None if name is None else load_image(data.picture(name)) for name in wanted]

    corpus = list(dict.fromkeys(names))
    queries: dict[str, list[Any]] = {"id": [task.id for task in tasks], "text": [task.text for task in tasks]}
    if composed:
        queries["image"] = pictures(task.reference for task in tasks)
    made: AbsTaskRetrieval = type(data.name, (AbsTaskRetrieval,), {"metadata": metadata})()
    split: Any = {
        "corpus": Table.from_dict({"id": corpus, "image": pictures(corpus)}),
        "queries": Table.from_dict(queries),
        "relevant_docs": {task.id: dict(task.relevant) for task in tasks},
        "top_ranked": {task.id: list(task.candidates or ()) for task in tasks} if lists else None,
    }
    made.dataset, made.data_loaded = {"default": {"test": split}}, True
    return made
