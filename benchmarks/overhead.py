"""What a collective costs inside an executable, and a call of a decorated function, beside raw mpi4py and plain jax.jit.

    mpiexec -bind-to core -n 2 python benchmarks/overhead.py
    mpirun --allow-run-as-root -n 2 python benchmarks/overhead.py

Microseconds, medians of the repetitions, all in one run, in turn, with a barrier before each. The compiled loops hold a
64x64 matrix product (else XLA runs them inline); its own time is measured by the same loop without the collective.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mpi4py import MPI

import collectives
import spmd
from collectives import ffi
from placements import Mesh, P, Shard

WORLD: Any = collectives.world()
MESH = Mesh(a=WORLD.size)


def reduce_in(token: Any, x: Any) -> tuple[Any, Any]:
    """A sum over the world as a custom call."""

    def prepare(transfer: Any) -> Any:
        return WORLD.prepare(transfer, lambda: "sum")

    token, (found,) = ffi.collective(token, [x], "all_reduce", WORLD.rank, WORLD.size, prepare, [{"op": "sum"}])
    return token, found


def loop(count: int, communicates: bool) -> Callable[..., Any]:
    """`count` matrix products, each with or without a sum of `x` over the ranks."""

    @jax.jit
    def run(token: Any, w: Any, x: Any) -> Any:
        def body(_: Any, carry: Any) -> Any:
            token, w, x = carry
            if communicates:
                token, x = reduce_in(token, x)
            return token, jnp.tanh(w @ w) + x[0] * 1e-30, x * 0.5

        return lax.fori_loop(0, count, body, (token, w, x))

    return run


def aligned(nbytes: int) -> np.ndarray:
    """float32 memory on a boundary of 64 bytes."""
    raw = np.zeros(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(np.float32)


def timed(call: Callable[[], Any]) -> float:
    """Microseconds of one call, after a barrier."""
    WORLD.barrier()
    start = time.perf_counter()
    jax.block_until_ready(call())
    return (time.perf_counter() - start) * 1e6


def medians(calls: dict[str, Callable[[], Any]], repeat: int) -> dict[str, float]:
    """Medians of calls made in turn, after a first round that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(repeat + 1):
        for name, call in calls.items():
            found = timed(call)
            if number:
                times[name].append(found)
    return {name: statistics.median(values) for name, values in times.items()}


def in_a_loop(nbytes: int, count: int, repeat: int) -> dict[str, float]:
    """Per sum: raw mpi4py, and ours inside a compiled loop."""
    w = jnp.eye(64) * 0.1
    x = jnp.zeros(nbytes // 4, jnp.float32)
    send, receive = aligned(nbytes), aligned(nbytes)

    def raw() -> None:
        for _ in range(count):
            MPI.COMM_WORLD.Allreduce(send, receive)

    def ours(run: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: run(ffi.new_token(), w, x)

    found = medians({"raw": raw, "with": ours(loop(count, True)), "without": ours(loop(count, False))}, repeat)
    return {"raw mpi4py": found["raw"] / count, "ours": (found["with"] - found["without"]) / count}


def a_call(repeat: int) -> dict[str, float]:
    """One cached call with one small all_reduce, blocked: decorated, and plain jax.jit of the same local function."""
    x = spmd.distribute(np.arange(8.0, dtype=np.float32), P(a=Shard(0)), MESH)
    decorated = spmd.jit(lambda x: x.sum(), mesh=MESH)

    @jax.jit
    def local(token: Any, x: Any) -> Any:
        return reduce_in(token, x.sum())

    token = ffi.new_token()
    shard = x.local

    def unchecked() -> Any:
        os.environ["SPMD_CHECK"] = "off"
        try:
            return decorated(x)
        finally:
            del os.environ["SPMD_CHECK"]

    calls = {"spmd.jit": lambda: decorated(x), "unchecked": unchecked, "jax.jit": lambda: local(token, shard)}
    return medians(calls, repeat)


def main() -> None:
    """Print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=15)
    options = parser.parse_args()
    rows = {f"{nbytes} bytes": in_a_loop(nbytes, 1000, options.repeat) for nbytes in (8, 65536)}
    call = a_call(options.repeat * 20)
    if WORLD.rank:
        return
    print(MPI.Get_library_version().splitlines()[0][:40], f"jax {jax.__version__}, {WORLD.size} ranks")
    for name, row in rows.items():
        raw, ours = row["raw mpi4py"], row["ours"]
        print(f"  all_reduce of {name}: raw {raw:.2f} us, in a compiled loop {ours:.2f} us", end=": ")
        print(f"+{ours - raw:.2f}, x{ours / raw:.2f}")
    decorated, unchecked, plain = (call[name] for name in ("spmd.jit", "unchecked", "jax.jit"))
    print(f"  one call: spmd.jit {decorated:.1f} us, without the agreement {unchecked:.1f}, jax.jit {plain:.1f}")
    print(f"            +{unchecked - plain:.1f} for spmd.jit, +{decorated - unchecked:.1f} for the agreement")


if __name__ == "__main__":
    main()
