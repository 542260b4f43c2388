"""A prompt, of a whole list or of one candidate: its template (data), its token ids, its layout."""

from __future__ import annotations

import hashlib
import json
import re
import string
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib import resources
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

# Private-use characters that stand for an image and for the query while the chat template is applied.
_IMAGE, _QUERY = "\ue000", "\ue001"


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
    may use `{image}`, `{id}`, `{query}`, `{count}`, `{first}` and `{last}`. By default the query comes after
    all images, so that its tokens have seen every candidate; a template with `{query}` in its intro puts it
    before them. A prompt of one candidate (scorer "pointwise") is `pair`.

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
        instruction: what `{instruction}` is
        answer: follows the chat template's generation prompt, as the start of the model's answer
        answer_logits: follows `answer` where the model answers with one identifier
        end: token ids that end every prompt
        system: the system message
        chat: the text around the prompt's body, `{body}`; by default the tokenizer's chat template
        identifiers: the candidates' names, one character each
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
    answer: str = ""
    answer_logits: str = ""
    end: tuple[int, ...] = ()
    system: str = ""
    chat: str | None = None
    identifiers: str = IDENTIFIERS
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
    if "{instruction}" not in (template.pair or ""):
        raise InputError("the model's prompt template has no {instruction}")
    return replace(template, instruction=instruction)


def own_template(backbone: Backbone) -> Path | None:
    """Return the prompt template in the model's folder, if there is one."""
    folder = folder_of(backbone.name)
    path = None if folder is None else folder / TEMPLATE_FILE
    return path if path is not None and path.is_file() else None


_ASKS = ("ask_logits", "ask_generate", "ask_composed_logits", "ask_composed_generate")


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
    """the token that names each candidate, as it would follow this prompt; of a pair, its two answers"""

    def scores(self, logits: Tensor) -> Answer:
        """Score each candidate by the log-probability of its identifier among all identifiers of the list.

        logits: (vocabulary,) of the token that follows the prompt
        """
        chosen = logits[torch.as_tensor(self.identifiers, device=logits.device)]
        if not chosen.isfinite().all():
            raise ScoringError("the model's logits are not finite: there is no ranking in them")
        return Answer(chosen.log_softmax(dim=-1).tolist())


def sizes_of(features: Iterable[ImageFeatures]) -> list[Size]:
    """Return images as a prompt takes them: numbers of visual tokens, or rows with markup between them."""
    return [feature.rows or len(feature.tokens) for feature in features]


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
        image_sizes: visual tokens of each candidate, or rows of them (`sizes_of` features)
        reference_size: the same of the reference image of a composed query
        generate: ask for the whole order, not for the best candidate

    Returns:
        Token ids and layout.
    """
    names = template.identifiers[: len(image_sizes)]
    if len(image_sizes) > len(names):
        raise InputError(f"{len(image_sizes)} candidates in one prompt; there are {len(names)} identifiers")
    composed = reference_size is not None
    ask = template.question(composed=composed, generate=generate)
    body = template.intro + (template.reference or "" if composed else "")
    body += "".join((template.candidate or "").replace("{id}", name) for name in names) + ask
    body = _filled(backbone, body, {"count": str(len(names)), "first": names[0], "last": names[-1]})
    text = _chat(backbone.tokenizer, template, body) + template.answer
    if not generate:
        text += template.answer_logits
    sizes = [reference_size, *image_sizes] if reference_size is not None else list(image_sizes)
    return _prompt(backbone, template, text, query, sizes, names, composed=composed)


def build_pair(
    backbone: Backbone,
    template: PromptTemplate,
    query: str,
    image_size: Size,
    *,
    reference_size: Size | None = None,
    place: int = 0,
) -> Prompt:
    """Build the prompt for a query and one candidate (scorer "pointwise").

    Args:
        backbone, template, query, reference_size: as in `build_prompt`
        image_size: visual tokens of the candidate
        place: the candidate's place in its list

    Returns:
        Token ids, layout, and the tokens of the two answers.
    """
    composed = reference_size is not None
    if template.pair_roles and not composed:
        text = _pair_by_roles(backbone)
    else:
        body = _filled(backbone, template.pair_of(composed=composed), {"instruction": template.instruction})
        text = _chat(backbone.tokenizer, template, body)
    sizes = [image_size] if reference_size is None else [reference_size, image_size]
    names = () if template.head is not None else template.answers
    text += template.answer
    return _prompt(backbone, template, text, query, sizes, names, composed=composed, place=place)


def _filled(backbone: Backbone, body: str, values: dict[str, str]) -> str:
    """Fill in a template's fields; images and the query by the characters that stand for them."""
    before, after = backbone.family.markup
    image = before + _IMAGE + after
    for field, value in {**values, "image": image, "reference": image, "query": _QUERY}.items():
        body = body.replace(f"{{{field}}}", value)
    return body


