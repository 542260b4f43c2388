"""The service's own budget, for requests that name neither a method nor a `keep`."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from radical_rerank import RaDiCal
from radical_rerank.backbones import Backbone
from radical_rerank.embedded.scenes.lists import make_list
from radical_rerank.service.backend import Rerankers
from radical_rerank.service.settings import Settings


def test_requests_that_name_something_get_it() -> None:
    settings = Settings(model="scenes", flops=0.3)
    assert settings.budget == {"flops": 0.3}
    assert settings.kind(None, None) == ("radical", None)
    assert settings.kind("fastv", None) == ("fastv", 0.2)
    assert settings.kind(None, 0.5) == ("radical", 0.5)
    assert Settings(model="scenes").kind(None, None) == ("radical", 0.2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"flops": 0.3, "latency": 1.0}, "two budgets"),
        ({"speedup": 0.5}, "at least 1"),
        ({"latency": 1.0, "method": "fastv"}, 'needs the method "radical"'),
        ({"permutations": "auto", "keep": 0.2}, "needs speedup or flops"),
        ({"permutations": 0}, "permutations"),
    ],
)
def test_a_wrong_budget_is_told_at_start(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Settings(model="scenes", **given)


def test_orders_go_with_the_budget_or_with_every_request() -> None:
    auto = Settings(model="scenes", flops=0.2, permutations="auto")
    assert auto.budget == {"flops": 0.2, "permutations": "auto"}
    rerankers = Rerankers(Backbone.from_pretrained("scenes"), auto.budget, **auto.asking)
    assert rerankers("radical", None).permutations == "auto"
    assert rerankers("radical", 0.5).permutations == 1
    twice = Settings(model="scenes", permutations=2)
    rerankers = Rerankers(Backbone.from_pretrained("scenes"), twice.budget, **twice.asking)
    assert rerankers("fastv", 0.5).permutations == 2


def test_the_budget_is_kept() -> None:
    rerankers = Rerankers(Backbone.from_pretrained("scenes"), {"flops": 0.3})
    own, other = rerankers("radical", None), rerankers("radical", 0.5)
    assert isinstance(own.pruner, RaDiCal)
    assert own.pruner.flops == 0.3
    assert other.pruner.keep == 0.5
    assert own.prompt_cache is other.prompt_cache
    assert own.vision_cache is other.vision_cache
    report = own.rank("a red star", make_list("test", 0, 20).images).report
    assert report is not None
    assert report.flops_saved == pytest.approx(0.7, abs=0.01)
