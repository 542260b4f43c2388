"""Tables of records, as Markdown, LaTeX, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from radical_rerank.errors import InputError
from radical_rerank.files import replacing
from radical_rerank.lab.metrics import MEASURES, bootstrap, paired_test, relative

CONDITIONAL = ("R@1", "R@5", "R@10", "MRR@10")
"""measures that are also reported over the queries whose pool holds a relevant picture"""
Groups = dict[tuple[str, str], list[dict[str, Any]]]
"""the records of each setting, by its name and the data set's options"""


@dataclass(frozen=True)
class TableRow:
    """One setting: means over queries and seeds. Quality is in percent, savings are fractions.

    Args:
        name: the name of the setting
        method, keep, options: the pruning method, its budget and its options
        data: options of the data set
        queries: how many queries were ranked
        seeds: how many seeds each query was ranked under
        measures: means of all measures
        conditional: the same over the queries whose pool holds a relevant picture
        interval: 95% bootstrap interval of MRR@10 over queries
        rel_d: MRR@10 in percent of Dense
        p_dense: p-value of the paired test against Dense
        p_best: p-value of the paired test against the best other setting at the same budget
        visual_tokens, visual_tokens_left: visual tokens of a list at first and at the end
        average_tokens: tokens per layer
        flops_saved, kv_saved: savings of the decoder's arithmetic and of its key-value cache
        seconds: median time per list
        scoring: the part of it in which the method scores and chooses tokens
        paper: the paper's MRR@10
        graded: some pictures are more relevant than others
        seeds_used: the seeds
        unreadable: generated answers without an order; the order of the prompt was kept
        cut: texts of documents that were cut
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
    seeds_used: tuple[int, ...] = ()
    unreadable: int = 0
    cut: int = 0
    scoring: float = 0.0


def summarize(records: Iterable[dict[str, Any]], paper: Mapping[str, float] | None = None) -> list[TableRow]:
    """Average records over queries and seeds, one row per setting.

    A test compares two settings on the queries that both have. Two records of the same setting, query and
    seed are an error, because they belong to different runs.

    Args:
        records: records of one run, from `Records.claimed` or from memory
        paper: the paper's MRR@10 by the name of the setting

    Returns:
        The rows, in the order in which the settings first occur.

    Example:
        >>> from radical_rerank import Backbone, generated_list
        >>> from radical_rerank.lab.datasets import Dataset, Task
        >>> from radical_rerank.lab.records import Cell
        >>> from radical_rerank.lab.runner import Runner
        >>> query, images = generated_list(0, candidates=4)
        >>> task = Task("q1", query, {"0": 1}, candidates=("0", "1", "2", "3"))
        >>> data = Dataset("example", [task], lambda name: images[int(name)])
        >>> runner = Runner(Backbone.from_pretrained("scenes"))
        >>> (row,) = summarize(runner.records_of(data, 0, [Cell("Dense", "dense")]))
        >>> row.name, row.measures["MRR@10"]
        ('Dense', 100.0)
    """
    groups: Groups = {}
    for record in records:
        groups.setdefault((record["cell"], json.dumps(record["data"], sort_keys=True)), []).append(record)
    for (name, _), group in groups.items():
        _check_one_run(name, group)
    scores = {key: per_query(group, "MRR@10") for key, group in groups.items()}
    return [_row(key, groups, scores, (paper or {}).get(key[0])) for key in groups]


def _scoring(seconds: Mapping[str, float]) -> float:
    return seconds.get("prior", 0.0) + seconds.get("selection", 0.0)


def _row(
    key: tuple[str, str],
    groups: Groups,
    scores: dict[tuple[str, str], dict[str, float]],
    paper: float | None,
) -> TableRow:
    """Make the row of one setting. scores: MRR@10 per query of every setting"""
    name, data = key
    group, mine = groups[key], scores[key]
    first = group[0]
    seeds = tuple(dict.fromkeys(record["seed"] for record in group))
    dense = scores.get(("Dense", data))
    best = _best_other(key, groups, scores)
    means = _means(group)
    low, high = bootstrap(list(mine.values()))
    inside = [record for record in group if record["in_pool"]]
    return TableRow(
        name=name,
        method=first["method"],
        keep=first["keep"],
        data=first["data"],
        options=first["options"],
        queries=len(mine),
        seeds=len(seeds),
        measures=means,
        conditional=_means(inside),
        interval=(100 * low, 100 * high),
        rel_d=relative(means["MRR@10"], 100 * float(np.mean(list(dense.values()))) if dense else 0.0),
        p_dense=paired(mine, dense) if dense and name != "Dense" else None,
        p_best=paired(mine, scores[best]) if best and name != "Dense" else None,
        visual_tokens=_mean(group, "visual_tokens"),
        visual_tokens_left=_mean(group, "visual_tokens_left"),
        average_tokens=_mean(group, "average_tokens"),
        flops_saved=_mean(group, "flops_saved"),
        kv_saved=_mean(group, "kv_saved"),
        seconds=float(np.median([sum(record["seconds"].values()) for record in group])),
        scoring=float(np.median([_scoring(record["seconds"]) for record in group])),
        paper=paper,
        graded=any(grade > 1 for record in group for grade in record["relevant"].values()),
        seeds_used=seeds,
        unreadable=sum(record.get("unreadable", 0) for record in group),
        cut=sum(record.get("cut", 0) for record in group),
    )


def _best_other(
    key: tuple[str, str], groups: Groups, scores: dict[tuple[str, str], dict[str, float]]
) -> tuple[str, str] | None:
    """Return the best other setting on the same data and at the same budget."""
    keep = groups[key][0]["keep"]
    rivals = [
        other
        for other, group in groups.items()
        if other[1] == key[1]
        and other[0] != key[0]
        and group[0]["keep"] == keep
        and group[0]["method"] != "dense"
    ]
    return max(rivals, key=lambda other: np.mean(list(scores[other].values())), default=None)


def _check_one_run(name: str, group: Sequence[dict[str, Any]]) -> None:
    """Raise an InputError unless all records are of one data set and model, one per query and seed."""
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


def per_query(group: Sequence[dict[str, Any]], measure: str) -> dict[str, float]:
    """Return the mean over seeds of each query."""
    by_query: dict[str, list[float]] = {}
    for record in group:
        by_query.setdefault(record["task"], []).append(record["measures"][measure])
    return {task: sum(values) / len(values) for task, values in by_query.items()}


def _means(group: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the mean of every measure over queries, in percent. Without records it is nan."""
    if not group:
        return dict.fromkeys(MEASURES, float("nan"))
    return {name: 100 * float(np.mean(list(per_query(group, name).values()))) for name in MEASURES}


