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
from radical_rerank.files import replacing
from radical_rerank.lab.catalog import pools_of, retrieve
from radical_rerank.lab.diagnosis import Diagnosis, Evidence, evidence, summary
from radical_rerank.lab.experiments.definitions import TITLES, Experiment, compared, seeded
from radical_rerank.lab.experiments.setup import Setup
from radical_rerank.lab.metrics import jaccard, rbo
from radical_rerank.lab.overlay import overlay
from radical_rerank.lab.plots import COLOURS, bars, figure, save
from radical_rerank.lab.questions import ask
from radical_rerank.lab.records import Cell
from radical_rerank.lab.runner import Work, work_of
from radical_rerank.lab.tables import (
    published,
    seeds_of,
    sparsevlm_note,
    summarize,
    write_facts,
    write_tables,
)


def similarity(setup: Setup) -> list[Any]:
    """Lists of every degree of likeness, in five quintiles of the mean cosine between candidates."""
    records = setup.folder.records()
    names = ("radical", "pyramiddrop", "fastv", "random")
    plan = Experiment(
        "how alike the candidates are", lambda budgets: compared(names, budgets[:1], similarity=None)
    )
    setup.run(plan, records)
    data = setup.testbed.lists(lists=setup.limit, similarity=None)
    embedder = setup.testbed.embedder(setup.runner.backbone)
    alike = []
    for task in setup.progress(data.tasks, "likeness of the candidates"):
        vectors = embedder.embed_images([data.picture(name) for name in task.candidates or ()])
        unit = torch.nn.functional.normalize(vectors - vectors.mean(), dim=-1)
        count = len(unit)
        alike.append(float(((unit @ unit.T).sum() - count) / (count * (count - 1))))
    edges = np.quantile(alike, [0.2, 0.4, 0.6, 0.8])
    bins = [int(np.searchsorted(edges, value)) + 1 for value in alike]
    chosen = ({**r, "data": {"quintile": bins[int(r["task"])]}} for r in records.claimed())
    rows = sorted(summarize(chosen), key=lambda row: row.data["quintile"])
    note = f"`{setup.command}`: quintile 5 holds the lists most alike."
    write_tables(setup.folder.path, "similarity", plan.about, rows, note)
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
    save(picture, setup.folder.path / "similarity.png")
    return rows


def retrievers(setup: Setup) -> list[Any]:
    """The same queries over the pools of three first stages, and how much the pools share."""
    data = setup.testbed.gallery()
    count = min(setup.limit, len(data.tasks))
    first = setup.testbed.embedder(setup.runner.backbone)
    gallery = first.embed_images([data.picture(name) for name in setup.progress(data.gallery, "embedding")])
    kinds = {
        "words": first,
        "pairs": setup.testbed.embedder(setup.runner.backbone, words=False, pairs=True),
        "words and pairs": setup.testbed.embedder(setup.runner.backbone, pairs=True),
    }
    pools = {
        kind: {
            task: [name for name, _ in found]
            for task, found in retrieve(data, embedder, 20, gallery=gallery).items()
        }
        for kind, embedder in kinds.items()
    }
    cells = seeded(compared(["radical", "pyramiddrop", "sparsevlm"], setup.keeps[:1]), setup.seeds)
    chosen = []
    for kind, pool in pools.items():
        records = setup.folder.records(kind.replace(" ", "-"))
        setup.runner.run(data, cells, records, pools=pool, limit=count, progress=setup.progress)
        chosen += [{**r, "data": {"pool": kind}} for r in records.claimed()]
    rows = summarize(chosen)
    overlaps = []
    for a, b in combinations(pools, 2):
        both = [(pools[a][task.id], pools[b][task.id]) for task in data.tasks[:count]]
        overlaps.append(
            f"{a} / {b}: Jaccard@20 {np.mean([jaccard(x, y) for x, y in both]):.2f}, "
            f"RBO(0.9) {np.mean([rbo(x, y) for x, y in both]):.2f}"
        )
    note = f"`{setup.command}`. " + "; ".join(overlaps) + "."
    write_tables(setup.folder.path, "retrievers", "three first stages", rows, note)
    return rows


def composed(setup: Setup) -> list[Any]:
    """A reference picture and a change in words: fixed lists, and pools that may miss the target."""
    names = ["radical", "fastv", "pyramiddrop", "sparsevlm", "dart", "visionzip", "lowres", "random"]
    cells = seeded(compared(names, setup.keeps), setup.seeds)
    chosen = []
    for kind, data in (
        ("lists", setup.testbed.composed(lists=setup.limit)),
        ("pools", setup.testbed.composed_gallery()),
    ):
        records, path = setup.folder.records(kind), setup.folder.path / "pool.run"
        pools = (
            None
            if kind == "lists"
            else pools_of(data, setup.runner.backbone, None, 20, path, testbed=setup.testbed)
        )
        setup.runner.run(data, cells, records, pools=pools, limit=setup.limit, progress=setup.progress)
        chosen += [{**r, "data": {"candidates": kind}} for r in records.claimed()]
    rows = summarize(chosen, published("composed", "FashionIQ"))
    note = (
        f"`{setup.command}`. Lists hold the target; pools are the first 20 of a "
        "first stage and may not, then a query counts 0, and c marks the queries whose pool has it. The "
        "paper's column is its conditional MRR@10 on FashionIQ."
    )
    write_tables(setup.folder.path, "composed", "a reference picture and a change in words", rows, note)
    bars(
        setup.folder.path / "composed.png",
        [r for r in rows if r.data["candidates"] == "lists"],
        "composed queries, lists",
    )
    return rows


