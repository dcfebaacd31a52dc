"""Local functions: every collective against whole arrays, with its gradient; JAX's transformations; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from local_functions import TABLE, check
from oracle import fitting

import collectives as c
import spmd
from placements import Mesh, P, Partial, Shard

ROWS, ONE = P(a=Shard(0)), Mesh(a=3)


def signed(*shape: int, dtype: str = "float32") -> np.ndarray:
    """Numbers of both signs that vary with position."""
    return ((np.arange(np.prod(shape)) * 5) % 13 - 6).reshape(shape).astype(dtype)


MESHES = [
    *((mesh, ("a",)) for mesh in fitting(*(Mesh(a=n) for n in (1, 2, 3, 4)))),
    *((mesh, axes) for mesh in fitting(Mesh(a=2, b=2)) for axes in (("b", "a"), ("b",))),
    *((mesh, axes) for mesh in fitting(Mesh(b=3, a=2)) for axes in (("a", "b"), ("b", "a"))),
]


@pytest.mark.parametrize("name", TABLE)
def test_collectives_of_local_functions(name: str, everything: bool) -> None:
    """Over one axis and over two in both orders, of which some are not local."""
    for mesh, axes in MESHES if everything else MESHES[2::4]:
        if not (name.startswith("halo") and len(axes) > 1):
            check(name, mesh, axes)


def mapped(function: Callable[..., Any], placed: Any, out: Any, mesh: Mesh = ONE, **options: Any) -> Any:
    """A local function of arguments so placed."""
    return spmd.shard_map(function, mesh=mesh, in_placements=placed, out_placements=out, **options)


def jitted(function: Callable[..., Any], *placements: P, mesh: Mesh = ONE) -> Any:
    return spmd.jit(function, mesh=mesh, in_placements=placements)


def with_halos(x: Any, down: int, across: int) -> Any:
    """The blocks of an array, each with two rows and columns around it: a wall above and below, a ring from left to right."""
    around = jnp.pad(jnp.pad(x, ((2, 2), (0, 0)), mode="edge"), ((0, 0), (2, 2)), mode="wrap")
    height, width = x.shape[0] // down, x.shape[1] // across
    return jnp.block(
        [
            [around[i * height : (i + 1) * height + 4, j * width : (j + 1) * width + 4] for j in range(across)]
            for i in range(down)
        ]
    )


@pytest.mark.parametrize("mesh", fitting(Mesh(a=2, b=2), Mesh(b=3, a=1), Mesh(a=1, b=2)), ids=repr)
def test_halos_with_corners(mesh: Mesh) -> None:
    """Fields of two dtypes over two axes; one call for each dtype; values and gradient."""
    fields, placed = (signed(4, 12), signed(4, 12, dtype="int32")), P(a=Shard(0), b=Shard(1))

    def exchanged(x: Any) -> Any:
        return c.halo_exchange(x, {"b": 1, "a": 0}, 2, {"a": "edge", "b": "periodic"})

    local = mapped(exchanged, placed, placed, mesh)
    for found, field in zip(local(fields), fields, strict=True):
        np.testing.assert_array_equal(found.full(), with_halos(field, mesh.shape["a"], mesh.shape["b"]))
    program = local.lower(fields)
    assert len(program.messages) == 2
    assert {each.name for each in program.collectives} == {"permute"}

    def total(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def weighed(x: Any) -> Any:
            made = function(x)
            return (made * jnp.cos(jnp.arange(made.size).reshape(made.shape))).sum()

        return jax.grad(weighed)

    found = jitted(total(lambda x: local((x, fields[1]))[0]), placed, mesh=mesh)(fields[0])
    expected = total(lambda x: with_halos(x, mesh.shape["a"], mesh.shape["b"]))(jnp.asarray(fields[0]))
    np.testing.assert_allclose(found.full(), expected, rtol=1e-5, atol=1e-5)


def test_ragged_all_to_all_f20() -> None:
    """Rows to ranks, none, some and all of them, in numbers that the values decide; values and gradient."""
    counts = np.array([[0, 5, 1], [2, 0, 2], [3, 3, 0]])
    x = signed(18, 2)

    def moved(x: Any) -> Any:
        sizes = jnp.asarray(counts)[c.axis_index("a")]
        return c.ragged_all_to_all(x, sizes, "a", limit=5, capacity=9)

    local = mapped(moved, ROWS, (ROWS, ROWS), Mesh(a=3))
    shards, expected = x.reshape(3, 6, 2), []
    for to in range(3):
        starts = counts[:, :to].sum(1)
        came = np.concatenate([shards[i, starts[i] : starts[i] + counts[i, to]] for i in range(3)])
        expected.append(np.pad(came, ((0, 9 - len(came)), (0, 0))))
    found, sizes = local(x)
    np.testing.assert_array_equal(found.full(), np.concatenate(expected))
    np.testing.assert_array_equal(sizes.full(), counts.T.reshape(-1))
    gradient = jitted(jax.grad(lambda x: (local(x)[0] ** 2).sum()), ROWS, mesh=Mesh(a=3))(x)
    sent = np.arange(6) < counts.sum(1)[:, None]
    np.testing.assert_array_equal(gradient.full(), 2 * x * sent.reshape(-1, 1))


def test_what_ragged_all_to_all_has_no_room_for() -> None:
    """Rows beyond a limit are lost, and the counts are those of what came; without limits nothing is."""
    counts, x = np.array([[3, 1], [1, 3]]), np.arange(1.0, 9.0, dtype=np.float32)

    def moved(x: Any, **limits: int) -> Any:
        return c.ragged_all_to_all(x, jnp.asarray(counts)[c.axis_index("a")], "a", **limits)

    for limits, rows, came in (
        ({}, [1, 2, 3, 5, 0, 0, 0, 0, 4, 6, 7, 8, 0, 0, 0, 0], [3, 1, 1, 3]),
        ({"limit": 2}, [1, 2, 5, 0, 4, 6, 7, 0], [2, 1, 1, 2]),
        ({"capacity": 3}, [1, 2, 3, 4, 6, 7], [3, 0, 1, 2]),
    ):
        found, sizes = mapped(lambda x: moved(x, **limits), ROWS, (ROWS, ROWS), Mesh(a=2))(x)  # noqa: B023
        np.testing.assert_array_equal(found.full(), rows)
        np.testing.assert_array_equal(sizes.full(), came)


def test_loops_of_a_batch() -> None:
    """vmap of a loop with a decision for each row, inside and around; a carry that comes in as a constant."""
    x = signed(6, 3) / 2

    def halved(row: Any) -> Any:
        return lax.while_loop(lambda r: jnp.abs(r).max() > 1, lambda r: r / 2, row)

    expected = jax.vmap(halved)(x)
    np.testing.assert_array_equal(mapped(jax.vmap(halved), ROWS, ROWS)(x).full(), expected)

    def of_all(row: Any) -> Any:
        return lax.while_loop(lambda r: c.all_reduce(jnp.abs(r).max(), "a", "max") > 1, lambda r: r / 2, row)

    around = mapped(of_all, ROWS, ROWS)
    batched = jitted(lambda x: jax.vmap(around)(x), P(a=Shard(1)))(np.stack([x[:, 0], x[:, 1] * 9]))
    np.testing.assert_array_equal(batched.full(), jnp.stack([halved(x[:, 0]), halved(x[:, 1] * 9)]))

    def added(x: Any) -> Any:
        return lax.fori_loop(0, 3, lambda i, total: total + c.shift(x, "a"), c.vary(jnp.zeros((2, 3)), "a"))

    np.testing.assert_allclose(mapped(added, ROWS, ROWS)(x).full(), 3 * np.roll(x, 2, 0), rtol=1e-6)


def test_gradients_are_those_of_the_whole_c1_c11() -> None:
    """No factor n, inside the decorated function and outside: of a loss over all rows, of a gathered value, of a broadcast."""
    w, d = signed(3), signed(12, 3)

    def loss(w: Any, d: Any) -> Any:
        return c.all_reduce(jnp.mean((w * d) ** 2), "a", "mean")

    local, plain = mapped(loss, (P(), ROWS), P()), lambda w, d: jnp.mean((w * d) ** 2)
    expected = jax.grad(plain, (0, 1))(w, d)
    for found in (jitted(jax.grad(local, (0, 1)), P(), ROWS)(w, d), spmd.jit(spmd.grad(local, (0, 1)), mesh=ONE)(w, d)):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one.full(), other, rtol=1e-6)
    for collective, whole in ((c.all_gather, d), (c.broadcast, d[:4])):
        gathered = mapped(lambda x: collective(x, "a"), ROWS, P())  # noqa: B023
        weights = np.arange(whole.size, dtype=np.float32).reshape(whole.shape)
        gradient = jitted(jax.grad(lambda x: (gathered(x) * weights).sum()), ROWS)(d)  # noqa: B023
        np.testing.assert_array_equal(gradient.full(), np.pad(weights, ((0, 12 - len(whole)), (0, 0))))


def test_all_to_all_has_a_gradient_c3() -> None:
    local = mapped(lambda x: c.all_to_all(x, "a", 1, 0), ROWS, P(a=Shard(1)))
    x = signed(6, 9)
    np.testing.assert_array_equal(jitted(jax.grad(lambda x: (local(x) ** 2).sum()), ROWS)(x).full(), 2 * x)


def test_transformations(everything: bool) -> None:
    """vmap (C5), jvp, linearize, scan, while, checkpoint, and JAX's own shard_map, around and inside a local function."""
    x, w = signed(6, 4) / 8, signed(4) / 4

    def local(x: Any, w: Any) -> Any:
        return jnp.tanh(x * w) + c.shift(x, "a") - c.all_reduce(x.mean(0), "a", "mean")

    def whole(x: Any, w: Any) -> Any:
        return jnp.tanh(x * w) + jnp.roll(x, 2, 0) - x.mean(0)

    f = mapped(local, (ROWS, P()), ROWS)
    cases: dict[str, Callable[[Any], Any]] = {
        "grad": lambda f: jax.grad(lambda x, w: (f(x, w) ** 2).sum(), (0, 1))(x, w),
        "vmap": lambda f: jax.vmap(f, (None, 0))(x, jnp.stack([w, 2 * w, -w])),
        "vmap of rows": lambda f: jax.vmap(f, (1, None), 2)(jnp.stack([x, -x], 1), w),
        "grad of vmap": lambda f: jax.grad(lambda x: jax.vmap(f, (0, None))(x, w).sum())(jnp.stack([x, 2 * x])),
        "jvp": lambda f: jax.jvp(f, (x, w), (2 * x, w))[1],
        "linearize": lambda f: jax.linearize(f, x, w)[1](-x, 3 * w),
        "hessian": lambda f: jax.hessian(lambda w: (f(x, w) ** 2).sum())(w),
        "scan": lambda f: lax.scan(lambda y, _: (f(y, w), y.sum()), x, None, length=3),
        "grad of scan": lambda f: jax.grad(
            lambda x: lax.scan(lambda y, _: (f(y, w), None), x, None, length=3)[0].sum()
        )(x),
        "while": lambda f: lax.while_loop(lambda y: jnp.abs(y).max() < 9, lambda y: 3 * f(y, w), x),
        "cond": lambda f: lax.cond(x.sum() > 0, lambda x: f(x, w), lambda x: -f(x, w), x),
        "checkpoint": lambda f: jax.grad(lambda x: (jax.checkpoint(f)(x, w) ** 2).sum())(x),
    }
    for name, case in cases.items():
        found = spmd.jit(lambda: case(f), mesh=ONE)()  # noqa: B023
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(case(whole)), strict=True):
            np.testing.assert_allclose(one.full(), other, rtol=1e-4, atol=1e-4, err_msg=name)

    def inside(x: Any) -> Any:
        def step(y: Any, _: Any) -> Any:
            return 0.5 * c.shift(y, "a") + c.all_reduce(y.mean(0), "a", "mean"), c.all_reduce(y.sum(), "a")

        return lax.scan(step, x, None, length=3)

    def around(x: Any) -> Any:
        return lax.scan(lambda y, _: (0.5 * jnp.roll(y, 2, 0) + y.mean(0), y.sum()), x, None, length=3)

    scanned = mapped(inside, ROWS, (ROWS, P()))
    for one, other in zip(scanned(x), around(x), strict=True):
        np.testing.assert_allclose(one.full(), other, rtol=1e-5, atol=1e-6)
    plain = jax.shard_map(lambda x: x * lax.psum(x, "a"), in_specs=jax.P("a"), out_specs=jax.P("a"), axis_names={"a"})
    found = jitted(lambda x: jnp.sin(plain(2 * x)), ROWS)(x)
    np.testing.assert_allclose(found.full(), jnp.sin(2 * x * np.tile(2 * x.reshape(3, 2, 4).sum(0), (3, 1))), rtol=1e-5)


