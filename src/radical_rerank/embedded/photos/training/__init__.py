"""How the photos model is made, on two CPU cores, in three stages.

`features` runs EfficientNet-lite0 over the photographs, once. `alignment` teaches the rest of the vision
tower to describe cells and whole pictures in the space of the word embeddings. `listwise` teaches the decoder
to rank.
"""
