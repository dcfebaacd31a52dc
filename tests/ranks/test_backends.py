"""The back end of docs/backends.md, on real ranks: conformance, and programs on it."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import collectives
import spmd
from collectives import process, testing
from placements import Mesh, P, Shard

PAGE = Path(__file__).parents[2] / "docs" / "backends.md"
SIZE = collectives.world("mpi").size

if "pairs" not in process._BACKENDS:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(source, str(PAGE), "exec"), {"__name__": "page"})


def test_conforms() -> None:
    world: Any = collectives.world("pairs")
    assert type(world).__name__ == "Pairs"
    assert testing.check_communicator(world) > 900


def test_programs() -> None:
    """Collectives inside XLA's executables, through `prepare` as it is by default; messages, objects, groups."""
    mesh = Mesh(x=SIZE, backend="pairs")
    x = np.sin(np.arange(6.0 * SIZE)).reshape(2 * SIZE, 3).astype(np.float32)

    @spmd.jit(mesh=mesh, in_placements=P(x=Shard(0)), out_placements=(P(), P(x=Shard(0)), P(x=Shard(1))))
    def f(a: Any) -> Any:
        last, sums = jax.lax.scan(lambda c, _: (c - 0.1 * c.mean(0), c.sum()), a, None, length=3)
        return (a * a).sum() + sums.sum(), last, jnp.sort(a, 0)

    for found, expected in zip(f(x), jax.jit(f.__wrapped__)(x), strict=True):
        np.testing.assert_allclose(found.full(), expected, rtol=2e-5, atol=1e-5)
    world: Any = collectives.world("pairs")
    assert world.all_gather_object(world.rank) == list(range(SIZE))
    halves = world.split(world.rank % 2)
    assert halves.all_reduce(np.array([1])) == halves.size


def test_what_is_no_back_end() -> None:
    """Names that are taken, and a factory that makes another world."""
    with pytest.raises(collectives.BackendError, match="already"):
        collectives.register_backend("pairs", lambda host: host)
    if SIZE > 1:
        collectives.register_backend(f"alone{len(process._BACKENDS)}", lambda host: process.Alone())
        with pytest.raises(collectives.BackendError, match=f"made rank 0 of 1 of what is rank . of {SIZE}"):
            collectives.world(f"alone{len(process._BACKENDS) - 1}")
