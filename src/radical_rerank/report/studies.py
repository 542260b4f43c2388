"""Experiments that are more than a table of settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from radical_rerank.backbones import Block
from radical_rerank.diagnostics import Diagnosis, Evidence, evidence, summary
from radical_rerank.evaluation.experiments import TITLES, Experiment, compared, run_experiment, seeded
from radical_rerank.evaluation.metrics import jaccard, rbo
from radical_rerank.evaluation.open import pools_of, retrieve
from radical_rerank.evaluation.questions import ask
from radical_rerank.evaluation.records import Cell, RunFolder
from radical_rerank.evaluation.runner import Runner, Track, Work, work_of
from radical_rerank.evaluation.scene_sets import (
    scenes,
    scenes_composed,
    scenes_composed_gallery,
    scenes_gallery,
    scenes_questions,
)
from radical_rerank.files import replacing
from radical_rerank.report.overlay import overlay
from radical_rerank.report.plots import COLOURS, bars, figure, save
from radical_rerank.report.tables import (
    published,
    seeds_of,
    sparsevlm_note,
    summarize,
    write_facts,
    write_tables,
)
from radical_rerank.retrieval import SceneEmbedder


def similarity(
    runner: Runner,
    folder: RunFolder,
    command: str,
    *,
    keeps: Sequence[float],
    seeds: Sequence[int],
    limit: int,
    track: Track,
) -> list[Any]:
    """Lists of every degree of likeness, in five quintiles of the mean cosine between candidates."""
    records = folder.records()
    names = ("radical", "pyramiddrop", "fastv", "random")
    plan = Experiment(
        "how alike the candidates are", lambda budgets: compared(names, budgets[:1], similarity=None)
    )
    run_experiment(plan, runner, records, keeps=keeps, seeds=seeds, limit=limit, track=track)
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
    chosen = ({**r, "data": {"quintile": bins[int(r["task"])]}} for r in records.claimed())
    rows = sorted(summarize(chosen), key=lambda row: row.data["quintile"])
    note = f"`{command}`: quintile 5 holds the lists most alike."
    write_tables(folder.path, "similarity", plan.about, rows, note)
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
    save(picture, folder.path / "similarity.png")
    return rows


def retrievers(
    runner: Runner,
    folder: RunFolder,
    command: str,
    *,
    keeps: Sequence[float],
    seeds: Sequence[int],
    limit: int,
    track: Track,
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
        records = folder.records(kind.replace(" ", "-"))
        runner.run(data, cells, records, pools=pool, limit=count, track=track)
        chosen += [{**r, "data": {"pool": kind}} for r in records.claimed()]
    rows = summarize(chosen)
    overlaps = []
    for a, b in combinations(pools, 2):
        both = [(pools[a][task.id], pools[b][task.id]) for task in data.tasks[:count]]
        overlaps.append(
            f"{a} / {b}: Jaccard@20 {np.mean([jaccard(x, y) for x, y in both]):.2f}, "
            f"RBO(0.9) {np.mean([rbo(x, y) for x, y in both]):.2f}"
        )
    note = f"`{command}`. " + "; ".join(overlaps) + "."
    write_tables(folder.path, "retrievers", "three first stages", rows, note)
    return rows


def composed(
    runner: Runner,
    folder: RunFolder,
    command: str,
    *,
    keeps: Sequence[float],
    seeds: Sequence[int],
    limit: int,
    track: Track,
) -> list[Any]:
    """A reference picture and a change in words: fixed lists, and pools that may miss the target."""
    names = ["radical", "fastv", "pyramiddrop", "sparsevlm", "dart", "visionzip", "lowres", "random"]
    cells = seeded(compared(names, keeps), seeds)
    chosen = []
    for kind, data in (
        ("lists", scenes_composed(lists=limit)),
        ("pools", scenes_composed_gallery()),
    ):
        records, path = folder.records(kind), folder.path / "pool.run"
        pools = None if kind == "lists" else pools_of(data, runner.backbone, None, 20, path)
        runner.run(data, cells, records, pools=pools, limit=limit, track=track)
        chosen += [{**r, "data": {"candidates": kind}} for r in records.claimed()]
    rows = summarize(chosen, published("composed", "FashionIQ"))
    note = (
        f"`{command}`. Lists hold the target; pools are the first 20 of a "
        "first stage and may not, then a query counts 0, and c marks the queries whose pool has it. The "
        "paper's column is its conditional MRR@10 on FashionIQ."
    )
    write_tables(folder.path, "composed", "a reference picture and a change in words", rows, note)
    bars(
        folder.path / "composed.png",
        [r for r in rows if r.data["candidates"] == "lists"],
        "composed queries, lists",
    )
    return rows


def transfer(
    runner: Runner,
    folder: RunFolder,
    command: str,
    *,
    keeps: Sequence[float],
    seeds: Sequence[int],
    limit: int,
    track: Track,
) -> list[Any]:
    """Questions about single scenes. There are no other candidates: RaDiCal goes without uniqueness."""
    names = ("dense", "radical", "fastv", "pyramiddrop", "sparsevlm", "dart", "random")
    data, records = scenes_questions(scenes=limit), folder.records()
    cells = [Cell(TITLES["dense"], "dense")]
    for name in names[1:]:
        for keep in keeps:
            options = {"prior": "relevance"} if name == "radical" else {}
            cells += [
                Cell(f"{TITLES[name]} {keep:.0%}", name, keep, seed, options)
                # There are no candidates to shuffle: a seed changes nothing but what is drawn.
                for seed in (seeds if name == "random" else seeds[:1])
            ]
    ask(runner, data, cells, records, track)
    right: dict[str, dict[str, list[bool]]] = {cell.name: {} for cell in cells}
    for record in records.claimed():
        right[record["cell"]].setdefault(record["kind"], []).append(record["right"])
    rows: list[Any] = [
        {"method": name, **{kind: 100 * float(np.mean(kinds[kind])) for kind in sorted(kinds, reverse=True)}}
        for name, kinds in right.items()
    ]
    note = (
        f"`{command}`: accuracy in percent on {len(data.questions)} questions. Random: {seeds_of(seeds)}; "
        "no other method draws." + sparsevlm_note((cell.method, cell.options) for cell in cells)
    )
    write_facts(folder.path, "transfer", "single scenes", note, rows, 2)
    return rows


def diagnosis(
    runner: Runner,
    folder: RunFolder,
    command: str,
    *,
    keeps: Sequence[float],
    seeds: Sequence[int],
    limit: int,
    track: Track,
) -> list[Any]:
    """z_l and H_norm layer by layer, on two differently seeded data sets."""
    found, records, plain = [], folder.records(), runner.plain
    for seed in (0, 1):
        data = scenes(lists=limit, seed=seed)
        cell = Cell("Diagnosis", "dense", data={"seed": seed})
        for number in track(range(len(data.tasks)), f"diagnosis, data set {seed + 1}"):
            work = work_of(data, number)
            if not runner.missing(work, [cell], records):
                continue
            known = evidence(
                runner.backbone,
                work.task.text,
                [work.pictures[name] for name in work.candidates],
                template=plain.template,
                max_image_tokens=plain.max_image_tokens,
            )
            named = runner.named(cell, number, work.content)
            records.add({"dataset": data.name, **named, **asdict(known), **runner.provenance})
        mine = (record for record in records.claimed() if record["data"] == cell.data)
        found.append(summary(Evidence(**{f.name: r[f.name] for f in fields(Evidence)}) for r in mine))
    first, second = found
    same = float(np.corrcoef(first.h_norm, second.h_norm)[0, 1])
    rows = [
        {"layer": layer, "z": z, "H_norm": h, "z, second": z2, "H_norm, second": h2}
        for layer, (z, h, z2, h2) in enumerate(
            zip(first.z, first.h_norm, second.z, second.h_norm, strict=True)
        )
    ]
    _draw_diagnosis(folder.path / "diagnose.png", first)
    facts = (
        f"r(z, 1 − H_norm) = {first.pearson:.2f} and {second.pearson:.2f}; "
        f"r of the two H_norm curves = {same:.3f}; "
        + ", ".join(f"z of {name} = {value:.2f}" for name, value in first.references.items())
    )
    note = f"`{command}`: {facts}. Lists are as drawn; no seed shuffles them."
    write_facts(folder.path, "diagnose", "reliability of attention, layer by layer", note, rows, 3)
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
    runner: Runner,
    folder: RunFolder,
    command: str,
    *,
    keeps: Sequence[float],
    seeds: Sequence[int],
    limit: int,
    track: Track,
) -> list[Any]:
    """Which tokens each method keeps: rows are methods, columns the first candidates of a list."""
    names = ("dense", "radical", "pyramiddrop", "sparsevlm", "fastv", "dart", "visionzip", "random")
    data, records = scenes(lists=min(limit, 6)), folder.records()
    cells = [Cell(TITLES[name], name, 1.0 if name == "dense" else keeps[0], seeds[0]) for name in names]
    works = [work_of(data, number) for number in range(len(data.tasks))]
    for work in track(works, "cases"):
        images = [work.pictures[name] for name in work.candidates]
        for cell in runner.missing(work, cells, records):
            ranking = runner.reranker(cell).rank(work.task.text, images)
            report = ranking.report
            assert report is not None
            records.add(
                {
                    "dataset": data.name,
                    "query": work.task.text,
                    **runner.named(cell, work.number, work.content),
                    "order": ranking.order,
                    "alive": report.stages[-1].survivors if report.stages else None,
                    "blocks": [[asdict(block) for block in blocks] for blocks in report.blocks],
                    **runner.provenance,
                }
            )
    rows: list[Any] = []
    found = records.claimed()
    for work in works:
        mine = [record for record in found if record["task"] == str(work.number)]
        target = next(i for i, name in enumerate(work.candidates) if name in work.task.relevant)
        with replacing(folder.path / f"case-{work.number}.png", "wb") as file:
            _sheet(work, mine, target, keeps[0]).save(file, "PNG")
        rows += [
            {
                "case": work.number,
                "query": work.task.text,
                "method": record["cell"],
                "rank of the match": record["order"].index(target) + 1,
            }
            for record in mine
        ]
    return rows


def _sheet(work: Work, records: Sequence[dict[str, Any]], target: int, keep: float) -> Image.Image:
    """One line per method: the tokens of the match and of the first other candidates, as far as alive."""
    shown, cell, label = 8, 100, 150
    first = [target, *(i for i in range(len(work.candidates)) if i != target)][:shown]
    sheet = Image.new("RGB", (label + cell * shown, 40 + cell * len(records)), "white")
    pen = ImageDraw.Draw(sheet)
    pen.text((6, 6), f"“{work.task.text}”   {keep:.0%} kept; the first column is the match", fill="black")
    for line, record in enumerate(records):
        top = 40 + line * cell
        place = record["order"].index(target) + 1
        pen.text((6, top + 30), f"{record['cell']}\nmatch at rank {place}", fill="black")
        for column, i in enumerate(first):
            blocks = [Block(**block) for block in record["blocks"][i]]
            alive = None if record["alive"] is None else record["alive"][i]
            picture = overlay(work.pictures[work.candidates[i]], blocks, alive)
            picture.thumbnail((cell - 6, cell - 6))
            sheet.paste(picture, (label + column * cell, top))
    return sheet