def test_some_axes_are_local() -> None:
    """Along the others the body is planned: sharded features, a contraction that is reduced by the plan, uneven sizes."""
    mesh = Mesh(a=2, b=2)
    x, w = signed(4, 5), signed(5, 3)

    def local(x: Any, w: Any) -> Any:
        return c.all_reduce(jnp.tanh(x) @ w, "a")

    f = mapped(local, (P(a=Shard(0), b=Shard(1)), P(b=Shard(0))), P(), mesh, axes="a")
    np.testing.assert_allclose(f(x, w).full(), (np.tanh(x) @ w).reshape(2, 2, 3).sum(0), rtol=1e-5)
    f.lower(x, w).check(all_reduce=2)
    gradient = jax.grad(lambda x, w: (f(x, w) ** 2).sum(), (0, 1))
    found = spmd.jit(gradient, mesh=mesh, in_placements=(P(a=Shard(0), b=Shard(1)), P(b=Shard(0))))(x, w)
    expected = jax.grad(lambda x, w: ((jnp.tanh(x) @ w).reshape(2, 2, 3).sum(0) ** 2).sum(), (0, 1))(x, w)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.full(), other, rtol=1e-4, atol=1e-4)

    def nested(x: Any) -> Any:
        inner = jax.shard_map(
            lambda y: y + c.axis_index(("a", "b")),
            in_specs=jax.P(None, "b"),
            out_specs=jax.P(None, "b"),
            axis_names={"b"},
        )
        return inner(x) * 2

    both = mapped(nested, P(a=Shard(0), b=Shard(1)), P(a=Shard(0), b=Shard(1)), mesh, axes="a")
    numbers = np.array([[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3], [2, 2, 3, 3]])
    np.testing.assert_array_equal(both(signed(4, 4)).full(), 2 * (signed(4, 4) + numbers))