def paired(a: dict[str, float], b: dict[str, float]) -> float:
    """Return the p-value of a paired test on the queries that both have."""
    common = [task for task in a if task in b]
    return paired_test([a[task] for task in common], [b[task] for task in common])


def _mean(group: Sequence[dict[str, Any]], field: str) -> float:
    return float(np.mean([record[field] for record in group]))


# Writing.


def table_of(rows: Sequence[TableRow]) -> tuple[list[str], list[list[str]]]:
    """Return the full table as text: its heads and its lines.

    Some columns appear only if they hold something: nDCG@10 with graded relevance, the paper's figures, and,
    if pools can miss every relevant picture, measures with a c in front. Those count only the queries whose
    pool holds a relevant picture.
    """
    columns = list(_columns(rows))
    return [head for head, _ in columns], [[text(row) for _, text in columns] for row in rows]


Column = tuple[str, Callable[[TableRow], str]]
"""a head, and the text of a row"""


def _columns(rows: Sequence[TableRow]) -> Iterator[Column]:
    yield "setting", _label
    for name in ("R@1", "R@5", "R@10", "MRR@10"):
        yield name, partial(_quality, name=name)
    yield "95%", lambda row: f"{row.interval[0]:.1f}–{row.interval[1]:.1f}"
    yield "Rel_D", lambda row: f"{row.rel_d:.1f}"
    if any(row.graded for row in rows):
        yield "nDCG@10", partial(_quality, name="nDCG@10")
    if any(row.conditional != row.measures for row in rows):
        for name in CONDITIONAL:
            yield f"c{name}", partial(_conditional, name=name)
    yield "p (Dense)", lambda row: _p(row.p_dense)
    yield "p (best other)", lambda row: _p(row.p_best)
    yield "tokens left", lambda row: f"{row.visual_tokens_left:.0f} of {row.visual_tokens:.0f}"
    yield "tokens / layer", lambda row: f"{row.average_tokens:.0f}"
    yield "FLOPs saved", lambda row: f"{100 * row.flops_saved:.1f}%"
    yield "KV saved", lambda row: f"{100 * row.kv_saved:.1f}%"
    yield "s / list", lambda row: f"{row.seconds:.3f}"
    yield "scoring s", lambda row: f"{row.scoring:.3f}"
    if any(row.paper is not None for row in rows):
        yield "paper", lambda row: "" if row.paper is None else f"{row.paper:.2f}"


