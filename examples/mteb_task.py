"""MTEB: evaluate pruning methods on a reranking task."""

import mteb

from radical_rerank.embedded.scenes.datasets import scene_lists
from radical_rerank.integrations.mteb import RadicalSearch
from radical_rerank.lab.mteb_task import task_of

# For a task of MTEB itself: mteb.get_task(NAME).convert_to_reranking(PREDICTIONS, top_k=20)
task = task_of(scene_lists(lists=4, count=10))
for method, keep in (("dense", 1.0), ("radical", 0.2), ("random", 0.2)):
    result = mteb.evaluate(
        RadicalSearch("scenes", method=method, keep=keep), task, cache=None, show_progress_bar=False
    )
    print(method, result[0].get_score())
