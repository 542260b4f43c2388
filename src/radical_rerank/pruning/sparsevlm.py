from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from radical_rerank.errors import InputError
from radical_rerank.method import top_k
from radical_rerank.pruning.base import Merge, Pruner, Stage, StageView, scaled

SHAPE = (300, 200, 110)
"""Version 1.5's fixed list for 192 tokens on average; scaled so that the last cut leaves R"""


@dataclass(kw_only=True)
class SparseVLM(Pruner):
    """SparseVLM cuts after layers 3, 8 and 18 (of 36), by the attention of the words that matter.

    "SparseVLM: Visual Token Sparsification for Efficient Vision-Language Model Inference", arXiv:2410.04417.

    The raters are chosen once, on the decoder's input: m_t = mean over visual v of softmax over words t of
    (v · t); the words above the mean are raters. A token's score is the raters' mean attention to it. Of the
    pruned tokens, the best 30% are clustered. Each cluster's mean takes the place of its centre and counts
    towards the budget.

    The RaDiCal paper says only "per-method schedule". The default is the shape of the published fixed list,
    scaled to R. `budget="adaptive"` is version 1.0's: min(int(rank(P) · scale + bias), n − 1), P the
    raters' attention. It does not meet R.

    Args:
        keep: the fraction of visual tokens alive at the end
        layers: the tokens leave after these; None: at the depths of 3, 8 and 18 of 36
        budget: "fixed" or "adaptive", with `scale` and `bias`
        recycle: the share of the pruned tokens that is clustered; 0 for none

    Example:
        >>> [stage.layer for stage in SparseVLM(keep=0.2).stages(num_layers=36)]
        [3, 8, 18]
    """

    layers: tuple[int, ...] | None = None
    budget: str = "fixed"
    scale: float = 13.5
    bias: float = 0.0
    recycle: float = 0.3

    summary: ClassVar[str] = (
        "three cuts by the attention of the words that matter; dropped tokens are clustered"
    )

    def check(self) -> None:
        if self.budget not in ("fixed", "adaptive"):
            raise InputError(f'budget must be "fixed" or "adaptive", not {self.budget!r}')
        if not 0 <= self.recycle <= 1:
            raise InputError(f"recycle must lie in [0, 1], not {self.recycle!r}")

    def stages(self, num_layers: int) -> list[Stage]:
        after = self.layers or [scaled(layer, num_layers) for layer in (3, 8, 18)]
        shares = [min(1.0, self.keep * part / SHAPE[-1]) for part in SHAPE[-len(after) :]]
        places = dict(zip(after, shares, strict=True))
        return [Stage(layer, share, "after", of_all=True) for layer, share in places.items()]

    def score(self, view: StageView) -> Tensor:
        return self._rated(view).mean(dim=0)

    def select(self, view: StageView, count: int) -> Tensor | Merge:
        rated = self._rated(view)
        score, alive = rated.mean(dim=0), len(view.alive)
        if self.budget == "adaptive":
            rank = int(torch.linalg.matrix_rank(rated.float()))
            count = max(1, min(int(rank * self.scale + self.bias), alive - 1))
        if count >= alive:
            return torch.arange(alive, device=score.device)
        clusters, recycled = recycling(alive, count, self.recycle)
        if not clusters:
            return top_k(score, count)
        order = score.argsort(descending=True, stable=True)
        best, pool = order[: count - clusters], order[count - clusters :][:recycled]
        pool = pool.sort().values
        centres, group = cluster(view.hidden[pool].float(), clusters)
        kept = torch.cat([best, pool[centres]])
        mix = torch.zeros(count, alive, device=score.device)
        mix[torch.arange(len(best)), best] = 1
        for number in range(clusters):
            members = pool[group == number]
            mix[len(best) + number, members] = 1 / len(members)
        places = kept.argsort()
        return Merge(kept[places], mix[places])

    def _rated(self, view: StageView) -> Tensor:
        """Return (raters, n) the raters' attention."""
        raters = view.once("raters", lambda: raters_of(view.vision, view.text_embeddings))
        return view.attention([view.rows[i] for i in raters.tolist()])


def raters_of(vision: Tensor, text: Tensor) -> Tensor:
    """Return the indices of the words whose mean share of the visual tokens' attention is above average."""
    share = (vision.float() @ text.float().T).softmax(dim=-1).mean(dim=0)
    raters = (share > share.mean()).nonzero()[:, 0]
    return raters if len(raters) else torch.arange(len(text), device=text.device)


def recycling(alive: int, count: int, share: float) -> tuple[int, int]:
    """Return (C, m): m = int(share · pruned) + 1 tokens are clustered into C = int(m / 10) + 1 clusters.

    Clusters are part of the budget: pruned = alive − (count − C). (0, 0) if they would take all of it.
    """
    clusters = recycled = 0
    if share:
        for _ in range(4):  # C changes m by a tenth of its share, so this converges at once
            recycled = int(share * (alive - count + clusters)) + 1
            clusters = int(recycled / 10) + 1
    return (clusters, recycled) if clusters < count and clusters <= recycled else (0, 0)


def cluster(points: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Cluster by DPC-kNN. Returns the centres (C,) and the cluster of each point (m,).

    Density is exp(−mean squared distance to the C nearest), distance L2 / √d. Centres have the largest
    density · distance to the nearest denser point. Ties in density are broken by index instead of by noise.
    """
    distance = torch.cdist(points, points) / points.shape[1] ** 0.5
    nearest = distance.topk(min(clusters, len(points)), largest=False).values
    density = (-nearest.square().mean(dim=-1)).exp()
    rank = torch.empty_like(density, dtype=torch.long)
    rank[density.argsort(descending=True, stable=True)] = torch.arange(len(points), device=points.device)
    denser = rank[None] < rank[:, None]
    separation = distance.masked_fill(~denser, torch.inf).amin(dim=1)
    separation = separation.where(separation.isfinite(), distance.max())
    centres = (density * separation).argsort(descending=True, stable=True)[:clusters]
    group = distance[:, centres].argmin(dim=1)
    group[centres] = torch.arange(len(centres), device=points.device)
    return centres, group