def transfer(setup: Setup) -> list[Any]:
    """Questions about single scenes. There are no other candidates: RaDiCal goes without uniqueness."""
    names = ("dense", "radical", "fastv", "pyramiddrop", "sparsevlm", "dart", "random")
    data, records = setup.testbed.questions(pictures=setup.limit), setup.folder.records()
    cells = [Cell(TITLES["dense"], "dense")]
    for name in names[1:]:
        for keep in setup.keeps:
            options = {"prior": "relevance"} if name == "radical" else {}
            cells += [
                Cell(f"{TITLES[name]} {keep:.0%}", name, keep, seed, options)
                # There are no candidates to shuffle: a seed changes nothing but what is drawn.
                for seed in (setup.seeds if name == "random" else setup.seeds[:1])
            ]
    ask(setup.runner, data, cells, records, setup.progress)
    right: dict[str, dict[str, list[bool]]] = {cell.name: {} for cell in cells}
    for record in records.claimed():
        right[record["cell"]].setdefault(record["kind"], []).append(record["right"])
    rows: list[Any] = [
        {"method": name, **{kind: 100 * float(np.mean(kinds[kind])) for kind in sorted(kinds, reverse=True)}}
        for name, kinds in right.items()
    ]
    note = (
        f"`{setup.command}`: accuracy in percent on {len(data.questions)} questions. Random: "
        f"{seeds_of(setup.seeds)}; no other method draws."
        + sparsevlm_note((cell.method, cell.options) for cell in cells)
    )
    write_facts(setup.folder.path, "transfer", "single scenes", note, rows, 2)
    return rows


def diagnosis(setup: Setup) -> list[Any]:
    """z_l and H_norm layer by layer, on two differently seeded data sets."""
    found, records, plain = [], setup.folder.records(), setup.runner.plain
    for seed in (0, 1):
        data = setup.testbed.lists(lists=setup.limit, seed=seed)
        cell = Cell("Diagnosis", "dense", data={"seed": seed})
        for number in setup.progress(range(len(data.tasks)), f"diagnosis, data set {seed + 1}"):
            work = work_of(data, number)
            if not setup.runner.missing(work, [cell], records):
                continue
            known = evidence(
                setup.runner.backbone,
                work.task.text,
                [work.pictures[name] for name in work.candidates],
                template=plain.template,
                max_image_tokens=plain.max_image_tokens,
            )
            named = setup.runner.named(cell, number, work.content)
            records.add({"dataset": data.name, **named, **asdict(known), **setup.runner.provenance})
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
    _draw_diagnosis(setup.folder.path / "diagnose.png", first)
    facts = (
        f"r(z, 1 − H_norm) = {first.pearson:.2f} and {second.pearson:.2f}; "
        f"r of the two H_norm curves = {same:.3f}; "
        + ", ".join(f"z of {name} = {value:.2f}" for name, value in first.references.items())
    )
    note = f"`{setup.command}`: {facts}. Lists are as drawn; no seed shuffles them."
    write_facts(setup.folder.path, "diagnose", "reliability of attention, layer by layer", note, rows, 3)
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


def cases(setup: Setup) -> list[Any]:
    """Which tokens each method keeps: rows are methods, columns the first candidates of a list."""
    names = ("dense", "radical", "pyramiddrop", "sparsevlm", "fastv", "dart", "visionzip", "random")
    data, records = setup.testbed.lists(lists=min(setup.limit, 6)), setup.folder.records()
    cells = [
        Cell(TITLES[name], name, 1.0 if name == "dense" else setup.keeps[0], setup.seeds[0]) for name in names
    ]
    works = [work_of(data, number) for number in range(len(data.tasks))]
    for work in setup.progress(works, "cases"):
        images = [work.pictures[name] for name in work.candidates]
        for cell in setup.runner.missing(work, cells, records):
            ranking = setup.runner.reranker(cell).rank(work.task.text, images)
            report = ranking.report
            assert report is not None
            records.add(
                {
                    "dataset": data.name,
                    "query": work.task.text,
                    **setup.runner.named(cell, work.number, work.content),
                    "order": ranking.order,
                    "alive": report.stages[-1].survivors if report.stages else None,
                    "blocks": [[asdict(block) for block in blocks] for blocks in report.blocks],
                    **setup.runner.provenance,
                }
            )
    rows: list[Any] = []
    found = records.claimed()
    for work in works:
        mine = [record for record in found if record["task"] == str(work.number)]
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
