"""Callbacks: with whole values, once, in the program's order; what they gather is reported."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback

import spmd
from placements import Mesh, P, Shard

MESH, GRID = Mesh(a=3), Mesh(b=2, a=2)
ROWS, NESTED = P(a=Shard(0)), P(b=Shard(0), a=Shard(0))
X = (np.arange(14, dtype=np.float32) * 5 % 7 - 3).reshape(7, 2)
seen: list[Any] = []


def note(*values: Any) -> None:
    seen.append([np.asarray(value).tolist() for value in values])


def doubled(x: Any) -> Any:
    seen.append("doubled")
    return np.asarray(x) * 2


def calls(x: Any) -> Any:
    """One of every kind, in loops and branches too."""
    total = x.sum()
    io_callback(note, None, total, ordered=True)
    y = io_callback(doubled, jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=True)

    def step(carry: Any, row: Any) -> tuple[Any, Any]:
        io_callback(note, None, carry, row, ordered=True)
        return carry + row, row * 2

    last, rows = lax.scan(step, x[0], x)
    count = lax.while_loop(lambda n: n < 3, lambda n: (io_callback(note, None, n, ordered=True), n + 1)[1], 0)
    chosen = lax.cond(total > 0, lambda v: (io_callback(note, None, v, ordered=True), v)[1], lambda v: -v, total)
    return y + 1, last, rows, count, chosen


@pytest.mark.parametrize(
    ("mesh", "placement"), [(MESH, ROWS), (GRID, NESTED), (GRID, P(b=Shard(1))), (Mesh(a=1), ROWS)]
)
def test_callbacks_happen_once_with_whole_values(mesh: Mesh, placement: P) -> None:
    decorated = spmd.jit(calls, mesh=mesh, in_placements=placement, fallback="allow")
    seen.clear()
    expected = calls(jnp.asarray(X))
    jax.effects_barrier()
    wanted = list(seen)
    assert len(wanted) >= 12
    for _ in range(2):  # op by op, then compiled
        seen.clear()
        found = decorated(X)
        jax.effects_barrier()
        assert seen == wanted
        for array, whole in zip(found, expected, strict=True):
            np.testing.assert_array_equal(array.full(), whole)


def test_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    def prints(x: Any) -> Any:
        jax.debug.print("whole {x}", x=x[:, 0], ordered=True)
        jax.debug.callback(lambda v: print("called", v.shape), x)
        return lax.fori_loop(0, 2, lambda i, y: (jax.debug.print("{}", i, ordered=True), y * 2)[1], x)

    decorated = spmd.jit(prints, mesh=MESH, in_placements=ROWS, fallback="allow")
    for _ in range(2):
        decorated(X)
        jax.effects_barrier()
        lines = capfd.readouterr().out.splitlines()
        assert [line for line in lines if not line.startswith("called")] == [f"whole {X[:, 0]}", "0", "1"]
        assert [line for line in lines if line.startswith("called")] == ["called (7, 2)"]


def test_what_a_callback_gathers_is_reported() -> None:
    """As a fallback; nothing where the value is whole already."""

    def shards(x: Any) -> Any:
        jax.debug.callback(note, x)
        return x * 2

    def whole(x: Any) -> Any:
        jax.debug.callback(note, spmd.constrain(x.sum(0), P()))
        return x * 2

    with pytest.warns(
        spmd.PlacementWarning, match=r"(?s)callbacks see whole values.*debug_callback \(shards.*40 bytes moved"
    ):
        program = spmd.jit(shards, mesh=MESH, in_placements=ROWS).lower(X)
    assert "# once, on the first rank; shards+1" in str(program)
    with pytest.raises(spmd.FallbackError, match="debug_callback"):
        spmd.jit(shards, mesh=MESH, in_placements=ROWS, fallback="error").lower(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spmd.jit(whole, mesh=MESH, in_placements=ROWS, fallback="error").lower(X).check(all_reduce=1)


def test_results_of_a_callback_go_to_every_rank() -> None:
    """Signed zeros, flags and integers as they are; sharded where that is asked for."""

    def function(x: Any) -> Any:
        kinds = [jax.ShapeDtypeStruct((5,), kind) for kind in (np.float32, np.bool_, np.int32)]
        return io_callback(
            lambda v: (np.float32([-0.0, np.nan, np.inf, 1, -2]), np.asarray(v) > 0, np.int32([1, -2, 3, -4, 5])),
            kinds,
            x,
        )

    x = np.float32([1, -1, 2, -2, 0])
    expected = function(jnp.asarray(x))
    for placement in (P(), ROWS):
        decorated = spmd.jit(function, mesh=MESH, in_placements=ROWS, out_placements=placement, fallback="allow")
        for array, whole in zip(decorated(x), expected, strict=True):
            np.testing.assert_array_equal(array.full(), whole)
            if array.dtype == np.float32:
                np.testing.assert_array_equal(np.signbit(array.full()), np.signbit(whole))


def test_iterations_with_callbacks_are_not_apart() -> None:
    """A map over a sharded dim that prints goes over all rows, in order, on every rank."""

    def rows(x: Any) -> Any:
        return lax.map(lambda row: (io_callback(note, None, row, ordered=True), row * 2)[1], x)

    seen.clear()
    found = spmd.jit(rows, mesh=MESH, in_placements=ROWS, fallback="allow")(X)
    jax.effects_barrier()
    assert seen == [[row.tolist()] for row in X]
    np.testing.assert_array_equal(found.full(), X * 2)


def test_checked_errors() -> None:
    """`checkify` makes errors values, which a decorated function returns like any other."""

    def function(x: Any) -> Any:
        checkify.check(x.sum() > 100, "the sum is {total}", total=x.sum())
        return jnp.log(x)

    checked = checkify.checkify(function, errors=checkify.user_checks | checkify.nan_checks)
    error, found = spmd.jit(checked, mesh=MESH, in_placements=ROWS, fallback="allow")(X)
    error = jax.tree.map(lambda value: value.full(), error)
    with pytest.raises(checkify.JaxRuntimeError, match="the sum is"):
        error.throw()
    np.testing.assert_array_equal(found.full(), jnp.log(X))
    plain, _ = checked(jnp.asarray(X))
    assert error.get() == plain.get()
