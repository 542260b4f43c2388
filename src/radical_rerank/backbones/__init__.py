"""The only room that knows Hugging Face internals: model families, the engine, loading."""

from radical_rerank.backbones.engine import Run
from radical_rerank.backbones.families import Block, ImageFeatures, Pixels, decoder_shape, family_of
from radical_rerank.backbones.loading import Backbone, layout_of
from radical_rerank.backbones.stopping import stopping
from radical_rerank.pruning import Pruner

Pruner.engine = Run  # methods never import the engine; it comes to them

__all__ = [
    "Backbone",
    "Block",
    "ImageFeatures",
    "Pixels",
    "Run",
    "decoder_shape",
    "family_of",
    "layout_of",
    "stopping",
]
