"""`radical rank`, `calibrate`, `methods`, `demo`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from radical_rerank.cli.common import AsJson, Device, Dtype, print_json, print_table, say
from radical_rerank.errors import InputError
from radical_rerank.files import EMBEDDED

app = typer.Typer()


@app.command()
def rank(
    query: Annotated[str, typer.Argument(help="What to look for, in words.")],
    images: Annotated[list[str], typer.Argument(help="Image files, the candidates.", metavar="IMAGE...")],
    model: Annotated[
        str, typer.Option(help="A model id or a folder; by default the small model of scenes that ships.")
    ] = EMBEDDED,
    method: Annotated[str, typer.Option(help="A name from `radical methods`.")] = "radical",
    keep: Annotated[float, typer.Option(help="The fraction of visual tokens that is kept.")] = 0.2,
    top_k: Annotated[int | None, typer.Option(help="Show only the best so many.")] = None,
    reference: Annotated[str | None, typer.Option(help="An image that the query changes.")] = None,
    scorer: Annotated[str, typer.Option(help="logits or generate.")] = "logits",
    template: Annotated[str | None, typer.Option(help="A prompt template, a JSON file.")] = None,
    max_image_tokens: Annotated[int, typer.Option(help="Larger images are scaled down to this.")] = 384,
    on_error: Annotated[
        str, typer.Option(help="raise or skip: what to do with an unreadable image.")
    ] = "raise",
    device: Device = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Put images in the order in which they match a query."""
    from radical_rerank.pruning import build
    from radical_rerank.reranking import Reranker

    pruner = build(method, keep=keep)
    missing = [image for image in [*images, *([reference] if reference else [])] if not Path(image).exists()]
    if missing and on_error == "raise":  # before a large model is loaded in vain
        raise InputError(f"{missing[0]} does not exist")
    reranker = Reranker.from_pretrained(
        model,
        pruner,
        scorer=scorer,
        template=template,
        max_image_tokens=max_image_tokens,
        device=device,
        dtype=dtype,
        say=say,
    )
    ranking = reranker.rank(query, images, top_k=top_k, reference=reference, on_error=on_error)  # type: ignore[arg-type]
    for skipped in ranking.skipped:
        say(f"skipped: {skipped.reason}")
    if as_json:
        results = [
            {
                "rank": place,
                "index": result.index,
                "score": result.score,
                "probability": result.probability,
                "image": str(result.document),
            }
            for place, result in enumerate(ranking, start=1)
        ]
        print_json(
            {
                "query": query,
                "model": model,
                "method": method,
                "results": results,
                "skipped": [{"index": s.index, "reason": s.reason} for s in ranking.skipped],
                "repairs": ranking.repairs,
                "totals": asdict(ranking.totals),
                "pruning": [report.to_dict() for report in ranking.reports],
            }
        )
        return
    table = Table("rank", "score", title=escape(query), title_justify="left")
    table.add_column("image", overflow="fold")
    for place, result in enumerate(ranking, start=1):
        table.add_row(str(place), f"{result.score:.3f}", escape(str(result.document)))
    console = Console()
    console.print(table)
    if ranking.repairs:
        console.print(f"the written order had to be mended {ranking.repairs} times")
    totals = ranking.totals
    if totals.prompts:
        prompts = f"{totals.prompts} prompts, " if totals.prompts > 1 else ""
        console.print(
            f"{prompts}{totals.visual_tokens} visual tokens, {totals.visual_tokens_left} at the end; "
            f"{totals.flops_saved:.0%} of the decoder's FLOPs and {totals.kv_saved:.0%} of its KV cache "
            f"saved; {sum(totals.seconds.values()):.2f} s"
        )


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help="A model id or a folder.")],
    lists: Annotated[
        str | None,
        typer.Option(help='Your own lists, JSON lines of {"query": …, "images": [paths]}.'),
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="Where to write the profile; by default your cache.")
    ] = None,
    stages: Annotated[int, typer.Option(help="K: the stages of the schedule that is shown.")] = 4,
    gap: Annotated[int, typer.Option(help="g: the least distance between its layers.")] = 2,
    device: Device = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Measure how concentrated a model's attention is, layer by layer, and keep it as its trust profile."""
    from radical_rerank.backbones import Backbone
    from radical_rerank.method import alpha_maximin
    from radical_rerank.pruning import Profile
    from radical_rerank.reranking import calibrate as measure

    wanted = list(_read_lists(Path(lists))) if lists else None
    backbone = Backbone.from_pretrained(model, device=device, dtype=dtype)
    profile = measure(backbone, wanted, say=say)
    path = profile.save(out or Profile.cache_path(backbone.identity))
    schedule = alpha_maximin(profile.layers, profile.alpha, stages, gap=gap)
    say(f"saved to {path}")
    if as_json:
        print_json(json.loads(path.read_text(encoding="utf-8")) | {"schedule": schedule})
        return
    table = Table(
        "layer", "H_norm", "alpha", "", title=f"{escape(model)}, {profile.lists} lists", title_justify="left"
    )
    assert profile.h_norm is not None
    for layer, h, alpha in zip(profile.layers, profile.h_norm, profile.alpha, strict=True):
        bar = "█" * round(20 * alpha) + (" ◄ prunes" if layer in schedule else "")
        table.add_row(str(layer), f"{h:.4f}", f"{alpha:.2f}", bar)
    Console().print(table)


@app.command()
def methods(as_json: AsJson = False) -> None:
    """List the token-reduction methods."""
    from radical_rerank.pruning import METHODS

    rows = {name: method.summary for name, method in METHODS.items()}
    if as_json:
        print_json([{"name": name, "summary": summary} for name, summary in rows.items()])
        return
    print_table(("name", "what it keeps"), rows.items())


@app.command()
def demo(
    out: Annotated[str, typer.Option(help="The folder of the page.")] = "demo",
    queries: Annotated[int, typer.Option(min=1, help="How many queries.")] = 8,
    size: Annotated[int, typer.Option(min=20, help="How many scenes the gallery has.")] = 1000,
    as_json: AsJson = False,
) -> None:
    """Search a gallery of generated scenes and rerank what is found, unpruned and pruned."""
    from radical_rerank.demo import run_demo

    run_demo(Path(out), queries=queries, size=size, as_json=as_json)


def _read_lists(path: Path) -> Iterator[tuple[str, list[str]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            query, images = record["query"], record["images"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}, line {number}: not a list record: {error!r}") from None
        if not (isinstance(query, str) and query.strip() and isinstance(images, list) and images):
            raise InputError(f"{path}, line {number}: needs a query and a list of images")
        yield query, [str(path.parent / image) for image in images]
