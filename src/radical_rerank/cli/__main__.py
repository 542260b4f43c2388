"""`python -m radical_rerank.cli`."""

from radical_rerank.cli import main

main()
