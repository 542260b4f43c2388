"""Packages of the extra `[lab]`."""

from __future__ import annotations

from radical_rerank.errors import InputError


def missing_package(package: str) -> InputError:
    """Return the error for a package that is not installed. It says how to install it."""
    return InputError(f"this needs {package}: pip install 'radical-rerank[lab]'")
