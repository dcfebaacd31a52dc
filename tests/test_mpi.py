"""Real ranks: `mpiexec` launches the tests of `tests/ranks`, the value cases again, the examples, and the table of faults.

One launch for each rank count runs all cases of that count; each fault has a launch of its own. Skipped, with the reason,
where no mpiexec and mpi4py are installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Final

import pytest

TESTS = Path(__file__).parent
MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
pytestmark = pytest.mark.skipif(
    MPIEXEC is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpiexec and mpi4py: pip install '.[mpich]'",
)


def is_open_mpi() -> bool:
    assert MPIEXEC is not None
    out = subprocess.run([MPIEXEC, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    return "Open MPI" in out or "Open RTE" in out or "PRRTE" in out or "prte" in out


def mpiexec(n: int, *command: str, timeout: float, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command on n ranks; a launch that does not end in time is killed, and fails the test."""
    assert MPIEXEC is not None
    extra = ["--allow-run-as-root", "--oversubscribe"] if is_open_mpi() else []
    env = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMI"))}
    env |= {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}",
        "PYTHONUNBUFFERED": "1",
        **environ,
    }
    return subprocess.run(
        [MPIEXEC, *extra, "-n", str(n), sys.executable, *command],
        capture_output=True, text=True, errors="replace", timeout=timeout, env=env, cwd=TESTS.parent, check=False,
    )  # fmt: skip


TEXTBOOK = ("test_many_small_parameters_share_messages_e8", "test_fsdp_on_ranks_that_do_not_divide_e13")


