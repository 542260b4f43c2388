"""The paper's mathematics: tensors in, tensors out.

* `what`: which visual evidence decides the order (CCU, QRel, DTI, AttentionInfo)
* `when`: how far a layer's attention is trusted (entropy, trust α, fusion)
* `where`: which layers prune, how much, and what it costs (α-Maximin and six others, keep ratios, FLOPs)
"""

from radical_rerank.method.what import (
    attention_information,
    candidate_uniqueness,
    discriminative_importance,
    exact_uniqueness,
    min_max,
    query_relevance,
    ranks,
    saliency,
    signed_prior,
    text_averaged,
    uniqueness_of,
)
from radical_rerank.method.when import (
    arithmetic_fusion,
    geometric_fusion,
    normalized_entropy,
    trust,
)
from radical_rerank.method.where import (
    STRATEGIES,
    DecoderShape,
    LayerCost,
    allot,
    alpha_maximin,
    keep_count,
    keep_ratio,
    kv_bytes,
    macs,
    saving,
    tokens_per_layer,
    top_k,
)

__all__ = [
    "STRATEGIES",
    "DecoderShape",
    "LayerCost",
    "allot",
    "alpha_maximin",
    "arithmetic_fusion",
    "attention_information",
    "candidate_uniqueness",
    "discriminative_importance",
    "exact_uniqueness",
    "geometric_fusion",
    "keep_count",
    "keep_ratio",
    "kv_bytes",
    "macs",
    "min_max",
    "normalized_entropy",
    "query_relevance",
    "ranks",
    "saliency",
    "saving",
    "signed_prior",
    "text_averaged",
    "tokens_per_layer",
    "top_k",
    "trust",
    "uniqueness_of",
]
