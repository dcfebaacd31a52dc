"""Loops and branches: values and gradients on every rank, carries by fixed point, and what their bodies communicate.

Run in a lone process on the simulator, and by `tests/test_mpi.py` again on real ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import FEW, GRIDS, agree, fit

import spmd
from placements import Mesh, P, Partial, Shard

ROWS, COLUMNS, WHOLE = P(a=Shard(0)), P(a=Shard(1)), P()
FOUR = Mesh(a=4, backend="simulated")


def signed(*shape: int) -> np.ndarray:
    """Numbers of both signs, of size 1 at most, that vary with position."""
    return ((((np.arange(int(np.prod(shape))) * 7) % 11 - 5) / 6).reshape(shape)).astype(np.float32)


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)


def lower(
    function: Any, placements: Any, *args: Any, mesh: Mesh = FOUR, out: Any = None, fallback: Any = "error"
) -> spmd.Program:
    return spmd.jit(function, mesh=mesh, in_placements=placements, out_placements=out, fallback=fallback).lower(*args)


def layers(ws: Any, x: Any) -> Any:
    """A stack of residual blocks, scanned; the size of every activation is a second output."""

    def block(h: Any, w: Any) -> tuple[Any, Any]:
        into, out = w
        h = h + jnp.tanh(h @ into) @ out
        return h, jnp.sum(h**2)

    return lax.scan(block, x, ws)


WS = [signed(3, 4, 6), signed(3, 6, 4)[:, ::-1].copy()]
X = signed(5, 4)


@pytest.mark.parametrize(
    "placements",
    [
        (WHOLE, ROWS),
        ([P(a=Shard(2)), P(a=Shard(1))], WHOLE),
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (
                ([P(a=Shard(1)), P(a=Shard(2))], ROWS),
                ([P(a=Shard(0)), WHOLE], COLUMNS),
                ([WHOLE, P(a=Shard(1))], P(a=Partial())),
            )
        ),
    ],
)
def test_scan_over_layers(placements: Any) -> None:
    """Replicated and sharded weights on every dim, the scanned one included; sharded, whole and partial activations."""
    meshes = FEW
    if any(p == P(a=Partial()) for p in jax.tree.leaves(placements, is_leaf=lambda p: isinstance(p, P))):
        placements = (placements[0], WHOLE)

    def both(a: Any, b: Any, x: Any) -> Any:
        return layers([a, b], x)

    weights = placements[0] if isinstance(placements[0], list) else [placements[0]] * 2
    agree(both, [*WS, X], [*weights, placements[1]], meshes, compiled=True)


@pytest.mark.slow
def test_scan_on_two_axes() -> None:
    """Data- and tensor-parallel at once, in both orders."""

    def both(a: Any, b: Any, x: Any) -> Any:
        return layers([a, b], x)

    agree(both, [*WS, X], [P(b=Shard(2)), P(b=Shard(1)), ROWS], GRIDS)
    agree(both, [*WS, X], [P(b=Shard(2), a=Shard(1)), P(b=Shard(1), a=Shard(2)), P(a=Shard(0), b=Shard(0))], GRIDS)


@pytest.mark.slow
def test_reverse_unrolled_and_without_inputs() -> None:
    """scan's own options; a carry of several leaves; ys alone; length zero."""

    def several(x: Any) -> Any:
        def body(carry: Any, row: Any) -> Any:
            total, count = carry
            return (total + row.sum(), count + 1), (row * 2, total)

        return lax.scan(body, (0.0, 0), x, reverse=True, unroll=2)

    for placement in (ROWS, COLUMNS, WHOLE):
        agree(several, [signed(6, 5)], [placement], FEW)
    agree(lambda x: lax.scan(lambda c, _: (jnp.sin(c @ x), None), x, None, length=3)[0], [signed(4, 4)], [ROWS], FEW)
    agree(lambda x: lax.scan(lambda c, r: (c + r, c), jnp.zeros(3), x[:0]), [signed(4, 3)], [COLUMNS], FEW)
    agree(lambda x: lax.map(lambda r: r / (1 + jnp.sum(r**2)), x), [signed(6, 5)], [ROWS], FEW)


