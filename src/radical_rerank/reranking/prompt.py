"""The prompt of one list: its template (data), its token ids, and the layout that the engine needs."""

from __future__ import annotations

import hashlib
import json
import string
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from radical_rerank.backbones import Backbone, Size
from radical_rerank.backbones.model import folder_of
from radical_rerank.errors import InputError, OutOfWorldWarning, ScoringError
from radical_rerank.pruning import Layout

TEMPLATE_FILE = "radical_template.json"
IDENTIFIERS = string.ascii_uppercase + string.ascii_lowercase
"""One token each in every supported tokenizer, unlike numbers ("10" is two)"""

# Private-use characters that stand for an image and for the query while the chat template is applied.
_IMAGE, _QUERY = "\ue000", "\ue001"


@dataclass(frozen=True)
class PromptTemplate:
    """The words of the prompt. `{image}`, `{id}`, `{query}`, `{count}`, `{first}` and `{last}` are filled in.

    The query comes after all images, so that its tokens have seen every candidate.

    Args:
        candidate: comes once per candidate
        ask_logits: the question, with the query
        ask_generate: the question for the whole order
        intro, reference: come before the candidates; `reference` only for composed queries
        ask_composed_logits, ask_composed_generate: the questions for composed queries. A model that cannot
            answer a question has none
        answer: follows the chat template's generation prompt, as the start of the model's answer
        system: the system message
        window: how many candidates the model ranks well in one prompt

    Example:
        >>> template = PromptTemplate.load("qwen3_vl")
        >>> template.candidate
        '{id}: {image}\\n'
    """

    candidate: str
    ask_logits: str
    ask_generate: str | None = None
    intro: str = ""
    reference: str | None = None
    ask_composed_logits: str | None = None
    ask_composed_generate: str | None = None
    answer: str = ""
    system: str = ""
    window: int = len(IDENTIFIERS)

    def __post_init__(self) -> None:
        for name, needed in (
            ("reference", ("{image}",)),
            ("candidate", ("{id}", "{image}")),
            ("ask_logits", ("{query}",)),
            ("ask_generate", ("{query}",)),
            ("ask_composed_logits", ("{query}",)),
            ("ask_composed_generate", ("{query}",)),
        ):
            text = getattr(self, name)
            missing = [field for field in needed if text is not None and text.count(field) != 1]
            if missing:
                raise InputError(f"prompt template: {name} must contain {missing[0]} exactly once")

    def question(self, *, composed: bool, generate: bool) -> str:
        """Return the question, or raise an InputError if the model has no such question."""
        name = f"ask{'_composed' if composed else ''}_{'generate' if generate else 'logits'}"
        text: str | None = getattr(self, name)
        if text is None or (composed and self.reference is None):
            wanted = "queries with a reference image" if composed else "writing the whole order"
            raise InputError(f"the model's prompt template has no {name}: it was not made for {wanted}")
        return text

    @classmethod
    def of(cls, backbone: Backbone) -> PromptTemplate:
        """Return the model's own template, if its folder has one, else its family's."""
        folder = folder_of(backbone.name)
        own = folder / TEMPLATE_FILE if folder is not None else None
        if own is not None and own.is_file():
            return cls.load(own)
        kind = backbone.model.config.model_type
        shipped = resources.files("radical_rerank.reranking") / "templates" / f"{kind}.json"
        return cls.load(kind if shipped.is_file() else "default")

    @classmethod
    def load(cls, source: str | Path | dict[str, str]) -> PromptTemplate:
        """Load a template from a dict, a JSON file, or the name of a model family."""
        if not isinstance(source, dict):
            shipped = resources.files("radical_rerank.reranking") / "templates" / f"{source}.json"
            path = shipped if shipped.is_file() else Path(source)
            try:
                source = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise InputError(f"cannot read the prompt template {path}: {error}") from None
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(source) - known)  # type: ignore[arg-type]
        if unknown:
            raise InputError(f"prompt template: unknown field {unknown[0]!r}")
        try:
            return cls(**source)  # type: ignore[arg-type]
        except TypeError as error:
            raise InputError(f"prompt template: {error}") from None


@dataclass(frozen=True)
class Answer:
    """The model's answer to a prompt.

    scores: per candidate, in the order of the prompt
    repairs: corrections made to a generated order
    readable: whether there was an order in a generated answer
    """

    scores: list[float]
    repairs: int = 0
    readable: bool = True


@dataclass(frozen=True)
class Prompt:
    """Token ids with every image's placeholder tokens, and where things are."""

    ids: list[int]
    layout: Layout
    identifiers: list[int]
    """the token that names each candidate, as it would follow this prompt"""

    def scores(self, logits: Tensor) -> Answer:
        """Score each candidate by the log-probability of its identifier among all identifiers of the list.

        logits: (vocabulary,) of the token that follows the prompt
        """
        chosen = logits[torch.as_tensor(self.identifiers, device=logits.device)]
        if not chosen.isfinite().all():
            raise ScoringError("the model's logits are not finite: there is no ranking in them")
        return Answer(chosen.log_softmax(dim=-1).tolist())


def query_tokens(backbone: Backbone, text: str) -> int:
    """Return how many tokens a query has."""
    return len(_encode_plain(backbone.tokenizer, text.strip()))


