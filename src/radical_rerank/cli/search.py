"""`radical search`: find pictures in a folder, and put the best in order."""

from __future__ import annotations

import html
import os
import re
import time
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from radical_rerank import progress as bars
from radical_rerank.cli.common import AsJson, Device, Dtype, ModelKwargs, log, print_json
from radical_rerank.embedded import DEFAULT_MODEL
from radical_rerank.errors import InputError
from radical_rerank.files import replacing

if TYPE_CHECKING:
    from radical_rerank.backbones import Backbone
    from radical_rerank.reranking import Document, Ranking
    from radical_rerank.retrieval import Embedder, FolderIndex, Found, Update

app = typer.Typer()

NAMED = 10
"""unreadable pictures that are named in messages; the JSON has all"""
THUMBNAIL = 512
"""the longer side of a picture on the page, in pixels"""


@app.command()
def search(
    query: Annotated[str, typer.Argument(help="What to look for, in words.")],
    folder: Annotated[str, typer.Argument(help="A folder with pictures and PDF files; its subfolders too.")],
    model: Annotated[
        str,
        typer.Option(help="A model id or a folder; by default the small model of photographs that ships."),
    ] = DEFAULT_MODEL,
    first_stage: Annotated[
        str | None,
        typer.Option(
            help="What finds the candidates: photos, scenes, siglip2, jina, qwen, or a model id.",
            show_default=f"the model's own if it ships, else {DEFAULT_MODEL}",
        ),
    ] = None,
    method: Annotated[str, typer.Option(help="A name from `radical methods`.")] = "radical",
    keep: Annotated[float, typer.Option(help="The fraction of visual tokens to keep.")] = 0.2,
    top_k: Annotated[int, typer.Option(min=1, help="Show the best K.")] = 5,
    candidates: Annotated[int, typer.Option(min=1, help="How many pictures are reranked.")] = 20,
    page: Annotated[str | None, typer.Option(help="Write the results to this file, as a web page.")] = None,
    show: Annotated[bool, typer.Option("--open", help="Show the results in your web browser.")] = False,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Embed all pictures again.")] = False,
    device: Device = None,
    dtype: Dtype = None,
    model_kwargs: ModelKwargs = None,
    as_json: AsJson = False,
) -> None:
    """Search a folder of pictures: find candidates by their embeddings, then rerank them.

    Every page of a PDF file is a picture, too. The embeddings are kept in your cache: a later search reads
    new and changed files and the candidates, and no others.
    """
    from radical_rerank.reranking import Reranker
    from radical_rerank.retrieval import FolderIndex
    from radical_rerank.retrieval.folder import check_folder

    check_folder(folder)  # before a large model is loaded for nothing
    seconds: dict[str, float] = {}
    with _timed(seconds, "load"):
        reranker = Reranker(model, method, keep=keep, device=device, dtype=dtype, model_kwargs=model_kwargs)
        reranker.check_query(query)
        index = FolderIndex(folder, first_stage_of(first_stage, reranker.backbone))
    with _timed(seconds, "index"):
        update = _updated(index, rebuild)
    with _timed(seconds, "retrieve"):
        found = index.search(query, max(candidates, top_k))
    with _timed(seconds, "rerank"):
        found, documents = _documents(found, reranker.page_text)
        ranking = reranker.rank(query, documents, top_k=top_k, on_error="skip")
    for skipped in ranking.skipped:
        log.warning("skipped: %s", skipped.reason)
    results = _results(ranking, found)
    if page or show:
        pictures = [documents[result.index] for result in ranking]
        written = write_page(page or index.path.with_suffix(".html"), query, folder, results, pictures)
        log.info("the results as a page: %s", written)
        if show:
            webbrowser.open(written.resolve().as_uri())
    if as_json:
        print_json(_facts(index, update, ranking) | {"results": results, "seconds": seconds})
        return
    _print_results(ranking, results)
    Console().print(
        f"{len(index)} pictures, searched with {escape(index.embedder.name)} in {seconds['retrieve']:.2f} s; "
        f"{len(found)} candidates, reranked in {seconds['rerank']:.2f} s"
    )


