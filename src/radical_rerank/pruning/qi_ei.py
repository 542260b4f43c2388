from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import normalize

from radical_rerank.method import top_k
from radical_rerank.pruning.base import EarlyPruner, StageView
from radical_rerank.pruning.images import apportion, by_image, kept_tokens


@dataclass(kw_only=True)
class QIEI(EarlyPruner):
    """QI-EI keeps, of each picture, the tokens that are most like a word of the query, before the decoder.

    The query-image early interaction of ZipRerank, a listwise reranker of pages.

    A token's score is its largest cosine with any word of the query: max over w of cos(w, t). Each picture
    keeps the same fraction of its tokens.

    Args:
        keep: the fraction of each picture's visual tokens

    Example:
        >>> QIEI(keep=0.25).stages(num_layers=36)
        [Stage(layer=0, keep=0.25, when='before', of_all=False)]
    """

    summary: ClassVar[str] = "before the decoder: of each picture, the tokens most like a word of the query"

    def score(self, view: StageView) -> Tensor:
        words = normalize(view.query_words.float(), dim=-1)
        tokens = normalize(view.vision.float(), dim=-1)
        return (tokens @ words.T).amax(dim=-1)[view.alive]

    def select(self, view: StageView, count: int) -> Tensor:
        score, inside = by_image(self.score(view), view)
        chosen = inside.new_zeros(inside.shape)
        for row, budget in enumerate(apportion(inside.sum(dim=1).tolist(), count)):
            own = score[row, inside[row]]
            chosen[row, top_k(own, budget)] = True
        return kept_tokens(chosen, inside)