def test_parts_leave_a_local_function_c8() -> None:
    """Each op; nothing is sent until the result is used; the gradient is that of the reduction."""
    x = signed(6, 4)
    for op in ("sum", "max", "min", "prod"):
        f = mapped(lambda x: 2 * x, ROWS, P(a=Partial(op)))
        f.lower(x).check()
        kept = f(x)
        assert kept.placements == P(a=Partial(op))
        expected = lambda x: getattr(jnp, op)(2 * x.reshape(3, 2, 4), 0)  # noqa: B023, E731
        np.testing.assert_array_equal(kept.full(), expected(x))
        gradient = jitted(jax.grad(lambda x: (f(x) * jnp.arange(4.0)).sum()), ROWS)(x)  # noqa: B023
        other = jax.grad(lambda x: (expected(x) * jnp.arange(4.0)).sum())(jnp.asarray(x))  # noqa: B023
        np.testing.assert_allclose(gradient.full(), other, rtol=1e-6)


def test_predicates_that_differ_d1() -> None:
    """Where ranks that decide differently do not communicate with one another, each gets its own; otherwise it is refused."""
    mesh, x = Mesh(a=2, b=3), signed(4, 9)
    placed = P(a=Shard(0), b=Shard(1))

    def branches(x: Any) -> Any:
        total = c.all_reduce(x.sum(), "a")
        return lax.switch(
            c.axis_index("b"),
            [lambda v: c.shift(v, "a"), lambda v: -c.shift(v, "a") + total, lambda v: 2 * v + c.all_reduce(v, "a")],
            x,
        )

    def whole(x: Any) -> Any:
        a, b, d = (x[:, 3 * i : 3 * i + 3] for i in range(3))
        both = np.tile(d.reshape(2, 2, 3).sum(0), (2, 1))
        return np.concatenate([np.roll(a, 2, 0), -np.roll(b, 2, 0) + b.sum(), 2 * d + both], 1)

    f = mapped(branches, placed, placed, mesh)
    for _ in range(2):
        np.testing.assert_allclose(f(x).full(), whole(x), rtol=1e-6)

    def loops(x: Any) -> Any:
        return lax.while_loop(lambda v: c.all_reduce(jnp.abs(v).sum(), "a") < 200, lambda v: 2 * v + c.shift(v, "a"), x)

    def doubled(x: Any) -> Any:
        while np.abs(x).sum() < 200:
            x = 2 * x + np.roll(x, 2, 0)
        return x

    g = mapped(loops, placed, placed, mesh)
    for _ in range(2):
        np.testing.assert_allclose(
            g(x).full(), np.concatenate([doubled(x[:, i : i + 3]) for i in (0, 3, 6)], 1), rtol=1e-6
        )


