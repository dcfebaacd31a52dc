"""Edges that a hostile reader tried: caches, closures, annotations, loops, large meshes, keys, axes of size 1."""

from __future__ import annotations

from typing import Annotated, Any, Optional

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import agree, same

import spmd
from placements import (
    InvalidPlacement,
    ItemSizes,
    Layout,
    Mesh,
    MeshError,
    P,
    Partial,
    PartialTypeError,
    Shard,
    plan_steps,
)

M = Mesh(a=2)
S = P(a=Shard(0))
Rows = Annotated[jax.Array, S]


def reals(*shape: int) -> np.ndarray:
    return (np.arange(int(np.prod(shape)), dtype=np.float32) * 7 % 11 - 5).reshape(shape)


def test_closed_over_numpy_memory_is_copied() -> None:
    """A later write is seen neither by the next call, compiled or not, nor by a result."""
    w, big = reals(4), np.ones((600, 600), np.float32)
    f = spmd.jit(lambda x: (x + w, w), mesh=M)
    g = spmd.jit(lambda x: x + big, mesh=M)
    with pytest.warns(spmd.PlacementWarning):
        g(np.float32(0))
    first = f(reals(4))
    w[:] = 100
    big[:] = 100
    for result in (first, f(reals(4)), f(reals(4))):
        same(result[0], 2 * reals(4), M)
        same(result[1], reals(4), M)
    assert float(g(np.float32(0)).full().max()) == 1


def test_caches_of_jax_know_the_mesh() -> None:
    """A jax.jit helper traced for one mesh is traced anew for another, and refused outside."""
    plain = spmd.jit(lambda x: x * 2, mesh=M)
    helper = jax.jit(lambda x: plain(x))
    same(spmd.jit(lambda x: helper(x), mesh=M)(reals(4)), 2 * reals(4), M)
    with pytest.raises(spmd.TransformationError):
        helper(reals(4))
    with pytest.raises(spmd.ArgumentError, match="on one mesh"):
        spmd.jit(lambda x: helper(x), mesh=Mesh(a=3))(reals(4))
    first = jax.jit(lambda x: spmd.constrain(x, P(Shard(0))) * 1)
    for mesh, axis in ((Mesh(a=2, b=2), "a"), (Mesh(b=2, a=2), "b")):
        assert spmd.jit(lambda x: first(x), mesh=mesh)(reals(4)).placements == P(**{axis: Shard(0)})


def test_digests_hold_the_moves_of_arguments_and_results() -> None:
    """Programs that differ in those alone have other digests."""
    x = spmd.distribute(reals(4), S, M)

    def i(x: Any) -> Any:
        return x

    moved = spmd.jit(i, mesh=M, in_placements=P(), out_placements=S, redistribute="allow").lower(x)
    kept = spmd.jit(i, mesh=M, in_placements=S, out_placements=S).lower(x)
    assert moved.digest != kept.digest


def test_placements_inside_generic_annotations() -> None:
    """X | None, Optional, list, dict and tuple of annotated arrays; elsewhere a P is refused, never dropped."""

    def f(d: dict[str, Rows], l: list[Rows], o: Rows | None, p: Optional[Rows], t: tuple[Rows, ...]) -> list[Rows]:  # noqa: UP045
        return [d["x"], *l, o, p, *t]

    x = reals(5)
    for result in spmd.jit(f, mesh=M)({"x": x}, [x, x], x, x, (x, x, x)):
        assert result.placements == S

    def bad(x: set[Rows]) -> None: ...

    with pytest.raises(spmd.AnnotationError, match="says nothing about an argument"):
        spmd.jit(bad)


def test_a_tracer_from_outside_is_refused_in_a_closure_too() -> None:
    """jax.grad over a closed-over value would run unpartitioned."""

    def loss(w: Any) -> Any:
        return spmd.jit(lambda x: (x * w).sum(), mesh=M, in_placements=S)(reals(4)).full()

    with pytest.raises(spmd.TransformationError, match="from outside"):
        jax.grad(loss)(2.0)


