"""A prompt, of a whole list or of one candidate: its template (data), its token ids, its layout."""

from __future__ import annotations

import hashlib
import json
import re
import string
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from importlib import resources
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from radical_rerank.backbones import Backbone, ImageFeatures, Size
from radical_rerank.backbones.families import FAMILIES
from radical_rerank.backbones.model import folder_of
from radical_rerank.errors import InputError, OutOfWorldWarning, ScoringError
from radical_rerank.pruning import Layout

TEMPLATE_FILE = "radical_template.json"
IDENTIFIERS = string.ascii_uppercase + string.ascii_lowercase
"""One token each in every supported tokenizer, unlike numbers ("10" is two)"""

# Private-use characters that stand, while the chat template is applied, for a candidate's picture, a picture
# of the query, and what users write: the query, a document's text, the instruction.
_IMAGE, _CONTEXT, _QUERY, _TEXT, _INSTRUCTION = "\ue000", "\ue002", "\ue001", "\ue003", "\ue004"
_IMAGES, _WRITTEN = re.compile(f"([{_IMAGE}{_CONTEXT}])"), re.compile(f"([{_QUERY}{_TEXT}{_INSTRUCTION}])")


@dataclass(frozen=True)
class ScoreHead:
    """A head of the checkpoint's own: Linear, ReLU, Linear(1) on the last token's hidden state.

    Args:
        weights: what the names of its weights begin with
        bias: the probability is sigmoid(value - bias)
    """

    weights: str
    bias: float = 0.0


