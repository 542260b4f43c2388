"""Schemathesis against our own OpenAPI schema: no 5xx, no response that the schema does not describe.

RADICAL_SCHEMA_CASES sets the number of cases per operation; `make fuzz` runs 2,000 in all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the service is an extra")
pytest.importorskip("schemathesis", reason="schemathesis is for tests")

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import CHECKS

from radical_rerank.backbones import Backbone
from radical_rerank.lab.bench.service import listening
from radical_rerank.pruning import METHODS
from radical_rerank.service.app import create_app
from radical_rerank.service.settings import Settings
from tests.service.helpers import PICTURES, QUERY, uri

CASES = int(os.environ.get("RADICAL_SCHEMA_CASES", "12"))
schema = schemathesis.openapi.from_dict(create_app(Settings()).openapi())

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with listening(Backbone.from_pretrained("scenes"), patience=100.0) as url:
        yield url


# A schema cannot say that a string is an image, so valid requests may be refused. And an invalid case may
# become valid when it is given images.
NEGATIVE = [check for check in CHECKS.get_all() if check.__name__ == "negative_data_rejection"]
NOT_ASKED = [check for check in CHECKS.get_all() if check.__name__ == "positive_data_acceptance"]
limited = settings(
    max_examples=CASES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@schema.parametrize()
@limited
def test_every_case_is_answered_as_the_schema_says(case: Any, url: str) -> None:
    case.call_and_validate(base_url=url, excluded_checks=NOT_ASKED)


@schema.include(path="/v1/rerank").parametrize()
@limited
def test_so_is_every_case_with_images(case: Any, url: str) -> None:
    """With real images, so that rankings run too; the other fields are generated."""
    if isinstance(case.body, dict):
        case.body["documents"] = [uri(image) for image in PICTURES[:2]]
        case.body["query"] = str(case.body.get("query") or QUERY)
        if isinstance(case.body.get("reference"), (str, dict)):
            case.body["reference"] = uri(PICTURES[2])
        if isinstance(case.body.get("method"), str):
            case.body["method"] = list(METHODS)[len(case.body["method"]) % len(METHODS)]
    case.call_and_validate(base_url=url, excluded_checks=[*NOT_ASKED, *NEGATIVE])
