"""What design section 1 says of arguments, results, the cache, closures and transformations."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracle import FEW, GRIDS, RANKS, agree, same

import spmd
from placements import InvalidPlacement, Mesh, P, Partial, PartialTypeError, Shard

MESH = Mesh(dp=2, tp=2)
ROWS, COLUMNS = P(dp=Shard(0)), P(tp=Shard(1))
Rows = Annotated[jax.Array, P(dp=Shard(0))]
X = (np.arange(20, dtype=np.float32) * 7 % 11 - 5).reshape(5, 4)
W1 = (np.arange(24, dtype=np.float32) * 5 % 7 - 3).reshape(4, 6)
W2 = (np.arange(18, dtype=np.float32) * 3 % 5 - 2).reshape(6, 3)


@spmd.jit(mesh=MESH)
def mlp(x: Rows, w1: Annotated[jax.Array, P(tp=Shard(1))], w2: Annotated[jax.Array, P(tp=Shard(0))]) -> Rows:
    """The MLP of the README."""
    return jnp.tanh(x @ w1) @ w2


def test_annotations_state_placements() -> None:
    """Value, placement, Program and metadata of a decorated function."""
    y = mlp(X, W1, W2)
    same(y, jnp.tanh(X @ W1) @ W2, MESH)
    assert y.placements == ROWS
    assert (y.shape, y.ndim, y.size, y.nbytes, y.dtype) == ((5, 3), 2, 15, 60, jnp.float32)
    assert {at: shard.shape for at, shard in y.shards.items()} == {(i, j): (3 - i, 3) for i in (0, 1) for j in (0, 1)}
    mlp.lower(X, W1, W2).check(all_reduce=1)
    assert mlp.__name__ == "mlp"
    assert mlp.__doc__ == "The MLP of the README."


def test_annotations_in_every_form() -> None:
    """A bare P, a pytree of P, a tuple of results, a name of the decorating frame, *args and **kwargs."""
    local = P(dp=Shard(0))

    @spmd.jit(mesh=MESH)
    def f(  # type: ignore[valid-type]
        x: local,
        p: {"w": COLUMNS, "b": P()},  # noqa: F821, UP037
        *more: ROWS,
        k: P() = 1,
        **rest: P(dp=Shard(1)),
    ) -> tuple[ROWS, Any]:
        return x @ p["w"] + p["b"], [x.sum() + k, *more, rest]

    result, others = f(X, {"w": W1, "b": W1[0]}, X + 1, k=2, z=X)
    same(result, X @ W1 + W1[0], MESH)
    assert result.placements.named[0] == ("dp", Shard(0))
    assert others[1].placements == ROWS
    assert others[2]["z"].placements == P(dp=Shard(1))
    assert float(others[0]) == X.sum() + 2


def test_prefixes_dicts_and_functions_state_placements() -> None:
    """in_placements as a prefix, by name, and leaf by leaf."""
    params = {"w": W1, "b": W1[0]}

    def f(params: Any, x: Any) -> Any:
        return x @ params["w"] + params["b"]

    def place(path: str, aval: Any) -> P:
        assert path in ("params['w']", "params['b']")
        return P(tp=Shard(aval.ndim - 1))

    for stated in (
        (P(), ROWS),
        ({"w": COLUMNS, "b": None}, ROWS),
        (place, ROWS),
        {"x": ROWS, "params": place},
        [None, ROWS],
    ):
        result = spmd.jit(f, mesh=MESH, in_placements=stated)(params, X)
        same(result, f(params, X), MESH)
        assert ("dp", Shard(0)) in result.placements.named
    both = spmd.jit(
        f, mesh=MESH, in_placements=ROWS.__class__(dp=None), out_placements=lambda path, aval: P(tp=Shard(1))
    )
    assert both(params, X).placements == COLUMNS


def test_static_arguments_and_keywords() -> None:
    """Static parameters by number or name; keyword arguments are bound first; equal calls share an entry."""
    calls = []

    @functools.partial(spmd.jit, mesh=MESH, static_argnums=1, static_argnames="scale", in_placements=(ROWS, P()))
    def f(x: Any, power: int, y: Any, scale: float = 1.0) -> Any:
        calls.append((power, scale))
        return scale * x**power + y

    for _ in range(2):
        same(f(X, 2, 1.0), X**2 + 1, MESH)
        same(f(y=1.0, power=2, x=X), X**2 + 1, MESH)
        same(f(X, 3, y=2.0, scale=0.5), 0.5 * X**3 + 2, MESH)
    assert calls == [(2, 1.0), (3, 0.5)]
    scale = spmd.jit(lambda x, k: x * k, mesh=MESH, static_argnums=1)
    assert [scale(np.int32(3), k).dtype for k in (2, 2.0, True)] == [jnp.int32, jnp.float32, jnp.int32]
    with pytest.raises(spmd.ArgumentError, match="a call takes arrays"):
        scale(jax.ShapeDtypeStruct((), np.int32), 2)
    with pytest.raises(spmd.ArgumentError, match="not hashable"):
        f(X, [2], 1.0)


def test_structures_of_arguments_and_results() -> None:
    """None leaves, named tuples, registered dataclasses, empty containers, methods, partials, defaults."""

    class Pair(NamedTuple):
        a: Any
        b: Any

    @jax.tree_util.register_dataclass
    @dataclass
    class State:
        value: Any
        rest: Any

    f = spmd.jit(
        lambda s, t: (Pair(s.value + t.a, None), {}, State(t.b, ())), mesh=MESH, in_placements=(ROWS, Pair(ROWS, None))
    )
    pair, empty, state = f(State(X, None), Pair(X, 2))
    same(pair.a, 2 * X, MESH)
    assert (pair.b, empty, int(state.value), state.rest) == (None, {}, 2, ())

    class Model:
        def __init__(self, w: Any) -> None:
            self.w = w

        @functools.partial(spmd.jit, mesh=MESH, static_argnums=0)
        def __call__(self, x: Any, y: Any = 3) -> Any:
            return x @ self.w + y

    same(Model(W1)(X), X @ W1 + 3, MESH)
    same(spmd.jit(functools.partial(lambda k, x: k * x, 2), mesh=MESH)(X), 2 * X, MESH)
    same(spmd.jit(jnp.add, mesh=MESH)(X, 1), X + 1, MESH)


def test_the_mesh_of_a_call() -> None:
    """Stated, else current, else that of the arguments; none is an error; the current one is read at the call."""
    f = spmd.jit(lambda x: x * 2)
    with pytest.raises(spmd.ArgumentError, match="no mesh"):
        f(X)
    with spmd.use_mesh(MESH):
        assert f(X).mesh == MESH
        with spmd.use_mesh(Mesh(dp=3)):
            assert f(X).mesh == Mesh(dp=3)
            assert spmd.zeros(4).mesh == Mesh(dp=3)
    assert spmd.current_mesh() is None
    spmd.set_mesh(MESH)
    try:
        assert f(X).mesh == MESH
    finally:
        spmd.set_mesh(None)
    assert f(spmd.distribute(X, ROWS, MESH)).mesh == MESH


def test_shapes_that_depend_on_the_mesh() -> None:
    """A decorated function may ask for its mesh; each mesh has a trace of its own, through jax.jit too."""

    @jax.jit
    def pieces(x: Any) -> Any:
        mesh = spmd.current_mesh()
        assert mesh is not None
        return x.reshape(mesh.size, -1).sum(1)

    f = spmd.jit(lambda x: pieces(x) * 2)
    x = np.arange(12, dtype=np.float32)
    for size in (2, 3, 4, 2):
        with spmd.use_mesh(Mesh(dp=size)):
            found = f(x)
        assert found.shape == (size,)
        np.testing.assert_array_equal(found.full(), x.reshape(size, -1).sum(1) * 2)
        found = spmd.jit(pieces, mesh=Mesh(dp=size), in_placements=P(dp=Shard(0)))(x)
        np.testing.assert_array_equal(found.full(), x.reshape(size, -1).sum(1))
    assert spmd.current_mesh() is None


def test_loops_promote_as_in_jax() -> None:
    """Weak carries, casts in sums, wide and narrow numbers: dtypes and values of the plain function."""

    def mixed(x: Any) -> Any:
        total, rows = jax.lax.scan(lambda c, r: (c + r.sum().astype(c.dtype), r * 2), jnp.zeros((), jnp.float16), x)
        count = jax.lax.fori_loop(0, 3, lambda i, n: n + i, 0)
        weak = jax.lax.while_loop(lambda v: v < 5, lambda v: v * 2, 1.5)
        return total, rows, count, weak, jnp.where(x > 0, 1, x.astype(jnp.int8)), x.astype(jnp.bfloat16).sum(0) * 2.5

    for wide in (False, True):
        with jax.enable_x64(wide):
            x = X.astype(np.float64 if wide else np.float32)
            found, expected = spmd.jit(mixed, mesh=MESH, in_placements=ROWS)(x), mixed(jnp.asarray(x))
            for array, whole in zip(found, expected, strict=True):
                assert (array.dtype, array.weak_type) == (whole.dtype, whole.weak_type)
                np.testing.assert_allclose(
                    np.asarray(array.full(), np.float64), np.asarray(whole, np.float64), rtol=2e-2
                )


def test_darrays_keep_their_placement_or_move_in_the_open() -> None:
    """Free moves happen; others raise, and name the remedy, unless allowed: then the Program lists them."""
    x = spmd.distribute(X, ROWS, MESH)
    assert spmd.jit(lambda x: x + 1, mesh=MESH)(x).placements == ROWS
    sliced = spmd.jit(lambda x: x + 1, mesh=MESH, in_placements=P(dp=Shard(0), tp=Shard(1)))
    sliced.lower(x).check()
    same(sliced(x), X + 1, MESH)
    gathering = spmd.jit(lambda x: x + 1, mesh=MESH, in_placements=P())
    with pytest.raises(spmd.ArgumentError, match=r"argument x is DArray.*all_gather.*x\.redistribute\(P\(\)\)"):
        gathering(x)
    allowed = spmd.jit(lambda x: x + 1, mesh=MESH, in_placements=P(), redistribute="allow")
    program = allowed.lower(x)
    program.check(all_gather=1)
    assert "argument x is stated as P()" in program.collectives[0].reason
    same(allowed(x), X + 1, MESH)
    left = spmd.jit(lambda x: x + 1, mesh=MESH, in_placements=P(dp=None, tp=Shard(1)))
    assert left(x).placements == P(dp=Shard(0), tp=Shard(1))


def test_results_read_like_arrays_where_they_are_replicated() -> None:
    """float, int, bool, iteration and np.asarray of replicated arrays; of others they raise, with the remedy."""
    f = spmd.jit(lambda x: (x.sum(), x), mesh=MESH, in_placements=ROWS)
    total, y = f(X)
    assert float(total) == X.sum()
    assert int(total) == int(X.sum())
    assert bool(total) is bool(X.sum())
    assert complex(total) == X.sum()
    assert total.item() == X.sum()
    assert f"{total:.1f}" == f"{X.sum():.1f}"
    whole = y.redistribute(P())
    np.testing.assert_array_equal(np.asarray(whole), X)
    assert [row.shape for row in whole] == [(4,)] * 5
    assert len(y) == 5
    for read in (np.asarray, list, float, bool):
        with pytest.raises(spmd.NotReplicatedError, match=r"x\.full\(\)"):
            read(y)
    with pytest.raises(spmd.NotReplicatedError, match="simulates 4 ranks"):
        _ = y.local
    assert spmd.zeros(3, P(), Mesh()).local.shape == (3,)
    assert y.block_until_ready() is y
    assert y.is_ready()
    assert isinstance(y.full(), jax.Array)


def test_eager_use_of_a_darray_raises() -> None:
    """Arithmetic, jnp functions, *_like, JAX transformations from outside: each an error that says what to do."""
    y = spmd.distribute(X, ROWS, MESH)
    for use in (
        lambda: y + 1, lambda: np.ones(4, np.float32) * y, lambda: -y, lambda: y[0], lambda: y == y, lambda: y @ W1,
        lambda: np.float32(2) - y, lambda: np.sum(y), lambda: np.isnan(y),
    ):  # fmt: skip
        with pytest.raises(spmd.EagerError, match=r"spmd\.jit.*x\.full\(\)"):
            use()
    for use in (
        lambda: jnp.sin(y), lambda: jnp.zeros_like(y), lambda: jnp.ones_like(y, dtype=jnp.float32), lambda: jnp.asarray(y),
        lambda: jax.jit(lambda y: y)(y), lambda: jax.grad(lambda y: y.sum())(y), lambda: jax.vmap(jnp.sin)(y),
        lambda: jax.eval_shape(jnp.sin, y), lambda: optax.adam(1e-3).init({"w": y}), lambda: jnp.full_like(y, 3),
        lambda: jax.device_put(y),
    ):  # fmt: skip
        with pytest.raises(spmd.TransformationError, match=r"spmd\.grad"):
            use()
    with pytest.raises(AttributeError, match=r"x\.sum on DArray"):
        y.sum()
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        y.nonsense  # noqa: B018
    with pytest.raises(TypeError, match="unhashable"):
        hash(y)


def test_decorated_functions_under_transformations_from_outside() -> None:
    """jax.grad, jit, vmap raise and name spmd's; make_jaxpr gives the undecorated jaxpr."""
    for use in (lambda: jax.jit(mlp)(X, W1, W2), lambda: jax.vmap(mlp, (0, None, None))(X[None], W1, W2)):
        with pytest.raises(spmd.TransformationError, match=r"spmd\.vmap"):
            use()
    with pytest.raises(spmd.TransformationError, match=r"spmd\.grad"):
        jax.grad(lambda w: mlp(X, w, W2).sum())(W1)
    plain = jax.make_jaxpr(lambda x, w1, w2: jnp.tanh(x @ w1) @ w2)(X, W1, W2)
    assert str(jax.make_jaxpr(mlp)(X, W1, W2)) == str(plain)


