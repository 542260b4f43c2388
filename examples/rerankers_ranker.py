"""The rerankers library: image documents by path."""

import tempfile
from pathlib import Path

from radical_rerank.integrations.rerankers import RadicalRanker
from radical_rerank.embedded.scenes.lists import make_list

sample = make_list("test", 7, 6)  # six generated scenes; the first sentence describes one of them
with tempfile.TemporaryDirectory() as folder:
    paths = [str(Path(folder) / f"scene {i}.png") for i in range(6)]
    for path, image in zip(paths, sample.images, strict=True):
        image.save(path)
    results = RadicalRanker(keep=0.2).rank(sample.descriptions[0].text(), paths)
for result in results.top_k(3):
    print(result.doc_id, round(result.score, 3))
