"""What needs an extra names it."""

from __future__ import annotations

import importlib
import sys

import pytest


def hide(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the imports of a library fail, as if it were not installed."""
    loaded = [name for name in sys.modules if name == library or name.startswith(f"{library}.")]
    for name in {library, *loaded}:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize(
    ("module", "library", "extra"),
    [
        ("integrations.langchain", "langchain_core", "langchain"),
        ("integrations.llamaindex", "llama_index", "llamaindex"),
        ("integrations.rerankers", "rerankers", "rerankers"),
        ("integrations.mteb", "mteb", "mteb"),
        ("integrations.lmms_eval", "lmms_eval", "lmms-eval"),
        ("service.settings", "pydantic_settings", "serve"),
        ("service.app", "fastapi", "serve"),
    ],
)
def test_a_missing_library_names_its_extra(
    module: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(library, monkeypatch)
    monkeypatch.delitem(sys.modules, f"radical_rerank.{module}", raising=False)
    with pytest.raises(ImportError) as caught:
        importlib.import_module(f"radical_rerank.{module}")
    assert f"pip install 'radical-rerank[{extra}]'" in str(caught.value)
    assert (caught.value.name or "").split(".")[0] == library


@pytest.mark.parametrize(
    ("library", "arguments", "extra"),
    [("fastapi", [], "serve"), ("ray", ["--ray"], "ray")],
)
def test_so_does_the_command(
    library: str,
    arguments: list[str],
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from radical_rerank.cli import main

    pytest.importorskip("fastapi", reason="the service is an extra")
    hide(library, monkeypatch)
    monkeypatch.delitem(sys.modules, "radical_rerank.service.app", raising=False)
    with pytest.raises(SystemExit) as stop:
        main(["serve", "--port", "0", *arguments])
    assert stop.value.code == 2
    assert f"pip install 'radical-rerank[{extra}]'" in capsys.readouterr().err