@dataclass(frozen=True)
class PromptTemplate:
    """The words of the prompt. Fields in braces are filled in.

    A prompt of a whole list (scorers "logits" and "generate") is intro, reference, candidates, question. It
    may use `{image}`, `{id}`, `{query}`, `{instruction}`, `{count}`, `{first}`, `{last}` and `{kind}`
    ("image", or "document" if there are texts). By default the query comes after all images, so that its
    tokens have seen every candidate; a template with `{query}` in its intro puts it before them. A prompt of
    one candidate (scorer "pointwise") is `pair`.

    `{image}` is what a document holds: its pictures, then its text. `{query}` is the query's pictures, then
    its words.

    Args:
        candidate: comes once per candidate
        ask_logits: the question, with the query
        ask_generate: the question for the whole order
        intro, reference: come before the candidates; `reference` only for composed queries
        ask_composed_logits, ask_composed_generate: the questions for composed queries. A model that cannot
            answer a question has none
        pair: one candidate and the query: `{image}`, `{query}`, `{instruction}`
        pair_composed: the same with `{reference}`, which comes before `{image}`
        pair_roles: the checkpoint's chat template writes the pair itself, from two messages with the roles
            "query" and "document", as sentence-transformers' CrossEncoder has it
        answers: the two answers to a pair: relevant, not relevant; each is one token
        head: the head that scores a pair, instead of the answers
        instruction: what to look for, by default
        instruct: what `{instruction}` becomes, if there is an instruction
        texts: whether the model reads documents with text
        query_images: whether the model reads queries with pictures that no words change
        answer: follows the chat template's generation prompt, as the start of the model's answer
        answer_logits: follows `answer` where the model answers with one identifier
        end: token ids that end every prompt
        system: the system message
        chat: the text around the prompt's body, `{body}`; by default the tokenizer's chat template
        identifiers: the candidates' names, one character each
        none: the answer that no candidate fits, a letter or word of one token that the question offers
        window: how many candidates the model ranks well in one prompt
        stride: how far apart the windows of a longer list are; by default half a window

    Example:
        >>> template = PromptTemplate.load("qwen3_vl")
        >>> template.candidate
        '{id}: {image}\\n'
    """

    candidate: str | None = None
    ask_logits: str | None = None
    ask_generate: str | None = None
    intro: str = ""
    reference: str | None = None
    ask_composed_logits: str | None = None
    ask_composed_generate: str | None = None
    pair: str | None = None
    pair_composed: str | None = None
    pair_roles: bool = False
    answers: tuple[str, str] = ("yes", "no")
    head: ScoreHead | None = None
    instruction: str = ""
    instruct: str = "{instruction}"
    texts: bool = True
    query_images: bool = True
    answer: str = ""
    answer_logits: str = ""
    end: tuple[int, ...] = ()
    system: str = ""
    chat: str | None = None
    identifiers: str = IDENTIFIERS
    none: str | None = None
    window: int = len(IDENTIFIERS)
    stride: int | None = None

    def __post_init__(self) -> None:
        # What comes from JSON has lists and dicts.
        for name in ("answers", "end"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.head, dict):
            object.__setattr__(self, "head", ScoreHead(**self.head))
        object.__setattr__(self, "window", min(self.window, len(self.identifiers)))
        self._check()

    def _check(self) -> None:
        asks = [name for name in _ASKS if getattr(self, name) is not None]
        if (self.candidate is None or not asks) and self.pair is None and not self.pair_roles:
            raise InputError("prompt template: candidate and ask_logits, or pair, are missing")
        needed = {"reference": ["{image}"], "candidate": ["{id}", "{image}"], "pair": ["{image}", "{query}"]}
        needed |= {"pair_composed": ["{reference}", "{image}", "{query}"], "chat": ["{body}"]}
        needed |= {"instruct": ["{instruction}"]}
        if "{query}" not in self.intro:
            needed |= {name: ["{query}"] for name in asks}
        for name, fields_of in needed.items():
            text = getattr(self, name)
            missing = [field for field in fields_of if text is not None and text.count(field) != 1]
            if missing:
                raise InputError(f"prompt template: {name} must contain {missing[0]} exactly once")
        if any((self.intro + getattr(self, name)).count("{query}") != 1 for name in asks):
            raise InputError("prompt template: intro and question must contain {query} exactly once together")
        if "{reference}" in (self.pair_composed or "").partition("{image}")[2]:
            raise InputError("prompt template: in pair_composed, {reference} must come before {image}")
        if len(self.answers) != 2 or len(set(self.identifiers)) != len(self.identifiers):
            raise InputError("prompt template: two answers are needed, and identifiers that differ")

    def question(self, *, composed: bool, generate: bool) -> str:
        """Return the question, or raise an InputError if the model has no such question."""
        name = f"ask{'_composed' if composed else ''}_{'generate' if generate else 'logits'}"
        text: str | None = getattr(self, name)
        if text is None or (composed and self.reference is None):
            wanted = "writing the whole order" if generate else "ranking a whole list in one prompt"
            raise self._lacks(name, "queries with a reference image" if composed else wanted)
        return text

    def pair_of(self, *, composed: bool) -> str:
        """Return the body of a prompt of one candidate, or raise an InputError if the model has none."""
        text = self.pair_composed if composed else self.pair
        if text is None:
            wanted = "queries with a reference image" if composed else "judging one image at a time"
            raise self._lacks("pair_composed" if composed else "pair", wanted)
        return text

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that name its words. Fields that are not set do not count."""
        words = {one.name: getattr(self, one.name) for one in fields(self)}
        unset = {one.name: one.default for one in fields(self)}
        chosen = {name: repr(value) for name, value in words.items() if value != unset[name]}
        return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:16]

    @staticmethod
    def _lacks(name: str, wanted: str) -> InputError:
        return InputError(f"the model's prompt template has no {name}: it was not made for {wanted}")

    @classmethod
    def of(cls, backbone: Backbone) -> PromptTemplate:
        """Return the model's own template, if its folder has one, else its family's."""
        return cls.load(own_template(backbone) or backbone.model.config.model_type)

    @classmethod
    def load(cls, source: str | Path | dict[str, Any]) -> PromptTemplate:
        """Load a template from a dict, a JSON file, or the name of a model family: most use the default."""
        if isinstance(source, dict):
            values = source
        else:
            shipped = resources.files("radical_rerank.reranking") / "templates"
            path = shipped / f"{source}.json"
            if not path.is_file():
                path = shipped / "default.json" if source in FAMILIES else Path(source)
            try:
                values = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise InputError(f"cannot read the prompt template {path}: {error}") from None
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise InputError(f"prompt template: unknown field {unknown[0]!r}")
        try:
            return cls(**values)
        except TypeError as error:
            raise InputError(f"prompt template: {error}") from None


def choose_template(
    backbone: Backbone,
    template: PromptTemplate | dict[str, Any] | str | Path | None,
    preset: PromptTemplate | None,
    instruction: str | None,
) -> PromptTemplate:
    """Return the user's template, else the preset's, else the model's own, with the user's instruction."""
    if template is None:
        template = preset or PromptTemplate.of(backbone)
    elif not isinstance(template, PromptTemplate):
        template = PromptTemplate.load(template)
    if instruction is None:
        return template
    template = replace(template, instruction=instruction)
    if not any("{instruction}" in (getattr(template, name) or "") for name in ("intro", "pair", *_ASKS)):
        raise InputError(_NO_INSTRUCTION)
    return template


def own_template(backbone: Backbone) -> Path | None:
    """Return the prompt template in the model's folder, if there is one."""
    folder = folder_of(backbone.name)
    path = None if folder is None else folder / TEMPLATE_FILE
    return path if path is not None and path.is_file() else None