@pytest.mark.parametrize("n", [2, 3, 4])
def test_ranks(n: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Every test for real ranks, and the value cases, on n ranks; each rank's log is shown where one fails.

    Without `--all` two ranks run all of the former and a quarter of the latter, three and four ranks a third of the former
    each, three an eighth of the latter, and none runs loops.
    """
    everything = request.config.getoption("--all")
    parts = {2: "test_cases=0/4", 3: "test_ranks=0/3 test_cases=1/8", 4: "test_ranks=1/3"}
    part = {} if everything else {"SPMD_TEST_PART": parts[n]}
    targets = [str(TESTS / "ranks" / f"test_{name}.py") for name in ("ranks", "communicator")]
    targets += [str(TESTS / "ranks" / "test_backends.py")] if n == 2 or everything else []
    targets += [str(TESTS / "test_cases.py")] if n < 4 or everything else []
    targets += [f"{TESTS / 'test_textbook.py'}::{name}" for name in TEXTBOOK]
    targets += [str(TESTS / "test_loops.py")] if n == 2 and everything else []
    run_on_ranks(n, targets, tmp_path, SPMD_TIMEOUT="120", **part)


@pytest.mark.parametrize("n", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_nccl(n: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The NCCL back end against a stand-in for cupy's NCCL; with `--all` every test for real ranks runs on it too."""
    everything = request.config.getoption("--all")
    targets = [str(TESTS / "ranks" / "test_nccl.py")]
    targets += [str(TESTS / "ranks" / "test_ranks.py"), str(TESTS / "test_cases.py")] if everything else []
    run_on_ranks(n, targets, tmp_path, SPMD_TIMEOUT="120", SPMD_TEST_BACKEND="standin", SPMD_TEST_PART="test_cases=1/4")


def run_on_ranks(n: int, targets: list[str], folder: Path, **environ: str) -> None:
    """Run tests on every rank; each rank's log is shown where one fails."""
    done = mpiexec(n, str(TESTS / "ranks" / "run.py"), str(folder), *targets, timeout=900, **environ)
    logs = {path.stem: path.read_text() for path in sorted(folder.glob("*.log"))}
    statuses = [path.read_text() for path in sorted(folder.glob("*.status"))]
    shown = "\n".join(f"--- {name}\n{log[-3000:]}" for name, log in logs.items())
    assert done.returncode == 0, f"{shown}\n--- stderr\n{done.stderr[-3000:]}"
    assert statuses == ["0"] * n, shown
    counts = {re.search(r"(\d+) passed", log).group(1) for log in logs.values()}  # type: ignore[union-attr]
    assert len(counts) == 1, "the ranks ran different numbers of tests"


def test_the_main_job_under_mpiexec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The same file, on 1 to 4 real ranks, in every kind of parallelism (by turns): the first losses agree, and accuracies.

    Without `--all` some rank counts and kinds.
    """
    everything = request.config.getoption("--all")
    script = textwrap.dedent(
        """
        import json, sys, jax
        sys.path.insert(0, "examples")
        import collectives, train_digits as t
        world = collectives.world()
        some = {2: ("zero1",), 3: ("fsdp",), 4: ("fsdp_tp",)}
        kinds = t.KINDS if EVERYTHING else some.get(world.size, ("dp",))
        single = [("dp", "float32")] if EVERYTHING or world.size in (1, 3) else []
        for kind, dtype in [*single, *((kind, "float64") for kind in kinds)]:
            with jax.enable_x64(dtype == "float64"):
                result = t.train(t.parallel(kind, world.size), t.load(dtype), 20, 256, 50, quiet=True)
            if world.rank == 0:
                print("LOSSES", json.dumps([dtype, result.losses]))
        """
    ).replace("EVERYTHING", str(bool(everything)))
    curves: dict[str, list[list[float]]] = {"float64": [], "float32": []}
    for n in (1, 2, 3, 4):
        done = mpiexec(n, "-c", script, timeout=400)
        assert done.returncode == 0, done.stderr[-3000:]
        for line in re.findall(r"LOSSES (.*)", done.stdout):
            dtype, losses = json.loads(line)
            curves[dtype].append(losses)
    for dtype, tolerance in (("float64", 1e-9), ("float32", 1e-4)):
        assert {len(curve) for curve in curves[dtype]} == {50}
        assert len(curves[dtype]) >= 2
        for curve in curves[dtype]:
            assert curve == pytest.approx(curves[dtype][0], rel=tolerance)
    accuracies = []
    for n in (1, 2, 3, 4) if everything else (1, 3):
        done = mpiexec(n, "examples/train_digits.py", "--ranks", str(n), "--epochs", "30", timeout=120)
        assert done.returncode == 0, done.stderr[-3000:]
        accuracies.append(float(re.search(r"([\d.]+)% of 359", done.stdout).group(1)))  # type: ignore[union-attr]
    assert min(accuracies) >= 97
    assert max(accuracies) - min(accuracies) <= 100 * 3 / 359 + 0.1


PRELUDE = """
import sys, os, time, signal
import numpy as np, jax, jax.numpy as jnp
import collectives, spmd
from placements import Mesh, P, Shard
world = collectives.world(); rank, size = world.rank, world.size
mesh = Mesh(a=size)
f = spmd.jit(lambda x: x.sum(0), mesh=mesh, in_placements=P(a=Shard(0)))
x = np.arange(6., dtype=np.float32)
f(x)
"""
SHORT = "os.environ['SPMD_TIMEOUT'] = '4'\n"
"""For faults that end by a time-out: from here on, as starting up and compiling may take longer on a busy machine."""

FAULTS: dict[str, tuple[int, str, str, bool]] = {
    "raise on one rank": (3, "if rank == 0: raise ValueError('the reason')\nf(x)", "ValueError: the reason", False),
    "sys.exit with a status": (3, "if rank == 1: sys.exit(3)\nf(x)", "rank 1 exits with status 3", False),
    "an error while tracing on one rank": (
        2, "g = spmd.jit(lambda x: x + (1 / 0 if rank else 1), mesh=mesh)\ng(x)", "ZeroDivisionError", False,
    ),
    "leaving early": (2, "if rank == 0: sys.exit(0)\nf(x)", "rank 0 has left", False),
    "one rank makes the first call on a mesh": (
        2, "if rank == 1: spmd.jit(lambda x: x.sum(), mesh=Mesh(b=size), in_placements=P(b=Shard(0)))(x)",
        "making the communicator of world ranks [0, 1], which each of them has to call for: rank 0 has", False,
    ),
    "a rank that never comes": (2, SHORT + "if rank == 1: time.sleep(30)\nf(x)", "not done after 4 s", False),
    "only one rank gathers": (
        2,
        "y = spmd.distribute(x, P(a=Shard(0)), mesh)\nprint(y)\nif rank == 0: y.full()\nelse: f(x)",
        "make different calls", False,
    ),
    "an error caught and the work continued": (
        2,
        SHORT + "g = spmd.jit(lambda x: x * 2 + x.sum(), mesh=mesh, in_placements=P(a=Shard(0)))\n"
        "try:\n"
        "    if rank == 1: time.sleep(8)\n"
        "    f(x)\n"
        "except collectives.TransportError as e: print('caught', e)\n"
        "try: g(x)\n"
        "except collectives.TransportError as e: print('again:', e); raise",
        "is poisoned", False,
    ),
    "Ctrl-C": (
        2,
        "if rank == 0:\n"
        "    import threading\n"
        "    threading.Timer(2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "    f(x)\n"
        "time.sleep(20)",
        "KeyboardInterrupt", False,
    ),
    "a callback that raises, and is caught": (  # the others must not go on with what they never got
        3,
        "from jax.experimental import io_callback\n"
        "def boom(total): raise RuntimeError('my own code')\n"
        "def local(x): return x * io_callback(boom, jax.ShapeDtypeStruct((), x.dtype), x.sum())\n"
        "g = spmd.jit(local, mesh=mesh, in_placements=P(a=Shard(0)), fallback='allow')\n"
        "try:\n"
        "    g(x)\n"
        "    open('/dev/stderr', 'w').write('went on with nothing\\n')\n"
        "except Exception as e: print('caught', e)",
        "has left without coming here", False,
    ),
    "a forked child is no rank": (
        2, "pid = os.fork()\nif pid == 0: sys.exit(5)\nos.waitpid(pid, 0)\nf(x)\nprint('fine')", "fine", True,
    ),
    "a caught exit is forgotten": (
        2, "try: sys.exit(2)\nexcept SystemExit: pass\nf(x)\nprint('fine')", "fine", True,
    ),
    "a program fails underway": (  # its memory cannot be given back: MPI may still use it
        2,
        "os.environ['SPMD_CHECK'] = 'off'\nbig = np.ones(400_000, np.float32)\n"
        "g = spmd.jit(lambda x: jnp.tanh(x) + x.sum(), mesh=mesh, in_placements=P(a=Shard(0)))\ng(big)\n"
        + SHORT + "if rank == 1: time.sleep(9)\n"
        "try: g(big)\nexcept collectives.TransportError: pass\nprint('continued')",
        "all_reduce[a, sum] float32[]  4 bytes", False,
    ),
    "large arguments that are not ready": (
        2,
        "big = np.arange(4_000_000, dtype=np.float32)\n"
        "g = spmd.jit(lambda x: jnp.tanh(x.reshape(2, -1)).sum(0) * 2, mesh=mesh, in_placements=P(a=Shard(0)))\n"
        "g(big)\nif rank == 1: time.sleep(0.3)\nr = g(big)\nprint('fine')",
        "fine", True,
    ),
    "a rank compiles again": (2,
        "g = spmd.jit(lambda x, loud=False: x.sum(0), mesh=mesh, in_placements=P(a=Shard(0)), static_argnames='loud')\n"
        "for step in range(3): g(x, loud=rank == 0 and step == 0)\nprint('fine')",
        "fine", True,
    ),
    "pieces in place of the whole array": (
        2, "spmd.distribute(x + rank, P(a=Shard(0)), mesh)", "goes to spmd.from_local", False,
    ),
    "other kinds from one source": (
        2, "spmd.distribute(x if rank else x.astype(np.int32), P(), mesh, source=0)", "make different calls", False,
    ),
    "a signal that the user handled": (
        2,
        "signal.signal(signal.SIGINT, lambda *a: print('handled'))\nos.kill(os.getpid(), signal.SIGINT)\n"
        "if rank: time.sleep(1)\nf(x)\nprint('fine')",
        "fine", True,
    ),
    "a rank that leaves once it has taken part": (  # the root of a small broadcast is through before the leaf, 3, gets it
        4,
        "if rank in (1, 2): time.sleep(3)\nassert world.broadcast(x + rank, root=0)[1] == 1\nprint('fine')", "fine", True,
    ),
    "work that is underway at the end": (  # it ends, as the others may wait for it
        2,
        "if rank == 0: time.sleep(2)\nworld.all_reduce(np.ones(200_000), async_op=True)\n"
        "world.send(np.ones(100_000), 1 - rank, async_op=True)\nworld.recv(1 - rank, async_op=True)\nprint('fine')",
        "fine", True,
    ),
    "work at the end on several communicators": (  # each rank finishes them in an order of its own
        2,
        SHORT + "groups = [world.group(range(2)) for _ in range(6)]\nif rank == 1: time.sleep(0.3)\n"
        "for g in groups:\n    for _ in range(3): g.all_reduce(np.ones(300_000), async_op=True)\nprint('fine')",
        "fine", True,
    ),
    "communicators of the same ranks": (  # how far a rank came on each is told apart
        3,
        "half = world.split(rank // 2)\nsame = half.split(0)\nagain = world.group([0, 1]) if rank < 2 else None\n"
        "if rank == 1:\n    world.gather(x)\n    sys.exit(0)\nif rank == 2: time.sleep(2)\nworld.gather(x)\nprint('fine')",
        "fine", True,
    ),
    "work at the end that nobody joins": (
        2, SHORT + "if rank == 0: world.recv(1, async_op=True)", "recv from 1: rank 1 has left", False,
    ),
    "a message that never comes": (
        2,
        SHORT + "world.barrier()\nif rank == 1: time.sleep(6)\n"
        "try: world.recv(1) if rank == 0 else None\n"
        "except collectives.CollectiveTimeout as e: print('caught', e)\n"
        "if rank == 0: world.all_reduce(x)",
        "is poisoned", False,
    ),
    "a collective of a program that is stuck on a GPU": (  # NCCL knows no time-outs; a stand-in for it
        2,
        "import standin\nfrom collectives.nccl import NcclCommunicator\n" + SHORT +
        "collectives.register_backend('standin', lambda host: NcclCommunicator(host, standin, standin.Device()))\n"
        "other = Mesh(a=size, backend='standin')\n"
        "g = spmd.jit(lambda x: x * 2 + x.sum(), mesh=other, in_placements=P(a=Shard(0)))\ng(x)\n"
        "standin.stuck.append(True)\ng(x)\ntime.sleep(20)\nprint('went on with nothing')",
        "CollectiveTimeout: <lambda>: all_reduce[a, sum]", False,
    ),
    "a normal end at different times": (2, "time.sleep(2 * rank)\nprint('fine')", "fine", True),
}  # fmt: skip


VARIANTS: Final = (
    "a caught exit is forgotten", "a normal end at different times", "a rank compiles again", "communicators of the same ranks",
    "large arguments that are not ready", "other kinds from one source", "pieces in place of the whole array",
    "work at the end on several communicators",
)  # fmt: skip
"""Faults that are much like others: with `--all` only."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in VARIANTS else name for name in sorted(FAULTS)]
)
def test_fault(name: str) -> None:
    """The job ends in time, non-zero where something failed, and says what happened."""
    n, body, message, fine = FAULTS[name]
    start = time.monotonic()
    done = mpiexec(n, "-W", "ignore", "-c", PRELUDE + body, timeout=90, SPMD_TIMEOUT="60")
    elapsed = time.monotonic() - start
    text = done.stdout + done.stderr
    assert message in text, text[-3000:]
    assert "went on with nothing" not in text
    assert (done.returncode == 0) is fine, text[-3000:]
    assert elapsed < 45