GRID, BLOCKS = Mesh(a=2, c=2), P(a=Shard(0), c=Shard(1))


def test_iterations_are_not_apart_where_they_communicate() -> None:
    """A local function in a loop over rows that are sharded over its axis: every iteration is one of all ranks."""
    x = signed(4, 6)

    def local(row: Any) -> Any:
        return c.all_reduce(row * (1 + c.axis_index("c")), "c")

    def first(row: Any) -> Any:
        return c.broadcast(row * (2 - c.axis_index("c")), "c")

    for function, factor in ((local, 3), (first, 2)):
        f = mapped(function, P(), P(), GRID)
        rows = jitted(lambda x: lax.map(f, x), P(c=Shard(0)), mesh=GRID)  # noqa: B023
        np.testing.assert_array_equal(rows(x).full(), factor * x)
        total = jitted(lambda x: lax.scan(lambda t, r: (t + f(r).sum(), None), 0.0, x)[0], P(c=Shard(0)), mesh=GRID)  # noqa: B023
        assert float(total(x)) == factor * x.sum()


def test_ranks_go_their_own_ways() -> None:
    """Decisions that differ between ranks which do not meet: where the plan communicates, in iterations that are apart, in
    loops within branches that the others do not take; and what they call."""
    x = signed(4, 6) / 2
    up, down = x[:2], x[2:]

    def decided(v: Any) -> Any:
        return lax.cond(
            c.axis_index("a") == 1,
            lambda v: v - v.sum(1, keepdims=True),
            lambda v: 2 * v + v.max(1, keepdims=True),
            v,
        )

    expected = np.concatenate([2 * up + up.max(1, keepdims=True), down - down.sum(1, keepdims=True)])
    f = mapped(decided, BLOCKS, BLOCKS, GRID, axes="a")
    for _ in range(2):
        np.testing.assert_allclose(f(x).full(), expected, rtol=1e-6)

    def looped(v: Any) -> Any:
        return lax.fori_loop(0, 1 + 2 * c.axis_index("a"), lambda i, v: v - v.mean(1, keepdims=True) + i, v)

    def steps(v: Any, n: int) -> Any:
        for i in range(n):
            v = v - v.mean(1, keepdims=True) + i
        return v

    g = mapped(looped, BLOCKS, BLOCKS, GRID, axes="a")
    for _ in range(2):
        np.testing.assert_allclose(g(x).full(), np.concatenate([steps(up, 1), steps(down, 3)]), rtol=1e-5, atol=1e-5)

    def row(r: Any) -> Any:
        return lax.cond(r.sum() > 0, lambda r: r * r.sum(), lambda r: -r - r.max(), r)

    def until(r: Any) -> Any:
        return lax.while_loop(lambda r: jnp.abs(r).sum() > 1, lambda r: r / 2 - r.mean() / 8, r)

    for function in (row, until):
        apart = jitted(lambda x: lax.map(function, x), P(c=Shard(0), a=Shard(1)), mesh=GRID)  # noqa: B023
        for _ in range(2):
            np.testing.assert_allclose(apart(x).full(), lax.map(function, jnp.asarray(x)), rtol=1e-5, atol=1e-6)

    def nested(v: Any) -> Any:  # the second row of ranks would never end in the loop
        return lax.cond(
            c.all_reduce(v.sum(), "c") > 0,
            lambda v: lax.while_loop(lambda y: c.all_reduce(y.sum(), "c") < 100, lambda y: 2 * y + c.shift(y, "c"), v),
            lambda v: v - 1.0,
            v,
        )

    for _ in range(2):
        found = mapped(nested, BLOCKS, BLOCKS, GRID)(np.float32([[1, 2], [0, 0]])).full()
        np.testing.assert_array_equal(found, [[121, 122], [-1, -1]])

    seen: list[int] = []

    def called(v: Any) -> Any:
        def tell(v: Any) -> Any:
            jax.debug.callback(lambda i: seen.append(int(i)), c.axis_index("c"))
            return c.shift(v, "c")

        return lax.cond(c.axis_index("a") == 1, tell, lambda v: v, v)

    mapped(called, BLOCKS, BLOCKS, GRID)(x).full()
    jax.effects_barrier()
    assert sorted(seen) == [0, 1]


