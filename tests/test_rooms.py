"""Data flows one way: a room imports only from rooms above it."""

from __future__ import annotations

import ast
from pathlib import Path

import radical_rerank

ROOT = Path(radical_rerank.__file__).parent
ROOMS = [
    "errors", "files", "scenes", "method", "pruning", "backbones", "reranking", "retrieval", "evaluation",
    "diagnostics", "training", "report", "service", "integrations", "bench", "demo", "cli",
]  # fmt: skip


def imports_of(path: Path) -> set[str]:
    """Top-level names of our own package, and foreign packages, that a file imports anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""]
        for name in names:
            parts = name.split(".")
            found.add(f".{parts[1]}" if parts[0] == "radical_rerank" and len(parts) > 1 else parts[0])
    return found


def files() -> list[tuple[str, Path]]:
    return [
        (path.relative_to(ROOT).parts[0].removesuffix(".py"), path)
        for path in sorted(ROOT.rglob("*.py"))
        if path != ROOT / "__init__.py"
    ]


def test_a_room_imports_only_from_rooms_above_it() -> None:
    assert len(files()) > 20
    for room, path in files():
        assert room in ROOMS, f"{path} is in no known room"
        for name in imports_of(path):
            if name.startswith("."):
                assert ROOMS.index(name[1:]) <= ROOMS.index(room), f"{path} imports {name[1:]}"


def test_method_imports_torch_alone() -> None:
    standard = {"__future__", "collections", "dataclasses", "itertools", "math", "random", "typing"}
    for room, path in files():
        if room == "method":
            assert imports_of(path) <= standard | {"torch", ".method"}, path


def test_one_room_touches_hugging_face() -> None:
    for room, path in files():
        # The command line hushes loading bars; training makes the embedded model; a dual
        # encoder of the first stage is loaded where it is used.
        allowed = {
            "cli": {"transformers"},
            "training": {"transformers", "tokenizers"},
            "retrieval": {"transformers"},
        }.get(room, set())
        if room != "backbones":
            assert not (imports_of(path) & {"transformers", "tokenizers", "huggingface_hub"}) - allowed, path


def test_torchvision_is_nobody_s_need() -> None:
    for _, path in files():
        assert "torchvision" not in imports_of(path)
