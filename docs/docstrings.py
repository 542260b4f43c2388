"""Griffe extension: docstrings of this package as Markdown.

* a line `name: text` or `name, other: text` outside of an `Args:` section becomes a list item
* an `====` table stays as it is typed
* the code of `Example:` is shown as code
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ITEM = re.compile(r"^((?:\w+)(?:, \w+)*): (?=\S)")


class Docstrings(griffe.Extension):
    """Rewrites every docstring that names parameters or fields."""

    def on_object(self, *, obj: griffe.Object, loader: Any, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value, names_in(obj))


def names_in(obj: griffe.Object) -> set[str]:
    """What a docstring of this object may explain: parameters, or fields and those of `__init__`."""
    if isinstance(obj, griffe.Function):
        return {parameter.name for parameter in obj.parameters}
    if isinstance(obj, griffe.Class):
        init = obj.members.get("__init__")
        return set(obj.members) | (names_in(init) if isinstance(init, griffe.Function) else set())
    return set()


def as_markdown(text: str, names: set[str]) -> str:
    result: list[str] = []
    in_item = in_table = False
    for line in [*text.splitlines(), ""]:
        line = "Examples:" if line == "Example:" else line
        found = _ITEM.match(line)
        if in_table and not line.strip():
            result += ["```", ""]
            in_table = False
        elif line.startswith("====") and not in_table:
            result += ["```text", line]
            in_table, in_item = True, False
        elif found and not in_table and set(found[1].split(", ")) <= names:
            if result and result[-1] and not in_item:
                result.append("")
            shown = ", ".join(f"`{name}`" for name in found[1].split(", "))
            result.append(f"* {shown}: {line[found.end() :]}")
            in_item = True
        elif in_item and line.strip():
            result.append("  " + line.strip())  # the rest of an item
        else:
            in_item = False
            result.append(line)
    return "\n".join(result)
