"""Experiments that are more than a list of settings. Each returns the rows of its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from radical_rerank.backbones import Block
from radical_rerank.files import replacing
from radical_rerank.lab.datasets import Dataset
from radical_rerank.lab.diagnosis import Diagnosis, Evidence, evidence, summary
from radical_rerank.lab.experiments.definitions import TITLES, Experiment, compared, seeded
from radical_rerank.lab.experiments.setup import Setup
from radical_rerank.lab.first_stage import pools_of, retrieve
from radical_rerank.lab.metrics import jaccard, rbo
from radical_rerank.lab.overlay import overlay
from radical_rerank.lab.paper import CANDIDATES, published
from radical_rerank.lab.plots import PALETTE, bars, figure, save
from radical_rerank.lab.questions import ask
from radical_rerank.lab.records import Cell, Records
from radical_rerank.lab.runner import Pools, QueryWork, Scores, work_of
from radical_rerank.lab.tables import (
    TableRow,
    seeds_of,
    sparsevlm_note,
    summarize,
    write_facts,
    write_tables,
)
from radical_rerank.reranking.encoding import load_image

# Similarity of the candidates.


def similarity(setup: Setup) -> list[TableRow]:
    """Compare methods by how similar the candidates are: quintiles of the mean cosine between them."""
    records = setup.folder.records()
    names = ("radical", "pyramiddrop", "fastv", "random")
    plan = Experiment(
        "how alike the candidates are", lambda budgets: compared(names, budgets[:1], similarity=None)
    )
    setup.run(plan, records)
    quintiles = _quintiles(setup, setup.testbed.lists(lists=setup.limit, similarity=None))
    chosen = ({**r, "data": {"quintile": quintiles[int(r["task"])]}} for r in records.claimed())
    rows = sorted(summarize(chosen), key=lambda row: row.data["quintile"])
    note = f"`{setup.command}`: quintile 5 holds the most similar lists."
    write_tables(setup.folder.path, "similarity", plan.about, rows, note)
    _draw_similarity(setup.folder.path / "similarity.png", rows)
    return rows


def _quintiles(setup: Setup, data: Dataset) -> list[int]:
    """Return the quintile (1 to 5) of each list by the mean cosine between its candidates."""
    embedder = setup.testbed.embedder(setup.runner.backbone)
    means = []
    for task in setup.progress(data.tasks, "similarity of the candidates"):
        vectors = embedder.embed_images([data.picture(name) for name in task.candidates or ()])
        unit = torch.nn.functional.normalize(vectors - vectors.mean(), dim=-1)
        count = len(unit)
        means.append(float(((unit @ unit.T).sum() - count) / (count * (count - 1))))
    edges = np.quantile(means, [0.2, 0.4, 0.6, 0.8])
    return [int(np.searchsorted(edges, value)) + 1 for value in means]


def _draw_similarity(path: Path, rows: Sequence[TableRow]) -> None:
    picture, axes = figure()
    titles = list(dict.fromkeys(row.name for row in rows if row.name != "Dense"))
    dense = {row.data["quintile"]: row.measures["MRR@10"] for row in rows if row.name == "Dense"}
    for colour, name in zip(PALETTE, titles, strict=False):
        mine = {row.data["quintile"]: row.measures["MRR@10"] for row in rows if row.name == name}
        axes.plot(list(mine), [mine[q] - dense[q] for q in mine], "o-", ms=4, label=name, color=colour)
    axes.axhline(0, color="black", lw=1, ls="--")
    axes.set_xticks(range(1, 6))
    axes.set_xlabel("quintile of candidate similarity")
    axes.set_ylabel("MRR@10 − Dense (points)")
    axes.legend(frameon=False, fontsize=8)
    save(picture, path)


# First stages.


def retrievers(setup: Setup) -> list[TableRow]:
    """Rerank the pools of three first stages, and measure how much the pools overlap."""
    data = setup.testbed.gallery()
    count = min(setup.limit, len(data.tasks))
    found = _three_pools(setup, data)
    pools = {kind: {task: list(own) for task, own in scores.items()} for kind, scores in found.items()}
    cells = seeded(compared(["radical", "pyramiddrop", "sparsevlm"], setup.keeps[:1]), setup.seeds)
    title = f"{TITLES['radical']} {setup.keeps[0]:.0%} with the first stage's scores"
    mixed = Cell(title, "radical", setup.keeps[0])
    mixed = replace(mixed, data={"weight": setup.runner.reranker(mixed).weight})
    chosen = []
    for kind, pool in pools.items():
        records = setup.folder.records(kind.replace(" ", "-"))
        options: Any = {"pools": pool, "limit": count, "progress": setup.progress}
        setup.runner.run(data, cells, records, **options)
        setup.runner.run(data, seeded([mixed], setup.seeds), records, scores=found[kind], **options)
        chosen += [{**r, "data": {"pool": kind}} for r in records.claimed()]
    rows = summarize(chosen)
    overlaps = _overlaps(pools, [task.id for task in data.tasks[:count]])
    note = f"`{setup.command}`. " + "; ".join(overlaps) + "."
    write_tables(setup.folder.path, "retrievers", "three first stages", rows, note)
    return rows


def _three_pools(setup: Setup, data: Dataset) -> dict[str, Scores]:
    """Return what three variants of the testbed's embedder find, best first, with their scores."""
    first = setup.testbed.embedder(setup.runner.backbone)
    gallery = first.embed_images([data.picture(name) for name in setup.progress(data.gallery, "embedding")])
    kinds = {
        "words": first,
        "pairs": setup.testbed.embedder(setup.runner.backbone, words=False, pairs=True),
        "words and pairs": setup.testbed.embedder(setup.runner.backbone, pairs=True),
    }
    return {
        kind: {
            task: dict(nearest)
            for task, nearest in retrieve(data, embedder, CANDIDATES, gallery=gallery).items()
        }
        for kind, embedder in kinds.items()
    }


