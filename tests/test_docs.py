"""What the documents show is run as it stands."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

import radical_rerank
from radical_rerank import Profile
from radical_rerank.backbones import Backbone
from radical_rerank.cli import app
from radical_rerank.pruning import METHODS
from radical_rerank.reranking.preset import presets
from radical_rerank.reranking.prompt import PromptTemplate
from tests.cases import PROFILE, draw_list, keep_profile, make_case, model_of

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]
REPOSITORY = re.compile(
    r"https://(?:github\.com/radical-rerank/radical-rerank/(?:blob|tree)/main"
    r"|raw\.githubusercontent\.com/radical-rerank/radical-rerank/main)/([^)\s#]+)"
)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE)


def run(source: str, name: str, scope: dict[str, Any]) -> None:
    """Run it as a file of its own: without this file's `from __future__`."""
    exec(compile(source, name, "exec", dont_inherit=True), scope)


@pytest.fixture(scope="session")
def embedded() -> Backbone:
    return Backbone.from_pretrained("scenes")


@pytest.fixture
def substitutes(
    embedded: Backbone, backbones: dict[str, Backbone], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with a.jpg, b.jpg and c.jpg; small models for large ones."""
    tiny = backbones["qwen3_vl"]  # it reads texts, as large models do
    keep_profile(tiny)
    for name, image in zip("abc", draw_list(1, 3)[1], strict=True):
        image.save(tmp_path / f"{name}.jpg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        Backbone, "from_pretrained", lambda name="", **_: tiny if str(name).startswith("Qwen/") else embedded
    )
    monkeypatch.setitem(METHODS, "norm", METHODS["dense"])  # the guide adds one: it goes with the test


@pytest.fixture
def stock_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model and processor where a page loads them with transformers."""
    import transformers

    model, case = model_of("qwen3_vl"), make_case("qwen3_vl", [(4, 4), (3, 5), (4, 4)])
    processor = SimpleNamespace(apply_chat_template=lambda *_, **__: transformers.BatchFeature(case.inputs))
    for kind, made in (("AutoModelForImageTextToText", model), ("AutoProcessor", processor)):
        fake = SimpleNamespace(from_pretrained=lambda *_, made=made, **__: made)
        monkeypatch.setattr(transformers, kind, fake)
    monkeypatch.setattr(model.generation_config, "pad_token_id", 0)
    find = Profile.find
    monkeypatch.setattr(
        Profile, "find", lambda model, **how: PROFILE if isinstance(model, str) else find(model, **how)
    )


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)])
@pytest.mark.filterwarnings("ignore::radical_rerank.errors.OutOfWorldWarning")
def test_the_python_of_a_page_runs(page: str, substitutes: None, stock_model: None) -> None:
    scope: dict[str, Any] = {"__name__": "__main__"}
    for number, block in enumerate(python_blocks(page)):
        run(block, f"{page}, block {number}", scope)
    if page.endswith("own-model.md"):
        assert len(scope["run"].stages[0][-1].survivors) < 0.3 * 47


@pytest.mark.filterwarnings("ignore::radical_rerank.errors.OutOfWorldWarning")
def test_the_usage_of_the_readme(substitutes: None, capsys: pytest.CaptureFixture[str]) -> None:
    usage = python_blocks("README.md")[0]
    assert len([line for line in usage.splitlines() if line.strip()]) <= 8
    run(usage, "README.md", {"__name__": "__main__"})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    visual, left, saved = lines[-1].split()
    assert int(left) < int(visual)
    assert 0 < float(saved) < 1


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    notebook = json.loads(text_of("docs/notebooks/new_method.ipynb"))
    assert notebook["nbformat"] == 4
    scope: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            run("".join(cell["source"]), "new_method.ipynb", scope)
    assert "RaDiCal" in capsys.readouterr().out


def commands(text: str) -> list[list[str]]:
    """What a document says to type: `radical …` in code, continued lines joined, comments left out."""
    code = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    code += re.findall(r"`(radical [^`]*)`", text)
    lines = "\n".join(code).replace("\\\n", " ").splitlines()
    return [line.split("#")[0].split() for line in lines if line.startswith("radical ")]


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_the_commands_of_a_page_exist(page: str) -> None:
    known = typer.main.get_command(app)
    found = commands(text_of(page))
    assert len(found) > 8 or page != "README.md"
    for words in found:
        command: Any = known
        rest = words[1:]
        while hasattr(command, "commands") and rest:
            assert rest[0] in command.commands, words
            command = command.commands[rest.pop(0)]
        options = {option for parameter in command.params for option in parameter.opts}
        assert not {word for word in rest if word.startswith("--")} - options, (page, words)


def test_the_readme_names_every_method_and_every_folder() -> None:
    readme = text_of("README.md")
    for name in METHODS:
        assert f"| `{name}` |" in readme
    for folder in Path(radical_rerank.__file__).parent.iterdir():
        if (folder / "__init__.py").is_file():
            assert f"  {folder.name}/ " in readme, folder


def test_the_guide_says_what_each_preset_reads() -> None:
    guide = text_of("docs/guides/rerankers.md").partition("## Texts, pictures, instructions")[2]
    lines = [line.strip("|").split("|") for line in guide.partition("\n## ")[0].splitlines() if "|" in line]
    told = {row[0].strip(" `"): [cell.strip() == "yes" for cell in row[1:]] for row in lines[2:]}
    templates = {name: preset.template for name, preset in presets().items()}
    templates["none: any other model"] = PromptTemplate.load("qwen3_vl")
    assert told == {
        name: [
            template.texts,
            template.query_images,
            bool(template.reference or template.pair_composed),
            "{instruction}" in f"{template.intro}{template.pair}{template.ask_logits}",
        ]
        for name, template in templates.items()
    }


def test_every_public_name_is_in_the_api_reference() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs/api").glob("*.md"))
    for name in radical_rerank.__all__:
        assert name == "RadicalError" or f"::: radical_rerank.{name}\n" in pages, name


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_into_the_repository_lead_somewhere(page: str) -> None:
    for path in REPOSITORY.findall(text_of(page)):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"\]\((?!https?:|#)([^)#]+)", text_of(page)):
        assert ((ROOT / page).parent / path).exists(), path