_NO_INSTRUCTION = "the model's prompt template has no {instruction}"
_ASKS = ("ask_logits", "ask_generate", "ask_composed_logits", "ask_composed_generate")


@dataclass(frozen=True)
class Answer:
    """The model's answer to a prompt.

    scores: per candidate, in the order of the prompt
    repairs: corrections made to a generated order
    readable: whether there was an order in a generated answer
    signals: facts about the whole list, see `Prompt.scores`
    """

    scores: list[float]
    repairs: int = 0
    readable: bool = True
    signals: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Prompt:
    """Token ids with every image's placeholder tokens, and where things are."""

    ids: list[int]
    layout: Layout
    identifiers: list[int]
    """the token that names each candidate, as it would follow this prompt; of a pair, its two answers"""
    order: tuple[int, ...] = ()
    """its images in order, by their numbers: the query's first, then the candidates'"""
    none: int | None = None
    """the token of the answer that no candidate fits, if the template has one"""

    def scores(self, logits: Tensor) -> Answer:
        """Score each candidate by the log-probability of its identifier among all identifiers of the list.

        The signals are "logit", the largest logit of an identifier, "mass", the log-probability of all
        identifiers in the vocabulary, and "match", the log-odds of all identifiers against `none`.

        logits: (vocabulary,) of the token that follows the prompt
        """
        chosen = logits[torch.as_tensor(self.identifiers, device=logits.device)]
        if not chosen.isfinite().all():
            raise ScoringError("the model's logits are not finite: there is no ranking in them")
        together = chosen.logsumexp(dim=-1)
        signals = {"logit": float(chosen.max()), "mass": float(together - logits.logsumexp(dim=-1))}
        if self.none is not None:
            signals["match"] = float(together - logits[self.none])
        return Answer(chosen.log_softmax(dim=-1).tolist(), signals=signals)


@dataclass(frozen=True)
class Content:
    """What a prompt shows of a document or a query: the sizes of its pictures, and its text."""

    images: tuple[Size, ...] = ()
    text: str = ""

    @classmethod
    def of(cls, content: Content | Size | str) -> Content:
        """Return a single picture or a text as a content."""
        if isinstance(content, str):
            return cls(text=content)
        return content if isinstance(content, Content) else cls((content,))


def sizes_of(features: Iterable[ImageFeatures]) -> list[Size]:
    """Return images as a prompt takes them: numbers of visual tokens, or rows with markup between them."""
    return [feature.rows or len(feature.tokens) for feature in features]


def cut_text(backbone: Backbone, text: str, limit: int) -> tuple[str, int]:
    """Cut a text to so many tokens. Returns it, and how many it had."""
    _, spans = _encode_spans(backbone.tokenizer, text)
    return (text[: spans[limit - 1][1]] if len(spans) > limit else text), len(spans)


def query_tokens(backbone: Backbone, text: str) -> int:
    """Return how many tokens a query has."""
    return len(_encode_spans(backbone.tokenizer, text.strip())[0])


