"""Tables from records alone: Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from radical_rerank.errors import InputError
from radical_rerank.files import replacing
from radical_rerank.lab.metrics import MEASURES, bootstrap, paired_test, relative

CONDITIONAL = ("R@1", "R@5", "R@10", "MRR@10")
"""the paper's measures of the queries whose pool holds a match"""


@dataclass(frozen=True)
class TableRow:
    """One setting, means over queries and seeds. Quality in percent, costs as fractions saved.

    conditional: the same measures over the queries whose pool holds a match
    interval: 95% bootstrap interval of MRR@10 over queries; p_dense, p_best: paired tests against Dense and
    against the best other setting at the same budget
    """

    name: str
    method: str
    keep: float
    data: dict[str, Any]
    options: dict[str, Any]
    queries: int
    seeds: int
    measures: dict[str, float]
    conditional: dict[str, float]
    interval: tuple[float, float]
    rel_d: float
    p_dense: float | None
    p_best: float | None
    visual_tokens: float
    visual_tokens_left: float
    average_tokens: float
    flops_saved: float
    kv_saved: float
    seconds: float
    paper: float | None
    graded: bool = False
    """some pictures match better than others"""
    seeds_used: tuple[int, ...] = ()
    unreadable: int = 0
    """answers without an order in them: the prompt's own order counts"""


def summarize(records: Iterable[dict[str, Any]], paper: dict[str, float] | None = None) -> list[TableRow]:
    """Rows in the order in which the settings first occur. Queries are compared only where both ran.

    Two records of one query, setting and seed are of different runs: no mean of them means anything.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["cell"], json.dumps(record["data"], sort_keys=True)), []).append(record)
    for (name, _), group in groups.items():
        _check_one_run(name, group)
    scores = {key: _per_query(group, "MRR@10") for key, group in groups.items()}
    rows = []
    for (name, data), group in groups.items():
        mine, first = scores[name, data], group[0]
        seeds = tuple(dict.fromkeys(record["seed"] for record in group))
        dense = scores.get(("Dense", data))
        rivals = [
            key
            for key, others in groups.items()
            if key[1] == data
            and key[0] != name
            and others[0]["keep"] == first["keep"]
            and others[0]["method"] != "dense"
        ]
        best = max(rivals, key=lambda key: np.mean(list(scores[key].values())), default=None)
        mean = {m: 100 * float(np.mean(list(_per_query(group, m).values()))) for m in MEASURES}
        inside = [record for record in group if record["in_pool"]]
        rows.append(
            TableRow(
                name=name,
                method=first["method"],
                keep=first["keep"],
                data=first["data"],
                options=first["options"],
                queries=len(mine),
                seeds=len(seeds),
                measures=mean,
                conditional={
                    m: 100 * float(np.mean(list(_per_query(inside, m).values()))) if inside else float("nan")
                    for m in MEASURES
                },
                interval=tuple(100 * x for x in bootstrap(list(mine.values()))),  # type: ignore[arg-type]
                rel_d=relative(mean["MRR@10"], 100 * float(np.mean(list(dense.values()))))
                if dense
                else float("nan"),
                p_dense=_paired(mine, dense) if dense and name != "Dense" else None,
                p_best=_paired(mine, scores[best]) if best and name != "Dense" else None,
                visual_tokens=_mean(group, "visual_tokens"),
                visual_tokens_left=_mean(group, "visual_tokens_left"),
                average_tokens=_mean(group, "average_tokens"),
                flops_saved=_mean(group, "flops_saved"),
                kv_saved=_mean(group, "kv_saved"),
                seconds=float(np.median([sum(record["seconds"].values()) for record in group])),
                paper=(paper or {}).get(name),
                graded=any(grade > 1 for record in group for grade in record["relevant"].values()),
                seeds_used=seeds,
                unreadable=sum(record.get("unreadable", 0) for record in group),
            )
        )
    return rows


def _check_one_run(name: str, group: Sequence[dict[str, Any]]) -> None:
    """All records of a row are of one data set and model, and there is one per query and seed."""
    for fields in (("dataset",), ("model", "fingerprint", "dtype")):
        kinds = {tuple(record.get(field) for field in fields) for record in group}
        if len(kinds) > 1:
            raise InputError(f"the records of {name!r} are of {len(kinds)} {fields[0]}s: {sorted(kinds)}")
    seen: set[tuple[str, int]] = set()
    for record in group:
        key = record["task"], record["seed"]
        if key in seen:
            raise InputError(
                f"there are two records of {name!r} for query {key[0]} and seed {key[1]}: they are of "
                "different settings"
            )
        seen.add(key)


def _per_query(group: Sequence[dict[str, Any]], measure: str) -> dict[str, float]:
    """Per query the mean over seeds."""
    found: dict[str, list[float]] = {}
    for record in group:
        found.setdefault(record["task"], []).append(record["measures"][measure])
    return {task: sum(values) / len(values) for task, values in found.items()}


def _paired(a: dict[str, float], b: dict[str, float]) -> float:
    common = [task for task in a if task in b]
    return paired_test([a[task] for task in common], [b[task] for task in common])


def _mean(group: Sequence[dict[str, Any]], field: str) -> float:
    return float(np.mean([record[field] for record in group]))


def published(experiment: str, dataset: str = "Flickr30K") -> dict[str, float]:
    """The paper's MRR@10 of the same cells, on its own model and data."""
    text = (resources.files("radical_rerank.lab.experiments") / "published.json").read_text(encoding="utf-8")
    return json.loads(text).get(experiment, {}).get(dataset, {})


