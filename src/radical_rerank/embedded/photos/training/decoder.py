"""The decoder's first weights: a circuit that ranks before any training.

It is late interaction and the first stage's score, written as attention. Each step is a few layers.

bind    A visual token copies the identifier of its candidate: the nearest one before it.
gather  The last row copies the mean of the words. From here on it asks for the whole query.
look    A word looks for visual tokens that match it, the last row for whole pictures that match the query.
        They copy nothing yet. Pruning can see where they look.
read    The same, but they copy the identifiers of what they see. A row then holds m_j, the share of its
        attention that candidate j got.
weigh   An MLP turns m_j into w · (log(m_j + ε) + c), w the weight of the word: adding up logarithms asks for
        candidates that have all words, adding up shares for candidates that have any.
answer  The last row adds the rows of the words to its own. The output head reads the identifiers in it.

Training starts from here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from radical_rerank.embedded.photos import PICTURE, PLAIN, SCALE, WORD_DIMS
from radical_rerank.reranking.prompt import IDENTIFIERS

HEAVY, FAINT = 0.999, 0.3
"""the quantile of the words' norms that has weight 1; the weight below which a word only looks around"""
FLAG = 0.6 * SCALE
"""the value of a flag where it is set"""
LETTERS = slice(WORD_DIMS, WORD_DIMS + len(IDENTIFIERS))
"""a dimension per identifier"""
ANSWER, MARKUP, TEXT, VISUAL, LETTER = 249, 251, 253, 254, 255
"""dimensions of flags: what kind of token this is. ANSWER is the last row, TEXT all other words"""

SHARPNESS = {"bind": 2.1, "gather": 1.4, "read": 1.2, "answer": 1.4}
"""the product of the query's and the key's norms, as a multiple of the head's size"""
LOOKS = (0.2, 1.3, 1.3, 0.8, 0.8, 0.8)
"""the same for the layers that look, in turn: attention is more concentrated in some than in others"""
STRENGTH = {"bind": 1.0, "gather": 4.5, "look": 0.0, "read": 0.75, "answer": 1.0}
"""how much of an identifier, or of the words, a layer copies"""
ONLY = 1.6, -0.4, 1.6
"""how much the last row asks for whole pictures, how much a word does, and how much a picture answers"""
BAND, SLOW, EVEN = (0.0015, 0.03), 2e-5, (1e-4, 0.002)
"""rotations per position: of the dimensions that tell the nearest identifier from the one before it; at most,
of those that compare contents; of those that see all words of a query alike"""
WEIGHED = slice(WORD_DIMS, WORD_DIMS + 26)
"""the identifiers whose shares are weighed: capital letters. A window has at most 20 candidates"""
KNEES = (
    (0.0003, 3190.0),
    (0.001, 925.0),
    (0.003, 349.0),
    (0.01, 114.0),
    (0.03, 37.0),
    (0.1, 11.7),
    (0.3, 3.8),
)
"""log(m + 0.0001) as a sum of ramps: (where a ramp ends, its slope)"""
GAIN, CENTRE = 0.4, 4.0
"""what multiplies the logarithm, and what is added to it; a row's norm must stay about that of its word"""
WHOLE = 1.3
"""the weight of the whole query, beside the mean of its words, of which the heaviest have weight 1"""
TYPICAL = 12.0, 7.5, 13.2
"""after the last reading layer and its norm: a word row's value at an identifier with m = 1, at TEXT, and at
PLAIN for a word that says nothing"""


def start_decoder(model: Any, tokenizer: Any, usage: Tensor, norm: float) -> None:
    """Give an aligned model the decoder's first weights, in place.

    Args:
        model: after the alignment
        tokenizer: its tokenizer
        usage: (vocabulary,) how often each word is used
        norm: the mean norm of its visual tokens
    """
    text = model.model.language_model
    with torch.no_grad():
        directions = _frequent_directions(model.get_input_embeddings().weight[:, :WORD_DIMS], usage)
        _flag_tokens(model, tokenizer, norm)
        for number, layer in enumerate(text.layers):
            _quiet(layer)
            step = step_of(number, len(text.layers))
            sharpness = SHARPNESS[step] if step in SHARPNESS else LOOKS[(number - 2) % len(LOOKS)]
            _attend(layer.self_attn, step, sharpness, text.config, directions)
        _weigh(text.layers[-3].mlp)
        # The answer is an identifier: the output head hears little else.
        text.norm.weight.fill_(0.02)
        text.norm.weight[LETTERS] = 1.0
    model.tie_weights()


