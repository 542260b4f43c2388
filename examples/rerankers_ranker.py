"""The rerankers library: rank image files by path."""

import tempfile
from pathlib import Path

from radical_rerank import generated_list
from radical_rerank.integrations.rerankers import RadicalRanker

query, images = generated_list(7, candidates=6)
with tempfile.TemporaryDirectory() as folder:
    paths = [str(Path(folder) / f"scene {i}.png") for i in range(len(images))]
    for path, image in zip(paths, images, strict=True):
        image.save(path)
    results = RadicalRanker("scenes", keep=0.2).rank(query, paths)
for result in results.top_k(3):
    print(result.doc_id, round(result.score, 3))