def test_our_functions_inside_loops_that_fall_back() -> None:
    """constrain, spmd.grad, nested functions and closed-over DArrays in the body of a scan."""
    w = spmd.distribute(reals(3), S, M)
    inner = spmd.jit(lambda r: r * 2, in_placements=S)
    x = reals(4, 3)

    def body(c: Any, r: Any) -> Any:
        return spmd.constrain(c + inner(r), S) + r * jnp.asarray(w) - spmd.grad(lambda c: jnp.sum((c - r) ** 2))(c), r

    def plain(c: Any, r: Any) -> Any:
        return c + 2 * r + r * reals(3) - 2 * (c - r), r

    f = spmd.jit(lambda x: lax.scan(body, jnp.zeros(3), x), mesh=M, fallback="allow")
    for _ in range(2):
        for found, expected in zip(f(x), lax.scan(plain, jnp.zeros(3), x), strict=True):
            same(found, expected, M)


def test_constant_results_are_arrays() -> None:
    """Python numbers, numpy arrays and zero cotangents leave as jax arrays."""
    f = spmd.jit(lambda x: (x, 3.0, np.arange(3)), mesh=M)
    for _ in range(2):
        results = f(reals(3))
        assert all(isinstance(shard, jax.Array) for result in results for shard in result.shards.values())
        assert all(result.is_ready() for result in results)
        assert results[1].weak_type
        assert jax.typeof(results[1].full()).weak_type


@pytest.mark.parametrize("ndim", [1, 3])
def test_meshes_of_many_axes_are_planned_quickly(ndim: int) -> None:
    """Five axes: the search stays small (else this does not end), and what is free is found to be."""
    mesh = Mesh(a=2, b=2, c=2, d=2, e=2)
    shape = (64, 64, 64)[:ndim]
    last = ndim - 1
    placements = [
        P(), P(**{axis: Partial() for axis in "abcde"}), P(**{axis: Shard(0) for axis in "edcba"}),
        P(d=Shard(0), c=Shard(0), b=Shard(last), a=Shard(last), e=Shard(last)), P(a=Partial(), b=Shard(last), e=Shard(0)),
    ]  # fmt: skip
    for source in placements:
        for target in placements:
            steps = plan_steps(Layout.of(source, mesh, ndim), Layout.of(target, mesh, ndim), shape, ItemSizes(4, 4))
            if source == P():
                assert not any(step.communicates for step in steps)
    agree(lambda x: x.T @ x, [reals(5, 3)], [placements[2]], [mesh], gradient=False)


def test_constrain_checks_the_dtype() -> None:
    """Parts that a dtype does not have are refused, as anywhere."""
    for op, value in (("sum", np.array([True])), ("and", reals(3)), ("mean", np.array([2**30], np.int32))):
        with pytest.raises(PartialTypeError, match=r"defined|is for|not an integer"):
            spmd.jit(lambda x, op=op: spmd.constrain(x, P(a=Partial(op))), mesh=M)(value)


def test_float8() -> None:
    """Casts between small floats and products of them."""
    x = jnp.asarray(reals(4, 4), jnp.float8_e4m3fn)
    for placement in (S, P(a=Shard(1)), P(a=Partial())):
        for function in (
            lambda x: x.astype(jnp.float8_e5m2), lambda x: x.astype(jnp.bfloat16),
            lambda x: lax.dot(x, x, preferred_element_type=jnp.float32),
        ):  # fmt: skip
            agree(function, [x], [placement], [M], gradient=False)


def test_keys() -> None:
    """Typed keys print, lie in pieces, and have no parts."""
    key, keys = jax.random.key(0), jax.random.split(jax.random.key(0), 4)
    assert "key<fry>[]" in repr(spmd.distribute(key, P(), M))
    placed = spmd.from_local([keys[:2], keys[2:]], S, M)
    assert np.array_equal(jax.random.key_data(placed.full()), jax.random.key_data(keys))
    assert spmd.from_local([key, key], P(), M).shape == ()
    for use in (
        lambda: spmd.distribute(key, P(a=Partial()), M),
        lambda: spmd.jit(lambda k: k, mesh=M, out_placements=P(a=Partial()))(key),
    ):
        with pytest.raises(PartialTypeError, match="a key has no parts"):
            use()