def build_prompt(
    backbone: Backbone,
    template: PromptTemplate,
    query: str | Content,
    documents: Sequence[Size | Content],
    *,
    reference_size: Size | None = None,
    instruction: str | None = None,
    generate: bool = False,
) -> Prompt:
    """Build the prompt for a query and candidates.

    What users write is tokenized with special tokens as plain text: no query or document can forge markup.
    Words of the query that the tokenizer does not know give an OutOfWorldWarning.

    Args:
        backbone: the model
        template: the words of the prompt
        query: the query's text, or its pictures and text
        documents: visual tokens of each candidate, or rows of them (`sizes_of` features); or its `Content`
        reference_size: the same of the reference image of a composed query
        instruction: what to look for; by default the template's
        generate: ask for the whole order, not for the best candidate

    Returns:
        Token ids and layout.
    """
    names = template.identifiers[: len(documents)]
    if len(documents) > len(names):
        raise InputError(f"{len(documents)} candidates in one prompt; there are {len(names)} identifiers")
    asked = _Asked(template, query, reference_size, instruction)
    contents = list(map(Content.of, documents))
    ask = template.question(composed=asked.composed, generate=generate)
    body = template.intro
    if asked.composed:
        body += (template.reference or "").replace("{image}", _picture(backbone, _CONTEXT))
    for name, content in zip(names, contents, strict=True):
        shown = (template.candidate or "").replace("{id}", name)
        body += shown.replace("{image}", _shown(backbone, template, content))
    values = {"count": str(len(names)), "first": names[0], "last": names[-1], "kind": _kind(contents)}
    text = _chat(backbone.tokenizer, template, asked.filled(backbone, body + ask, values)) + template.answer
    if generate:
        return _prompt(backbone, asked, text, contents, names)
    text += template.answer_logits
    if template.none is None:
        return _prompt(backbone, asked, text, contents, names)
    prompt = _prompt(backbone, asked, text, contents, (*names, template.none))
    return replace(prompt, identifiers=prompt.identifiers[:-1], none=prompt.identifiers[-1])


def build_pair(
    backbone: Backbone,
    template: PromptTemplate,
    query: str | Content,
    document: Size | Content,
    *,
    reference_size: Size | None = None,
    instruction: str | None = None,
    place: int = 0,
) -> Prompt:
    """Build the prompt for a query and one candidate (scorer "pointwise").

    Args:
        backbone, template, query, reference_size, instruction: as in `build_prompt`
        document: visual tokens of the candidate, or its `Content`
        place: the candidate's place in its list

    Returns:
        Token ids, layout, and the tokens of the two answers.
    """
    asked = _Asked(template, query, reference_size, instruction)
    content = Content.of(document)
    shown = _shown(backbone, template, content)
    if template.pair_roles and not asked.composed:
        text = _pair_by_roles(backbone, asked, content)
    else:
        values = {"image": shown, "reference": _picture(backbone, _CONTEXT), "kind": _kind([content])}
        body = asked.filled(backbone, template.pair_of(composed=asked.composed), values)
        text = _chat(backbone.tokenizer, template, body)
    names = () if template.head is not None else template.answers
    return _prompt(backbone, asked, text + template.answer, [content], names, place=place)


class _Asked:
    """What is asked for: the query and the instruction, checked against the template."""

    def __init__(
        self,
        template: PromptTemplate,
        query: str | Content,
        reference: Size | None,
        instruction: str | None,
    ) -> None:
        query = Content.of(query)
        self.template, self.text, self.composed = template, query.text, reference is not None
        self.context = query.images if reference is None else (reference,)
        self.instruction = template.instruction if instruction is None else instruction
        self.must_instruct = instruction is not None
        if query.images and not template.query_images:
            raise InputError(
                "the model's prompt template has no place for pictures in a query (query_images)"
            )

    def filled(self, backbone: Backbone, body: str, values: dict[str, str]) -> str:
        """Fill in a template's fields; what users give by the characters that stand for it."""
        if self.must_instruct and "{instruction}" not in body:
            raise InputError(_NO_INSTRUCTION)
        instruct = self.template.instruct.replace("{instruction}", _INSTRUCTION) if self.instruction else ""
        query = "" if self.composed else _picture(backbone, _CONTEXT) * len(self.context)
        query += _QUERY if self.text else ""
        for name, value in {**values, "instruction": instruct, "query": query}.items():
            body = body.replace(f"{{{name}}}", value)
        return body


def _picture(backbone: Backbone, kind: str) -> str:
    """Return a picture in the markup of the model's family."""
    before, after = backbone.family.markup
    return before + kind + after