# Writing.


def table_of(rows: Sequence[TableRow]) -> tuple[list[str], list[list[str]]]:
    """Heads and lines. Where pools may miss every match, c marks the queries whose pool has one. The paper's
    column is there only where it says something."""
    conditional = any(row.conditional != row.measures for row in rows)
    quoted = any(row.paper is not None for row in rows)
    graded = any(row.graded for row in rows)
    heads = ["setting", "R@1", "R@5", "R@10", "MRR@10", "95%", "Rel_D", *(["nDCG@10"] if graded else [])]
    heads += [f"c{m}" for m in CONDITIONAL] if conditional else []
    heads += ["p (Dense)", "p (best other)", "tokens left", "tokens / layer", "FLOPs saved", "KV saved"]
    heads += ["s / list", *(["paper"] if quoted else [])]
    lines = []
    for row in rows:
        lines.append(
            [
                _label(row),
                *(f"{row.measures[m]:.2f}" for m in ("R@1", "R@5", "R@10", "MRR@10")),
                f"{row.interval[0]:.1f}–{row.interval[1]:.1f}",
                f"{row.rel_d:.1f}",
                *([f"{row.measures['nDCG@10']:.2f}"] if graded else []),
                *(f"{row.conditional[m]:.2f}" for m in CONDITIONAL if conditional),
                _p(row.p_dense),
                _p(row.p_best),
                f"{row.visual_tokens_left:.0f} of {row.visual_tokens:.0f}",
                f"{row.average_tokens:.0f}",
                f"{100 * row.flops_saved:.1f}%",
                f"{100 * row.kv_saved:.1f}%",
                f"{row.seconds:.3f}",
                *(["" if row.paper is None else f"{row.paper:.2f}"] if quoted else []),
            ]
        )
    return heads, lines


def short_table_of(rows: Sequence[TableRow]) -> tuple[list[str], list[list[str]]]:
    """The five columns that matter most, for a terminal of 80. The files have them all."""
    lines = [
        [
            _label(row),
            f"{row.measures['MRR@10']:.2f}",
            f"{row.rel_d:.1f}",
            _p(row.p_dense),
            f"{100 * row.flops_saved:.1f}%",
        ]
        for row in rows
    ]
    return ["setting", "MRR@10", "Rel_D", "p (Dense)", "FLOPs saved"], lines


def _label(row: TableRow) -> str:
    return row.name + "".join(f", {key} = {value}" for key, value in row.data.items() if value is not None)


