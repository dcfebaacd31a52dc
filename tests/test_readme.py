"""The README's Python blocks run, in order, and print what the README says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


NAMES = ("backends", "communicators", "concepts", "local", "programs", "ranks", "training")
PAGES = ("README.md", *(f"docs/{name}.md" for name in NAMES))


@pytest.mark.parametrize("page", PAGES)
def test_blocks_print_what_the_page_says(page: str, tmp_path: Path) -> None:
    """Each ```python block is run as a file in one namespace; a ```text block after it is its output."""
    text = (ROOT / page).read_text()
    blocks = re.findall(r"^```(python|text)\n(.*?)^```", text, re.M | re.S)
    assert any(kind == "python" for kind, _ in blocks)
    namespace: dict[str, object] = {"__name__": "page"}
    printed, checked = None, 0
    for number, (kind, body) in enumerate(blocks):
        if kind == "python":
            assert not printed, f"block {number - 1} of {page} prints, and the page does not show it:\n{printed}"
            path = tmp_path / str(number) / "example.py"
            path.parent.mkdir()
            path.write_text(body)
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(body, str(path), "exec"), namespace)
            printed = out.getvalue()
        else:
            assert printed == body, f"block {number} of {page}"
            printed, checked = None, checked + 1
    assert not printed
    assert checked