def _overlaps(pools: Mapping[str, Pools], tasks: Sequence[str]) -> list[str]:
    """Describe how much each two of the pools overlap."""
    texts = []
    for a, b in combinations(pools, 2):
        both = [(pools[a][task], pools[b][task]) for task in tasks]
        texts.append(
            f"{a} / {b}: Jaccard@{CANDIDATES} {np.mean([jaccard(x, y) for x, y in both]):.2f}, "
            f"RBO(0.9) {np.mean([rbo(x, y) for x, y in both]):.2f}"
        )
    return texts


# Composed queries.


def composed(setup: Setup) -> list[TableRow]:
    """Compare methods on composed queries, over fixed lists and over pools that may miss the target."""
    names = ["radical", "fastv", "pyramiddrop", "sparsevlm", "dart", "visionzip", "lowres", "random"]
    cells = seeded(compared(names, setup.keeps), setup.seeds)
    gallery = setup.testbed.composed_gallery()
    path = setup.folder.path / "pool.run"
    pools = pools_of(gallery, setup.runner.backbone, None, CANDIDATES, path, testbed=setup.testbed)
    chosen = []
    for kind, data, pool in (
        ("lists", setup.testbed.composed(lists=setup.limit), None),
        ("pools", gallery, pools),
    ):
        records = setup.folder.records(kind)
        setup.runner.run(data, cells, records, pools=pool, limit=setup.limit, progress=setup.progress)
        chosen += [{**r, "data": {"candidates": kind}} for r in records.claimed()]
    rows = summarize(chosen, published("composed", "FashionIQ"))
    note = (
        f"`{setup.command}`. Lists hold the target. Pools are the first {CANDIDATES} of a first stage: if "
        "one misses the target, its query counts 0, and columns with a c leave it out. The paper's column is "
        "its conditional MRR@10 on FashionIQ."
    )
    write_tables(setup.folder.path, "composed", "a reference picture and a change in words", rows, note)
    bars(
        setup.folder.path / "composed.png",
        [r for r in rows if r.data["candidates"] == "lists"],
        "composed queries, lists",
    )
    return rows


# Questions.


def transfer(setup: Setup) -> list[dict[str, Any]]:
    """Compare methods on questions about single pictures. RaDiCal then has no uniqueness to use."""
    data, records = setup.testbed.questions(pictures=setup.limit), setup.folder.records()
    cells = _transfer_cells(setup)
    ask(setup.runner, data, cells, records, setup.progress)
    right: dict[str, dict[str, list[bool]]] = {cell.name: {} for cell in cells}
    for record in records.claimed():
        right[record["cell"]].setdefault(record["kind"], []).append(record["right"])
    rows: list[dict[str, Any]] = [
        {"method": name, **{kind: 100 * float(np.mean(kinds[kind])) for kind in sorted(kinds, reverse=True)}}
        for name, kinds in right.items()
    ]
    note = (
        f"`{setup.command}`: accuracy in percent on {len(data.questions)} questions. Random: "
        f"{seeds_of(setup.seeds)}; the other methods do not draw at random."
        + sparsevlm_note((cell.method, cell.options) for cell in cells)
    )
    write_facts(setup.folder.path, "transfer", "single scenes", note, rows, 2)
    return rows


def _transfer_cells(setup: Setup) -> list[Cell]:
    cells = [Cell(TITLES["dense"], "dense")]
    for name in ("radical", "fastv", "pyramiddrop", "sparsevlm", "dart", "random"):
        for keep in setup.keeps:
            options = {"prior": "relevance"} if name == "radical" else {}
            # There are no candidates to shuffle, so a seed matters only to a method that draws.
            seeds = setup.seeds if name == "random" else setup.seeds[:1]
            cells += [Cell(f"{TITLES[name]} {keep:.0%}", name, keep, seed, options) for seed in seeds]
    return cells


# Diagnosis.


