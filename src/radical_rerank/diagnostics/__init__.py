"""How far a layer's attention can be believed: reliability z_l, entropy, their correlation."""

from radical_rerank.diagnostics.reliability import Diagnosis, diagnose, spearman, z_score

__all__ = ["Diagnosis", "diagnose", "spearman", "z_score"]