def test_spmd_transformations() -> None:
    """grad, value_and_grad, vjp, jvp, vmap with DArrays, inside and outside; cotangents are placed like their primals."""

    def f(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(x @ w["w"]) ** 2) + jnp.sum(w["b"] ** 3)

    whole = {"w": W1, "b": W1[0]}
    placed = {"w": COLUMNS, "b": P(dp=Shard(0), tp=Shard(0))}
    w, x = spmd.distribute(whole, placed, MESH), spmd.distribute(X, ROWS, MESH)
    expected, gradient = jax.value_and_grad(f)(whole, X)
    for transformed in (spmd.value_and_grad(f), spmd.jit(spmd.value_and_grad(f), mesh=MESH)):
        value, found = transformed(w, x)
        same(value, expected, MESH)
        for name in whole:
            same(found[name], gradient[name], MESH)
            assert found[name].layout == w[name].layout
    both = spmd.grad(f, argnums=(1, 0))(w, x)
    same(both[0], jax.grad(f, 1)(whole, X), MESH)
    assert both[0].placements == ROWS
    value, aux = spmd.grad(lambda x: (jnp.sum(x**2), x.max()), has_aux=True)(x)
    same(value, 2 * X, MESH)
    assert float(aux) == X.max()
    out, tangent = spmd.jvp(jnp.tanh, (x,), (x,))
    same(tangent, jax.jvp(jnp.tanh, (X,), (X,))[1], MESH)
    out, pull = spmd.vjp(lambda x: x @ W1, x)
    same(out, X @ W1, MESH)
    (cotangent,) = pull(out)
    same(cotangent, X @ W1 @ W1.T, MESH)
    assert cotangent.placements == ROWS
    same(spmd.vmap(lambda row: row * row.sum())(x), jax.vmap(lambda row: row * row.sum())(X), MESH)
    batch = np.stack([X, X + 1, -X])
    result = spmd.vmap(mlp, in_axes=(0, None, None))(batch, W1, W2)
    same(result, jax.vmap(lambda x: jnp.tanh(x @ W1) @ W2)(batch), MESH)
    assert result.placements == P(dp=Shard(1))