def test_dtypes_of_what_moves() -> None:
    """Flags are scattered, counts of a byte add up, nothing has no rows, signed zeros stay."""
    flags = np.arange(18).reshape(6, 3) % 5 > 1
    scattered = mapped(lambda x: c.scatter(x, "a", 1, 0), ROWS, P(a=Shard(1)))
    np.testing.assert_array_equal(scattered(flags).full(), flags[:2])
    assert np.signbit(scattered(np.full((6, 3), -0.0, np.float32)).full()).all()
    many = np.arange(900, dtype=np.float32).reshape(900, 1)
    sizes = np.full(9, 100, np.int8)
    found, came = mapped(lambda x, n: c.ragged_all_to_all(x, n, "a", 100), (ROWS, ROWS), (ROWS, ROWS))(many, sizes)
    np.testing.assert_array_equal(found.full()[:, 0], many.reshape(3, 3, 100).swapaxes(0, 1).reshape(-1))
    assert came.full().tolist() == [100] * 9
    bools, _ = mapped(lambda x, n: c.ragged_all_to_all(x, n, "a"), (ROWS, ROWS), (ROWS, ROWS))(
        flags, np.ones(9, np.int32)
    )
    assert bools.dtype == np.bool_
    empty, _ = mapped(lambda x, n: c.ragged_all_to_all(x, n, "a", 2), (ROWS, ROWS), (ROWS, ROWS))(
        flags[:0], np.zeros(9, np.int32)
    )
    assert not empty.full().any()


