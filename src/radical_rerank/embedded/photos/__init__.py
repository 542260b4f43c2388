"""A small reranker of photographs."""

WORD_DIMS = 192
"""words and visual tokens live in the first dimensions; the others tell kinds of tokens apart"""
