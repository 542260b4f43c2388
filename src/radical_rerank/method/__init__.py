"""The paper's mathematics: tensors in, tensors out.

* `what`: which visual evidence decides the order (CCU, QRel, DTI, AttentionInfo)
* `when`: how far a layer's attention is trusted (entropy, trust α, fusion)
* `where`: which layers prune, how much, and what it costs (α-Maximin and six others, keep ratios, FLOPs)
* `plan`: a budget of arithmetic as a schedule
"""

from radical_rerank.method.plan import Schedule, arithmetic, counts_within, plan
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
    nucleus_count,
    saving,
    tokens_per_layer,
    top_k,
)

__all__ = [
    "STRATEGIES",
    "DecoderShape",
    "LayerCost",
    "Schedule",
    "allot",
    "alpha_maximin",
    "arithmetic",
    "arithmetic_fusion",
    "attention_information",
    "candidate_uniqueness",
    "counts_within",
    "discriminative_importance",
    "exact_uniqueness",
    "geometric_fusion",
    "keep_count",
    "keep_ratio",
    "kv_bytes",
    "macs",
    "min_max",
    "normalized_entropy",
    "nucleus_count",
    "plan",
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