def diagnosis(setup: Setup) -> list[dict[str, Any]]:
    """Measure z_l and H_norm layer by layer, on two data sets with different seeds."""
    records = setup.folder.records()
    first, second = (_diagnosed(setup, records, seed) for seed in (0, 1))
    same = float(np.corrcoef(first.h_norm, second.h_norm)[0, 1])
    rows: list[dict[str, Any]] = [
        {"layer": layer, "z": z, "H_norm": h, "z, second": z2, "H_norm, second": h2}
        for layer, z, h, z2, h2 in zip(
            first.layers, first.z, first.h_norm, second.z, second.h_norm, strict=True
        )
    ]
    _draw_diagnosis(setup.folder.path / "diagnose.png", first)
    facts = (
        f"r(z, 1 − H_norm) = {first.pearson:.2f} and {second.pearson:.2f}; "
        f"r of the two H_norm curves = {same:.3f}; "
        + ", ".join(f"z of {name} = {value:.2f}" for name, value in first.references.items())
    )
    note = f"`{setup.command}`: {facts}. The candidates are not shuffled."
    write_facts(setup.folder.path, "diagnose", "reliability of attention, layer by layer", note, rows, 3)
    return rows


def _diagnosed(setup: Setup, records: Records, seed: int) -> Diagnosis:
    """Measure the lists of one data set, except where a record exists already."""
    data, plain = setup.testbed.lists(lists=setup.limit, seed=seed), setup.runner.plain
    cell = Cell("Diagnosis", "dense", data={"seed": seed})
    for number in setup.progress(range(len(data.tasks)), f"diagnosis, data set {seed + 1}"):
        work = work_of(data, number)
        if not setup.runner.missing(work, [cell], records):
            continue
        measured = evidence(
            setup.runner.backbone,
            work.task.text,
            [load_image(work.documents[name]) for name in work.candidates],
            template=plain.template,
            max_image_tokens=plain.max_image_tokens,
        )
        named = setup.runner.named(cell, number, work.content)
        records.add({"dataset": data.name, **named, **asdict(measured), **setup.runner.provenance})
    mine = (record for record in records.claimed() if record["data"] == cell.data)
    return summary(Evidence(**{f.name: record[f.name] for f in fields(Evidence)}) for record in mine)


def _draw_diagnosis(path: Path, result: Diagnosis) -> None:
    picture, axes = figure()
    axes.plot(result.layers, result.z, "o-", color=PALETTE[0], label="z of attention")
    for colour, (name, value) in zip(PALETTE[1:], result.references.items(), strict=False):
        axes.axhline(value, color=colour, ls="--", lw=1, label=f"z of {name}")
    axes.set_xlabel("layer")
    axes.set_ylabel("z")
    other = axes.twinx()
    other.plot(result.layers, result.h_norm, "s-", ms=3, color="#9ca3af", label="H_norm")
    other.set_ylabel("H_norm")
    picture.legend(frameon=False, fontsize=8, loc="outside upper center", ncols=5)
    save(picture, path)


# Cases.


def cases(setup: Setup) -> list[dict[str, Any]]:
    """Draw which tokens each method keeps: a row per method, a column per candidate."""
    names = ("dense", "radical", "pyramiddrop", "sparsevlm", "fastv", "dart", "visionzip", "random")
    data, records = setup.testbed.lists(lists=min(setup.limit, 6)), setup.folder.records()
    cells = [
        Cell(TITLES[name], name, 1.0 if name == "dense" else setup.keeps[0], setup.seeds[0]) for name in names
    ]
    works = [work_of(data, number) for number in range(len(data.tasks))]
    for work in setup.progress(works, "cases"):
        for cell in setup.runner.missing(work, cells, records):
            records.add(_case(setup, data, work, cell))
    rows: list[dict[str, Any]] = []
    claimed = records.claimed()
    for work in works:
        mine = [record for record in claimed if record["task"] == str(work.number)]
        target = next(i for i, name in enumerate(work.candidates) if name in work.task.relevant)
        with replacing(setup.folder.path / f"case-{work.number}.png", "wb") as file:
            _sheet(work, mine, target, setup.keeps[0]).save(file, "PNG")
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


def _case(setup: Setup, data: Dataset, work: QueryWork, cell: Cell) -> dict[str, Any]:
    """Rank one list. Returns a record with the tokens that are alive at the end."""
    images = [work.documents[name] for name in work.candidates]
    ranking = setup.runner.reranker(cell).rank(work.task.text, images)
    report = ranking.report
    assert report is not None
    return {
        "dataset": data.name,
        "query": work.task.text,
        **setup.runner.named(cell, work.number, work.content),
        "order": ranking.order,
        "alive": report.stages[-1].survivors if report.stages else None,
        "blocks": [[asdict(block) for block in blocks] for blocks in report.blocks],
        **setup.runner.provenance,
    }


def _sheet(work: QueryWork, records: Sequence[dict[str, Any]], target: int, keep: float) -> Image.Image:
    """Draw one line per method: the alive tokens of the match and of the first other candidates."""
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
            picture = overlay(load_image(work.documents[work.candidates[i]]), blocks, alive)
            picture.thumbnail((cell - 6, cell - 6))
            sheet.paste(picture, (label + column * cell, top))
    return sheet