def _kind(contents: Sequence[Content]) -> str:
    """Return what a prompt calls its candidates."""
    return "document" if any(content.text for content in contents) else "image"


def _shown(backbone: Backbone, template: PromptTemplate, content: Content) -> str:
    """Return what a document holds: its pictures, then its text."""
    if content.text and not template.texts:
        raise InputError("the model reads no texts: its template has no place for a document's text (texts)")
    return _picture(backbone, _IMAGE) * len(content.images) + (_TEXT if content.text else "")


def _prompt(
    backbone: Backbone,
    asked: _Asked,
    text: str,
    contents: Sequence[Content],
    names: Sequence[str],
    *,
    place: int = 0,
) -> Prompt:
    """Make token ids and layout of a text in which characters stand for images and what users write.

    names: the words that may follow the prompt
    """
    tokenizer = backbone.tokenizer
    _warn_of_unknown_words(tokenizer, asked.text)
    ids = _begin_of_text(tokenizer, text)
    sizes = {_CONTEXT: iter(asked.context), _IMAGE: chain(*(content.images for content in contents))}
    texts = (content.text for content in contents if content.text)
    written = {_QUERY: repeat(asked.text), _INSTRUCTION: repeat(asked.instruction), _TEXT: texts}
    spans: dict[str, list[range]] = {_CONTEXT: [], _IMAGE: []}
    kinds: list[str] = []
    markup: list[tuple[int, range]] = []
    words: list[int] = []
    shown = 0  # where the last candidate ends
    for part in _IMAGES.split(text):
        if part in spans:
            start = len(ids)
            markup += _place_image(backbone, ids, next(sizes[part]))
            spans[part].append(range(start, len(ids)))
            kinds.append(part)
        else:
            for kind, where in _place_text(tokenizer, ids, part, written):
                words += where if kind == _QUERY else ()
                shown = max([shown, *(token + 1 for token in where)]) if kind == _TEXT else shown
        shown = len(ids) if part == _IMAGE else shown
    if asked.text and not words:
        raise InputError(f"the query {asked.text!r} has no words that the tokenizer knows")
    ids += asked.template.end
    tail = _WRITTEN.split(_IMAGES.split(text)[-1])[-1]
    identifiers = list(_identifier_ids(tokenizer, tail, tuple(names)))
    layout = _layout(asked, contents, len(ids), spans, markup, words, shown, place)
    order = {_CONTEXT: count(0), _IMAGE: count(len(asked.context))}
    return Prompt(ids, layout, identifiers, tuple(next(order[kind]) for kind in kinds))


def _layout(
    asked: _Asked,
    contents: Sequence[Content],
    length: int,
    spans: dict[str, list[range]],
    markup: list[tuple[int, range]],
    words: list[int],
    shown: int,
    place: int,
) -> Layout:
    """Return the layout. spans: of all images; words: the query's; shown: where the last candidate ends"""
    context = set[int]().union(*spans[_CONTEXT])
    if not words:  # a query of pictures alone
        marks = {position for position, _ in markup}
        words = sorted(context - marks)
    sizes = [*asked.context, *chain(*(content.images for content in contents))]
    counts = [size if isinstance(size, int) else sum(row.tokens for row in size) for size in sizes]
    seed = f"{asked.text} {counts}" + (f" {place}" if place else "")
    owners = [number for number, content in enumerate(contents) for _ in content.images]
    return Layout(
        length,
        tuple(spans[_IMAGE]),
        tuple(words),
        tuple(spans[_CONTEXT]),
        rows=tuple(position for position in range(shown, length) if position not in context),
        key=int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=4).digest(), "big"),
        markup=tuple(markup),
        owners=tuple(owners),
        count=len(contents),
    )


