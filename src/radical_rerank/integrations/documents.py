"""What the model is shown of another library's documents: their pictures, and their texts.

Every adapter has the option `text`:

* None (default): texts go along if the model reads them (`reranker.template.texts`), else pictures alone.
* True: texts go along, and a plain string is always a text. An error if the model reads no texts.
* False: pictures alone.

A document of which nothing is left to show is an error that names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radical_rerank.errors import InputError
from radical_rerank.reranking import Reranker
from radical_rerank.reranking.encoding import is_text


def shown(
    reranker: Reranker, text: bool | None, name: str, images: Sequence[Any], words: str | None
) -> dict[str, Any]:
    """Return a document as `Reranker.rank` takes it.

    Args:
        reranker: what ranks it
        text: the adapter's option
        name: for error messages
        images: its pictures
        words: its text

    Example:
        >>> shown(Reranker("scenes"), None, "document 0", ["mug.jpg"], "a mug")
        {'images': ['mug.jpg']}
    """
    reads = reads_texts(reranker, text)
    words = (words or "").strip()
    if not images and not (words and reads):
        why = "" if not words else ", and the model reads no texts" if text is None else ", and text is False"
        raise InputError(f"{name} has no picture{why or ' and no text'}")
    return {"images": list(images), **({"text": words} if words and reads else {})}


def shown_string(reranker: Reranker, text: bool | None, name: str, string: str) -> dict[str, Any]:
    """Return a plain string as `Reranker.rank` takes it: a text, or the path or data URI of a picture."""
    picture = text is not True and not is_text(string)
    return shown(reranker, text, name, [string] if picture else [], None if picture else string)


def reads_texts(reranker: Reranker, text: bool | None) -> bool:
    """Return whether texts go along. text: the adapter's option"""
    if text and not reranker.template.texts:
        raise InputError("text=True, but the model reads no texts: its prompt template has no place for them")
    return reranker.template.texts if text is None else text


def as_list(value: Any) -> list[Any]:
    """Return the pictures of a field that holds none, one, or a list of them.

    Example:
        >>> as_list(None), as_list("a.jpg"), as_list(["a.jpg", "b.jpg"])
        ([], ['a.jpg'], ['a.jpg', 'b.jpg'])
    """
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
