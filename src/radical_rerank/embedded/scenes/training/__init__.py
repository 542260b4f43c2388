"""How the scenes model is trained from scratch, on two CPU cores.

Stage A (`alignment`) teaches the vision encoder to describe each cell in the space of the word embeddings.
Stage B (`losses`) freezes it and teaches the decoder to rank.
"""