def _place_text(
    tokenizer: Any, ids: list[int], text: str, written: Mapping[str, Iterator[str]]
) -> list[tuple[str, list[int]]]:
    """Add a text without images to `ids`. Returns where what users wrote is.

    What a user wrote is tokenized as one text with the template's words around it, up to the next special
    token, since a token may hold the end of one and the start of the other: "?\\n".
    """
    places: list[tuple[str, list[int]]] = []
    own = ""
    for piece in [*_special(tokenizer).split(text), None]:
        if piece is not None and not _WRITTEN.search(piece):
            own += piece
            continue
        ids += _encode(tokenizer, own)
        own = ""
        if piece is None:
            break
        whole, fields = "", []
        for part in _WRITTEN.split(piece):
            value = next(written[part]) if part in written else part
            fields += [(part, len(whole), len(whole) + len(value))] if part in written else []
            whole += value
        own_ids, spans = _encode_spans(tokenizer, whole)
        tokens = list(enumerate(spans, start=len(ids)))
        for part, start, end in fields:
            places.append((part, [i for i, (left, right) in tokens if left < end and right > start]))
        ids += own_ids
    return places


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
            f"the model does not know the words {shown} of {text!r}", OutOfWorldWarning, stacklevel=4
        )


def _chat(tokenizer: Any, template: PromptTemplate, body: str) -> str:
    if template.chat is not None:
        return template.chat.replace("{body}", body)
    if tokenizer.chat_template is None:
        return template.system + body
    messages = [{"role": "system", "content": template.system}] if template.system else []
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


def _pair_by_roles(backbone: Backbone, asked: _Asked, content: Content) -> str:
    """Return what the checkpoint's own chat template writes for a query and a document."""
    tokenizer = backbone.tokenizer
    named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    messages = []
    for role, images, words in (
        ("query", asked.context, _QUERY if asked.text else ""),
        ("document", content.images, _TEXT if content.text else ""),
    ):
        parts = [{"type": "image", "image": ""}] * len(images)
        messages.append({"role": role, "content": parts + [{"type": "text", "text": words}] * bool(words)})
    try:
        text: str = tokenizer.apply_chat_template(
            messages,
            chat_template="reranker" if "reranker" in named else None,
            tokenize=False,
            add_generation_prompt=True,
        )
    except Exception as error:  # a template may raise anything on roles that it does not know
        raise InputError(f"{_NO_ROLES}: {error}") from None
    image = tokenizer.convert_ids_to_tokens(backbone.image_token_id)
    text = text.replace(image, _CONTEXT, len(asked.context)).replace(image, _IMAGE)
    shown = [text.count(kind) for kind in (_CONTEXT, _IMAGE, _QUERY, _TEXT)]
    if shown != [len(asked.context), len(content.images), bool(asked.text), bool(content.text)]:
        raise InputError(f"{_NO_ROLES}: pass template= with a pair of your own")
    return text


_NO_ROLES = 'the checkpoint\'s chat template does not write a pair from the roles "query" and "document"'


@lru_cache(maxsize=1024)
def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Return the ids of the template's text, which recurs in every prompt. Special tokens are special."""
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else ()


def _encode_spans(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the ids of a user's text, and from which to which character each goes.

    What looks like a special token is plain text.
    """
    encoded = tokenizer(
        text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True
    )
    return encoded["input_ids"], encoded["offset_mapping"]


@lru_cache(maxsize=16)
def _special(tokenizer: Any) -> re.Pattern[str]:
    """Match special tokens, the longest first."""
    tokens = sorted((str(t) for t in tokenizer.added_tokens_decoder.values() if t.special), key=len)
    return re.compile(f"({'|'.join(map(re.escape, reversed(tokens)))})" if tokens else "((?!))")


def _begin_of_text(tokenizer: Any, text: str) -> list[int]:
    """Return the token that this tokenizer puts before every text, unless the chat template wrote it."""
    start = tokenizer.bos_token_id
    if start is None or text.startswith(tokenizer.bos_token) or tokenizer("A")["input_ids"][0] != start:
        return []
    return [start]


@lru_cache(maxsize=256)
def _identifier_ids(tokenizer: Any, tail: str, names: tuple[str, ...]) -> list[int]:
    """Return the single token of each name when it follows `tail`."""
    plain = _encode(tokenizer, tail)
    ids: list[int] = []
    for name in names:
        *start, token = _encode(tokenizer, tail + name)
        if tuple(start) != plain or token in ids or token == tokenizer.unk_token_id:
            what = "letter" if len(name) == 1 else "word"
            raise InputError(f"the {what} {name!r} is not one token of its own after {tail[-20:]!r}")
        ids.append(token)
    return ids