def test_a_carry_finds_its_placement_d2() -> None:
    """D2: a carry that starts replicated, or as a literal zero, and becomes sharded; cumulative sums; an integer counter."""

    def sums(x: Any) -> Any:
        return lax.scan(lambda c, row: (c + row, c), jnp.zeros(x.shape[1]), x)

    agree(sums, [signed(6, 5)], [COLUMNS], FEW)
    program = lower(sums, (COLUMNS,), struct(6, 8))
    program.check()
    assert [str(layout) for layout in program.plan.departures] == ["P(a=S(0))", "P(a=S(1))"]

    def power(x: Any, w: Any) -> Any:
        return lax.fori_loop(0, 3, lambda i, v: jnp.tanh(v @ w) + i, x)

    agree(power, [signed(5, 4), signed(4, 4)], [ROWS, WHOLE], FEW)
    lower(power, (ROWS, WHOLE), struct(8, 4), struct(4, 4)).check()

    def slices(x: Any) -> Any:
        return lax.fori_loop(0, 3, lambda i, total: total + lax.dynamic_index_in_dim(x, i, 0, False), jnp.zeros(4))

    agree(slices, [signed(5, 4)], [COLUMNS], FEW)
    agree(slices, [signed(5, 4)], [ROWS], FEW)


def test_a_sum_over_iterations_stays_in_parts() -> None:
    """The products of every iteration are parts; one reduction follows the loop."""

    def total(x: Any, y: Any) -> Any:
        def body(carry: Any, rows: Any) -> Any:
            a, b = rows
            return carry + a.T @ b, None

        return lax.scan(body, jnp.zeros((3, 2)), (x, y))[0]

    x, y = signed(4, 5, 3), signed(4, 5, 2)
    placement = P(a=Shard(1))
    agree(total, [x, y], [placement, placement], FEW)
    program = lower(total, (placement, placement), struct(4, 8, 3), struct(4, 8, 2))
    program.check(all_reduce=1)
    assert program.collectives[0].count == 1
    lower(total, (placement, placement), struct(4, 8, 3), struct(4, 8, 2), out=P(a=Shard(0))).check(reduce_scatter=1)


def test_while_and_nested_loops() -> None:
    """A predicate from a sum over the ranks; a loop in a loop; early exit."""

    def halve(x: Any) -> Any:
        return lax.while_loop(lambda v: jnp.sum(v**2) > 0.1, lambda v: v * 0.5, x)

    agree(halve, [signed(5, 3)], [ROWS], FEW, gradient=False, compiled=True)

    def nested(x: Any) -> Any:
        def outer(h: Any, row: Any) -> Any:
            h = lax.fori_loop(0, 2, lambda i, v: v + jnp.sum(v) * 0.1 + row, h)
            return h, h.sum()

        return lax.scan(outer, x[0], x)

    for placement in (ROWS, COLUMNS):
        agree(nested, [signed(4, 5)], [placement], FEW)


def test_cond_and_switch() -> None:
    """Branches with and without collectives, of other natural placements; a predicate that depends on data."""

    def chosen(x: Any) -> Any:
        return lax.cond(x.sum() > 0, lambda x: x @ x.T, lambda x: x @ x.T * 2 + x.sum(), x)

    for sign in (1, -1):
        for placement in (ROWS, COLUMNS):
            agree(chosen, [sign * signed(5, 3) + sign], [placement], FEW[1:], compiled=sign > 0)

    def switched(x: Any, i: Any) -> Any:
        return lax.switch(i, [lambda x: x.sum(0), lambda x: x[0] * 1.0, lambda x: jnp.zeros(3)], x)

    for i in range(3):
        agree(switched, [signed(5, 3), np.int32(i)], [ROWS, WHOLE], FEW)


