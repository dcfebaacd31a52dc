"""The pages that are generated are current; the tour runs, as a notebook's cells one after the other."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_api_page_is_current() -> None:
    """docs/api.md is what docs/make_api.py writes."""
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.page() == module.PAGE.read_text(), "run python docs/make_api.py"


def cells() -> list[tuple[str, str]]:
    """Source and printed text of every code cell of the tour."""
    found = []
    for cell in json.loads((ROOT / "examples" / "tour.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            printed = "".join("".join(output.get("text", "")) for output in cell["outputs"])
            found.append(("".join(cell["source"]), printed))
    return found


def test_the_tour_prints_what_it_shows() -> None:
    """Every cell runs, in order, and prints what the notebook holds: but for file names of cells."""
    namespace: dict[str, object] = {"__name__": "tour"}
    for number, (source, shown) in enumerate(cells()):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(source, f"cell{number}.py", "exec"), namespace)
        printed, expected = (
            [line.split("; loss (")[0] for line in text.splitlines()] for text in (out.getvalue(), shown)
        )
        assert printed == expected, f"cell {number}"