def test_the_extreme_of_shards_has_a_gradient_c16() -> None:
    """logsumexp by a maximum that is subtracted, and a maximum with a tie between shards."""
    x = signed(6, 3)

    def logsumexp(x: Any) -> Any:
        top = c.all_reduce(x.max(0), "a", "max")
        return top + jnp.log(c.all_reduce(jnp.exp(x - top).sum(0), "a"))

    for local, whole in (
        (logsumexp, lambda x: jax.nn.logsumexp(x, 0)),
        (lambda x: c.all_reduce(x[0], "a", "max"), lambda x: x.reshape(3, 2, 3)[:, 0].max(0)),
    ):
        f = mapped(local, ROWS, P())
        tied = np.concatenate([x[:2], x[:2], x[4:] - 9])
        found = jitted(jax.grad(lambda x: (f(x) * jnp.arange(1.0, 4)).sum()), ROWS)(tied)  # noqa: B023
        expected = jax.grad(lambda x: (whole(x) * jnp.arange(1.0, 4)).sum())(jnp.asarray(tied))  # noqa: B023
        np.testing.assert_allclose(found.full(), expected, rtol=1e-5, atol=1e-6)


def test_a_solver_in_local_form_c10() -> None:
    """Conjugate gradients whose product gathers, and its gradient: two reductions in one function."""
    rng = np.random.default_rng(0)
    m = rng.standard_normal((6, 6)).astype(np.float32)
    a, b = m @ m.T + 6 * np.eye(6, dtype=np.float32), rng.standard_normal(6).astype(np.float32)

    def solve(a: Any, b: Any) -> Any:
        def product(x: Any) -> Any:
            return c.all_gather(a @ x, "a")

        # JAX takes what a solver gives as varying: a mean of equals says that it is not
        return c.all_reduce(jax.scipy.sparse.linalg.cg(product, c.all_gather(b, "a"), tol=1e-7)[0], "a", "mean")

    f = mapped(solve, (ROWS, ROWS), P())
    np.testing.assert_allclose(f(a, b).full(), np.linalg.solve(a, b), rtol=2e-4, atol=2e-5)
    found = jitted(jax.grad(lambda b: (f(a, b) ** 2).sum()), ROWS)(b)
    expected = jax.grad(lambda b: (jnp.linalg.solve(a, b) ** 2).sum())(b)
    np.testing.assert_allclose(found.full(), expected, rtol=1e-3, atol=1e-4)