def test_a_launcher_of_another_mpi() -> None:
    """Processes announced, but the library sees a world of one: an error that names both."""
    script = "import collectives; collectives.world()"
    env = {**os.environ, "WORLD_SIZE": "2", "RANK": "0", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=env, check=False
    )
    assert done.returncode != 0
    assert "announced 2 processes (WORLD_SIZE), but the MPI library sees 1" in done.stderr


@pytest.mark.slow
def test_messages_beyond_two_gibibytes(tmp_path: Path) -> None:
    """An array of 2^31 + 8 bytes broadcast, and a gather whose total passes 2^31 (needs some 14 GB)."""
    script = textwrap.dedent(
        """
        import numpy as np, collectives
        world = collectives.world()
        n = 2**31 + 8
        x = np.zeros(n, np.int8)
        if world.rank == 0: x[-1], x[0] = 5, 3
        y = world.broadcast(x, root=0)
        assert (y[0], y[-1]) == (3, 5)
        del x, y
        half = np.full(2**30 + 5, world.rank + 1, np.int8)
        whole = world.all_gather(half, dim=0, sizes=(len(half),) * 2)
        assert len(whole) == 2 * len(half) and whole[0] == 1 and whole[-1] == 2
        print("moved")
        """
    )
    done = mpiexec(2, "-c", script, timeout=300)
    assert "moved" in done.stdout, done.stderr[-3000:]
