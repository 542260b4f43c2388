"""A share of the score instead of a number of tokens: is it better at the same mean cost?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

from radical_rerank.lab.experiments.definitions import seeded
from radical_rerank.lab.experiments.setup import Setup
from radical_rerank.lab.records import Cell
from radical_rerank.lab.tables import paired, per_query, summarize, write_facts
from radical_rerank.pruning import RaDiCal
from radical_rerank.reranking.tuning import Tuner

FITTED = 60
"""lists, not those of the experiment, on which the shares are found"""


def nucleus(setup: Setup) -> list[dict[str, Any]]:
    """Rank with fixed numbers of tokens and with nuclei that cost as much on other lists."""
    records = setup.folder.records()
    pairs = _pairs(setup)
    cells = seeded([Cell("Dense", "dense"), *chain(*pairs)], setup.seeds)
    data = setup.testbed.lists(lists=setup.limit)
    setup.runner.run(data, cells, records, limit=setup.limit, progress=setup.progress)
    rows = _rows(pairs, list(records.claimed()))
    note = (
        f"`{setup.command}` on {setup.runner.backbone.name}. A stage of a nucleus keeps the fewest tokens "
        f"that hold a share of the score. The share was found on {FITTED} other lists, so that the mean cost "
        "is that of the row above. p: paired randomisation test. Cost: the decoder's arithmetic in percent "
        "of Dense."
    )
    write_facts(setup.folder.path, "nucleus", "a nucleus instead of a fixed number of tokens", note, rows, 3)
    return rows


def _pairs(setup: Setup) -> list[tuple[Cell, Cell]]:
    """Return, for each budget, a fixed number of tokens and the nucleus that costs as much on other lists."""
    source = setup.testbed.for_fitting(setup.testbed.name, FITTED)
    profile = setup.runner.known_profile
    tuner = Tuner(setup.runner.plain, source.pairs(FITTED), profile)
    dense = sum(one.cost for one in tuner.dense(setup.progress))
    pairs = []
    for keep in setup.keeps:
        fixed = RaDiCal(keep=keep, profile=profile)
        cost = sum(one.cost for one in tuner.rank(fixed)) / dense
        share = round(tuner.share(partial(_nucleus, fixed), cost, setup.progress), 6)
        name = f"a nucleus that costs as much as {keep:.0%}"
        pair = (
            Cell(f"{keep:.0%} of the tokens", "radical", keep),
            Cell(name, "radical", keep, options={"nucleus": share}),
        )
        pairs.append(pair)
    return pairs


def _rows(pairs: Sequence[tuple[Cell, Cell]], records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    by_name = {row.name: row for row in summarize(records)}
    scores = {
        name: per_query([record for record in records if record["cell"] == name], "MRR@10")
        for name in by_name
    }
    rows: list[dict[str, Any]] = []
    for fixed, other in pairs:
        for cell in (fixed, other):
            row = by_name[cell.name]
            rows.append(
                {
                    "setting": cell.name,
                    "MRR@10": row.measures["MRR@10"],
                    "Rel_D": row.rel_d,
                    "p (fixed)": None if cell is fixed else paired(scores[other.name], scores[fixed.name]),
                    "cost %": 100 * (1 - row.flops_saved),
                    "tokens left": row.visual_tokens_left,
                    "lists": row.queries,
                }
            )
    return rows


def _nucleus(fixed: RaDiCal, share: float) -> RaDiCal:
    return RaDiCal(keep=fixed.keep, nucleus=share, profile=fixed.profile)