def in_decoder_units(tokens: Tensor, norm: float) -> Tensor:
    """Return visual tokens of the aligned model as they come after `start_decoder`. (…, d) -> (…, d)"""
    scaled = tokens * (SCALE / norm)
    scaled[..., VISUAL] = FLAG
    return scaled


def step_of(layer: int, num_layers: int) -> str:
    """Return which step a layer of the circuit does."""
    if layer < 2:
        return ("bind", "gather")[layer]
    if layer >= num_layers - 2:
        return "answer"
    return "read" if layer >= num_layers - 4 else "look"


def _frequent_directions(words: Tensor, usage: Tensor) -> Tensor:
    """Return (d, d): the principal directions of the words in use, the most important first, as rows."""
    weight = words.norm(dim=-1) * usage.sqrt()
    unit = normalize(words, dim=-1)
    directions: Tensor = torch.linalg.eigh((unit * weight[:, None]).T @ unit)[1].flip(1).T
    return directions


def _flag_tokens(model: Any, tokenizer: Any, norm: float) -> None:
    """Scale words and visual tokens to the decoder's units and set the flags."""
    table = model.get_input_embeddings().weight
    length = table[:, :WORD_DIMS].norm(dim=-1)
    weight = (length / length.quantile(HEAVY)).clamp(max=1)
    # How much a word counts is the length of its embedding until here, and the flag PLAIN from here on.
    table[:, :WORD_DIMS] *= ((weight / FAINT).clamp(max=1) * SCALE / length.clamp(min=1e-6))[:, None]
    table[:, PLAIN] = (1 - weight) * SCALE
    table[:, TEXT] = FLAG
    markup = tokenizer.convert_tokens_to_ids(["<img>", "</img>"])
    table[markup, TEXT], table[markup, MARKUP] = 0.0, FLAG
    answer = table[tokenizer.convert_tokens_to_ids("<answer>")]
    answer[TEXT], answer[PLAIN], answer[ANSWER] = 0.0, 0.0, FLAG
    for number, letter in enumerate(IDENTIFIERS):
        row = table[tokenizer.convert_tokens_to_ids(letter)]
        row.zero_()
        row[WORD_DIMS + number], row[LETTER] = SCALE, FLAG
    last = model.model.multi_modal_projector.linear_2
    last.weight *= SCALE / norm
    last.bias *= SCALE / norm
    last.bias[VISUAL] = FLAG


def _quiet(layer: Any) -> None:
    """Begin a layer as the identity: nothing is added to its input."""
    attention, mlp = layer.self_attn, layer.mlp
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
        nn.init.normal_(linear.weight, std=0.5 * linear.in_features**-0.5)
    for linear in (attention.o_proj, mlp.down_proj):
        nn.init.zeros_(linear.weight)


def _attend(attention: Any, step: str, sharpness: float, config: Any, directions: Tensor) -> None:
    """Write a step into the attention of a layer, which has one head."""
    half = config.head_dim // 2
    speed = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    query, key, value = (linear.weight for linear in (attention.q_proj, attention.k_proj, attention.v_proj))
    for weight in (query, key, value):
        weight.zero_()
    for gain in (attention.q_norm.weight, attention.k_norm.weight):
        gain.fill_(sharpness**0.5)
    copied = torch.arange(config.hidden_size)[slice(WORD_DIMS) if step == "gather" else LETTERS]
    places = torch.arange(len(copied))
    value[places, copied] = 0.3
    # A row's norm becomes √d by the layer's own norm: what is copied is scaled back.
    attention.o_proj.weight[copied, places] = STRENGTH[step] * SCALE / (config.hidden_size**0.5 * 0.3)
    _match(query, key, speed, directions)
    if step == "answer":
        _collect(query, key, speed)
    if step == "gather":
        _gather(query, key, speed)
    if step == "bind":
        # Visual tokens look at the nearest letter instead.
        near = _between(speed, BAND)
        query[:, VISUAL] = 0.0
        query[near, VISUAL], key[near, LETTER] = 6.0, 4.0