def test_callbacks_happen_on_every_rank(capfd: pytest.CaptureFixture[str]) -> None:
    """A local function prints what each rank sees."""

    def show(x: Any) -> Any:
        jax.debug.print("rank {} has {}", c.axis_index("a"), x.sum())
        jax.debug.print("hello")
        return x

    mapped(show, ROWS, ROWS)(np.arange(6.0, dtype=np.float32)).full()
    jax.effects_barrier()
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == ["hello"] * 3 + ["rank 0 has 1.0", "rank 1 has 5.0", "rank 2 has 9.0"]


def test_reductions_share_a_message() -> None:
    program = mapped(lambda x: c.all_reduce((x.sum(), (x**2).sum()), "a"), ROWS, P()).lower(signed(6))
    program.check(all_reduce=2, max_messages=1)
    assert "all_reduce[a, sum]" in str(program)
    assert ": in a local function; " in str(program)


def test_named_sharding_constraints_are_constraints() -> None:
    """JAX's own, by axis names: the placement, with dims left open."""
    constrained = jitted(lambda x: lax.with_sharding_constraint(x * 2, jax.P(None, "a")), ROWS)
    constrained.lower(signed(6, 3)).check(all_to_all=1)
    assert constrained(signed(6, 3)).placements == P(a=Shard(1))
    free = jitted(lambda x: lax.with_sharding_constraint(x * 2, jax.P(jax.P.UNCONSTRAINED, None)), ROWS)
    assert free(signed(6, 3)).placements == ROWS


