"""A reranker for MTEB, through its search protocol."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from radical_rerank.backbones import DEFAULT_MODEL
from radical_rerank.errors import InputError, needs_extra
from radical_rerank.integrations.documents import as_list, reads_texts, shown
from radical_rerank.reranking import Query, Reranker

with needs_extra("mteb"):
    from mteb.models.model_meta import ModelMeta, ScoringFunction


class RadicalSearch:
    """Reranks the candidates of a first stage: tasks from `task.convert_to_reranking(path, top_k=20)`.

    A document may have an image, a text or both, and so may a query.

    Args:
        model_name: a model id or a folder
        revision: recorded with the results
        reranker: use this reranker instead of loading a model
        device: for loading the model
        text: whether the documents' texts are shown to the model; by default if it reads texts, see
            `integrations.documents`
        composed: a query's text changes its image (composed retrieval); False: they are the query together
        options: passed on to `Reranker`

    Example:
        >>> from datasets import Dataset
        >>> from radical_rerank import generated_list
        >>> query, images = generated_list(0, candidates=5)
        >>> names = [f"scene {i}" for i in range(5)]
        >>> search = RadicalSearch(keep=0.2)
        >>> search.index(Dataset.from_dict({"id": names, "image": images}))
        >>> scores = search.search([{"id": "q", "text": query}], top_k=5, top_ranked={"q": names})["q"]
        >>> max(scores, key=scores.get)
        'scene 2'
    """

    def __init__(
        self,
        model_name: str = DEFAULT_MODEL,
        revision: str | None = None,
        *,
        reranker: Reranker | None = None,
        device: str | None = None,
        text: bool | None = None,
        composed: bool = True,
        **options: Any,
    ) -> None:
        self.text, self.composed = text, composed
        self.reranker = reranker or Reranker(model_name, device=device, **options)
        self._name, self._revision = self.reranker.backbone.name, revision
        self._corpus: Any = None
        self._rows: dict[str, int] = {}

    def index(self, corpus: Any, **_: Any) -> None:
        """Set the documents to rank: a dataset with `id` and `image`, `text` (and `title`), or both."""
        self._corpus = corpus
        self._rows = {name: number for number, name in enumerate(corpus["id"])}

    def search(
        self, queries: Any, *, top_k: int, top_ranked: dict[str, list[str]] | None = None, **_: Any
    ) -> dict[str, dict[str, float]]:
        """Rank each query's candidates.

        Args:
            queries: rows with an `id` and a `text`, an `image` or both; and perhaps an `instruction`
            top_k: rank only the first K candidates
            top_ranked: the candidates of each query, by id

        Returns:
            Per query, a score of each candidate. The best one has the highest.
        """
        if top_ranked is None:
            raise InputError("a reranker needs candidates: convert the task with convert_to_reranking")
        scores = {}
        for query in queries:
            names = top_ranked[query["id"]][:top_k]
            ranking = self.reranker.rank(self._query(query), [self._shown(name) for name in names])
            # Scores of different windows are not comparable, but places in the list are.
            scores[query["id"]] = {
                names[result.index]: float(len(names) - place) for place, result in enumerate(ranking)
            }
        return scores

    def _query(self, row: Any) -> Query:
        # An instruction follows the words, as for MTEB's own models.
        words = " ".join(row[field] for field in ("text", "instruction") if row.get(field))
        image = row.get("image")
        if image is not None and row.get("text") and self.composed:
            return Query(words, image)
        return Query(words, images=as_list(image))

    def _shown(self, name: str) -> dict[str, Any]:
        row = self._corpus[self._rows[name]]
        words = " ".join(row[field] for field in ("title", "text") if row.get(field))
        return shown(self.reranker, self.text, f"document {name!r}", as_list(row.get("image")), words)

    @property
    def mteb_model_meta(self) -> ModelMeta:
        """The description of this model. MTEB stores results under its name and settings."""
        pruner = self.reranker.pruner
        # Everything that changes a ranking is part of it, so that results are never mixed up.
        settings = {name: str(value) for name, value in self.reranker.settings.items()}
        settings |= {field.name: str(getattr(pruner, field.name)) for field in fields(pruner)}
        settings |= {"text": str(reads_texts(self.reranker, self.text)), "composed": str(self.composed)}
        meta: ModelMeta = ModelMeta.create_empty(
            overwrites={
                "name": f"radical-rerank/{self._name.replace('/', '__')}",
                "revision": self._revision or "no_revision_available",
                "modalities": ["text", "image"],
                "similarity_fn_name": ScoringFunction.CUSTOM,
                "experiment_kwargs": {**settings, "method": type(pruner).__name__},
            }
        )
        return meta