def test_axes_called_self() -> None:
    """Any name is an axis."""
    mesh = Mesh({"self": 2, "b": 2})
    assert P.from_spec(("self",)) == P(self=Shard(0))
    assert mesh.submesh("b", self=1).ranks == (2, 3)


def test_axes_of_size_one_are_checked_and_kept() -> None:
    """Wrong on two ranks is wrong on one; None and a second move keep what was stated."""
    with pytest.raises(InvalidPlacement, match="do not mix"):
        Layout.of(P(a=Partial("sum"), b=Partial("max")), Mesh(a=1, b=2), 1)
    with pytest.raises(PartialTypeError, match="the sum of bool"):
        spmd.distribute(np.array([True]), P(a=Partial("sum")), Mesh(a=1))
    x = spmd.distribute(reals(4, 4), S, Mesh(a=1, b=2))
    assert x.redistribute(P(a=None, b=Shard(1))).placements == P(b=Shard(1), a=Shard(0))
    assert x.redistribute(P(b=Shard(1))).placements == P(b=Shard(1))


def test_weak_types_survive_full() -> None:
    """What is weak stays weak when gathered."""
    y = spmd.jit(lambda s: s * 2, mesh=M)(3.0)
    assert (y.full() * jnp.ones(1, jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("wrong", [Shard(0), None, {"a": Shard(0)}, "a"])
def test_what_is_no_p_is_said(wrong: Any) -> None:
    """In redistribute, constrain, distribute and the factories."""
    x = spmd.distribute(reals(4), S, M)
    for use in (
        lambda: x.redistribute(wrong),
        lambda: spmd.jit(lambda x: spmd.constrain(x, wrong), mesh=M)(x),
        lambda: spmd.zeros(3, wrong, M),
    ):
        with pytest.raises((InvalidPlacement, spmd.ArgumentError), match=r"is no P|is no placement"):
            use()


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: spmd.jit(5, mesh=M), "decorates a function"),
        (lambda: spmd.jit(M), "Options are keywords"),
        (lambda: spmd.jit(lambda x: x, mesh="m"), r"placements\.Mesh"),
        (lambda: spmd.jit(lambda x: x, check=True), "arguments of Program.check"),
        (lambda: spmd.jit(lambda x: x, in_placements=Shard), "in_placements is a P"),
    ],
)
def test_decorator_misuse(use: Any, message: str) -> None:
    """Refused at decoration."""
    with pytest.raises(spmd.ArgumentError, match=message):
        use()


def test_parts_do_not_mix_by_way_of_none() -> None:
    """An axis left as it is counts."""
    x = spmd.distribute(reals(4), P(b=Partial("sum")), Mesh(a=2, b=2))
    with pytest.raises(InvalidPlacement, match="do not mix"):
        x.redistribute(P(a=Partial("max"), b=None))


