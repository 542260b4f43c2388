"""What the documents show is run as it stands."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import typer

import radical_rerank
from radical_rerank.backbones import Backbone
from radical_rerank.cli import app
from radical_rerank.pruning import METHODS, Profile, Pruner, Stage, StageView
from tests.cases import PROFILE, draw_list, keep_profile, make_case, model_of

ROOT = Path(__file__).parents[1]


def python_blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)


def test_the_usage_of_the_readme(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, image in zip("abc", draw_list(1, 3)[1], strict=True):
        image.save(tmp_path / f"{name}.jpg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Backbone, "from_pretrained", lambda name, **options: backbone)
    keep_profile(backbone)
    usage = python_blocks("README.md")[0]
    assert len([line for line in usage.splitlines() if line.strip()]) <= 8
    exec(usage, {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    visual, left, saved = lines[-1].split()
    assert int(left) < int(visual)
    assert 0 < float(saved) < 1


def test_the_context_manager_of_the_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    model, case = model_of("qwen3_vl"), make_case("qwen3_vl", [(4, 4), (3, 5)])
    monkeypatch.setattr(Profile, "find", lambda name: PROFILE)
    scope = {"model": model, "inputs": {**case.inputs, "max_new_tokens": 3, "pad_token_id": 0}}
    exec(python_blocks("README.md")[1], scope)
    assert scope["output"].shape[1] > case.layout.length
    assert len(scope["run"].stages[0][-1].survivors) < 0.3 * len(case.layout.positions)


def test_the_method_of_the_contributing_guide() -> None:
    scope = {
        "dataclass": dataclass,
        "ClassVar": ClassVar,
        "Pruner": Pruner,
        "Stage": Stage,
        "StageView": StageView,
        "Tensor": torch.Tensor,
    }
    exec(python_blocks("CONTRIBUTING.md")[0], scope)
    model, case = model_of("internvl_qwen2"), make_case("internvl_qwen2", [(1, 1), (2, 1)])
    with scope["Norm"](keep=0.25).on(model, case.layout) as run, torch.no_grad():
        model(**case.inputs)
    assert run.stages[0][0].after == 12


def commands(text: str) -> list[list[str]]:
    """What a document says to type: `radical …` in code, continued lines joined, comments left out."""
    code = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE) + re.findall(
        r"`(radical [^`]*)`", text
    )
    lines = "\n".join(code).replace("\\\n", " ").splitlines()
    return [line.split("#")[0].split() for line in lines if line.startswith("radical ")]


@pytest.mark.parametrize("name", ["README.md", *sorted(map(str, ROOT.glob("docs/**/*.md")))])
def test_the_commands_of_the_documents_exist(name: str) -> None:
    known = typer.main.get_command(app)
    found = commands((ROOT / name).read_text(encoding="utf-8"))
    assert len(found) > 8 or name != "README.md"
    for words in found:
        command: Any = known
        rest = words[1:]
        while hasattr(command, "commands") and rest:
            assert rest[0] in command.commands, words
            command = command.commands[rest.pop(0)]
        options = {option for parameter in command.params for option in parameter.opts}
        unknown = {word for word in rest if word.startswith("--")} - options
        assert not unknown, (name, words)


def test_the_readme_names_every_method_and_every_folder() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in METHODS:
        assert f"| `{name}` |" in readme
    package = Path(radical_rerank.__file__).parent
    for path in package.rglob("*.py"):
        if path.name not in ("__init__.py", "__main__.py"):
            assert path.name in readme, path