def test_a_decorated_function_inside_another_is_inlined() -> None:
    """Its placements become constraints; another mesh is an error."""
    outer = spmd.jit(lambda x: mlp(x, W1, W2) * 2, mesh=MESH)
    same(outer(X), 2 * jnp.tanh(X @ W1) @ W2, MESH)
    assert outer(X).placements == ROWS
    with pytest.raises(spmd.ArgumentError, match="on one mesh"):
        spmd.jit(lambda x: mlp(x, W1, W2), mesh=Mesh(dp=2))(X)
    with pytest.raises(InvalidPlacement, match=r"argument 'x': x of shape .*out of range"):
        spmd.jit(lambda x: spmd.jit(lambda x: x, in_placements=P(dp=Shard(2)))(x), mesh=MESH)(X)


def test_closures() -> None:
    """A closed-over DArray is an argument like any other, in every kind of use; on another mesh it is an error."""
    w = spmd.distribute(W1, COLUMNS, MESH)

    def uses(x: Any, w: Any) -> list[Any]:
        inner = jax.jit(lambda x: x @ w)
        return [
            jnp.dot(x, w),
            x @ w,
            w.T @ w,
            w.sum(),
            2 * w - w[0],
            inner(x),
            jnp.where(w > 0, w, -w),
            jax.grad(lambda w: jnp.sum(w**2))(w),
        ]

    closed = spmd.jit(lambda x: uses(x, w), mesh=MESH, in_placements=ROWS)
    for found, expected in zip(closed(X), uses(jnp.asarray(X), jnp.asarray(W1)), strict=True):
        same(found, expected, MESH)
    names = [name for name in closed.lower(X).names if name.startswith("closure")]
    assert names == ["closure0"]
    with pytest.raises(spmd.ArgumentError, match="closed over by a function on Mesh"):
        spmd.jit(lambda x: x @ w, mesh=Mesh(dp=3))(X)
    with pytest.raises(spmd.TransformationError, match="inside a decorated function"):
        spmd.jit(lambda x: x @ w.full(), mesh=MESH)(X)


