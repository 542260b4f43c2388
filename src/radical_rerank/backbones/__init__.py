"""The only room that knows Hugging Face internals: model families, the engine, loading."""

from radical_rerank.backbones.engine import Run, stages_of
from radical_rerank.backbones.families.base import Block, Family, ImageFeatures, Pixels, Row, Size
from radical_rerank.backbones.heads import load_head
from radical_rerank.backbones.layout import layout_of
from radical_rerank.backbones.model import DEFAULT_MODEL as DEFAULT_MODEL
from radical_rerank.backbones.model import Backbone, decoder_shape, family_of

__all__ = [
    "DEFAULT_MODEL",
    "Backbone",
    "Block",
    "Family",
    "ImageFeatures",
    "Pixels",
    "Row",
    "Run",
    "Size",
    "decoder_shape",
    "family_of",
    "layout_of",
    "load_head",
    "stages_of",
]
