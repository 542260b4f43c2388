"""Every public name is documented in one form, and the examples run."""

from __future__ import annotations

import ast
import doctest
import inspect
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import radical_rerank

ROOT = Path(radical_rerank.__file__).parent
PUBLIC = [name for name in radical_rerank.__all__ if callable(getattr(radical_rerank, name))]
METHODS = list(radical_rerank.METHODS.values())


@pytest.mark.parametrize("name", [name for name in PUBLIC if not name.endswith("Error")])
def test_a_public_name_has_a_docstring_with_an_example_that_runs(name: str) -> None:
    documented = getattr(radical_rerank, name)
    text = inspect.getdoc(documented) or ""
    assert "Example:" in text, name
    scope = {key: getattr(radical_rerank, key) for key in radical_rerank.__all__}
    scope |= {"torch": torch, "Tensor": torch.Tensor, "dataclass": dataclass}
    examples = doctest.DocTestFinder(recurse=False).find(documented, name, globs=scope)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for example in examples:
        runner.run(example)
    assert runner.tries > 0
    assert runner.failures == 0


def test_every_method_names_its_paper() -> None:
    published = {"FastV", "PyramidDrop", "SparseVLM", "DART", "VisionZip"}
    published |= {"CDPruner", "DivPrune", "SCOPE", "V2Drop"}
    named = {"QIEI": "ZipRerank", "TrimTokenatorLC": "TrimTokenator"}
    for method in METHODS:
        text = method.__doc__ or ""
        if method.__name__ in published:
            assert "arXiv:" in text, method
        elif method.__name__ in named:
            assert named[method.__name__] in text, method
        elif method.__name__ not in ("Dense", "Random"):
            assert "From Saliency to Discriminability" in text, method


def public_definitions(path: Path) -> list[str]:
    """Public functions, classes and methods of a file that have no docstring."""
    missing = []

    def visit(node: ast.Module | ast.ClassDef, owner: str) -> None:
        for part in node.body:
            if not isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            if part.name.startswith("_"):
                continue
            overloaded = any("overload" in ast.unparse(mark) for mark in part.decorator_list)
            inherited = (
                isinstance(node, ast.ClassDef) and bool(node.bases) and isinstance(part, ast.FunctionDef)
            )
            if ast.get_docstring(part) is None and not overloaded and not inherited:
                missing.append(f"{path.relative_to(ROOT)}: {owner}{part.name}")
            if isinstance(part, ast.ClassDef):
                visit(part, f"{part.name}.")

    visit(ast.parse(path.read_text(encoding="utf-8")), "")
    return missing


def test_every_public_class_and_function_has_a_docstring() -> None:
    assert [name for path in sorted(ROOT.rglob("*.py")) for name in public_definitions(path)] == []