def test_large_constants_become_hidden_arguments() -> None:
    """Above 1 MB, with a warning; smaller ones stay constants, without one."""
    big = np.ones((600, 600), np.float32)
    f = spmd.jit(lambda x: x + big, mesh=MESH)
    with pytest.warns(spmd.PlacementWarning, match=r"closes over large arrays \(float32\[600, 600\]\)"):
        same(f(big), 2 * big, MESH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(big)
        spmd.jit(lambda x: x + big[:3], mesh=MESH)(np.float32(1))


def test_donation() -> None:
    """A donated DArray raises when read; others, and whole arrays, do not."""
    f = spmd.jit(lambda s, x: (s + x, x), mesh=MESH, donate_argnums=0)
    state, x = spmd.distribute(X, ROWS, MESH), spmd.distribute(X, ROWS, MESH)
    new, _ = f(state, x)
    same(new, 2 * X, MESH)
    same(x, X, MESH)
    assert state.is_deleted()
    for read in (lambda: state.shards, lambda: state.full(), lambda: f(state, x)):
        with pytest.raises(spmd.DeletedError, match="donated to"):
            read()
    assert "donated" in repr(state)
    same(spmd.jit(lambda s: s + 1, mesh=MESH, donate_argnames="s")(X), X + 1, MESH)
    x.delete()
    with pytest.raises(spmd.DeletedError, match="deleted"):
        x.full()


def test_numpy_memory_is_copied() -> None:
    """A later write to what was distributed is not seen."""
    source = X.copy()
    placed = [spmd.distribute(source, p, MESH) for p in (ROWS, P())] + [spmd.from_local([source] * 4, P(), MESH)]
    result = spmd.jit(lambda x: x, mesh=MESH)(source)
    source[:] = 99
    for array in (*placed, result):
        same(array, X, MESH, exact=True)


def test_constrain() -> None:
    """Pins a value, parts and axes left to propagation included; shifts under vmap; outside a function it raises."""
    f = spmd.jit(lambda x: spmd.constrain(x * 1, COLUMNS), mesh=MESH, in_placements=ROWS)
    assert f(X).placements == COLUMNS
    keep = spmd.jit(lambda x: spmd.constrain(x * 1, P(dp=None, tp=Shard(1))), mesh=MESH, in_placements=ROWS)
    assert keep(X).placements == P(dp=Shard(0), tp=Shard(1))
    parts = spmd.jit(lambda x: spmd.constrain(x, P(tp=Partial())), mesh=MESH, out_placements=P(tp=Partial()))
    assert parts(X).placements == P(tp=Partial())
    same(parts(X), X, MESH)
    batched = spmd.jit(jax.vmap(lambda x: spmd.constrain(x * 1, P(tp=Shard(0)))), mesh=MESH, in_placements=ROWS)
    assert batched(X).placements == P(dp=Shard(0), tp=Shard(1))
    for mesh in GRIDS:
        agree(
            lambda x: jnp.sin(spmd.constrain(x, P(b=Shard(1), a=Shard(0)))) if spmd_tracing() else jnp.sin(x),
            [X],
            [P()],
            [mesh],
        )
    with pytest.raises(spmd.TransformationError, match=r"x\.redistribute"):
        spmd.constrain(X, ROWS)


def spmd_tracing() -> bool:
    from spmd.trace import tracing_mesh

    return tracing_mesh() is not None


def test_factories() -> None:
    """zeros, ones, full, arange as in jnp, from shards alone; from_callback sees each part once."""
    for mesh in (*RANKS, *GRIDS):
        rows = P(a=Shard(0))
        same(spmd.zeros((5, 3), rows, mesh), jnp.zeros((5, 3)), mesh, exact=True)
        same(spmd.ones(5, rows, mesh, dtype=int), jnp.ones(5, int), mesh, exact=True)
        same(spmd.full((5,), 2.5, P(a=Partial()), mesh), jnp.full(5, 2.5), mesh, exact=True)
        for arguments in ((7,), (2, 9), (9, 2, -3), (0.0, 1.0, 0.1), (-1.5, 3.0), (5, 5), (4.0,), (2, 5.5)):
            same(spmd.arange(*arguments, placements=rows, mesh=mesh), jnp.arange(*arguments), mesh, exact=True)
    seen = []

    def part(index: tuple[slice, ...]) -> np.ndarray:
        seen.append(index)
        return X[index]

    same(spmd.from_callback(part, X.shape, ROWS, MESH), X, MESH, exact=True)
    assert seen == [(slice(0, 3), slice(0, 4)), (slice(3, 5), slice(0, 4))]
    for make in (lambda: spmd.zeros(4, ROWS, MESH), lambda: spmd.distribute(X, ROWS, MESH)):
        with pytest.raises(spmd.TransformationError, match=r"jnp\.zeros"):
            spmd.jit(lambda x: make() + x, mesh=MESH)(np.float32(1))  # noqa: B023
    with pytest.raises(spmd.ArgumentError, match=r"fn gave float32\[5, 4\]"):
        spmd.from_callback(lambda index: X, X.shape, ROWS, MESH)


def test_distribute_and_from_local() -> None:
    """Trees with prefixes; a source that exists; replicas that agree."""
    tree = spmd.distribute({"a": X, "b": [W1, 3]}, {"a": ROWS, "b": P()}, MESH)
    assert tree["a"].placements == ROWS
    assert int(tree["b"][1]) == 3
    same(spmd.distribute(X, ROWS, MESH, source=0), X, MESH)
    with pytest.raises(spmd.ArgumentError, match="source=7 is no rank"):
        spmd.distribute(X, ROWS, MESH, source=7)
    with pytest.raises(spmd.ArgumentError, match=r"x\.redistribute"):
        spmd.distribute(tree["a"], ROWS, MESH)
    with pytest.raises(spmd.ArgumentError, match="should hold the same values"):
        spmd.from_local([X, X, X, X + 1], P(), MESH)
    with pytest.raises(spmd.ArgumentError, match="pass a list of 4 arrays"):
        spmd.from_local(X, ROWS, MESH)
    with pytest.raises(spmd.ArgumentError, match="differ in dtype"):
        spmd.from_local([X, X, X, X.astype(int)], ROWS, MESH)


def test_parts_have_dtypes() -> None:
    """Sum of bool and mean of integers do not exist; bitwise parts are for bool and integers."""
    for dtype, op in (("bool", "sum"), ("int32", "mean"), ("bool", "mean"), ("float32", "or"), ("complex64", "max")):
        with pytest.raises(PartialTypeError, match=r"Use|is not|is for"):
            spmd.zeros(3, P(dp=Partial(op)), MESH, dtype=dtype)
        with pytest.raises(PartialTypeError, match="x of shape"):
            spmd.jit(lambda x: x, mesh=MESH, in_placements=P(dp=Partial(op)))(np.zeros(3, dtype))
    for dtype, op in (("bool", "and"), ("int32", "xor"), ("complex64", "mean"), ("bfloat16", "max"), ("uint8", "prod")):
        same(spmd.ones(3, P(dp=Partial(op)), MESH, dtype=dtype), jnp.ones(3, dtype), MESH, exact=True)


def test_redistribute_every_op_and_path() -> None:
    """Between shards, replicas and parts of every op, on both orders of two axes."""
    for mesh in GRIDS:
        for op in ("sum", "mean", "prod", "max", "min"):
            placements = (
                P(),
                P(a=Shard(0)),
                P(b=Shard(1)),
                P(b=Shard(0), a=Shard(0)),
                P(a=Partial(op)),
                P(b=Partial(op), a=Shard(1)),
            )
            for source in placements:
                x = spmd.distribute(X, source, mesh)
                for target in placements:
                    same(x.redistribute(target), X, mesh)
        for op, dtype in (("and", bool), ("or", bool), ("xor", np.int32)):
            whole = X.astype(dtype)
            x = spmd.distribute(whole, P(a=Partial(op)), mesh)
            same(x.redistribute(P(a=Shard(0))).redistribute(P(a=Partial(op), b=Shard(0))), whole, mesh)


def test_placements_like() -> None:
    """An optimizer state gets the placements of the params it copies, everything else P()."""
    params = {"w": W1, "b": W1[0]}
    placed = {"w": COLUMNS, "b": P(tp=Shard(0))}
    state = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)).init(params)
    found = spmd.placements_like(state, params, placed)
    assert found[1][0].mu == placed
    assert found[1][0].nu == placed
    assert found[1][0].count == P()
    assert spmd.placements_like({"m": W1, "n": W2}, W1, COLUMNS) == {"m": COLUMNS, "n": P()}
    assert spmd.placements_like(state, params, ROWS)[1][0].mu == {"w": ROWS, "b": ROWS}