X = np.arange(12, dtype=np.float32).reshape(6, 2)
FAULTS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "uneven (B11)": (lambda: mapped(lambda x: 2 * x, ROWS, ROWS)(X[:5]), spmd.ArgumentError, "Pad it to 6"),
    "reduced twice (C6)": (
        lambda: mapped(lambda x: c.all_reduce(c.all_reduce(x, "a"), "a"), ROWS, P())(X),
        c.InvalidCollective,
        "is the same on all ranks of a already",
    ),
    "gathered twice": (
        lambda: mapped(lambda x: c.all_gather(c.all_gather(x, "a"), "a"), ROWS, P())(X),
        c.InvalidCollective,
        "is the same on all ranks",
    ),
    "a result that differs": (lambda: mapped(lambda x: x, ROWS, P())(X), spmd.ArgumentError, "differs from rank to rank"),
    "parts that do not differ": (
        lambda: mapped(lambda x: c.all_reduce(x, "a"), ROWS, P(a=Partial()))(X),
        spmd.ArgumentError,
        "would count 3 times",
    ),
    "parts as an argument": (lambda: mapped(lambda x: x, P(a=Partial()), ROWS)(X), spmd.ArgumentError, "is Partial"),
    "no placement": (lambda: mapped(lambda x, y: x, (ROWS, None), ROWS)(X, X), spmd.ArgumentError, "has no placement"),
    "no result placement": (lambda: mapped(lambda x: x, ROWS, None), spmd.ArgumentError, "no out_placements"),
    "a dim from the back": (lambda: mapped(lambda x: x, ROWS, P(a=Shard(-1))), spmd.ArgumentError, "from the front"),
    "a dim that is none": (lambda: mapped(lambda x: x, ROWS, P(a=Shard(2)))(X), spmd.ArgumentError, "no dim 2"),
    "an unknown axis": (lambda: mapped(lambda x: x, ROWS, ROWS, axes="z")(X), spmd.ArgumentError, "z, which"),
    "a decorated function in a local one": (
        lambda: mapped(lambda x: jitted(lambda y: y, ROWS)(x), ROWS, ROWS)(X), spmd.TransformationError, "call the undecorated"
    ),
    "halos along no axis": (
        lambda: mapped(lambda x: c.halo_exchange(x, 0), ROWS, ROWS)(X), c.InvalidCollective, "the array dim for each axis"
    ),
    "sizes that are no integers": (
        lambda: mapped(lambda x: c.ragged_all_to_all(x, jnp.ones(3), "a"), ROWS, ROWS)(X), c.InvalidCollective, "are integers"
    ),
    "the largest of complex numbers": (
        lambda: mapped(lambda x: c.all_reduce(x + 0j, "a", "max"), ROWS, P())(X), c.InvalidCollective, "has no max"
    ),
    "a collective over no axis": (
        lambda: mapped(lambda x: c.all_reduce(x, "z"), ROWS, P())(X), c.InvalidCollective, "the local axes here are a"
    ),
    "a collective outside": (lambda: c.all_reduce(X, "a"), c.InvalidCollective, "no local function"),
    "a collective in global view": (lambda: jitted(lambda x: c.all_reduce(x, "a"), ROWS)(X), c.InvalidCollective, "jnp.sum"),
    "an op that is none": (lambda: mapped(lambda x: c.all_reduce(x, "a", "avg"), ROWS, P())(X), c.InvalidCollective, "avg"),
    "a mean of integers": (
        lambda: mapped(lambda x: c.all_reduce(x.astype(int), "a", "mean"), ROWS, P())(X), c.InvalidCollective, "cast first"
    ),
    "a root that is none": (lambda: mapped(lambda x: c.broadcast(x, "a", 3), ROWS, P())(X), c.InvalidCollective, "root 3"),
    "a destination twice": (
        lambda: mapped(lambda x: c.permute(x, "a", [(0, 1), (2, 1)]), ROWS, ROWS)(X), c.InvalidCollective, "twice"
    ),
    "pieces that do not divide": (
        lambda: mapped(lambda x: c.reduce_scatter(x, "a"), ROWS, ROWS)(X), c.InvalidCollective, "does not divide"
    ),
    "a halo that is too wide": (
        lambda: mapped(lambda x: c.halo_exchange(x, {"a": 0}, 3), ROWS, ROWS)(X), c.InvalidCollective, "as long as the width"
    ),
    "a branch that others wait for (D1)": (
        lambda: mapped(
            lambda x: lax.cond(x[0, 0] > 1, lambda: c.all_reduce(x, "a"), lambda: c.all_reduce(-x, "a")), ROWS, P()
        )(X),
        spmd.TransformationError,
        "would wait for others that never come",
    ),
    "a loop that others wait for": (
        lambda: mapped(lambda x: lax.while_loop(lambda v: v[0, 0] < 9, lambda v: v + c.shift(v, "a"), x), ROWS, ROWS)(X),
        spmd.TransformationError,
        "would wait for others",
    ),
    "a solver that some ranks would leave": (
        lambda: mapped(
            lambda x: jax.scipy.sparse.linalg.cg(lambda v: v + c.shift(v, "a"), c.all_reduce(x, "a") * c.axis_index("a"))[0],
            ROWS,
            ROWS,
        )(X),
        spmd.TransformationError,
        "would wait for others",
    ),
    "types that JAX did not check": (
        lambda: jitted(
            lambda x: jax.shard_map(lambda x: x, in_specs=jax.P("a"), out_specs=jax.P("a"), check_vma=False)(x), ROWS
        )(X),
        spmd.TransformationError,
        "check_vma=False",
    ),
    "groups of ranks": (
        lambda: mapped(lambda x: lax.all_gather(x, "a", axis_index_groups=[[0, 1, 2]]), ROWS, ROWS)(X),
        spmd.TransformationError,
        "give the mesh an axis",
    ),
    "a constraint over a local axis": (
        lambda: mapped(lambda x: spmd.constrain(x, ROWS), ROWS, ROWS)(X), spmd.TransformationError, "sees its own shard"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_refused(name: str) -> None:
    """Before anything is sent, on every rank alike, with the remedy."""
    call, kind, words = FAULTS[name]
    with pytest.raises(kind, match=words):
        call()
