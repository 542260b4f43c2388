"""A small reranker of photographs."""

WORD_DIMS = 192
"""words and visual tokens live in the first dimensions; the others tell kinds of tokens apart"""
SCALE = 8.0
"""the norm of words, identifiers and visual tokens in the decoder"""
PLAIN = 252
"""the dimension that says how little a word says about pictures: from 0 to `SCALE`"""
PICTURE = 250
"""the dimension that marks the visual token of the whole picture"""