def test_remat_gathers_again() -> None:
    """jax.checkpoint in a scan: right gradients; weights are gathered forward, and again backward."""

    def loss(a: Any, b: Any, x: Any, remat: bool) -> Any:
        def block(h: Any, w: Any) -> Any:
            return h + jnp.tanh(h @ w[0]) @ w[1], None

        return jnp.mean(lax.scan(jax.checkpoint(block) if remat else block, x, (a, b))[0] ** 2)

    shards = P(a=Shard(1))
    agree(lambda a, b, x: loss(a, b, x, True), [*WS, X], [shards, shards, ROWS], FEW)
    args = struct(3, 64, 256), struct(3, 256, 64), struct(512, 64)
    for remat in (False, True):
        gradient = jax.grad(lambda a, b, x, r=remat: loss(a, b, x, r), argnums=(0, 1))
        program = lower(gradient, (shards, shards, ROWS), *args, out=(shards, shards))
        program.check(all_gather=4, reduce_scatter=2)
        assert [c.count for c in program.collectives if c.name == "all_gather"] == [3] * 4


def test_what_does_not_change_is_gathered_once() -> None:
    """A sharded matrix that every iteration multiplies by is gathered before the loop."""

    def power(x: Any, w: Any) -> Any:
        return lax.fori_loop(0, 10, lambda i, v: jnp.tanh(v @ w), x)

    program = lower(power, (ROWS, ROWS), struct(512, 16), struct(16, 16))
    program.check(all_gather=1)
    assert program.collectives[0].count == 1
    agree(power, [signed(5, 4), signed(4, 4)], [ROWS, ROWS], FEW)


def test_constraints_and_closures_inside_a_body() -> None:
    """spmd.constrain places a value within an iteration; a closed-over DArray and array are operands of the loop."""
    mesh = fit(Mesh(a=2))
    closed = spmd.distribute(signed(4, 4), ROWS, mesh)
    constant = signed(4)

    def pinned(x: Any) -> Any:
        def body(h: Any, _: Any) -> Any:
            h = spmd.constrain(jnp.sin(h), COLUMNS)
            return h @ jnp.asarray(closed) + constant, None

        return lax.scan(body, x, None, length=3)[0]

    expected = signed(5, 4)
    for _ in range(3):
        expected = np.sin(expected) @ signed(4, 4) + constant
    decorated = spmd.jit(pinned, mesh=mesh, in_placements=ROWS)
    np.testing.assert_allclose(decorated(signed(5, 4)).full(), expected, rtol=1e-4, atol=1e-5)
    (loop,) = (planned for planned in decorated.lower(signed(5, 4)).plan.eqns if planned.bodies)
    (product,) = (each for each in loop.bodies[0].eqns if each.eqn.primitive.name == "dot_general")
    assert [str(layout) for layout in product.operands] == ["P(a=S(1))", "P(a=S(0))"]


def test_constants_of_bodies_stay_apart() -> None:
    """Numpy arrays that jitted functions in several loops and branches close over, in other orders: each keeps its own."""

    def adds(c: Any) -> Any:
        c = np.asarray(c, np.float32)
        return jax.jit(lambda x: x + c)

    functions = [adds(np.arange(4) * 10**i) for i in range(4)]

    def loops(x: Any) -> Any:
        for k in functions:
            x = lax.fori_loop(0, 1, lambda i, v, k=k: k(v), x)
        return x

    agree(loops, [np.ones(4, np.float32)], [ROWS], FEW, exact=True)
    a, b = np.arange(4, dtype=np.float32) + 2, np.arange(4, dtype=np.float32) * 10
    times, plus = jax.jit(lambda x: x * a), jax.jit(lambda x: x + b)

    def branches(p: Any, x: Any) -> Any:
        return lax.cond(p, lambda x: plus(times(x)), lambda x: times(plus(x)), x)

    for p in (True, False):
        agree(branches, [np.bool_(p), np.full(4, 3, np.float32)], [WHOLE, ROWS], FEW, exact=True)


