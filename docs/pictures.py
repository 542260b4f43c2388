"""The pictures of the documentation: `python docs/pictures.py` writes them to docs/images.

Needs the package with its extras lab and demo; takes about 20 seconds on a CPU. Everything is drawn from the
models that ship: photographs, a list of generated scenes, and the trust profile of the model scenes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import numpy as np
import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from PIL import Image

from radical_rerank import Ranking, Reranker
from radical_rerank.embedded.photos.pictures import sample_pictures
from radical_rerank.embedded.scenes.datasets import scene_lists
from radical_rerank.method import candidate_uniqueness, min_max, query_relevance
from radical_rerank.reranking.encoding import load_image

IMAGES = Path(__file__).parent / "images"
BLUE, ORANGE, GREEN, GREY, LIGHT = "#0b5fa5", "#c2410c", "#15803d", "#6b7280", "#dbeafe"
LIST = 2
"""the list that is shown: number 2 of the test split"""


PHOTOGRAPH = "a cat"
"""the query over photographs"""
SIDE = 288
"""the pixels of a photograph as the model sees it"""


def main() -> None:
    pyplot.rcParams.update({"font.size": 10, "svg.fonttype": "none"})
    photographs = [load_image(file).resize((SIDE, SIDE)) for file in sample_pictures()]
    survivors(PHOTOGRAPH, photographs, Reranker(keep=0.2).rank(PHOTOGRAPH, photographs), "photographs.png")
    data = scene_lists(lists=LIST + 1)
    task = data.tasks[LIST]
    images = [data.picture(name) for name in task.candidates or ()]
    reranker = Reranker("scenes", keep=0.2)
    ranking = reranker.rank(task.text, images)
    survivors(task.text, images, ranking, "survivors.png")
    signals(task.text, images, ranking, reranker)
    trust(reranker, ranking)
    pipeline(ranking)
    cost(task.text, images, reranker)


def save(figure: Any, name: str, dpi: int = 150) -> None:
    IMAGES.mkdir(exist_ok=True)
    figure.savefig(IMAGES / name, dpi=dpi, facecolor="white")
    pyplot.close(figure)
    print(IMAGES / name)


def masked(image: Image.Image, rows: int, columns: int, alive: list[int] | None) -> np.ndarray:
    """The image with the area of dropped tokens in pale grey; None: all are alive."""
    bright = np.asarray(image.convert("RGB"), dtype=np.float32) / 255
    if alive is None:
        return bright
    grid = np.zeros(rows * columns, dtype=bool)
    grid[alive] = True
    ys = np.arange(image.height) * rows // image.height
    xs = np.arange(image.width) * columns // image.width
    kept = grid.reshape(rows, columns)[ys[:, None], xs[None]]
    pale = 0.86 + 0.1 * (bright.mean(axis=-1, keepdims=True) - 0.5)
    return np.where(kept[..., None], bright, pale)


def picture(axes: Axes, shown: np.ndarray, **options: Any) -> None:
    axes.imshow(shown, interpolation="nearest", **options)
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_color("#d1d5db")


def survivors(query: str, images: list[Image.Image], ranking: Ranking, name: str, columns: int = 7) -> None:
    """The best candidates, and which of their tokens are alive after each stage."""
    report = ranking.report
    assert report is not None
    places = [report.indices.index(result.index) for result in ranking[:columns]]
    rows = [("all tokens", report.visual_tokens, None)] + [
        (f"before layer {stage.layer}", stage.after, stage.survivors) for stage in report.stages
    ]
    figure, grid = pyplot.subplots(
        len(rows), columns, figsize=(1.35 * columns + 1.6, 1.22 * len(rows) + 0.75), squeeze=False
    )
    figure.subplots_adjust(left=0.125, right=0.995, top=0.895, bottom=0.01, wspace=0.06, hspace=0.08)
    figure.suptitle(f"Query: “{query}”", x=0.01, y=0.985, ha="left", fontsize=13)
    for row, (label, count, alive) in zip(grid, rows, strict=True):
        for axes, place in zip(row, places, strict=True):
            (block,) = report.blocks[place]
            kept = None if alive is None else alive[place]
            picture(axes, masked(images[report.indices[place]], block.rows, block.columns, kept))
        share = f"{count} of {report.visual_tokens}" if alive is not None else f"{count}"
        row[0].annotate(
            f"{label}\n{share}", (-0.12, 0.5), xycoords="axes fraction", ha="right", va="center", fontsize=10
        )
    for number, (axes, result) in enumerate(zip(grid[0], ranking[:columns], strict=True), start=1):
        axes.annotate(
            f"rank {number}, p = {result.probability:.3f}",
            (0.5 * (axes.get_position().x0 + axes.get_position().x1), 0.902),
            xycoords="figure fraction", ha="center", va="bottom", fontsize=9,
        )  # fmt: skip
    save(figure, name, dpi=110)


def signals(query: str, images: list[Image.Image], ranking: Ranking, reranker: Reranker) -> None:
    """Uniqueness, relevance and their product, token by token."""
    report = ranking.report
    assert report is not None
    backbone = reranker.backbone
    features = backbone.encode([backbone.preprocess(image, reranker.max_image_tokens) for image in images])
    tokens = torch.cat([feature.tokens for feature in features])
    words = backbone.tokenizer(" " + query, add_special_tokens=False)["input_ids"]
    embedding = backbone.model.get_input_embeddings()(torch.tensor(words, device=backbone.device)).mean(dim=0)
    with torch.no_grad():
        unique, relevant = candidate_uniqueness(tokens), query_relevance(tokens, embedding)
        maps = {"CCU": unique, "QRel": relevant, "DTI = CCU · QRel": unique * relevant}
    sizes = [len(feature.tokens) for feature in features]
    parts = {name: min_max(values).split(sizes) for name, values in maps.items()}
    shown = [result.index for result in ranking[:4]]
    figure, grid = pyplot.subplots(len(shown), 4, figsize=(6.4, 1.45 * len(shown) + 0.75))
    figure.subplots_adjust(left=0.01, right=0.99, top=0.895, bottom=0.01, wspace=0.05, hspace=0.08)
    figure.suptitle(f"Query: “{query}”", x=0.01, y=0.985, ha="left", fontsize=12)
    for row, number in zip(grid, shown, strict=True):
        (block,) = features[number].blocks
        picture(row[0], np.asarray(images[number]))
        width, height = images[number].size
        for axes, values in zip(row[1:], parts.values(), strict=True):
            cells = values[number].reshape(block.rows, block.columns).cpu().numpy()
            picture(axes, cells, cmap="viridis", vmin=0, vmax=1, extent=(0, width, height, 0))
    for axes, name in zip(grid[0], ("candidate", *maps), strict=True):
        axes.set_title(name, fontsize=10, pad=4)
    save(figure, "signals.png")


def trust(reranker: Reranker, ranking: Ranking) -> None:
    """α and H_norm of every layer, and the layers that α-Maximin chose."""
    profile, report = reranker.profile, ranking.report
    assert report is not None
    assert profile is not None
    assert profile.h_norm is not None
    chosen = [stage.layer for stage in report.stages]
    figure, axes = pyplot.subplots(figsize=(7.2, 3.9), layout="constrained")
    for layer in chosen:
        axes.axvspan(layer - 0.18, layer + 0.18, color=LIGHT, zorder=0)
    axes.plot(profile.layers, profile.h_norm, "o-", ms=3, lw=1.2, color="#9ca3af", label="H_norm(l), entropy")
    axes.plot(profile.layers, profile.alpha, "o-", ms=5, lw=2, color=BLUE, label="α(l), weight of the prior")
    for layer in chosen:
        value = profile.alpha_at(layer)
        below = value > 0.6
        axes.annotate(
            f"{value:.2f}", (layer, value), (9, -14 if below else 3), textcoords="offset points", color=BLUE
        )
    axes.set_xticks(profile.layers)
    axes.set_ylim(-0.06, 1.08)
    axes.set_xlim(-0.6, len(profile.layers) - 0.4)
    axes.set_xlabel("decoder layer l  (shaded: RaDiCal prunes before this layer)")
    axes.text(-0.4, 0.08, "attention concentrated:\nα near 0, attention decides", color=GREY, va="center")
    axes.text(-0.4, 0.70, "attention spread out:\nα near 1, the prior decides", color=GREY, va="center")
    axes.grid(alpha=0.25, axis="y")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.legend(loc="outside upper left", ncols=2, frameon=False)
    save(figure, "trust.png")


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, colour: str) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.12", fc=colour, ec="#374151", lw=1
        )
    )
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9.5, linespacing=1.35)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **options: Any) -> None:
    style = {"arrowstyle": "-|>", "mutation_scale": 11, "lw": 1.1, "color": "#374151", **options}
    axes.add_patch(FancyArrowPatch(start, end, shrinkA=0, shrinkB=0, **style))


def pipeline(ranking: Ranking) -> None:
    """Query and images in, ranking out; the decoder's bars are its visual tokens, layer by layer."""
    report = ranking.report
    assert report is not None
    figure, axes = pyplot.subplots(figsize=(10.4, 4.6))
    figure.subplots_adjust(left=0.005, right=0.995, top=0.995, bottom=0.005)
    axes.set_xlim(0, 20.8)
    axes.set_ylim(0.8, 10)
    axes.axis("off")
    left, width, base, full = 7.1, 0.7, 5.0, 3.6
    chosen = {stage.layer: stage for stage in report.stages}
    text = report.tokens - report.visual_tokens
    for layer, count in enumerate(report.tokens_per_layer):
        middle, height = left + (layer + 0.5) * width, full * (count - text) / report.visual_tokens
        axes.bar(middle, height, width - 0.16, base, color=BLUE if layer in chosen else "#93c5fd")
        axes.text(middle, base - 0.3, str(layer), ha="center", va="center", fontsize=8, color=GREY)
        if layer in chosen or layer == 0:
            axes.text(middle, base + height + 0.28, str(count - text), ha="center", va="center", color=BLUE)
    end = left + width * len(report.tokens_per_layer)
    axes.text(
        (left + end) / 2, 9.6, "decoder: visual tokens in each layer (dark: pruned before this layer)",
        ha="center", va="center",
    )  # fmt: skip
    axes.text(left - 0.1, base - 0.3, "layer", ha="right", va="center", fontsize=8, color=GREY)
    box(axes, 0.2, 5.4, 2.7, 1.8, "query and\nN candidate\nimages", "#f3f4f6")
    box(axes, 3.6, 5.4, 2.2, 1.8, "vision\nencoder", "#f3f4f6")
    box(axes, 16.3, 5.4, 2.0, 1.8, "scores of\nthe letters\nA, B, C …", "#f3f4f6")
    box(axes, 19.0, 5.4, 1.6, 1.8, "ranking", "#dcfce7")
    box(axes, 3.2, 1.9, 3.0, 1.6, "WHAT: prior\nDTI = CCU · QRel\nonce per list", "#ffedd5")
    stage = left + 2.6 * width
    last = left + 11.4 * width
    rule = "at each stage: score = priorᵅ · attention¹⁻ᵅ\nthe top tokens stay"
    box(axes, stage, 1.9, last - stage, 1.6, rule, "#f3f4f6")
    box(axes, 16.3, 2.75, 4.3, 1.2, "WHEN: α of every layer\nonce per model", LIGHT)
    box(axes, 16.3, 1.1, 4.3, 1.2, "WHERE: α-Maximin chooses\nthe layers, once per model", LIGHT)
    arrow(axes, (2.9, 6.3), (3.6, 6.3))
    arrow(axes, (5.8, 6.3), (left, 6.3))
    arrow(axes, (end + 0.1, 6.3), (16.3, 6.3))
    arrow(axes, (18.3, 6.3), (19.0, 6.3))
    arrow(axes, (4.7, 5.4), (4.7, 3.5))
    arrow(axes, (1.55, 5.4), (3.2, 2.7), connectionstyle="angle,angleA=-90,angleB=180,rad=6")
    arrow(axes, (6.2, 2.7), (stage, 2.7))
    arrow(axes, (16.3, 3.3), (last, 3.1))
    arrow(axes, (16.3, 1.7), (last, 2.2))
    for layer in chosen:
        middle = left + width * (layer + 0.5)
        arrow(axes, (middle, 3.5), (middle, base - 0.55), color=BLUE)
    save(figure, "pipeline.png")


