"""The pages that are generated are current; the tour runs, as a notebook's cells one after the other."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
from pathlib import Path
from typing import Any

import jax
import pytest

import collectives
from spmd.rules import RULES

ROOT = Path(__file__).parents[1]


def script(name: str) -> Any:
    """A script of `docs` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_api_page_is_current() -> None:
    """docs/api.md is what docs/make_api.py writes."""
    module = script("make_api")
    assert module.page() == module.PAGE.read_text(), "run python docs/make_api.py"


@pytest.mark.skipif(jax.__version_info__[:2] != (0, 10), reason="the page names the primitives of the oldest JAX")
def test_the_coverage_page_is_current() -> None:
    """docs/coverage.md is what docs/make_coverage.py writes, and has every primitive that has a rule."""
    module = script("make_coverage")
    page = module.PAGE.read_text()
    assert module.render() == page, "run python docs/make_coverage.py"
    assert all(f"| `{primitive.name}` |" in page for primitive in RULES)


def test_torch_distributed_is_mapped_name_by_name() -> None:
    """Every name in the list, which a script extracted from its documents, is on the page, and what is here exists."""
    module = script("make_torch_names")
    listed = {name.removeprefix("torch.distributed.") for name in module.NAMES.read_text().split()}
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", (ROOT / "docs" / "torch_distributed.md").read_text(), re.M)
    names = [name for left, _ in rows for name in re.findall(r"`([^`]*)`", left)]
    assert len(listed) > 100
    assert sorted(listed - set(names)) == []
    assert len(names) == len(set(names)), "a name stands twice"
    assert all(right.strip() for _, right in rows)
    world = collectives.world()
    for owner, name in re.findall(r"`(world|collectives)\.(\w+)", "".join(right for _, right in rows)):
        assert hasattr(world if owner == "world" else collectives, name), f"{owner}.{name}"


def test_the_list_of_torch_names_is_what_the_script_extracts(tmp_path: Path) -> None:
    """Names are found where they stand, with their package, in calls, in titles; what is private is not."""
    module = script("make_torch_names")
    (tmp_path / "a.rst").write_text(
        ".. autofunction:: torch.distributed.all_reduce\nsee torch.distributed.nn.functional."
    )
    (tmp_path / "b.md").write_text("dist.isend(x) and torch.distributed._private, dist.P2POp")
    assert module.names(tmp_path) == [f"torch.distributed.{name}" for name in ("all_reduce", "isend", "nn.functional")]


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
