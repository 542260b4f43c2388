"""A model of MTEB, by its search protocol: real candidate groups, ranked list by list."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from mteb.models.model_meta import ModelMeta, ScoringFunction

from radical_rerank.backbones import DEFAULT_MODEL
from radical_rerank.errors import InputError
from radical_rerank.reranking import Query, Reranker


class RadicalSearch:
    """Reranks what a first stage found: tasks made by `task.convert_to_reranking(path, top_k=20)`.

    A query's text is the query; its image, where it has one too, the reference of a composed query.
    options: those of `Reranker.from_pretrained`; or pass a `reranker`
    """

    def __init__(
        self,
        model_name: str = DEFAULT_MODEL,
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