def cost(query: str, images: list[Image.Image], reranker: Reranker) -> None:
    """Tokens in every layer, method by method."""
    figure, axes = pyplot.subplots(figsize=(7.2, 3.7), layout="constrained")
    methods = {
        "Dense": ("dense", "black"),
        "RaDiCal": ("radical", BLUE),
        "PyramidDrop": ("pyramiddrop", GREEN),
        "SparseVLM": ("sparsevlm", "#7c3aed"),
        "FastV": ("fastv", ORANGE),
    }
    for title, (name, colour) in methods.items():
        other = Reranker(reranker.backbone, name, keep=0.2, vision_cache=reranker.vision_cache)
        report = other.rank(query, images).report
        assert report is not None
        counts = report.tokens_per_layer
        axes.stairs(
            counts, np.arange(len(counts) + 1) - 0.5, baseline=None, lw=2.2 if name == "radical" else 1.4,
            color=colour, label=f"{title}: {report.flops_saved:.0%} of the FLOPs saved",
        )  # fmt: skip
    axes.set_xticks(range(len(counts)))
    axes.set_xlim(-0.5, len(counts) - 0.5)
    axes.set_ylim(0, None)
    axes.set_xlabel("decoder layer")
    axes.set_ylabel("tokens, text included")
    axes.grid(alpha=0.25, axis="y")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper right", bbox_to_anchor=(1, 0.93))
    save(figure, "cost.png")


if __name__ == "__main__":
    main()