def facts_of(rows: Sequence[TableRow]) -> str:
    """What no column says: how many queries, which seeds, and whose budget SparseVLM had."""
    counts = sorted({row.queries for row in rows})
    many = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    facts = [f"{many} queries per row"]
    used = list(dict.fromkeys(row.seeds_used for row in rows))
    if len(used) == 1:
        facts.append(seeds_of(used[0]))
    else:
        facts += [
            f"{', '.join(row.name for row in rows if row.seeds_used == seeds)}: {seeds_of(seeds)}"
            for seeds in used
        ]
    unread = [f"{row.name} {row.unreadable}" for row in rows if row.unreadable]
    if unread:
        facts.append(f"answers without an order, for which the prompt's own counts: {', '.join(unread)}")
    return "; ".join(facts) + "." + sparsevlm_note((row.method, row.options) for row in rows)


def seeds_of(seeds: Sequence[int]) -> str:
    return f"{'seed' if len(seeds) == 1 else 'mean over seeds'} {', '.join(map(str, seeds))}"


def sparsevlm_note(settings: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """Which of SparseVLM's two budgets these (method, options) ran with; nothing where none is SparseVLM."""
    budgets = {options.get("budget", "fixed") for method, options in settings if method == "sparsevlm"}
    note = ""
    if "fixed" in budgets:
        note += " SparseVLM has the fixed budget: the shape of its published list, scaled to meet R."
    if "adaptive" in budgets:
        note += " SparseVLM, adaptive sets its own budget by the rank of the attention and does not meet R."
    return note


def _p(value: float | None) -> str:
    return "" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def write_tables(folder: str | Path, name: str, title: str, rows: Sequence[TableRow], note: str = "") -> None:
    """`name.md`, `name.tex`, `name.csv`, and `name.json` with all that is known of each row."""
    folder = Path(folder)
    heads, lines = table_of(rows)
    facts = facts_of(rows)
    seeds = [" ".join(map(str, row.seeds_used)) for row in rows]
    texts = {
        "md": f"# {title}\n\n{note}{' ' if note else ''}{facts}\n\n" + markdown(heads, lines),
        "tex": latex(heads, lines, f"{title}. {facts}"),
        "csv": comma_separated(
            [*heads, "seeds"], [[*line, used] for line, used in zip(lines, seeds, strict=True)]
        ),
        "json": json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False) + "\n",
    }
    for suffix, text in texts.items():
        with replacing(folder / f"{name}.{suffix}") as file:
            file.write(text)


def write_facts(
    folder: Path, name: str, title: str, note: str, rows: Sequence[dict[str, Any]], digits: int
) -> None:
    """`name.md` and `name.json` of rows that are not settings: a label first, then numbers."""
    heads = list(rows[0])
    lines = [[str(row[heads[0]]), *(f"{row[head]:.{digits}f}" for head in heads[1:])] for row in rows]
    with replacing(folder / f"{name}.md") as file:
        file.write(f"# {title}\n\n{note}\n\n{markdown(heads, lines)}")
    with replacing(folder / f"{name}.json") as file:
        json.dump({"note": note, "rows": rows}, file, indent=1, ensure_ascii=False)
        file.write("\n")


def markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *(["---:"] * (len(heads) - 1))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (heads, rule, *lines)) + "\n"


def latex(heads: Sequence[str], lines: Sequence[Sequence[str]], caption: str) -> str:
    special = {"%": r"\%", "&": r"\&", "_": r"\_", "α": r"$\alpha$", "–": "--", "<": "$<$", "#": r"\#"}

    def text(words: str) -> str:
        return "".join(special.get(c, c) for c in words)

    def escaped(line: Sequence[str]) -> str:
        return " & ".join(map(text, line)) + r" \\"

    body = "\n".join(escaped(line) for line in lines)
    return (
        "\\begin{table}\n\\centering\n"
        f"\\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}\n\\toprule\n{escaped(heads)}\n\\midrule\n{body}\n"
        f"\\bottomrule\n\\end{{tabular}}\n\\caption{{{text(caption)}}}\n\\end{{table}}\n"
    )


def comma_separated(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows(lines)
    return buffer.getvalue()