def _prompt(
    backbone: Backbone,
    template: PromptTemplate,
    text: str,
    query: str,
    sizes: Sequence[Size],
    names: Sequence[str],
    *,
    composed: bool,
    place: int = 0,
) -> Prompt:
    """Make token ids and layout of a text in which characters stand for the images and the query.

    sizes: visual tokens of each image, in the order of the text; the first is the reference of a composed
        query
    names: the words that may follow the prompt
    """
    tokenizer = backbone.tokenizer
    _warn_of_unknown_words(tokenizer, query)
    ids = _begin_of_text(tokenizer, text)
    images: list[range] = []
    markup: list[tuple[int, range]] = []
    words: tuple[int, ...] = ()
    remaining = iter(sizes)
    head, _, tail = text.partition(_QUERY)
    lead, before = _cut(tokenizer, head, last=True)
    after, rest = _cut(tokenizer, tail, last=False)
    for part in re.split(f"([{_IMAGE}{_QUERY}])", f"{lead}{_QUERY}{rest}"):
        if part == _IMAGE:
            start = len(ids)
            markup += _place_image(backbone, ids, next(remaining))
            images.append(range(start, len(ids)))
        elif part == _QUERY:
            own, where = _encode_query(tokenizer, before, query, after)
            words = tuple(len(ids) + number for number in where)
            ids += own
        else:
            ids += _encode(tokenizer, part)
    if not words:
        raise InputError(f"the query {query!r} has no words that the tokenizer knows")
    ids += template.end
    identifiers = list(_identifier_ids(tokenizer, re.split(f"[{_IMAGE}{_QUERY}]", text)[-1], tuple(names)))
    protected = (images.pop(0),) if composed else ()
    counts = [size if isinstance(size, int) else sum(row.tokens for row in size) for size in sizes]
    seed = f"{query} {counts}" + (f" {place}" if place else "")
    digest = hashlib.blake2b(seed.encode(), digest_size=4).digest()
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


def _pair_by_roles(backbone: Backbone) -> str:
    """Return what the checkpoint's own chat template writes for a query and an image document."""
    tokenizer = backbone.tokenizer
    named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    messages = [
        {"role": "query", "content": [{"type": "text", "text": _QUERY}]},
        {"role": "document", "content": [{"type": "image", "image": ""}]},
    ]
    try:
        text: str = tokenizer.apply_chat_template(
            messages,
            chat_template="reranker" if "reranker" in named else None,
            tokenize=False,
            add_generation_prompt=True,
        )
    except Exception as error:  # a template may raise anything on roles that it does not know
        raise InputError(f"{_NO_ROLES}: {error}") from None
    text = text.replace(tokenizer.convert_ids_to_tokens(backbone.image_token_id), _IMAGE)
    if (text.count(_QUERY), text.count(_IMAGE)) != (1, 1):
        raise InputError(f"{_NO_ROLES}: pass template= with a pair of your own")
    return text


_NO_ROLES = 'the checkpoint\'s chat template does not write a pair from the roles "query" and "document"'


@lru_cache(maxsize=1024)
def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Return the ids of the template's text, which recurs in every prompt. Special tokens are special."""
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else ()


def _encode_plain(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a user's text. What looks like a special token is plain text."""
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def _encode_query(tokenizer: Any, before: str, query: str, after: str) -> tuple[list[int], list[int]]:
    """Return the ids of the query with the words around it, and which of them are the query's.

    They are tokenized as one text, since a token may hold the end of one and the start of the other: "?\\n".
    """
    encoded = tokenizer(
        before + query + after,
        add_special_tokens=False,
        split_special_tokens=True,
        return_offsets_mapping=True,
    )
    start, end = len(before), len(before) + len(query)
    spans = encoded["offset_mapping"]
    own = [i for i, (left, right) in enumerate(spans) if left < end and right > start]
    return list(encoded["input_ids"]), own


def _cut(tokenizer: Any, text: str, *, last: bool) -> tuple[str, str]:
    """Cut a template's text at its last (first) image or special token: what is beyond is plain text."""
    spans = [match.span() for match in _special(tokenizer).finditer(text)]
    cuts = [0, *(end for _, end in spans)] if last else [*(start for start, _ in spans), len(text)]
    cut = cuts[-1] if last else cuts[0]
    return text[:cut], text[cut:]


@lru_cache(maxsize=16)
def _special(tokenizer: Any) -> re.Pattern[str]:
    tokens = sorted((str(t) for t in tokenizer.added_tokens_decoder.values() if t.special), key=len)
    return re.compile("|".join(map(re.escape, [_IMAGE, *reversed(tokens)])))


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
