"""Shared set-up: CPU only, `--all` for the slow tests, and the example scripts as modules."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

from collectives.launch import launch

# Most of the time goes into compiling thousands of small operations, each run a few times. JAX 0.12 has one emitter alone.
_FASTER = "--xla_backend_optimization_level=0"
if jax.__version_info__ < (0, 11):
    _FASTER += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", _FASTER)

ROOT = Path(__file__).parents[1]
collect_ignore = [] if launch() is not None else ["ranks"]
"""The tests of `ranks` run under mpiexec alone; `test_mpi.py` launches them."""


GROWTH = 1_000_000_000
"""Bytes by which a test process may grow before JAX forgets what it compiled: some hundred programs."""


def _resident() -> int:
    """The bytes of memory that this process holds; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def forget() -> None:
    """Let go of what JAX compiled, and give the memory back."""
    jax.clear_caches()
    gc.collect()
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", lambda kept: 0)(0)  # glibc keeps what was freed


@pytest.fixture(autouse=True, scope="session")
def _start() -> list[int]:
    return [_resident()]


@pytest.fixture(autouse=True)
def _bounded_memory(_start: list[int]) -> Iterator[None]:
    """Several processes run the tests at once, so each stays small."""
    yield
    if _resident() - _start[0] > GROWTH:
        forget()
        _start[0] = _resident()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the slow tests too, and larger samples")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the slow tests without `--all`; of the files that SPMD_TEST_PART="file=i/k ..." names keep the i-th of k parts."""
    for each in os.environ.get("SPMD_TEST_PART", "").split():
        file, _, fraction = each.partition("=")
        part, _, parts = fraction.partition("/")
        items[:] = [
            item
            for item in items
            if f"{file}.py" not in item.nodeid or zlib.crc32(item.nodeid.encode()) % int(parts) == int(part)
        ]
    if not config.getoption("--all"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow: pytest --all runs it"))


def sample(names: Iterable[str], share: int) -> list[Any]:
    """Names as parameters: one in `share` for the default run, by a hash, and all with `--all`."""
    return [
        name if zlib.crc32(name.encode()) % share == 0 else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(names)
    ]


@pytest.fixture
def everything(request: pytest.FixtureRequest) -> bool:
    """Whether `--all` asks for the larger samples."""
    return bool(request.config.getoption("--all"))


def load_example(name: str) -> ModuleType:
    """A script of `examples/` as a module. What the scripts share lies beside them."""
    if str(ROOT / "examples") not in sys.path:
        sys.path.append(str(ROOT / "examples"))
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
