"""Fixtures of the lab."""

from __future__ import annotations

import pytest

from radical_rerank.backbones import Backbone
from radical_rerank.lab.runner import Runner
from tests.cases import keep_profile


@pytest.fixture
def runner(backbone: Backbone) -> Runner:
    keep_profile(backbone)
    return Runner(backbone, {"commit": "test", "versions": {}}, options={"max_image_tokens": 24})
