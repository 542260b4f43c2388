"""The service on a local Ray cluster: two replicas, one of which dies while requests run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("fastapi", reason="the service is an extra")
pytest.importorskip("ray", reason="Ray is an extra")

import httpx

from radical_rerank import Reranker
from radical_rerank.errors import InputError
from radical_rerank.lab.bench.service import free_port
from radical_rerank.service.settings import Settings
from tests.cases import draw_list
from tests.service.helpers import PICTURES, QUERY, body, uri

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    import ray
    from ray import serve

    from radical_rerank.service.on_ray import deploy

    port = free_port()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    deploy(
        Settings(model="scenes", patience=100.0, deadline=120.0), port=port, max_replicas=2, upscale_delay=1.0
    )
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


def rankers() -> list[str]:
    """The actor names of the running replicas."""
    import ray

    return [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if "Ranker" in a["name"]]


def replicas(*states: str) -> int:
    from ray import serve

    counts = serve.status().applications["radical"].deployments["Ranker"].replica_states
    return sum(counts.get(state, 0) for state in states)


def ask(url: str) -> httpx.Response:
    query, images = draw_list(4, 20)
    documents = [uri(image) for image in images]
    return httpx.post(f"{url}/rerank", json={"query": query, "documents": documents}, timeout=120)


def test_the_same_service(url: str) -> None:
    answer = httpx.post(f"{url}/v1/rerank", json=body(return_pruning=True), timeout=120)
    assert answer.status_code == 200, answer.text
    expected = Reranker.from_pretrained("scenes", keep=0.2).rank(QUERY, PICTURES)
    assert [result["index"] for result in answer.json()["results"]] == expected.order
    assert answer.json()["pruning"][0]["method"] == "RaDiCal"
    refused = httpx.post(f"{url}/v1/rerank", json=body(documents=["words"]), timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "texts_not_supported")
    assert httpx.get(f"{url}/readyz", timeout=60).status_code == 200
    about = httpx.get(f"{url}/v1/about", timeout=60).json()
    assert about["profile"]["schedule"]
    assert about["texts"] is False


def test_a_replica_is_added_under_load(url: str) -> None:
    assert replicas("RUNNING") == 1
    until = time.monotonic() + 90

    def keep_asking() -> None:
        while replicas("STARTING", "RUNNING") < 2 and time.monotonic() < until:
            assert ask(url).status_code == 200

    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(keep_asking) for _ in range(3)]:
            future.result()
    while replicas("RUNNING") < 2 and time.monotonic() < until:
        time.sleep(0.2)
    assert replicas("RUNNING") == 2


def test_no_request_is_lost_with_a_replica(url: str) -> None:
    import ray

    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(ask, url) for _ in range(18)]
        time.sleep(1.0)
        actors = rankers()
        assert len(actors) == 2
        ray.kill(ray.get_actor(actors[0], namespace="serve"))
        answers = [future.result() for future in futures]
    orders = {
        tuple(result["index"] for result in answer.json()["results"])
        for answer in answers
        if answer.status_code == 200
    }
    assert len(orders) == 1
    lost = [answer for answer in answers if answer.status_code != 200]
    assert all(answer.status_code == 503 and answer.json()["error"]["code"] for answer in lost)
    assert len(lost) < 9


def test_max_replicas_must_be_at_least_replicas() -> None:
    from radical_rerank.service.on_ray import deploy

    with pytest.raises(InputError, match="max_replicas"):
        deploy(Settings(model="scenes"), replicas=3, max_replicas=2)