def test_predicates_that_decide_on_collectives_are_common() -> None:
    """A float predicate is broadcast over the axes of the body's collectives; one from integers is not, nor one of a loop
    that sends nothing."""

    def halve(x: Any) -> Any:
        return lax.while_loop(lambda v: jnp.sum(v**2) > 0.1, lambda v: v * 0.5, x)

    lower(halve, (ROWS,), struct(8, 3)).check(all_reduce=1, broadcast=1)

    def counted(x: Any, n: Any) -> Any:
        return lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] / (1 + jnp.sum(s[1] ** 2))), (0, x))[1]

    lower(counted, (ROWS, WHOLE), struct(8, 3), jax.ShapeDtypeStruct((), np.int32)).check(all_reduce=1)

    def chosen(x: Any, y: Any) -> Any:
        return lax.cond(y > 0, lambda x: x - x.sum(0), lambda x: x, x)

    lower(chosen, (ROWS, WHOLE), struct(8, 3), struct()).check(all_reduce=1, broadcast=1)
    lower(chosen, (COLUMNS, WHOLE), struct(8, 4), struct()).check()
    agree(chosen, [signed(5, 3), np.float32(2)], [ROWS, WHOLE], FEW)

    def nested(x: Any, y: Any) -> Any:
        steps = jnp.floor(y).astype(int)  # an integer, and made from a float: inside the loop too

        def body(carry: Any, i: Any) -> Any:
            x, n = carry
            return (lax.cond(n > i, lambda x: x - x.sum(0), lambda x: x, x), n), None

        return lax.scan(body, (x, steps), jnp.arange(3))[0][0]

    lower(nested, (ROWS, WHOLE), struct(8, 3), struct()).check(all_reduce=1, broadcast=1)
    integers = lower(nested, (ROWS, WHOLE), struct(8, 3), jax.ShapeDtypeStruct((), np.int32))
    integers.check(all_reduce=1)
    agree(nested, [signed(5, 3), np.float32(2.5)], [ROWS, WHOLE], FEW)
    agree(counted, [signed(5, 3), np.int32(3)], [ROWS, WHOLE], FEW, gradient=False)


def test_long_sums_in_a_body() -> None:
    """A thousand sums before one is added to the carry: planned in time, and as on one rank."""

    def total(x: Any) -> Any:
        def body(carry: Any, row: Any) -> Any:
            y = row
            for _ in range(300):
                y = y + row
            return y + carry, None

        return lax.scan(body, jnp.zeros(4), x)[0]

    agree(total, [np.ones((2, 4), np.float32)], [COLUMNS], FEW[:1], gradient=False)


def test_a_loop_without_communication_has_none() -> None:
    """Rows that do not meet stay where they are, through scan, while and cond."""

    def rows(x: Any) -> Any:
        x = lax.scan(lambda c, _: (c * 0.9 + jnp.sum(c, 1, keepdims=True), None), x, None, length=4)[0]
        x = lax.while_loop(lambda s: s[1] < 3, lambda s: (jnp.sin(s[0]), s[1] + 1), (x, 0))[0]
        return lax.cond(True, jnp.cos, jnp.tan, x)

    lower(rows, (ROWS,), struct(8, 3)).check()
    agree(rows, [signed(5, 3)], [ROWS], FEW, gradient=False)


def test_what_a_loop_computes_in_vain_is_dropped() -> None:
    """A sum over ranks that only unused outputs of a loop need is not computed, nor sent."""

    def last(x: Any) -> Any:
        return lax.scan(lambda c, r: (jnp.sin(c + r), (c.sum(), r.max())), x[0], x)[0]

    lower(last, (P(a=Shard(1)),), struct(6, 8)).check()


def test_the_text_shows_the_body() -> None:
    """A loop's body is indented, with its collectives and how often it runs."""

    def total(x: Any) -> Any:
        return lax.scan(lambda c, r: (c + jnp.tanh(r.sum()), None), 0.0, x)[0]

    program = lower(total, (P(a=Shard(1)),), struct(6, 8))
    text = str(program)
    assert ", 6 times" in text
    assert "\n    f = all_reduce[a, sum] e" in text
    assert program.collectives[0].count == 6
    assert program.bytes == 6 * program.collectives[0].bytes
    program.check(all_reduce=1, max_bytes=program.bytes)