def test_weak_types_keys_and_scalars() -> None:
    """Python scalars stay weak; typed and raw PRNG keys pass; x64 follows the flag."""
    double = spmd.jit(lambda x: x * 2, mesh=MESH)
    assert double(3).weak_type
    assert double(3).dtype == jnp.int32
    assert double(np.float64(3)).dtype == jnp.float32
    with jax.enable_x64(True):
        assert double(np.float64(3)).dtype == jnp.float64
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        draw = spmd.jit(lambda k: jax.random.normal(k, (3,)), mesh=MESH, fallback="allow")
        same(draw(key), jax.random.normal(key, (3,)), MESH)
    keys = jax.random.split(jax.random.key(1), 5)
    placed = spmd.distribute(keys, ROWS, MESH)
    assert np.array_equal(jax.random.key_data(placed.full()), jax.random.key_data(keys))


def test_fallbacks_are_named_refused_or_allowed() -> None:
    """One warning that names all of them; "error" raises; "allow" is silent; effects are refused."""

    def f(x: Any) -> Any:
        return jax.lax.approx_max_k(x, 2)[0] + jax.lax.reduce(x, np.float32(0), jnp.hypot, (0, 1))

    loud = spmd.jit(f, mesh=MESH, in_placements=ROWS)
    with pytest.warns(spmd.PlacementWarning, match=r"(?s)approx_top_k.*test_api|f:\d+") as caught:
        same(loud(X), f(X), MESH)
    assert len(caught) == 1
    names = {
        fallback.primitive
        for fallback in spmd.jit(f, mesh=MESH, in_placements=ROWS, fallback="allow").lower(X).fallbacks
    }
    assert names == {"approx_top_k"}  # it replicates x, and the reduction uses that
    with pytest.raises(spmd.FallbackError, match="approx_top_k"):
        spmd.jit(f, mesh=MESH, in_placements=ROWS, fallback="error")(X)
    same(spmd.jit(f, mesh=MESH, fallback="error")(X), f(X), MESH)  # on replicated operands nothing falls back

    def writing(x: Any) -> Any:
        ref = jax.new_ref(x)
        ref[...] = x * 2
        return ref[...]

    with pytest.raises(spmd.FallbackError, match=r"new_ref .*has an effect"):
        spmd.jit(writing, mesh=MESH)(X)


def test_loops_run_by_the_fallback() -> None:
    """scan, while and cond give the right values, replicated."""

    def f(x: Any) -> Any:
        carry, ys = jax.lax.scan(lambda c, row: (c + row.sum(), c * row), 1.0, x)
        looped = jax.lax.fori_loop(0, 3, lambda i, v: v * 0.5 + i, x)
        return carry, ys, looped, jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)

    agree(f, [X], [P(a=Shard(0))], FEW[:2], compiled=True)
