"""How far a layer's attention can be believed: reliability z_l, entropy, their correlation."""

from radical_rerank.diagnostics.reliability import (
    Diagnosis,
    Evidence,
    diagnose,
    evidence,
    spearman,
    summary,
    z_score,
)

__all__ = ["Diagnosis", "Evidence", "diagnose", "evidence", "spearman", "summary", "z_score"]
