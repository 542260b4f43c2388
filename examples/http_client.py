"""Any client of a rerank endpoint: `radical serve` in another terminal, then this."""

import base64
import io
import sys

import httpx

from radical_rerank.embedded.scenes.lists import make_list

sample = make_list("test", 7, 6)  # six generated scenes; the first sentence describes one of them
documents = []
for image in sample.images:
    image.save(file := io.BytesIO(), "PNG")
    documents.append({"image": base64.b64encode(file.getvalue()).decode()})
url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
body = {"query": sample.descriptions[0].text(), "documents": documents, "top_n": 3}
for result in httpx.post(f"{url}/v1/rerank", json=body).raise_for_status().json()["results"]:
    print(result["index"], round(result["relevance_score"], 3))