def first_stage_of(name: str | None, backbone: Backbone) -> Embedder:
    """Return a first stage by its name. Without one: that of the model if it ships, else of the default."""
    from radical_rerank.backbones import Backbone
    from radical_rerank.embedded.photos.embedder import PhotoEmbedder
    from radical_rerank.embedded.scenes.embedder import SceneEmbedder
    from radical_rerank.retrieval import embedder_of

    own: dict[str, Callable[[Backbone], Embedder]] = {"photos": PhotoEmbedder, "scenes": SceneEmbedder}
    if name is None:
        name = backbone.name if backbone.name in own else DEFAULT_MODEL
    if name not in own:
        return embedder_of(name)
    return own[name](backbone if backbone.name == name else Backbone.from_pretrained(name))


@contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[part] = round(time.perf_counter() - start, 3)


def _updated(index: FolderIndex, rebuild: bool) -> Update:
    """Bring the index up to date, and say what could not be read."""
    if rebuild:
        index.clear()
    update = index.update(bars.bar)
    for reason in update.unreadable[:NAMED]:
        log.warning("left out: %s", _printable(reason))
    if len(update.unreadable) > NAMED:
        log.warning("left out: %d more; --json names all", len(update.unreadable) - NAMED)
    return update


def _documents(found: Sequence[Found], page_text: bool) -> tuple[list[Found], list[Document]]:
    """Return what can be ranked: a PDF may have gone or changed since it was indexed."""
    usable, documents = [], []
    for each in found:
        try:
            documents.append(each.document(page_text=page_text))
            usable.append(each)
        except InputError as error:
            log.warning("skipped: %s", _printable(str(error)))
    return usable, documents


def _results(ranking: Ranking, found: Sequence[Found]) -> list[dict[str, Any]]:
    """Return the results for JSON, best first."""
    return [
        {
            "rank": place,
            "path": _printable(str(found[result.index].path)),
            "page": found[result.index].page,
            "score": result.score,
            "first_stage": {"rank": result.index + 1, "score": found[result.index].score},
        }
        for place, result in enumerate(ranking, start=1)
    ]


def _facts(index: FolderIndex, update: Update, ranking: Ranking) -> dict[str, Any]:
    return {
        "query": ranking.query,
        "folder": _printable(str(index.folder)),
        "model": ranking.model,
        "method": ranking.method,
        "first_stage": index.embedder.name,
        "index": {
            "file": _printable(str(index.path)),
            "pictures": len(index),
            "new": update.new,
            "changed": update.changed,
            "removed": update.removed,
            "embedded": update.embedded,
            "unreadable": {_printable(path): _printable(why) for path, why in index.unreadable.items()},
        },
    }


def _print_results(ranking: Ranking, results: Sequence[dict[str, Any]]) -> None:
    table = Table("rank", "score", title=escape(ranking.query), title_justify="left")
    table.add_column("image", overflow="fold")
    for result in results:
        table.add_row(str(result["rank"]), f"{result['score']:.3f}", escape(_name(result)))
    Console().print(table)


def _name(result: dict[str, Any]) -> str:
    from radical_rerank.reranking.encoding import with_page

    return with_page(result["path"], result["page"])


def _printable(text: str) -> str:
    """Return a path that can be printed: a file's name may be no text."""
    return os.fsencode(text).decode(errors="replace")


def write_page(
    path: str | Path, query: str, folder: str, results: Sequence[dict[str, Any]], pictures: Sequence[Any]
) -> Path:
    """Write the results as a web page: one file that needs no other files and no network.

    Args:
        path: the file to write
        query, folder: for the title
        results: as in the JSON
        pictures: the document of each result

    Returns:
        The path.
    """
    from radical_rerank.reranking.encoding import data_uri, load_image

    path, figures = Path(path), []
    for result, document in zip(results, pictures, strict=True):
        shown = document["image"] if isinstance(document, dict) else document
        picture = load_image(shown, name=_name(result)).copy()
        picture.thumbnail((THUMBNAIL, THUMBNAIL))
        name = html.escape(_name(result))
        figures.append(
            f'<figure><img src="{data_uri(picture, "WEBP", quality=90)}" alt="{name}">'
            f"<figcaption><span>{result['rank']}</span><span>{result['score']:.3f}</span></figcaption>"
            f"<p>{name}</p></figure>"
        )
    text = (resources.files("radical_rerank") / "cli" / "search.html").read_text(encoding="utf-8")
    parts = {
        "query": html.escape(query),
        "folder": html.escape(_printable(folder)),
        "figures": "\n".join(figures),
    }
    text = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], text)
    with replacing(path) as file:
        file.write(text)
    return path