def test_loops_with_a_decision_for_each_element_of_a_batch() -> None:
    """`vmap` of a loop whose condition depends on the element: it runs while any goes on, and the others keep their values."""

    def doubled(row: Any) -> Any:
        return lax.while_loop(lambda s: jnp.sum(s) < 9, lambda s: s * 1.7 + 1, row)

    def power(row: Any, n: Any) -> Any:
        return lax.fori_loop(0, n, lambda i, s: s * 1.1 + i, row)

    agree(jax.vmap(doubled), [signed(5, 3)], [ROWS], FEW, gradient=False)
    agree(jax.vmap(doubled), [signed(5, 3)], [COLUMNS], FEW, gradient=False)
    agree(jax.vmap(power), [signed(5, 3), np.arange(5, dtype=np.int32)], [ROWS, ROWS], FEW, gradient=False)
    agree(
        lambda x: lax.scan(lambda c, _: (jax.vmap(doubled)(c) - 3, None), x, length=2)[0],
        [signed(5, 3)],
        [ROWS],
        FEW,
        gradient=False,
    )


def test_what_a_loop_does_not_change_is_communicated_before_it() -> None:
    """Gathered, reduced and computed once: constants of the body, of the condition, under `checkpoint`."""
    w, x = struct(64, 64), struct(64, 64)

    def repeat(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda w, x: lax.fori_loop(0, 10, lambda i, h: f(h, w), x)

    def once(f: Callable[..., Any], **counts: int) -> None:
        program = lower(f, (ROWS, ROWS), w, x)
        program.check(**counts)
        assert {c.count for c in program.collectives} == {1}, str(program)

    once(repeat(lambda h, w: jnp.tanh(h @ w)), all_gather=1)
    once(repeat(lambda h, w: jnp.tanh(h @ (w * 0.5))), all_gather=1)
    once(repeat(lambda h, w: jnp.tanh(h @ (w.T @ w))), all_reduce=1)
    once(repeat(lambda h, w: jax.checkpoint(lambda h: jnp.tanh(h @ w))(h)), all_gather=1)
    gradient = jax.grad(lambda w, x: jnp.sum(repeat(lambda h, w: jax.checkpoint(lambda h: jnp.tanh(h @ w))(h))(w, x)))
    once(gradient, all_gather=2, all_reduce=1)  # what is recomputed is gathered again, for the backward loop as a whole

    def condition(w: Any, x: Any) -> Any:
        return lax.while_loop(lambda h: jnp.cumsum(w, 0)[-1, 0] + h[0, 0] < 5, lambda h: h + 1, x)

    found = lower(condition, (ROWS, WHOLE), w, x).collectives
    assert found
    assert {c.count for c in found} == {1}
    for f in (lambda h, w: jnp.tanh(h @ (w.T @ w)), lambda h, w: jax.checkpoint(lambda h: jnp.tanh(h @ (w * 0.5)))(h)):
        agree(repeat(f), [0.2 * signed(5, 5), signed(7, 5)], [ROWS, ROWS], FEW[:1])


def test_accumulators_of_every_kind_stay_in_parts() -> None:
    """A sum, a difference, a maximum over iterations: one reduction, after the loop."""
    cases: list[tuple[Callable[..., Any], Callable[..., Any], str]] = [
        (jnp.add, lambda x: x.sum(0), "sum"),
        (jnp.subtract, lambda x: x.sum(0), "sum"),
        (jnp.maximum, lambda x: x.max(0), "max"),
        (jnp.minimum, lambda x: x.min(0), "min"),
    ]
    for combine, reduce, op in cases:

        def total(x: Any, combine: Any = combine, reduce: Any = reduce) -> Any:
            return lax.scan(lambda total, row: (combine(total, reduce(row)), None), jnp.ones(x.shape[2]), x)[0]

        program = lower(total, (COLUMNS,), struct(6, 8, 3))
        program.check(all_reduce=1)
        assert [(c.op, c.count) for c in program.collectives] == [(op, 1)]
        agree(total, [signed(4, 5, 3)], [COLUMNS], FEW, gradient=False)


def test_batches_indexed_in_a_loop() -> None:
    """Each rank takes its rows, and the sum is reduced once. What must be gathered first is, once, before the loop; every rank
    computes on rows of its own all the same."""

    def total(w: Any, batches: Any) -> Any:
        def body(i: Any, total: Any) -> Any:
            x = lax.dynamic_index_in_dim(batches, i, 0, keepdims=False)
            return total + jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)

        return lax.fori_loop(0, batches.shape[0], body, jnp.zeros_like(w))

    def sorted_rows(w: Any, batches: Any) -> Any:
        return total(w, jnp.sort(batches, 1))

    for f, gathers in ((total, 0), (sorted_rows, 1)):
        program = lower(f, (WHOLE, COLUMNS), struct(256, 256), struct(8, 256, 256))
        program.check(all_gather=gathers, all_reduce=1)
        assert {c.count for c in program.collectives} == {1}
        agree(f, [signed(4, 3), signed(3, 5, 4)], [WHOLE, COLUMNS], FEW, gradient=False)


