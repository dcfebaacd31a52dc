"""Run pytest on every rank of a job: `mpiexec -n 3 python tests/ranks/run.py FOLDER TARGET ...`.

Each rank writes what pytest prints to FOLDER/rank<r>.log, and its exit status to FOLDER/rank<r>.status. With
SPMD_TEST_BACKEND=standin meshes run on the NCCL back end, over `tests/standin.py`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest

import collectives
from collectives import nccl, process

folder, *targets = sys.argv[1:]
rank = collectives.world().rank
if os.environ.get("SPMD_TEST_BACKEND") == "standin":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import standin

    collectives.register_backend("standin", lambda host: nccl.NcclCommunicator(host, standin, standin.Device()))
    process.default_backend = lambda: "standin"
with Path(folder, f"rank{rank}.log").open("w", buffering=1) as log, contextlib.redirect_stdout(log):
    arguments = [
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=--strict-markers",
        "-o",
        "faulthandler_timeout=0",
        "--tb=short",
    ]
    status = int(pytest.main([*arguments, *targets]))
Path(folder, f"rank{rank}.status").write_text(str(status))
sys.exit(status)
