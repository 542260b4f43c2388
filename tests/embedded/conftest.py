from __future__ import annotations

import pytest

from radical_rerank.backbones import Backbone


@pytest.fixture(scope="session")
def embedded() -> Backbone:
    """The model that ships."""
    return Backbone.from_pretrained("scenes")