def _between(speed: Tensor, limits: tuple[float, float]) -> list[int]:
    return ((speed > limits[0]) & (speed < limits[1])).nonzero()[:, 0].tolist()


def _collect(query: Tensor, key: Tensor, speed: Tensor) -> None:
    """Text looks at text instead, all of it alike."""
    even = _between(speed, EVEN)
    query[:, [TEXT, ANSWER]], key[:, TEXT] = 0.0, 0.0
    query[even, TEXT], query[even, ANSWER], key[even, TEXT] = 3.0, 3.0, 3.0


def _gather(query: Tensor, key: Tensor, speed: Tensor) -> None:
    """The last row looks at text instead, at plain words less, and all other rows at markup."""
    _, flat, sink, _ = _flags(speed)
    even = _between(speed, EVEN)
    query[:, [TEXT, ANSWER]], query[:, PLAIN], key[:, TEXT] = 0.0, 0.0, 0.0
    query[even, ANSWER], key[even, TEXT] = 3.0, 3.0
    query[flat, ANSWER], key[flat, PLAIN] = -1.3, 1.3
    query[sink, TEXT] = 12.0


def _flags(speed: Tensor) -> tuple[int, int, int, int]:
    """Return the slowest dimensions, which are kept for flags: rest, flat, sink, only."""
    half = len(speed)
    return half - 1, half - 2, half - 3, half - 4


def _match(query: Tensor, key: Tensor, speed: Tensor, directions: Tensor) -> None:
    """Look by content: words at the visual tokens whose embeddings are near theirs.

    Four dimensions are kept for flags: text does not look at text, plain words look at everything, all rows
    that are no words look at markup, which holds no identifier, and whole pictures are for the last row,
    which looks at nothing else.
    """
    half = len(speed)
    rest, flat, sink, only = _flags(speed)
    slow = [n for n in range(only) if speed[n] < SLOW]
    places = torch.tensor([*slow, *(n + half for n in slow)])
    turned = torch.linalg.qr(torch.randn(len(places), len(places)))[0] @ directions[: len(places)]
    query[places, :WORD_DIMS] = turned
    key[places, :WORD_DIMS] = turned
    query[rest, TEXT] = query[rest, ANSWER] = key[rest, VISUAL] = 0.8
    for kind in (TEXT, MARKUP, LETTER):
        key[rest, kind] = -4.0
    for kind in (VISUAL, MARKUP, LETTER):
        query[sink, kind] = 12.0
    key[sink, MARKUP] = 6.0
    query[flat, PLAIN], key[flat, VISUAL] = 1.0, 0.24
    query[only, ANSWER], query[only, TEXT], key[only, PICTURE] = ONLY


def _weigh(mlp: Any) -> None:
    """Write w · (log(m_j + ε) + c) − m_j into an MLP, for every identifier j."""
    gate, up, down = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
    unit, text, plain = TYPICAL
    used = 0

    def new_row() -> int:
        """Clear the next hidden unit; its gate is open in rows that have a weight. Returns its number."""
        nonlocal used
        gate[used], up[used] = 0.0, 0.0
        gate[used, [TEXT, ANSWER]] = 4 / text
        used += 1
        return used - 1

    def weigh(row: int) -> None:
        """Multiply a unit by the weight of the word, or of the whole query."""
        up[row, TEXT], up[row, ANSWER], up[row, PLAIN] = 1 / text, WHOLE / text, -0.95 / plain

    for end, slope in KNEES:  # -slope · relu(end − m), relu as a steep SiLU
        for letter in range(WEIGHED.start, WEIGHED.stop):
            row = new_row()
            weigh(row)
            gate[row, letter] = -4 / (end * unit)
            down[letter, row] = -GAIN * slope * end / 4
    row = new_row()
    weigh(row)
    down[WEIGHED, row] = GAIN * CENTRE / 4
    for letter in range(WEIGHED.start, WEIGHED.stop):  # the shares themselves are taken away
        row = new_row()
        up[row, letter] = 1.0
        down[letter, row] = -0.66 / 4
