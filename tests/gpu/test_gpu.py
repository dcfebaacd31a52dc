"""The NCCL back end on the GPUs of this machine, if there are any: `tests/gpu/run.py`, on one and on all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("run.py")


def test_on_one_gpu() -> None:
    """Skipped, with the reason, where there is none."""
    environ = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, str(RUN)], capture_output=True, text=True, timeout=300, env=environ, check=False
    )
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all passed" in done.stdout
