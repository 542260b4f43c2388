"""Plots of table rows, by Matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from radical_rerank.errors import needs_extra
from radical_rerank.files import replacing
from radical_rerank.lab.tables import TableRow

PALETTE = ("#0b5fa5", "#c2410c", "#15803d", "#7c3aed", "#b91c1c", "#0e7490", "#a16207", "#525252", "#be185d")


def figure(width: float = 6.4, height: float = 4.0, panels: int = 1) -> tuple[Any, Any]:
    """Return an empty figure and its axes, or an array of them. Width and height are in inches."""
    with needs_extra("lab"):
        import matplotlib as mpl
    mpl.use("Agg")
    from matplotlib import pyplot

    picture, axes = pyplot.subplots(1, panels, figsize=(width, height), layout="constrained", squeeze=False)
    for each in axes[0]:
        each.grid(alpha=0.25)
        each.spines[["top", "right"]].set_visible(False)
    return picture, axes[0] if panels > 1 else axes[0][0]


def save(picture: Any, path: Path) -> Path:
    """Write a figure to a file and close it. Returns the path."""
    from matplotlib import pyplot

    with replacing(path, "wb") as file:
        picture.savefig(file, dpi=140, format=path.suffix[1:])
    pyplot.close(picture)
    return path


def bars(path: str | Path, rows: Sequence[TableRow], title: str) -> Path:
    """Plot MRR@10 with its interval as one bar per setting, and Dense as a line.

    Args:
        path: the file to write
        rows: the settings
        title: the plot's title

    Returns:
        The path.
    """
    picture, axes = figure(height=0.6 + 0.3 * max(4, len(rows)))
    shown = [row for row in rows if row.method != "dense"][::-1]
    values = [row.measures["MRR@10"] for row in shown]
    error = [
        [max(0.0, v - row.interval[0]) for v, row in zip(values, shown, strict=True)],
        [max(0.0, row.interval[1] - v) for v, row in zip(values, shown, strict=True)],
    ]
    colours = [PALETTE[0] if row.method == "radical" else "#9ca3af" for row in shown]
    axes.barh(
        [row.name for row in shown], values, xerr=error, color=colours, error_kw={"lw": 1, "alpha": 0.6}
    )
    for row in rows:
        if row.method == "dense":
            axes.axvline(row.measures["MRR@10"], color="black", lw=1, ls="--")
            place = row.measures["MRR@10"], 1.0
            where = ("data", "axes fraction")
            axes.annotate("Dense", place, xycoords=where, ha="center", va="bottom", fontsize=9)
    axes.set_xlabel("MRR@10 (%)")
    axes.set_title(title, loc="left", fontsize=11)
    return save(picture, Path(path))


def curves(path: str | Path, rows: Sequence[TableRow], axis: str, title: str) -> Path:
    """Plot MRR@10 as one line per method, over an option that varies.

    Args:
        path: the file to write
        rows: the settings
        axis: the name of the option, in the rows' `data` or `options`
        title: the plot's title

    Returns:
        The path.
    """
    picture, axes = figure()
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        at = {**row.data, **row.options}.get(axis)
        if at is not None:
            label = "RaDiCal" if axis in row.options else row.name
            lines.setdefault(label, []).append((float(at), row.measures["MRR@10"]))
    for colour, (label, points) in zip(PALETTE * 3, lines.items(), strict=False):
        points.sort()
        dense = label == "Dense"
        axes.plot(*zip(*points, strict=True), "o-", ms=4, label=label, color="black" if dense else colour)
    for row in rows:
        if row.method == "dense" and axis not in row.data:
            axes.axhline(row.measures["MRR@10"], color="black", lw=1, ls="--", label="Dense")
    axes.set_xlabel({"num_stages": "K, stages", "gap": "g", "count": "N, candidates"}.get(axis, axis))
    axes.set_ylabel("MRR@10 (%)")
    axes.set_title(title, loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=8)
    return save(picture, Path(path))


def pareto(path: str | Path, rows: Sequence[TableRow], title: str) -> Path:
    """Plot MRR@10 over the decoder's FLOPs, one point per setting.

    Args:
        path: the file to write
        rows: the settings
        title: the plot's title

    Returns:
        The path.
    """
    picture, axes = figure()
    methods = sorted(dict.fromkeys(row.method for row in rows), key=lambda name: name != "radical")
    for colour, method in zip(PALETTE * 2, methods, strict=False):
        points = sorted(
            (100 * (1 - row.flops_saved), row.measures["MRR@10"]) for row in rows if row.method == method
        )
        label = next(row.name.split(" ")[0] for row in rows if row.method == method)
        axes.scatter(
            *zip(*points, strict=True),
            s=22,
            label=label,
            color="black" if method == "dense" else colour,
            zorder=3 if method == "radical" else 2,
        )
    axes.set_xlabel("decoder FLOPs (% of Dense)")
    axes.set_ylabel("MRR@10 (%)")
    axes.set_title(title, loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=8)
    return save(picture, Path(path))


def fronts(path: str | Path, rows: Sequence[TableRow], title: str) -> Path:
    """Plot MRR@10 over FLOPs and over time, one line per method. A row's name is "method, cost".

    Args:
        path: the file to write
        rows: the settings, "Dense" among them
        title: the plot's title

    Returns:
        The path.
    """
    picture, panels = figure(width=11, height=4.8, panels=2)
    dense = next(row for row in rows if row.name == "Dense")
    costs: tuple[tuple[str, Callable[[TableRow], float]], ...] = (
        ("decoder FLOPs (% of Dense)", lambda row: 100 * (1 - row.flops_saved)),
        ("measured time per list (% of Dense)", lambda row: 100 * row.seconds / dense.seconds),
    )
    labels = dict.fromkeys(row.name.rsplit(",", 1)[0] for row in rows if row.name != "Dense")
    for axes, (name, cost) in zip(panels, costs, strict=True):
        axes.axhline(dense.measures["MRR@10"], color="black", lw=1, ls="--", label="Dense")
        for number, label in enumerate(labels):
            own = [row for row in rows if row.name.rsplit(",", 1)[0] == label]
            ours = label.startswith("RaDiCal")
            axes.plot(
                *zip(*sorted((cost(row), row.measures["MRR@10"]) for row in own), strict=True),
                marker="o",
                ms=4,
                lw=2.4 if ours else 1.2,
                ls="-" if number < len(PALETTE) else ":",
                label=label,
                color=PALETTE[number % len(PALETTE)],
                zorder=3 if ours else 2,
            )
        axes.set_xlabel(name)
    panels[0].set_ylabel("MRR@10 (%)")
    panels[0].set_title(title, loc="left", fontsize=11)
    panels[1].legend(frameon=False, fontsize=7, ncols=2)
    return save(picture, Path(path))
