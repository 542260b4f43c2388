"""Call the HTTP service. Start it first, in another terminal: radical serve."""

import sys

import httpx

from radical_rerank import generated_list
from radical_rerank.reranking.encoding import data_uri
from radical_rerank.service import DEFAULT_HOST, DEFAULT_PORT

query, images = generated_list(7, candidates=6)
url = sys.argv[1] if len(sys.argv) > 1 else f"http://{DEFAULT_HOST}:{DEFAULT_PORT}"
body = {"query": query, "documents": [{"image": data_uri(image)} for image in images], "top_n": 3}
for result in httpx.post(f"{url}/v1/rerank", json=body).raise_for_status().json()["results"]:
    print(result["index"], round(result["relevance_score"], 3))
