"""Without the packages of the extra `[lab]`, the lab says how to install them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from radical_rerank.errors import InputError
from radical_rerank.lab.plots import figure

HIDDEN = """
import sys
for package in ("ir_measures", "matplotlib", "ray"):
    sys.modules[package] = None  # an import then fails, as if the package were not installed
"""
MAIN = HIDDEN + "from radical_rerank.cli import main\nmain(sys.argv[1:])\n"


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("command", [["eval", "--out", "unused"], ["experiment", "main"], ["experiment"]])
def test_commands_name_the_extra(command: list[str]) -> None:
    done = run(MAIN, *command)
    assert done.returncode == 2
    assert done.stderr == "error: this needs ir_measures: pip install 'radical-rerank[lab]'\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["eval", "--help"],
        ["experiment", "--help"],
        ["bench", "--help"],
        ["bench", "prefill", "--help"],
        ["datasets"],
    ],
)
def test_help_and_data_sets_need_no_extra(command: list[str]) -> None:
    done = run(MAIN, *command)
    assert not done.returncode, done.stderr
    assert done.stdout


@pytest.mark.slow
def test_modules_name_the_extra() -> None:
    program = HIDDEN + (
        "from radical_rerank.errors import InputError\n"
        "import radical_rerank.lab.bench.prefill, radical_rerank.lab.catalog\n"
        "try:\n"
        "    import radical_rerank.lab.metrics\n"
        "except InputError as error:\n"
        "    print(error)\n"
    )
    done = run(program)
    assert done.stdout == "this needs ir_measures: pip install 'radical-rerank[lab]'\n", done.stderr


def test_plots_need_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"needs matplotlib: pip install 'radical-rerank\[lab\]'"):
        figure()
