"""MTEB: its own evaluation of a task with real lists of candidates."""

import mteb

from radical_rerank.embedded.scenes.datasets import scenes
from radical_rerank.integrations.mteb import RadicalSearch, task_of

# Or any of its tasks: mteb.get_task(NAME).convert_to_reranking(PREDICTIONS, top_k=20)
task = task_of(scenes(lists=4, count=10))
for method, keep in (("dense", 1.0), ("radical", 0.2), ("random", 0.2)):
    result = mteb.evaluate(RadicalSearch(method=method, keep=keep), task, cache=None, show_progress_bar=False)
    print(method, result[0].get_score())
