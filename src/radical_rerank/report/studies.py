"""Experiments that are more than a table of settings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from radical_rerank.diagnostics import Diagnosis, diagnose
from radical_rerank.evaluation.experiments import TITLES, Experiment, compared, run_experiment, seeded
from radical_rerank.evaluation.metrics import jaccard, rbo
from radical_rerank.evaluation.open import pools_of, retrieve
from radical_rerank.evaluation.questions import accuracy
from radical_rerank.evaluation.records import Cell, Records
from radical_rerank.evaluation.runner import Runner, Track
from radical_rerank.evaluation.scene_sets import (
    scenes,
    scenes_composed,
    scenes_composed_gallery,
    scenes_gallery,
    scenes_questions,
)
from radical_rerank.files import replacing
from radical_rerank.pruning import build
from radical_rerank.report.overlay import overlay
from radical_rerank.report.plots import COLOURS, bars, figure, save
from radical_rerank.report.tables import published, summarize, write_facts, write_tables
from radical_rerank.retrieval import SceneEmbedder


def similarity(
    runner: Runner, folder: Path, *, keeps: Sequence[float], seeds: Sequence[int], limit: int, track: Track
) -> list[Any]:
    """Lists of every degree of likeness, in five quintiles of the mean cosine between candidates."""
    records = Records(folder / "records.jsonl")
    names = ("radical", "pyramiddrop", "fastv", "random")
    plan = Experiment(
        "how alike the candidates are", lambda budgets: compared(names, budgets[:1], similarity=None)
    )
    cells = run_experiment(plan, runner, records, keeps=keeps, seeds=seeds, limit=limit, track=track)
    data = scenes(lists=limit, similarity=None)
    embedder = SceneEmbedder(runner.backbone)
    alike = []
    for task in track(data.tasks, "likeness of the candidates"):
        vectors = embedder.embed_images([data.picture(name) for name in task.candidates or ()])
        unit = torch.nn.functional.normalize(vectors - vectors.mean(), dim=-1)
        count = len(unit)
        alike.append(float(((unit @ unit.T).sum() - count) / (count * (count - 1))))
    edges = np.quantile(alike, [0.2, 0.4, 0.6, 0.8])
    bins = [int(np.searchsorted(edges, value)) + 1 for value in alike]
    chosen = ({**r, "data": {"quintile": bins[int(r["task"])]}} for r in records.of(cells, limit))
    rows = sorted(summarize(chosen), key=lambda row: row.data["quintile"])
    note = f"`radical experiment similarity --limit {limit}`: quintile 5 holds the lists most alike."
    write_tables(folder, "similarity", plan.about, rows, note)
    picture, axes = figure()
    titles = list(dict.fromkeys(row.name for row in rows if row.name != "Dense"))
    dense = {row.data["quintile"]: row.measures["MRR@10"] for row in rows if row.name == "Dense"}
    for colour, name in zip(COLOURS, titles, strict=False):
        mine = {row.data["quintile"]: row.measures["MRR@10"] for row in rows if row.name == name}
        axes.plot(list(mine), [mine[q] - dense[q] for q in mine], "o-", ms=4, label=name, color=colour)
    axes.axhline(0, color="black", lw=1, ls="--")
    axes.set_xticks(range(1, 6))
    axes.set_xlabel("quintile of candidate similarity")
    axes.set_ylabel("MRR@10 − Dense (points)")
    axes.legend(frameon=False, fontsize=8)
    save(picture, folder / "similarity.png")
    return rows


def retrievers(
    runner: Runner, folder: Path, *, keeps: Sequence[float], seeds: Sequence[int], limit: int, track: Track
) -> list[Any]:
    """The same queries over the pools of three first stages, and how much the pools share."""
    data = scenes_gallery()
    count = min(limit, len(data.tasks))
    first = SceneEmbedder(runner.backbone)
    gallery = first.embed_images([data.picture(name) for name in track(data.gallery, "embedding")])
    kinds = {
        "words": first,
        "pairs": SceneEmbedder(runner.backbone, words=False, pairs=True),
        "words and pairs": SceneEmbedder(runner.backbone, pairs=True),
    }
    pools = {
        kind: {
            task: [name for name, _ in found]
            for task, found in retrieve(data, embedder, 20, gallery=gallery).items()
        }
        for kind, embedder in kinds.items()
    }
    cells = seeded(compared(["radical", "pyramiddrop", "sparsevlm"], keeps[:1]), seeds)
    chosen = []
    for kind, pool in pools.items():
        records = Records(folder / f"{kind.replace(' ', '-')}.jsonl")
        runner.run(data, cells, records, pools=pool, limit=count, track=track)
        chosen += [{**r, "data": {"pool": kind}} for r in records.of(cells, count)]
    rows = summarize(chosen)
    overlaps = []
    for a, b in combinations(pools, 2):
        both = [(pools[a][task.id], pools[b][task.id]) for task in data.tasks[:count]]
        overlaps.append(
            f"{a} / {b}: Jaccard@20 {np.mean([jaccard(x, y) for x, y in both]):.2f}, "
            f"RBO(0.9) {np.mean([rbo(x, y) for x, y in both]):.2f}"
        )
    note = f"`radical experiment retrievers --limit {limit}`. " + "; ".join(overlaps) + "."
    write_tables(folder, "retrievers", "three first stages", rows, note)
    return rows


def composed(
    runner: Runner, folder: Path, *, keeps: Sequence[float], seeds: Sequence[int], limit: int, track: Track
) -> list[Any]:
    """A reference picture and a change in words: fixed lists, and pools that may miss the target."""
    names = ["radical", "fastv", "pyramiddrop", "sparsevlm", "dart", "visionzip", "lowres", "random"]
    cells = seeded(compared(names, keeps), seeds)
    chosen = []
    for kind, data in (
        ("lists", scenes_composed(lists=limit)),
        ("pools", scenes_composed_gallery()),
    ):
        records = Records(folder / f"{kind}.jsonl")
        path = folder / "pool.run"
        pools = None if kind == "lists" else pools_of(data, runner.backbone, None, 20, path)
        runner.run(data, cells, records, pools=pools, limit=limit, track=track)
        chosen += [{**r, "data": {"candidates": kind}} for r in records.of(cells, limit)]
    rows = summarize(chosen, published("composed", "FashionIQ"))
    note = (
        f"`radical experiment composed --limit {limit}`. Lists hold the target; pools are the first 20 of a "
        "first stage and may not, then a query counts 0, and c marks the queries whose pool has it. The "
        "paper's column is its conditional MRR@10 on FashionIQ."
    )
    write_tables(folder, "composed", "a reference picture and a change in words", rows, note)
    bars(
        folder / "composed.png",
        [r for r in rows if r.data["candidates"] == "lists"],
        "composed queries, lists",
    )
    return rows


def transfer(
    runner: Runner, folder: Path, *, keeps: Sequence[float], seeds: Sequence[int], limit: int, track: Track
) -> list[Any]:
    """Questions about single scenes. There are no other candidates: RaDiCal goes without uniqueness."""
    names = ("dense", "radical", "fastv", "pyramiddrop", "sparsevlm", "dart", "random")
    data = scenes_questions(scenes=limit)
    pruners = {}
    for name in names:
        for keep in keeps if name != "dense" else (1.0,):
            options: dict[str, Any] = {"keep": keep}
            if name in ("radical", "random"):
                options["calibration"] = runner.profile
            if name == "radical":
                options["prior"] = "relevance"
            pruners[TITLES[name] if name == "dense" else f"{TITLES[name]} {keep:.0%}"] = build(
                name, **options
            )
    found = accuracy(runner.backbone, pruners, data, lambda items: track(items, "questions"))
    rows: list[Any] = [
        {"method": name, **{kind: 100 * share for kind, share in kinds.items()}}
        for name, kinds in found.items()
    ]
    asked = len(data.questions)
    note = f"`radical experiment transfer --limit {limit}`: accuracy in percent on {asked} questions."
    write_facts(folder, "transfer", "single scenes", note, rows, 2)
    return rows


def diagnosis(
    runner: Runner, folder: Path, *, keeps: Sequence[float], seeds: Sequence[int], limit: int, track: Track
) -> list[Any]:
    """z_l and H_norm layer by layer, on two differently seeded data sets."""
    found: list[Diagnosis] = []
    for seed in (0, 1):
        data = scenes(lists=limit, seed=seed)
        lists = (
            (task.text, [data.picture(name) for name in task.candidates or ()])
            for task in track(data.tasks, f"diagnosis, data set {seed + 1}")
        )
        found.append(diagnose(runner.backbone, lists))
    first, second = found
    same = float(np.corrcoef(first.h_norm, second.h_norm)[0, 1])
    rows = [
        {"layer": layer, "z": z, "H_norm": h, "z, second": z2, "H_norm, second": h2}
        for layer, (z, h, z2, h2) in enumerate(
            zip(first.z, first.h_norm, second.z, second.h_norm, strict=True)
        )
    ]
    _draw_diagnosis(folder / "diagnose.png", first)
    facts = (
        f"r(z, 1 − H_norm) = {first.pearson:.2f} and {second.pearson:.2f}; "
        f"r of the two H_norm curves = {same:.3f}; "
        + ", ".join(f"z of {name} = {value:.2f}" for name, value in first.references.items())
    )
    note = f"`radical experiment diagnose --limit {limit}`: {facts}."
    write_facts(folder, "diagnose", "reliability of attention, layer by layer", note, rows, 3)
    return rows


def _draw_diagnosis(path: Path, found: Diagnosis) -> None:
    picture, axes = figure()
    axes.plot(range(len(found.z)), found.z, "o-", color=COLOURS[0], label="z of attention")
    for colour, (name, value) in zip(COLOURS[1:], found.references.items(), strict=False):
        axes.axhline(value, color=colour, ls="--", lw=1, label=f"z of {name}")
    axes.set_xlabel("layer")
    axes.set_ylabel("z")
    other = axes.twinx()
    other.plot(range(len(found.h_norm)), found.h_norm, "s-", ms=3, color="#9ca3af", label="H_norm")
    other.set_ylabel("H_norm")
    picture.legend(frameon=False, fontsize=8, loc="outside upper center", ncols=5)
    save(picture, path)


def cases(
    runner: Runner, folder: Path, *, keeps: Sequence[float], seeds: Sequence[int], limit: int, track: Track
) -> list[Any]:
    """Which tokens each method keeps: rows are methods, columns the first candidates of a list."""
    names = ("dense", "radical", "pyramiddrop", "sparsevlm", "fastv", "dart", "visionzip", "random")
    data = scenes(lists=min(limit, 6))
    shown, rows = 8, []
    for number, task in enumerate(track(data.tasks, "cases")):
        ids = list(task.candidates or ())
        target = next(i for i, name in enumerate(ids) if name in task.relevant)
        first = [target, *(i for i in range(len(ids)) if i != target)][:shown]
        images = [data.picture(name) for name in ids]
        cell, label = 100, 150
        sheet = Image.new("RGB", (label + cell * shown, 40 + cell * len(names)), "white")
        pen = ImageDraw.Draw(sheet)
        pen.text((6, 6), f"“{task.text}”   {keeps[0]:.0%} kept; the first column is the match", fill="black")
        for line, name in enumerate(names):
            setting = Cell(name, name, 1.0 if name == "dense" else keeps[0])
            ranking = runner.reranker(setting).rank(task.text, images)
            report = ranking.report
            assert report is not None
            top = 40 + line * cell
            place = ranking.order.index(target) + 1
            pen.text((6, top + 30), f"{TITLES[name]}\nmatch at rank {place}", fill="black")
            rows.append(
                {"case": number, "query": task.text, "method": TITLES[name], "rank of the match": place}
            )
            for column, i in enumerate(first):
                alive = report.stages[-1].survivors[i] if report.stages else None
                picture = overlay(images[i], report.blocks[i], alive)
                picture.thumbnail((cell - 6, cell - 6))
                sheet.paste(picture, (label + column * cell, top))
        with replacing(folder / f"case-{number}.png", "wb") as file:
            sheet.save(file, "PNG")
    return rows