class Callable_:
    """A callable instance with string annotations, and a decorated method."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * 3

    @spmd.jit
    def method(self, x: jax.Array) -> jax.Array:
        return x * 2


def test_instances_and_methods() -> None:
    """Callable instances are decorated; a method lowers through its instance."""
    same(spmd.jit(Callable_(), mesh=M)(reals(4)), 3 * reals(4), M)
    method = spmd.jit(lambda self, x: x * 2, mesh=M, static_argnums=0, in_placements=(S,))

    class Model:
        double = method

    same(Model().double(reals(4)), 2 * reals(4), M)
    Model().double.lower(reals(4)).check()


def test_what_is_jaxs_is_translated() -> None:
    """PartitionSpecs and placements of one axis, in annotations and prefixes; meshes of JAX's; never ignored."""
    spec = jax.sharding.PartitionSpec("a")
    for extra in (spec, Shard(0)):

        def f(x: Annotated[jax.Array, extra]) -> Any:
            return x

        with pytest.raises(spmd.AnnotationError, match=r"P\(dp=Shard\(0\)\)"):
            spmd.jit(f, mesh=M)
    with pytest.raises(spmd.ArgumentError, match=r"is a JAX PartitionSpec, here P\(a=S\(0\)\)"):
        spmd.jit(lambda x: x, mesh=M, in_placements=(spec,))(reals(4))
    with pytest.raises(spmd.ArgumentError, match="is the placement of one axis; name the axis"):
        spmd.distribute(reals(4), Shard(0), M)
    with pytest.raises(spmd.ArgumentError, match="placements come first"):
        spmd.distribute(reals(4), M)
    with pytest.raises(spmd.ArgumentError, match=r"got a jax"):
        spmd.jit(lambda x: x, mesh=jax.make_mesh((1,), ("a",)))
    for make in (lambda: Mesh(2, 2), lambda: Mesh((2, 2), ("a", "b"))):
        with pytest.raises(MeshError, match="axes have names"):
            make()


def test_transformed_functions_are_lowered() -> None:
    """What spmd.grad and its kin send is read before it runs."""
    w = spmd.distribute(reals(4, 2), S, M)
    program = spmd.grad(lambda w, x: jnp.sum((x @ w) ** 2)).lower(w, reals(3, 4))
    assert program.name == "grad(<lambda>)"
    program.check(all_reduce=1)


def test_small_things() -> None:
    """Iteration over a closed-over DArray, params of plain numbers, coordinates, dims beyond int32."""
    w = spmd.distribute(reals(4, 2), S, M)
    same(spmd.jit(lambda x: sum(r for r in w) + x, mesh=M)(reals(2)), reals(4, 2).sum(0) + reals(2), M)
    assert spmd.placements_like({"m": 1.0, "n": reals(3)}, 2.0, P()) == {"m": P(), "n": P()}
    f = spmd.jit(lambda x: x * 2, mesh=M, out_placements=S)
    with pytest.raises(MeshError, match="a coordinate is a tuple"):
        f.lower(reals(4), coordinate=1)
    huge = f.lower(jax.ShapeDtypeStruct((2**33,), np.int8))
    with pytest.raises(spmd.ArgumentError, match="int32"):
        huge.memory_analysis()
    with pytest.raises(spmd.TransformationError, match="cannot be made inside"):
        jax.jit(lambda x: spmd.from_callback(lambda index: x[index], (4,), S, M).full())(reals(4))


def test_constants_that_print_alike_differ() -> None:
    """Equal equations are merged by the bits of their constants, not by how numpy prints them."""

    def difference(x: Any) -> Any:
        return (jnp.sin(x * (1 + 1e-6)) - jnp.sin(x * (1 - 1e-6))) / 2e-6, x * 0.001, x * 0.004, x**1.0001, x**1.0002

    with np.printoptions(precision=2, suppress=True):
        agree(difference, [np.float32([0.5, -1.5, 2.0]) + 3], [P(a=Shard(0))], [Mesh(a=1), Mesh(a=2)], gradient=False)


def test_parts_are_reduced_before_an_infinity() -> None:
    """A sum times infinity, or a large number, is what it is of whole arrays, though parts have both signs."""
    x = np.float32([1, 2, -1, -0.5])
    rows = P(a=Shard(0))
    meshes = [Mesh(a=2), Mesh(a=3)]
    for factor in (np.inf, -np.inf, 1e38, 0.0):
        agree(lambda x, s: jnp.sum(x) * s, [x, np.float32(factor)], [rows, P()], meshes, gradient=False)
        agree(lambda x, factor=factor: jnp.sum(x) * factor, [x], [rows], meshes, gradient=False)
        agree(lambda x, w: (x @ x[:, None]) @ w, [x, np.float32([[factor]])], [rows, P()], meshes, gradient=False)
