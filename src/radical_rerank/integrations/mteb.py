"""A model of MTEB, by its search protocol: real candidate groups, ranked list by list."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from datasets import Dataset as Table
from mteb.abstasks import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models.model_meta import ModelMeta, ScoringFunction
from PIL import Image

from radical_rerank.errors import InputError
from radical_rerank.evaluation.datasets import Dataset
from radical_rerank.files import EMBEDDED
from radical_rerank.reranking import Query, Reranker
from radical_rerank.reranking.images import load_image


class RadicalSearch:
    """Reranks what a first stage found: tasks made by `task.convert_to_reranking(path, top_k=20)`.

    A query's text is the query; its image, where it has one too, the reference of a composed query.
    options: those of `Reranker.from_pretrained`; or pass a `reranker`
    """

    def __init__(
        self,
        model_name: str = EMBEDDED,
        revision: str | None = None,
        *,
        reranker: Reranker | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        self.reranker = reranker or Reranker.from_pretrained(model_name, device=device, **options)
        self._name, self._revision = model_name, revision
        self._corpus: Any = None

    def index(self, corpus: Any, **_: Any) -> None:
        self._corpus = corpus
        self._row = {name: number for number, name in enumerate(corpus["id"])}

    def search(
        self, queries: Any, *, top_k: int, top_ranked: dict[str, list[str]] | None = None, **_: Any
    ) -> dict[str, dict[str, float]]:
        """Per query its candidates, the first with the highest score."""
        if top_ranked is None:
            raise InputError("a reranker needs candidates: convert the task with convert_to_reranking")
        found = {}
        for query in queries:
            names = top_ranked[query["id"]][:top_k]
            images = [self._corpus[self._row[name]]["image"] for name in names]
            ranking = self.reranker.rank(Query(query["text"], query.get("image")), images)
            # Windows score each pass for itself: the place in the list is what holds throughout.
            found[query["id"]] = {
                names[result.index]: float(len(names) - place) for place, result in enumerate(ranking)
            }
        return found

    @property
    def mteb_model_meta(self) -> ModelMeta:
        pruner = self.reranker.pruner
        # MTEB keeps results by name and experiment: nothing that changes a ranking may share one.
        settings = {name: str(value) for name, value in self.reranker.settings.items()}
        settings |= {field.name: str(getattr(pruner, field.name)) for field in fields(pruner)}
        return ModelMeta.create_empty(
            overwrites={
                "name": f"radical-rerank/{self._name.replace('/', '__')}",
                "revision": self._revision or "no_revision_available",
                "modalities": ["text", "image"],
                "similarity_fn_name": ScoringFunction.CUSTOM,
                "experiment_kwargs": {**settings, "method": type(pruner).__name__},
            }
        )


def task_of(data: Dataset) -> AbsTaskRetrieval:
    """A data set of ours as an MTEB task, for any of its models.

    Its lists of candidates, where it has them, become the task's; else the task is one of retrieval from
    the gallery, which a first stage's predictions turn into lists (`convert_to_reranking`).
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
    made = type(data.name, (AbsTaskRetrieval,), {"metadata": metadata})()
    split = {
        "corpus": Table.from_dict({"id": corpus, "image": pictures(corpus)}),
        "queries": Table.from_dict(queries),
        "relevant_docs": {task.id: dict(task.relevant) for task in tasks},
        "top_ranked": {task.id: list(task.candidates or ()) for task in tasks} if lists else None,
    }
    made.dataset, made.data_loaded = {"default": {"test": split}}, True
    return made
