"""What needs an extra names it. In processes of their own: imports that fail would spoil this one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CASES = [
    ("integrations.langchain", "langchain_core", "langchain"),
    ("integrations.llamaindex", "llama_index", "llamaindex"),
    ("integrations.rerankers", "rerankers", "rerankers"),
    ("integrations.mteb", "mteb", "mteb"),
    ("integrations.lmms_eval", "lmms_eval", "lmms-eval"),
    ("service.settings", "pydantic_settings", "serve"),
    ("service.app", "fastapi", "serve"),
]
IMPORT = """
import importlib, json, sys
caught = []
for module, library, _ in json.loads(sys.argv[1]):
    sys.modules[library] = None  # imports of it then fail, as if it were not installed
    try:
        importlib.import_module(f"radical_rerank.{module}")
    except ImportError as error:
        caught.append([str(error), error.name])
    del sys.modules[library]
print(json.dumps(caught))
"""
COMMAND = """
import sys
from radical_rerank.cli import main
sys.modules[sys.argv[1]] = None
main(["serve", "--port", "0", *sys.argv[2:]])
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)


@pytest.mark.slow
def test_a_missing_library_names_its_extra() -> None:
    caught = json.loads(run(IMPORT, json.dumps(CASES)).stdout)
    assert len(caught) == len(CASES)
    for (_, library, extra), (message, name) in zip(CASES, caught, strict=True):
        assert f"pip install 'radical-rerank[{extra}]'" in message
        assert name.split(".")[0] == library


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "arguments", "extra"), [("fastapi", [], "serve"), ("ray", ["--ray"], "ray")]
)
def test_so_does_the_command(library: str, arguments: list[str], extra: str) -> None:
    pytest.importorskip("fastapi", reason="the service is an extra")
    done = run(COMMAND, library, *arguments)
    assert done.returncode == 2
    assert f"pip install 'radical-rerank[{extra}]'" in done.stderr