def newton(row: Any, goal: Any) -> Any:
    """A loop of an unknown number of iterations for each row."""
    return lax.while_loop(lambda y: jnp.abs(y**2 - row).max() > 1e-3, lambda y: 0.5 * (y + row / y), goal)


APART: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    "rows": (lambda x, w: lax.map(lambda r: jnp.sin(r @ w), x), {}),
    "in batches": (lambda x, w: lax.map(lambda r: jnp.sin(r @ w), x, batch_size=16), {}),
    "of several": (lambda x, w: lax.scan(lambda _, a: (None, (a[0] @ a[1], a[0].sum())), None, (x, x))[1], {}),
    "until each is there": (lambda x, w: lax.map(lambda r: newton(r**2 + 1, w[0] ** 2 + 1), x), {}),
    "summed": (lambda x, w: lax.scan(lambda c, r: (c + jnp.cos(r @ w), r.max()), w[0], x), {"all_reduce": 1}),
    "subtracted, backward": (lambda x, w: lax.scan(lambda c, r: (c - r, r * 2), w[1], x, reverse=True), {"all_reduce": 1}),
    "largest": (
        lambda x, w: lax.scan(lambda c, r: (jnp.maximum(c, (r @ w).max()), None), -jnp.inf, x)[0],
        {"all_reduce": 1},
    ),
}  # fmt: skip
TOGETHER: dict[str, Callable[..., Any]] = {
    "running": lambda x, w: lax.scan(lambda c, r: (c + r, c), w[0], x),
    "running, after": lambda x, w: lax.scan(lambda c, r: (c + r, c + r), w[0], x),
    "used": lambda x, w: lax.scan(lambda c, r: (c + r * jnp.tanh(c.sum()), None), w[0], x),
    "subtracted from": lambda x, w: lax.scan(lambda c, r: (r - c, r * 2), w[0], x),
    "replaced": lambda x, w: lax.scan(lambda c, r: (r, c), w[0], x),
    "doubled": lambda x, w: lax.scan(lambda c, r: (c + c + r, None), w[0], x)[0],
}