def build_prompt(
    backbone: Backbone,
    template: PromptTemplate,
    query: str,
    image_sizes: Sequence[Size],
    *,
    reference_size: Size | None = None,
    generate: bool = False,
) -> Prompt:
    """Build the prompt for a query and candidates with these numbers of visual tokens.

    Args:
        backbone: the model
        template: the words of the prompt
        query: the query's text. It is tokenized apart, with special tokens as plain text: no query can forge
            markup. Words that the tokenizer does not know give an OutOfWorldWarning
        image_sizes: visual tokens of each candidate, or rows of them (`ImageFeatures.rows`)
        reference_size: the same of the reference image of a composed query
        generate: ask for the whole order, not for the best candidate

    Returns:
        Token ids and layout.
    """
    if len(image_sizes) > len(IDENTIFIERS):
        raise InputError(f"{len(image_sizes)} candidates in one prompt; there are {len(IDENTIFIERS)} letters")
    names = IDENTIFIERS[: len(image_sizes)]
    _warn_of_unknown_words(backbone.tokenizer, query)
    composed = reference_size is not None
    ask = template.question(composed=composed, generate=generate)
    body = template.intro + (template.reference or "" if composed else "")
    body += "".join(template.candidate.replace("{id}", name) for name in names) + ask
    before, after = backbone.family.markup
    filled = {"{count}": str(len(names)), "{first}": names[0], "{last}": names[-1]}
    filled |= {"{image}": before + _IMAGE + after, "{query}": _QUERY}
    for field, value in filled.items():
        body = body.replace(field, value)
    text = _chat(backbone.tokenizer, template.system, body) + template.answer

    head, tail = text.split(_QUERY)
    *literals, lead = head.split(_IMAGE)
    ids = _begin_of_text(backbone.tokenizer, text)
    images: list[range] = []
    markup: list[tuple[int, range]] = []
    sizes = [reference_size, *image_sizes] if reference_size is not None else image_sizes
    for literal, size in zip(literals, sizes, strict=True):
        ids += _encode(backbone.tokenizer, literal)
        start = len(ids)
        markup += _place_image(backbone, ids, size)
        images.append(range(start, len(ids)))
    # Words carry the space before them in most tokenizers: the space before the query belongs to it.
    ids += _encode(backbone.tokenizer, lead.rstrip(" "))
    start = len(ids)
    ids += _encode_plain(backbone.tokenizer, lead[len(lead.rstrip(" ")) :] + query)
    words = tuple(range(start, len(ids)))
    if not words:
        raise InputError(f"the query {query!r} has no words that the tokenizer knows")
    ids += _encode(backbone.tokenizer, tail)
    identifiers = _identifier_ids(backbone.tokenizer, tail)[: len(names)]
    protected = (images.pop(0),) if composed else ()
    counts = [size if isinstance(size, int) else sum(row.tokens for row in size) for size in sizes]
    digest = hashlib.blake2b(f"{query} {counts}".encode(), digest_size=4).digest()
    key = int.from_bytes(digest, "big")
    layout = Layout(len(ids), tuple(images), words, protected, key=key, markup=tuple(markup))
    return Prompt(ids, layout, identifiers)


def _place_image(backbone: Backbone, ids: list[int], size: Size) -> list[tuple[int, range]]:
    """Add an image's placeholders to `ids`. Returns its markup, as `Layout` takes it."""
    if isinstance(size, int):
        ids += [backbone.image_token_id] * size
        return []
    markup: list[tuple[int, range]] = []
    for row in size:
        before, after = (_encode(backbone.tokenizer, text) for text in (row.before, row.after))
        start = len(ids) + len(before)
        span = range(start, start + row.tokens)
        end = (*[backbone.image_token_id] * row.ends, *after)
        markup += [(p, span) for p in (*range(len(ids), start), *range(span.stop, span.stop + len(end)))]
        ids += [*before, *[backbone.image_token_id] * row.tokens, *end]
    return markup


def _warn_of_unknown_words(tokenizer: Any, text: str) -> None:
    """Warn of words that a closed vocabulary has no token for; large models have none."""
    unknown = tokenizer.unk_token_id
    if unknown is None:
        return
    words = [
        word
        for word in dict.fromkeys(text.split())
        if unknown in tokenizer(" " + word, add_special_tokens=False)["input_ids"]
    ]
    if words:
        shown = ", ".join(map(repr, words))
        warnings.warn(
            f"the model does not know the words {shown} of {text!r}", OutOfWorldWarning, stacklevel=3
        )


def _chat(tokenizer: Any, system: str, body: str) -> str:
    if tokenizer.chat_template is None:
        return system + body
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": body})
    text: str = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    answer = text.rpartition(body)[2]
    if answer.rfind("<think>") > answer.rfind("</think>"):
        # The first word would be a thought, not an identifier.
        warnings.warn(
            "the model's chat template makes it think before it answers; an empty thought is inserted. Use a "
            "model that answers without thinking",
            stacklevel=2,
        )
        text = text.rstrip() + "\n\n</think>\n\n"
    return text


@lru_cache(maxsize=1024)
def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Return the ids of the template's text, which recurs in every prompt. Special tokens are special."""
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else ()


def _encode_plain(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a user's text. What looks like a special token is plain text."""
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def _begin_of_text(tokenizer: Any, text: str) -> list[int]:
    """Return the token that this tokenizer puts before every text, unless the chat template wrote it."""
    start = tokenizer.bos_token_id
    if start is None or text.startswith(tokenizer.bos_token) or tokenizer("A")["input_ids"][0] != start:
        return []
    return [start]


@lru_cache(maxsize=64)
def _identifier_ids(tokenizer: Any, tail: str) -> list[int]:
    """Return the single token of each letter when it follows `tail`."""
    plain = _encode(tokenizer, tail)
    ids: list[int] = []
    for letter in IDENTIFIERS:
        *start, token = _encode(tokenizer, tail + letter)
        if tuple(start) != plain or token in ids or token == tokenizer.unk_token_id:
            raise InputError(f"the letter {letter!r} is not one token of its own after {tail[-20:]!r}")
        ids.append(token)
    return ids
