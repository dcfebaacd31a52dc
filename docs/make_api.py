"""Write docs/api.md: every public name with its signature and docstring. Usage: python docs/make_api.py"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import collectives
import placements
import spmd
import spmd.testing

PAGE = Path(__file__).parent / "api.md"
PACKAGES = {
    placements: placements.__all__,
    spmd: [name for name in spmd.__all__ if name != "random"],
    spmd.random: spmd.random.__all__,
    collectives: collectives.__all__,
    spmd.testing: ["check_rule"],
}


def signature(name: str, value: Any) -> str:
    """`name(arguments)`, without annotations and defaults' addresses."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    parameters = [p.replace(annotation=p.empty) for p in found.parameters.values() if p.name not in ("self", "cls")]
    plain = found.replace(parameters=parameters, return_annotation=found.empty)
    return re.sub(r" at 0x[0-9a-f]+", "", f"{name}{plain}")


def text(value: Any) -> str:
    """A docstring as Markdown: examples become code blocks."""
    lines, in_example = [], False
    for line in (inspect.getdoc(value) or "").splitlines():
        starts = line.startswith(">>>")
        if starts and not in_example:
            lines.append("```pycon")
        if in_example and not line.strip():
            lines.append("```")
        in_example = starts or (in_example and bool(line.strip()))
        lines.append(line)
    return "\n".join([*lines, "```"] if in_example else lines)


def members(value: type) -> list[str]:
    """The public methods and properties that a class defines itself, one line each."""
    found = []
    for name, member in vars(value).items():
        inner = getattr(member, "__func__", member)
        if name.startswith("_") or not (inspect.isfunction(inner) or isinstance(inner, property)):
            continue
        shown = name if isinstance(inner, property) else signature(name, inner)
        summary = (inspect.getdoc(inner) or "").split("\n\n")[0].replace("\n", " ")
        found.append(f"- `{shown}`: {summary}")
    return found


def page() -> str:
    """The whole page."""
    parts = ["# API\n\nWritten by `docs/make_api.py` from the docstrings."]
    for package, names in PACKAGES.items():
        parts.append(f"## {package.__name__}")
        for name in names:
            value = getattr(package, name)
            is_class = inspect.isclass(value)
            plain = (is_class and issubclass(value, Exception)) or not callable(value)
            parts.append(f"### `{package.__name__}.{name if plain else signature(name, value)}`")
            parts.append(text(value))
            if is_class and not plain:
                parts.append("\n".join(members(value)))
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