def _quality(row: TableRow, name: str) -> str:
    return f"{row.measures[name]:.2f}"


def _conditional(row: TableRow, name: str) -> str:
    return f"{row.conditional[name]:.2f}"


def short_table_of(rows: Sequence[TableRow]) -> tuple[list[str], list[list[str]]]:
    """Return the five most important columns, which fit a terminal of 80 columns."""
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
    """Return a sentence on what no column shows: the number of queries, the seeds, SparseVLM's budget."""
    counts = sorted({row.queries for row in rows})
    count = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    facts = [f"{count} queries per row"]
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
        facts.append(f"answers without an order (the prompt's order was kept): {', '.join(unread)}")
    cut = [f"{row.name} {row.cut}" for row in rows if row.cut]
    if cut:
        facts.append(f"documents whose text was too long and was cut: {', '.join(cut)}")
    return "; ".join(facts) + "." + sparsevlm_note((row.method, row.options) for row in rows)


def seeds_of(seeds: Sequence[int]) -> str:
    """Describe the seeds of a mean: "seed 42", "mean over seeds 42, 123"."""
    return f"{'seed' if len(seeds) == 1 else 'mean over seeds'} {', '.join(map(str, seeds))}"


def sparsevlm_note(settings: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """Describe the budgets of SparseVLM in these (method, options) pairs. Empty if SparseVLM is not used."""
    budgets = {options.get("budget", "fixed") for method, options in settings if method == "sparsevlm"}
    note = ""
    if "fixed" in budgets:
        note += " SparseVLM has the fixed budget: its published schedule, scaled to keep R."
    if "adaptive" in budgets:
        note += " SparseVLM, adaptive sets its budget by the rank of the attention and does not meet R."
    return note


def _p(value: float | None) -> str:
    return "" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def write_tables(folder: str | Path, name: str, title: str, rows: Sequence[TableRow], note: str = "") -> None:
    """Write a table as `name.md`, `name.tex`, `name.csv`, and `name.json` with all fields of each row.

    Args:
        folder: where to write
        name: the files' name
        title: the table's title
        rows: the settings
        note: text above the table
    """
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
    """Write a table of dicts as `name.md` and `name.json`: a label first, then numbers.

    Args:
        folder: where to write
        name: the files' name
        title, note: text above the table
        rows: one dict per row, all with the same keys; None leaves a cell empty
        digits: decimals of the numbers
    """
    heads = list(rows[0])
    lines = [
        [str(row[heads[0]]), *("" if row[head] is None else f"{row[head]:.{digits}f}" for head in heads[1:])]
        for row in rows
    ]
    with replacing(folder / f"{name}.md") as file:
        file.write(f"# {title}\n\n{note}\n\n{markdown(heads, lines)}")
    with replacing(folder / f"{name}.json") as file:
        json.dump({"note": note, "rows": rows}, file, indent=1, ensure_ascii=False)
        file.write("\n")


def markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    rule = ["---", *(["---:"] * (len(heads) - 1))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (heads, rule, *lines)) + "\n"


def latex(heads: Sequence[str], lines: Sequence[Sequence[str]], caption: str) -> str:
    """Return a table as LaTeX, for the package booktabs."""
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
    """Return a table as CSV."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows(lines)
    return buffer.getvalue()