@pytest.mark.parametrize("name", sorted(APART))
def test_iterations_that_are_apart(name: str) -> None:
    """A map over a sharded dim: each rank its own rows, whatever their number; sums are reduced after the loop, once."""
    function, counts = APART[name]
    wide = jax.ShapeDtypeStruct((64, 8), np.float32), jax.ShapeDtypeStruct((8, 8), np.float32)
    program = spmd.jit(function, mesh=FOUR, in_placements=(P(a=Shard(0)), P())).lower(*wide)
    program.check(**counts)
    args, differentiable = [signed(7, 8), signed(8, 8)], name not in ("largest", "until each is there")
    for mesh, placements in (
        (Mesh(a=4), (P(a=Shard(0)), P())),
        (Mesh(a=10), (P(a=Shard(0)), P(a=Shard(1)))),
        (Mesh(a=2, b=2), (P(b=Shard(0), a=Shard(0)), P(b=Shard(0)))),
        (Mesh(a=2, b=2), (P(a=Shard(0), b=Shard(1)), P(b=Shard(0)))),
    ):
        agree(function, args, placements, [fit(mesh)], compiled=True, gradient=differentiable)
    if differentiable and not counts:
        backward = jax.grad(lambda x, w: sum(jnp.sum(y**2) for y in jax.tree.leaves(function(x, w))), (0, 1))
        lowered = spmd.jit(
            backward, mesh=FOUR, in_placements=(P(a=Shard(0)), P()), out_placements=(P(a=Shard(0)), P())
        ).lower(*wide)
        lowered.check(all_reduce=0 if name == "of several" else 1)


@pytest.mark.parametrize("name", sorted(TOGETHER))
def test_iterations_that_need_one_another(name: str) -> None:
    """What is summed and looked at in between is no sum of ranks."""
    for mesh, placements in (
        (Mesh(a=4), (P(a=Shard(0)), P())),
        (Mesh(a=2, b=2), (P(b=Shard(0), a=Shard(0)), P(b=Shard(0)))),
    ):
        agree(TOGETHER[name], [signed(7, 8), signed(8, 8)], placements, [fit(mesh)], compiled=True)


CASTS: dict[str, tuple[Callable[[Any, Any], Any], Any, Any]] = {
    "truncated": (lambda c, r: (c + r.mean()).astype(jnp.int32), np.float32(-0.7), np.int32(5)),
    "truncated to no sign": (lambda c, r: (c + r.mean()).astype(jnp.uint8), np.float32(-0.7), np.uint8(5)),
    "saturated": (lambda c, r: (c.astype(jnp.float32) + r.sum()).astype(jnp.int8), np.int32(1), np.int8(3)),
    "rounded": (lambda c, r: (c.astype(jnp.float32) + r.mean()).astype(jnp.int32), np.int32(1), np.int32(2**24)),
    "wrapped maximum": (
        lambda c, r: jnp.maximum(c.astype(jnp.int32), r.max()).astype(jnp.int8),
        np.int32(130),
        np.int8(3),
    ),
    "wrapped minimum": (
        lambda c, r: jnp.minimum(c.astype(jnp.int32), r.min()).astype(jnp.uint32),
        np.int32(-4),
        np.uint32(3),
    ),
    "flags": (lambda c, r: (c + r.max()).astype(bool), np.int32(0), np.True_),
    "wrapped sum": (lambda c, r: (c.astype(jnp.int32) + r.sum()).astype(jnp.int8), np.int32(9), np.int8(3)),
    "wide sum": (lambda c, r: (c.astype(jnp.float32) + r.mean()).astype(jnp.float16), np.float32(0.75), np.float16(3)),
}


@pytest.mark.parametrize("name", sorted(CASTS))
def test_sums_with_casts(name: str) -> None:
    """A cast that changes the sum in every iteration makes it none; integers that wrap and wider floats are sums still."""
    step, value, start = CASTS[name]
    args = [np.full((8, 4096), value), np.asarray(start)]

    def function(x: Any, c: Any) -> Any:
        return lax.scan(lambda c, r: (step(c, r), None), c, x)[0]

    for placements in ((P(a=Shard(0)), P()), (P(a=Shard(1)), P())):
        agree(function, args, placements, [fit(Mesh(a=4))], gradient=False)
    wide = jax.ShapeDtypeStruct((64, 4096), args[0].dtype), jax.ShapeDtypeStruct((), args[1].dtype)
    lowered = spmd.jit(function, mesh=FOUR, in_placements=(P(a=Shard(0)), P())).lower(*wide)
    apart = "16 times" in str(lowered)
    assert apart == (name in ("wrapped sum", "wide sum"))
