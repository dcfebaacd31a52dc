"""Write docs/torch_distributed_names.txt: every name of torch.distributed that a folder of documents mentions.

Usage: python docs/make_torch_names.py FOLDER
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

NAMES = Path(__file__).parent / "torch_distributed_names.txt"


def names(folder: Path) -> list[str]:
    """The names, without what is private, and without the package's own."""
    text = "\n".join(path.read_text(errors="replace") for path in sorted(folder.iterdir()))
    found = {name.rstrip(".") for name in re.findall(r"\btorch\.distributed(?:\.[A-Za-z]\w*)+", text)}
    found |= {f"torch.distributed.{name}" for name in re.findall(r"\bdist\.([a-z]\w*)\(", text)}
    return sorted(found)


if __name__ == "__main__":
    NAMES.write_text("\n".join(names(Path(sys.argv[1]))) + "\n")
