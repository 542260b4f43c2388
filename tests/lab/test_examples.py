"""The examples in the lab's docstrings run."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import radical_rerank

ROOT = Path(radical_rerank.__file__).parent
MODULES = [
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
    for path in sorted((ROOT / "lab").rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", MODULES)
def test_examples_run(module: str) -> None:
    result = doctest.testmod(import_module(module))
    assert result.attempted
    assert not result.failed
