"""Data flows one way: a room imports only from rooms above it. A walk through `radical rank` is short."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import radical_rerank
from tests.cases import draw_list

ROOT = Path(radical_rerank.__file__).parent
PRODUCT = ["method", "pruning", "backbones", "reranking", "retrieval", "service", "integrations"]
ROOMS = ["errors", "files", "progress", *PRODUCT, "lab", "embedded", "cli"]
EXCEPTIONS = {
    ("backbones/model.py", "embedded"): "the models that ship, and which one is the default",
    ("reranking/calibration.py", "embedded"): "the lists that calibration runs on, and samples to try",
    ("pruning/base.py", "backbones"): "the engine, bound when a method is used",
}
"""the only imports from below, each at one place"""


def imports_of(path: Path) -> set[str]:
    """Names of our own rooms (with a dot) and of foreign packages that a file imports at run time."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    imported = set()
    for node in ast.walk(tree):
        names = []
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names = (
                [f"{module}.{alias.name}" for alias in node.names] if module == "radical_rerank" else [module]
            )
        for name in names:
            parts = name.split(".")
            imported.add(f".{parts[1]}" if parts[0] == "radical_rerank" and len(parts) > 1 else parts[0])
    return imported


def files() -> list[tuple[str, Path]]:
    return [
        (path.relative_to(ROOT).parts[0].removesuffix(".py"), path)
        for path in sorted(ROOT.rglob("*.py"))
        if path != ROOT / "__init__.py"
    ]


def test_a_room_imports_only_from_rooms_above_it() -> None:
    assert len(files()) > 20
    used = set()
    for room, path in files():
        assert room in ROOMS, f"{path} is in no known room"
        for name in imports_of(path):
            if name.startswith(".") and ROOMS.index(name[1:]) > ROOMS.index(room):
                place = path.relative_to(ROOT).as_posix(), name[1:]
                assert place in EXCEPTIONS, f"{path} imports {name[1:]}"
                used.add(place)
    assert used == set(EXCEPTIONS), "an exception is no longer needed"


def test_the_product_never_imports_the_lab() -> None:
    for room, path in files():
        if room in PRODUCT:
            assert ".lab" not in imports_of(path), path


def test_method_imports_torch_alone() -> None:
    standard = {
        "__future__",
        "collections",
        "dataclasses",
        "functools",
        "itertools",
        "math",
        "random",
        "typing",
    }
    for room, path in files():
        if room == "method":
            assert imports_of(path) <= standard | {"torch", ".method"}, path


def test_one_room_touches_hugging_face() -> None:
    for room, path in files():
        # The command line turns off loading bars; the embedded models are made with transformers; a dual
        # encoder of the first stage is loaded where it is used; benchmarks build random models.
        allowed = {
            "cli": {"transformers"},
            "embedded": {"transformers", "tokenizers"},
            "retrieval": {"transformers"},
            "lab": {"transformers", "tokenizers"},
        }.get(room, set())
        if room != "backbones":
            assert not (imports_of(path) & {"transformers", "tokenizers", "huggingface_hub"}) - allowed, path


def test_nobody_needs_torchvision() -> None:
    for _, path in files():
        assert "torchvision" not in imports_of(path)


def test_only_the_lab_needs_its_extra() -> None:
    for room, path in files():
        if room != "lab":
            assert not imports_of(path) & {"matplotlib", "ir_measures"}, path


def function_lengths() -> dict[str, int]:
    """Lines of every function's body, without its docstring."""
    lengths = {}
    for _, path in files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                start = body[0].lineno if body else node.lineno
                end = max((part.end_lineno or 0 for part in body), default=start)
                lengths[f"{path.relative_to(ROOT)}:{node.name}"] = end - start + 1
    return lengths


def test_no_function_body_is_longer_than_sixty_lines() -> None:
    lengths = function_lengths()
    assert len(lengths) > 500
    assert {name: length for name, length in lengths.items() if length > 60} == {}


WALK = """
import json, sys
import radical_rerank
from pathlib import Path
from radical_rerank.cli import main

root, seen, visits = str(Path(radical_rerank.__file__).parent), set(), []

def watch(frame, event, argument):
    code = frame.f_code
    # Comprehensions and lambdas are part of the function they stand in.
    if event == "call" and code.co_filename.startswith(root) and not code.co_name.startswith("<"):
        if code not in seen:
            seen.add(code)
            visits.append(code.co_filename)

sys.setprofile(watch)
try:
    main(["rank", *sys.argv[1:]])
except SystemExit as end:
    assert not end.code
sys.setprofile(None)
print(json.dumps(visits))
"""


@pytest.mark.slow
def test_the_walk_through_a_ranking_is_short(tmp_path: Path) -> None:
    """A reader who follows `radical rank` visits few files, and rarely changes between them."""
    query, images = draw_list(0, 6)
    paths = [str(tmp_path / f"{i}.png") for i in range(len(images))]
    for path, image in zip(paths, images, strict=True):
        image.save(path)
    command = [sys.executable, "-c", WALK, query, *paths, "--model", "scenes"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    visits = json.loads(output.splitlines()[-1])
    assert len(visits) > 100
    assert len(set(visits)) <= 17
    assert sum(a != b for a, b in pairwise(visits)) <= 47
