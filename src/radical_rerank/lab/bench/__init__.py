"""How fast, and how far from the limit: interleaved runs in one process, medians of ratios."""
