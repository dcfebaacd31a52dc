"""The cases of users of the peers: each test is named after its row, and states the right answer."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracle import FEW, GRIDS, LAUNCH, RANKS, agree, fit, fitting, from_pieces, parts_of, same

import spmd
from placements import InvalidPlacement, Mesh, P, Partial, Replicate, Shard

ROWS, COLUMNS, PARTS, WHOLE = P(a=Shard(0)), P(a=Shard(1)), P(a=Partial()), P()
TWO = fit(Mesh(a=2))

SOME = fitting(Mesh(a=2), Mesh(a=3))


def signed(*shape: int, dtype: str = "float32") -> np.ndarray:
    """Small integers of both signs that vary with position: sums of them are exact."""
    return ((np.arange(int(np.prod(shape))) * 7) % 11 - 5).reshape(shape).astype(dtype)


def partial(whole: Any, mesh: Mesh, op: str = "sum") -> spmd.DArray:
    """A DArray of unequal parts along `a`."""
    return from_pieces(parts_of(whole, mesh.size, op), P(a=Partial(op)), mesh)


@pytest.mark.parametrize("mesh", RANKS)
def test_a1_a_scalar_is_added_to_parts_once(mesh: Mesh) -> None:
    """sum of 0..9 as parts: + 10 is 55, 10 - it is -35, it - 10 is 35; literal, array and closed-over scalars alike."""
    x = np.arange(10.0, dtype=np.float32).reshape(10, 1)
    ten = jnp.asarray(10.0)
    cases = (
        (lambda x: x.sum() + 10, 55), (lambda x: x.sum() + jnp.asarray(10.0), 55), (lambda x: 10 - x.sum(), -35),
        (lambda x: x.sum() - 10, 35), (lambda x: x.sum() + ten, 55),
    )  # fmt: skip
    for function, answer in cases:
        assert float(spmd.jit(function, mesh=mesh, in_placements=ROWS)(x)) == answer
        agree(function, [x], [ROWS], [mesh])
        whole = np.asarray(45.0, np.float32)
        assert float(spmd.jit(lambda y, f=function: f(y[None]), mesh=mesh)(partial(whole, mesh))) == answer


def test_a2_each_scalar_is_its_own() -> None:
    """parts * k, for k a Python int, a literal and a closed-over array: no cache may hold the first k."""
    whole = signed(4, 3)
    y = partial(whole, TWO)
    scale = spmd.jit(lambda y, k: y * k, mesh=TWO, static_argnames="k")
    for k in (1, 2, 3):
        closed = jnp.asarray(float(k))
        np.testing.assert_array_equal(spmd.jit(lambda y, k=k: y * k, mesh=TWO)(y).full(), k * whole)
        np.testing.assert_array_equal(spmd.jit(lambda y, k=closed: y * k, mesh=TWO)(y).full(), k * whole)
        np.testing.assert_array_equal(scale(y, k).full(), k * whole)
        same(spmd.grad(lambda y, k=k: jnp.sum(y * k))(y), np.full_like(whole, k), TWO)
    digests = {spmd.jit(lambda y, k=k: y * k, mesh=TWO).lower(y).digest for k in (2, 3)}
    digests |= {spmd.jit(lambda y, k=jnp.full(3, k): y * k, mesh=TWO).lower(y).digest for k in (2.0, 3.0)}
    assert len(digests) == 4
    np.testing.assert_array_equal(spmd.jit(lambda y: -5 * y, mesh=TWO)(y).full(), -5 * whole)
    np.testing.assert_array_equal(spmd.jit(lambda y: 2 * y, mesh=TWO)(y).full(), 2 * whole)


def test_a3_the_norm_of_parts_is_that_of_their_sum() -> None:
    """norm(a @ b) with the contracted dim sharded, and optax's global norm over a tree with one leaf of parts."""
    a, b = signed(4, 6), signed(6, 3)
    agree(lambda a, b: jnp.linalg.norm(a @ b), [a, b], [COLUMNS, ROWS])
    agree(lambda a, b: optax.tree.norm({"p": a @ b, "q": a}), [a, b], [COLUMNS, ROWS])
    for mesh in RANKS:
        norm = spmd.jit(jnp.linalg.norm, mesh=mesh)
        np.testing.assert_allclose(float(norm(partial(a, mesh))), np.linalg.norm(a), rtol=1e-6)


def test_a5_a_cast_sees_the_sum() -> None:
    """0.6 + 0.6 as int32 is 1; 1 - 1 as bool is False."""
    halves = from_pieces([np.float32([0.6]), np.float32([0.6])], PARTS, TWO)
    assert spmd.jit(lambda x: x.astype(jnp.int32), mesh=TWO)(halves).full().tolist() == [1]
    opposite = from_pieces([np.float32([1]), np.float32([-1])], PARTS, TWO)
    assert spmd.jit(lambda x: x.astype(bool), mesh=TWO)(opposite).full().tolist() == [False]


def test_a6_bfloat16_parts_are_reduced_after_a_widening_cast() -> None:
    """256 and seven ones on 8 ranks are 263: the cast keeps the parts, and one all_reduce sums them in float32."""
    mesh = fit(Mesh(a=8))
    pieces = [jnp.asarray([256.0 if rank == 0 else 1.0], jnp.bfloat16) for rank in range(8)]
    x = from_pieces(pieces, PARTS, mesh)
    cast = spmd.jit(lambda x: x.astype(jnp.float32), mesh=mesh)
    assert cast(x).full().tolist() == [263.0]
    program = cast.lower(x)
    program.check(all_reduce=1)
    assert program.collectives[0].dtype == "float32"
    gradient = spmd.grad(lambda x: jnp.sum(x.astype(jnp.float32) ** 2))(x)
    assert (gradient.dtype, gradient.full().tolist()) == (jnp.bfloat16, [528.0])  # 2 * 263, in bfloat16


def test_a7_functions_of_parts_see_mixed_signs() -> None:
    """Parts 3 and -1 are 2, for abs, relu, square and where."""
    x = from_pieces([np.float32([3]), np.float32([-1])], PARTS, TWO)
    functions = (jnp.abs, jax.nn.relu, jnp.square, lambda x: jnp.where(x > 0, x, 9))
    for function, answer in zip(functions, (2, 2, 4, 2), strict=True):
        assert float(spmd.jit(function, mesh=TWO)(x).full()[0]) == answer
        agree(function, [signed(5, 3)], [PARTS])


def test_a9_a_bias_is_added_once() -> None:
    """x @ w as parts, plus a replicated bias: value and all gradients as on one device."""
    x, w, b = signed(4, 6), signed(6, 3), signed(3)
    agree(lambda x, w, b: jnp.sum(x @ w + b), [x, w, b], [COLUMNS, ROWS, WHOLE])
    agree(lambda x, w, b: x @ w + b, [x, w, b], [COLUMNS, ROWS, WHOLE])
    parts = partial(signed(4, 3), TWO)
    gradient = spmd.grad(lambda z: jnp.sum(z + jnp.arange(3.0)))(parts)
    assert gradient.placements == P()  # what every part's cotangent is, is the same on all ranks
    np.testing.assert_array_equal(gradient.full(), np.ones((4, 3)))


def test_a10_a_mean_weighs_rows_and_not_ranks() -> None:
    """Means over uneven and empty shards."""
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert float(spmd.jit(jnp.mean, mesh=TWO, in_placements=ROWS)(x)) == 5.5
    assert float(spmd.jit(jnp.mean, mesh=TWO, in_placements=ROWS)(x[:1])) == 1.5
    for rows in (3, 1):
        agree(jnp.mean, [x[:rows]], [ROWS])
        agree(lambda x: jnp.var(x, axis=0), [x[:rows]], [ROWS])


def test_a14_reductions_where_ranks_are_empty() -> None:
    """max, min, prod and sum with empty shards, and of empty arrays."""
    row = np.asarray([[0, 1]])
    for x in (row, row.astype(np.float32), -row):
        agree(lambda x: (x.max(1), x.max(0), x.min(), x.prod(), x.sum(0)), [x], [ROWS], gradient=False)
    for shape in ((0,), (0, 3)):
        agree(lambda x: (x.sum(), x.prod()), [np.zeros(shape, np.float32)], [ROWS])
        agree(lambda x: (x.sum(0), x.prod(0)), [np.zeros(shape, np.int32)], [ROWS])


@pytest.mark.parametrize("mesh", RANKS, ids=str)
def test_a16_every_placement_pair_of_a_product(mesh: Mesh) -> None:
    """Nine pairs, odd sizes; and E @ I = E with both sharded alike on three ranks."""
    e, i = signed(3, 3), np.eye(3, dtype=np.float32)
    a, b = signed(7, 5), signed(5, 3)
    for left in (WHOLE, ROWS, COLUMNS):
        for right in (WHOLE, ROWS, COLUMNS):
            agree(jnp.matmul, [a, b], [left, right], [mesh], exact=True)
            agree(jnp.matmul, [e, i], [left, right], [mesh], exact=True, gradient=False)


def test_a18_size_one_dims_broadcast() -> None:
    """[1, 4] sharded by rows plus [4, 1] sharded by rows."""
    agree(jnp.add, [signed(1, 4), signed(4, 1)], [ROWS, ROWS], exact=True)
    agree(lambda x, y: x * y, [signed(1, 4), signed(4, 1)], [ROWS, COLUMNS], exact=True)
    agree(jnp.add, [signed(1, 4), signed(4, 1)], [P(a=Shard(0), b=Shard(1)), P(b=Shard(0))], GRIDS, exact=True)


def test_b1_a_gathered_uneven_array_has_its_size() -> None:
    """(5, 10) over 4 and back."""
    x = signed(5, 10)
    for mesh in (*RANKS, fit(Mesh(a=7))):
        moved = spmd.distribute(x, WHOLE, mesh).redistribute(ROWS).redistribute(WHOLE)
        assert all(np.array_equal(shard, x) for shard in moved.shards.values())
        same(spmd.distribute(x, ROWS, mesh), x, mesh, exact=True)


def test_b6_axes_that_share_a_dim_in_either_order() -> None:
    """A contraction between dims that are sharded over the same axes in different order."""
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    mesh = fit(Mesh(a=2, b=2))
    result = spmd.jit(jnp.matmul, mesh=mesh, in_placements=(P(a=Shard(1), b=Shard(1)), P(b=Shard(0), a=Shard(0))))(x, x)
    assert result.full()[0].tolist() == [56, 62, 68, 74]
    orders = (
        P(a=Shard(0), b=Shard(0)),
        P(b=Shard(0), a=Shard(0)),
        P(a=Shard(1), b=Shard(1)),
        P(b=Shard(1), a=Shard(0)),
    )
    for left in orders:
        for right in orders:
            agree(jnp.matmul, [signed(5, 7), signed(7, 6)], [left, right], GRIDS[:3], exact=True, gradient=False)
            agree(jnp.add, [signed(5, 7), signed(5, 7)], [left, right], GRIDS[2:], exact=True, gradient=False)
    agree(jnp.matmul, [signed(5, 7), signed(7, 6)], orders[:2], GRIDS)


def test_b9_local_pieces_of_any_size() -> None:
    """Pieces that are not our chunks: an error that shows both, or moved; never an invented size."""
    mesh = fit(Mesh(a=4))
    for dim, lengths in ((1, (2, 3, 4, 5)), (0, (3, 3, 3, 1))):
        shape = [2, 3]
        shape[dim] = sum(lengths)
        whole = signed(*shape)
        pieces = np.split(whole, np.cumsum(lengths)[:-1], axis=dim)
        with pytest.raises(spmd.ArgumentError, match=r"lengths \[.*have \[.*exchange=True"):
            from_pieces(pieces, P(a=Shard(dim)), mesh)
        same(from_pieces(pieces, P(a=Shard(dim)), mesh, exchange=True), whole, mesh, exact=True)
    with pytest.raises(spmd.ArgumentError, match="make an array of"):
        from_pieces(pieces, ROWS, mesh, shape=(12, 3), exchange=True)


def test_b13_operands_with_other_boundaries() -> None:
    """Rows 0 + 2 and rows 1 + 1 are brought to common boundaries before anything pairs them."""
    a, b = signed(2, 3), signed(2, 3)[:, ::-1].copy()
    x = from_pieces([a[:0], a], ROWS, TWO, exchange=True)
    y = from_pieces([b[:1], b[1:]], ROWS, TWO)
    for function in (jnp.multiply, jnp.add, jnp.cross):
        np.testing.assert_array_equal(spmd.jit(function, mesh=TWO, fallback="allow")(x, y).full(), function(a, b))
    agree(jnp.cross, [a, b], [ROWS, ROWS])


def test_b15_a_constraint_on_seventeen_rows_shards_them() -> None:
    """17 rows over 8 ranks: eight shards of two or three rows."""
    mesh = fit(Mesh(a=8))
    x = np.arange(17 * 16, dtype=np.float32).reshape(17, 16)
    result = spmd.jit(lambda x: spmd.constrain(x, ROWS) * 1, mesh=mesh)(x)
    assert result.placements == ROWS
    assert sorted(shard.shape[0] for shard in result.shards.values()) == [2] * 7 + [3]
    same(result, x, mesh, exact=True)
    gradient = spmd.jit(jax.grad(lambda x: jnp.sum(spmd.constrain(x, ROWS) ** 2)), mesh=mesh)(x)
    same(gradient, 2 * x, mesh)


def test_b16_results_that_do_not_divide() -> None:
    """A result of length 5, or of shape (7, 1), over 8 ranks."""
    mesh = fit(Mesh(a=8))
    agree(lambda x: 2 * x, [signed(5)], [WHOLE], [mesh], out=ROWS, exact=True)
    agree(lambda x: 2 * x, [signed(7, 1)], [WHOLE], [mesh], out=P(a=Shard(1)), exact=True)
    with pytest.raises(InvalidPlacement, match=r"result\['y'\] of shape \(5,\).*dim 1 is out of range"):
        spmd.jit(lambda x: {"y": x}, mesh=mesh, out_placements={"y": P(a=Shard(1))})(signed(5))


def test_b17_concatenation_on_a_two_axis_mesh() -> None:
    """Nothing is doubled along the axis that replicates."""
    mesh = fit(Mesh(data=4, model=2))
    rows = P(data=Shard(0))
    joined = spmd.jit(lambda x, y: jnp.concatenate([x, y]), mesh=mesh, in_placements=rows)(
        np.ones(4, np.float32), np.ones(12, np.float32)
    )
    np.testing.assert_array_equal(joined.full(), np.ones(16))
    functions = (
        lambda x, y: jnp.concatenate([x, y]), lambda x, y: jnp.concatenate([x, y], 1), lambda x, y: jnp.stack([x, y]),
        lambda x, y: jnp.pad(x + y, 1), lambda x, y: jnp.linspace(x, y, 5), lambda x, y: jnp.hstack([x, y[:, :1]]),
    )  # fmt: skip
    for function in functions:
        agree(function, [signed(4, 3), signed(4, 3) + 1], [rows, rows], [mesh, fit(Mesh(model=2, data=3))])
        agree(function, [signed(4, 3), signed(4, 3) + 1], [rows, P(data=Shard(1), model=Shard(0))], [mesh])


def test_c1_the_gradient_of_a_mean_over_the_batch() -> None:
    """No factor n: inside the decorated function, and by spmd.grad from outside."""
    w, d = signed(3), signed(8, 3)

    def loss(w: jax.Array, d: jax.Array) -> jax.Array:
        return jnp.mean((d @ w) ** 2)

    for mesh in RANKS:
        decorated = spmd.jit(loss, mesh=mesh, in_placements=(WHOLE, ROWS))
        expected = jax.grad(loss)(w, d)
        same(spmd.jit(jax.grad(loss), mesh=mesh, in_placements=(WHOLE, ROWS))(w, d), expected, mesh)
        same(spmd.grad(decorated)(w, d), expected, mesh)
        with pytest.raises(spmd.TransformationError, match=r"spmd\.grad"):
            jax.grad(lambda w: decorated(w, d))(w)  # noqa: B023


@pytest.mark.parametrize("placements", [ROWS, PARTS, WHOLE], ids=str)
def test_f22_a_repr_never_communicates(placements: P) -> None:
    """Uneven, empty, partial: one readable line."""
    mesh = fit(Mesh(a=4))
    for shape in ((5,), (0, 3), (1, 1)):
        text = repr(spmd.distribute(np.zeros(shape, np.float32), placements, mesh))
        assert f"{placements!r} on {mesh!r}" in text
        assert str(list(shape)).replace(" ", "") in text


def test_g2_signed_zeros_and_infinities_survive_parts() -> None:
    """A replicated -0.0 made into parts and reduced stays -0.0; inf - inf is nan, as in a plain sum."""
    for mesh in RANKS:
        zero = spmd.distribute(np.float32([-0.0, 0.0, 1.0]), PARTS, mesh).full()
        assert np.signbit(zero).tolist() == [True, False, False]
    infinite = from_pieces([np.float32([np.inf]), np.float32([-np.inf])], PARTS, TWO)
    assert np.isnan(infinite.full()[0])


def test_g3_meshes_larger_than_the_array() -> None:
    """More ranks than elements in every dim; 0-d arrays; axes of size 1."""
    mesh = fit(Mesh(a=5, b=4))
    agree(lambda x: (x @ x.T, x.sum(), x * 2), [signed(2, 3)], [P(a=Shard(0), b=Shard(1))], [mesh])
    agree(lambda x: (x.max(0), jnp.tanh(x)), [signed(1, 2)], [P(a=Shard(1), b=Shard(1))], [mesh])
    with pytest.raises(InvalidPlacement, match="0-d array has no dim"):
        spmd.jit(lambda x: x, mesh=mesh, in_placements=ROWS)(np.float32(1))
    unit = fit(Mesh(a=1, b=2))
    x = spmd.distribute(signed(4, 3), P(a=Shard(0), b=Shard(1)), unit)
    assert x.placements == P(a=Shard(0), b=Shard(1)) or str(x.placements) == "P(b=S(1), a=S(0))"
    stays = spmd.jit(lambda x: x + 1, mesh=unit, in_placements=P(a=Shard(1), b=Shard(1)))
    stays.lower(x).check()
    same(stays(x), signed(4, 3) + 1, unit, exact=True)
    with pytest.raises(InvalidPlacement, match="out of range"):
        spmd.distribute(signed(4), P(a=Shard(1)), fit(Mesh(a=1)))


def test_g4_bad_placements_name_the_argument() -> None:
    """The same axis twice, a dim out of range; Shard(-1) is the last dim."""
    double = spmd.jit(lambda x, scale: x * scale, mesh=TWO, in_placements={"x": P(a=Shard(2))})
    with pytest.raises(InvalidPlacement, match=r"x of shape \(4, 3\).*dim 2 is out of range"):
        double(signed(4, 3), 2)
    with pytest.raises(InvalidPlacement, match="not both"):
        P(Shard(0), a=Shard(1))
    with pytest.raises(InvalidPlacement, match="has 2 placements"):
        spmd.distribute(signed(4), P(Shard(0), Shard(0)), TWO)
    assert spmd.distribute(signed(4, 3), P(a=Shard(-1)), TWO).placements == COLUMNS


def test_g5_python_scalars_keep_bfloat16() -> None:
    """A Python scalar times bfloat16 parts is bfloat16; the x64 flag is part of the cache key."""
    x = from_pieces(parts_of(signed(4).astype(jnp.bfloat16), 2), PARTS, TWO)
    half = spmd.jit(lambda x: 0.5 * x, mesh=TWO)
    assert half(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(half(x).full(), np.float32), signed(4) / 2)
    third = spmd.jit(lambda x: jnp.asarray(1.0) / 3 + 0 * jnp.sum(x), mesh=TWO)
    assert third(np.ones(2, np.float32)).dtype == jnp.float32
    with jax.enable_x64(True):
        assert third(np.ones(2, np.float64)).dtype == jnp.float64
    assert third(np.ones(2, np.float32)).dtype == jnp.float32


def test_g7_the_call_cache_tells_calls_apart() -> None:
    """Equal shapes, other placements, axis order, static argument, closed-over constant: each its own answer."""
    mesh = fit(Mesh(a=2, b=2))
    x = signed(4, 6)
    scaled = spmd.jit(lambda x, k: k * x, mesh=mesh, static_argnums=1)
    placements = (WHOLE, ROWS, COLUMNS, P(b=Shard(0)), P(a=Shard(0), b=Shard(0)), P(b=Shard(0), a=Shard(0)), PARTS)
    for k in (2, 3):
        for placement in placements:
            result = scaled(spmd.distribute(x, placement, mesh), k)
            np.testing.assert_array_equal(result.full(), k * x)
    functions = [spmd.jit(lambda x, c=c: x + c, mesh=mesh) for c in (np.float32(1), np.float32(2))]
    assert [float(f(x).full()[0, 0]) for f in functions] == [-4, -3]
    weak, strong = scaled(2, 3), scaled(np.int32(2), 3)
    assert (weak.weak_type, strong.weak_type) == (True, False)


def test_g8_meshes_side_by_side() -> None:
    """Two meshes over the same ranks, a submesh, ranks in permuted order: the same values."""
    x = signed(5, 3)
    meshes = [fit(Mesh(a=4)), fit(Mesh(a=2, b=2))]
    meshes += [Mesh(a=4, ranks=[3, 1, 0, 2])] if LAUNCH is None or LAUNCH.size == 4 else []
    meshes += [Mesh(b=2, a=4).submesh("a", b=1)] if LAUNCH is None else []
    for mesh in meshes:
        same(spmd.jit(lambda x: x @ x.T, mesh=mesh, in_placements=ROWS)(x), x @ x.T, mesh, exact=True)
        same(spmd.grad(lambda x: jnp.sum((x @ x.T) ** 2))(spmd.distribute(x, ROWS, mesh)), 4 * x @ (x.T @ x), mesh)
    first, second = (spmd.distribute(x, ROWS, mesh) for mesh in meshes[:2])
    with pytest.raises(spmd.ArgumentError, match="is on another mesh than the function's"):
        spmd.jit(jnp.add, mesh=meshes[0])(first, second)
    assert Replicate() == Replicate()


def test_a11_the_place_of_the_largest_counts_from_the_whole() -> None:
    """argmax and argmin along a sharded dim: [10, 5, 3, 8] on two ranks gives 0 and 2; the first of ties; NaN; of a cube."""
    for values, (largest, least) in (([10, 5, 3, 8], (0, 2)), ([7, 1, 7], (0, 1)), ([1, np.nan, 3, np.nan], (1, 1))):
        x = np.asarray(values, np.float32)
        f = spmd.jit(lambda x: (x.argmax(), x.argmin()), mesh=TWO, in_placements=ROWS, fallback="error")
        assert tuple(map(int, f(x))) == (largest, least)
    cube = signed(3, 5, 4) + np.arange(4) / 8
    agree(lambda x: (jnp.argmax(x), jnp.argmin(x, 1)), [cube], [COLUMNS], RANKS, fallback="error", gradient=False)


def test_b3_an_uneven_array_is_flattened() -> None:
    """(6, 256) over four ranks, reshaped to one dim: each rank has its piece of the flat array."""
    (mesh,) = [mesh for mesh in RANKS if mesh.size == 4] or [fit(Mesh(a=4))]
    programs = agree(lambda x: x.reshape(-1), [signed(6, 256)], [ROWS], [mesh], exact=True, fallback="error")
    programs[0].check(exchange=1, max_bytes=256 * 4)


def test_b4_a_reshape_that_moves_data_says_so() -> None:
    """(12, 8) and (2, 4, 6) sharded along dim 1, reshaped across it: right, and the plan shows the move."""
    mesh = fit(Mesh(a=4))
    for shape, after in (((12, 8), (16, 6)), ((2, 4, 6), (8, 6)), ((8, 6), (4, 12))):
        programs = agree(lambda x, to=after: x.reshape(to), [signed(*shape)], [COLUMNS], [mesh], exact=True)
        assert programs[0].collectives


def test_b7_a_cartesian_product_is_an_array_like_any_other() -> None:
    def product(x: Any, y: Any) -> Any:
        return jnp.stack(jnp.meshgrid(x, y, indexing="ij"), -1).reshape(-1, 2)

    args = [np.arange(1, 5, dtype=np.float32), np.array([10.0, 20.0], np.float32)]
    agree(product, args, [ROWS, ROWS], FEW, exact=True, fallback="error")


def test_b21_a_scatter_has_global_indices() -> None:
    """Sharded indices into a sharded array: set, add with duplicates, out of bounds (dropped), negative."""
    zeros, ones = np.zeros(16, np.float32), np.ones(16, np.float32)
    index, twice = np.arange(16, dtype=np.int32), np.arange(16, dtype=np.int32) % 5
    beyond = np.array([0, 15, 16, 40, -1, -16, -17, 3], np.int32)
    for placements in ([ROWS, ROWS, ROWS], [ROWS, WHOLE, WHOLE], [WHOLE, ROWS, ROWS]):
        agree(lambda x, i, v: x.at[i].set(v), [zeros, index, ones], placements, SOME, exact=True)
        agree(lambda x, i, v: x.at[i].add(v), [zeros, twice, ones], placements, SOME, exact=True)
        agree(lambda x, i, v: x.at[i].add(v[:8]), [zeros, beyond, ones], placements, SOME, exact=True)


def test_b23_the_gradient_of_taken_columns() -> None:
    for placement in (WHOLE, ROWS, COLUMNS):
        agree(
            lambda x: jnp.sum(x[:, jnp.array([1, 3, 5])] ** 2),
            [signed(5, 7)],
            [placement],
            FEW,
            fallback="error",
        )


def test_b24_an_update_of_rows_moves_no_columns() -> None:
    program = agree(lambda x, u: x.at[0:3].set(u), [signed(5, 8), signed(3, 8)], [COLUMNS, COLUMNS], [TWO])[0]
    program.check()


def test_b26_a_reshape_of_a_small_dim() -> None:
    """(10, 1) sharded over two axes, to (2, 5, 1): two divides, four does not."""
    mesh = fit(Mesh(a=2, b=2))
    agree(
        lambda x: x.reshape(2, 5, 1), [signed(10, 1)], [P(a=Shard(0), b=Shard(0))], [mesh], exact=True, fallback="error"
    )


def test_e1_a_transform_along_another_dim_stays_where_it_is() -> None:
    x, cube = jax.ShapeDtypeStruct((8, 16), np.float32), jax.ShapeDtypeStruct((8, 16, 4), np.float32)
    for function, arg in (
        (lambda x: jnp.fft.fft(x, axis=1), x),
        (lambda x: jnp.fft.rfft(x, axis=1), x),
        (lambda x: jnp.fft.irfft(x.astype(jnp.complex64), axis=1), x),
        (jnp.fft.fft2, cube),
    ):
        spmd.jit(function, mesh=Mesh(a=4), in_placements=ROWS, fallback="error").lower(arg).check()


def test_e3_a_product_with_two_sharded_batch_dims() -> None:
    """Nothing forward; one reduction for the gradient of the weight, over both axes."""
    mesh, placements = Mesh(a=2, b=2), (P(a=Shard(0), b=Shard(1)), P())
    x, w = signed(2, 2, 3), signed(3, 1)
    spmd.jit(jnp.matmul, mesh=mesh, in_placements=placements).lower(x, w).check()
    gradient = jax.grad(lambda x, w: jnp.sum((x @ w) ** 2), 1)
    spmd.jit(gradient, mesh=mesh, in_placements=placements).lower(x, w).check(all_reduce=1)


def test_e5_what_users_of_the_peers_found_without_a_rule() -> None:
    """diagonal, select, cumsum, cumprod, searchsorted, unique, tril, roll, sort, qr, cholesky, svd: none falls back; a dynamic
    shape is JAX's own error, which names the way out."""
    square = np.eye(5, dtype=np.float32) * 9 + signed(5, 5)
    square = square @ square.T
    for function in (
        jnp.diagonal,
        lambda x: jnp.select([x > 1, x < -1], [x, -x], 0.5),
        lambda x: jnp.cumsum(x, 0),
        lambda x: jnp.cumprod(x / 60, 0),
        lambda x: jnp.searchsorted(jnp.arange(-5.0, 5.0), x[0]),
        lambda x: jnp.unique(x, size=12),
        jnp.tril,
        lambda x: jnp.roll(x, 2, 0),
        lambda x: jnp.sort(x, 0),
        lambda x: jnp.abs(jnp.linalg.qr(x)[1]),
        jnp.linalg.cholesky,
        jnp.linalg.svdvals,
    ):
        agree(function, [square], [ROWS], SOME[-1:], fallback="error", gradient=False)
    with pytest.raises(Exception, match="size"):
        spmd.jit(jnp.nonzero, mesh=TWO, in_placements=ROWS)(square)


def test_e7_order_and_counts_of_a_sharded_array() -> None:
    x = np.array([4, 3, 2, 5, 6, 0], np.int32)
    agree(lambda x: x[jnp.argsort(x)], [x], [ROWS], SOME, exact=True)
    agree(lambda x: jnp.bincount(x, length=9), [x], [ROWS], SOME, exact=True)


def test_e12_functions_with_derivatives_of_their_own() -> None:
    """custom_jvp and custom_vjp, with keyword arguments and arguments that are not differentiated."""

    @jax.custom_jvp
    def clipped(x: Any, bound: Any = 1.0) -> Any:
        return jnp.clip(x, -bound, bound)

    clipped.defjvp(lambda primals, tangents: (clipped(*primals), 0.5 * tangents[0]))

    @jax.custom_vjp
    def scaled(x: Any, *, by: float = 2.0) -> Any:
        return x * by

    scaled.defvjp(lambda x, by=2.0: (x * by, None), lambda _, g: (3.0 * g,))
    for function in (lambda x: clipped(x, 2.0), scaled):
        agree(function, [signed(5, 3)], [ROWS], SOME, fallback="error")


def test_e12_operands_by_name() -> None:
    """A rule's function takes its operands by name too; what is no array is bound before."""

    def project(x: Any, w: Any, *, power: int = 1) -> Any:
        return (jnp.tanh(x[..., None] * w) ** power).sum(-2)

    step = spmd.rule("b d, d f -> b f")(functools.partial(project, power=2))
    x, w = signed(5, 4), signed(4, 3)
    agree(lambda x, w: step(w=w, x=x), [x, w], [P(a=Shard(1)), P(a=Shard(0))], SOME, fallback="error")
    with pytest.raises(spmd.RuleError, match="power is no operand"):
        spmd.rule("b d, d f -> b f")(project)(x, w, power=3)
    with pytest.raises(spmd.RuleError, match="missing a required argument: 'w'"):
        step(x, v=w)


def test_b27_a_map_in_batches_larger_than_its_length() -> None:
    x = signed(5, 2, 4)
    for placement in (P(a=Shard(1)), P(a=Shard(0)), P(a=Shard(2))):
        agree(
            lambda x: jax.lax.map(lambda r: jnp.sin(r) @ r.T, x, batch_size=10),
            [x],
            [placement],
            SOME,
            compiled=True,
        )


def test_c10_a_solver_whose_products_are_reduced() -> None:
    """Conjugate gradients on rows of A, twice in one function: solution and gradient are those of a dense solve."""
    a, b = 0.5 * signed(7, 4), signed(4)

    def by_products(a: Any, b: Any) -> Any:
        def solved(b: Any) -> Any:
            return jax.scipy.sparse.linalg.cg(lambda v: a.T @ (a @ v) + 2 * v, b, tol=1e-7)[0]

        return solved(b) + solved(jnp.flip(b))

    def dense(a: Any, b: Any) -> Any:
        return jnp.linalg.solve(a.T @ a + 2 * jnp.eye(4), b + jnp.flip(b))

    for mesh in SOME:
        solve = spmd.jit(by_products, mesh=mesh, in_placements=(P(a=Shard(0)), P()), fallback="error")
        np.testing.assert_allclose(solve(a, b).full(), dense(a, b), rtol=1e-5, atol=1e-6)
        slope = spmd.jit(
            jax.grad(lambda b, a: jnp.sum(by_products(a, b) ** 2)), mesh=mesh, in_placements=(P(), P(a=Shard(0)))
        )
        expected = jax.grad(lambda b: jnp.sum(dense(a, b) ** 2))(jnp.asarray(b))
        np.testing.assert_allclose(slope(b, a).full(), expected, rtol=1e-4, atol=1e-5)


def test_d4_microbatches_of_a_sharded_batch() -> None:
    """A batch is cut into microbatches and scanned: it moves before the loop, where the text says so, and the gradient is
    reduced once, after it. Nothing is sent in the loop."""

    def accumulated(w: Any, x: Any) -> Any:
        def step(total: Any, rows: Any) -> Any:
            return total + jax.grad(lambda w: jnp.sum(jnp.tanh(rows @ w)))(w), None

        return jax.lax.scan(step, jnp.zeros_like(w), x.reshape(2, -1, x.shape[1]))[0]

    args = jax.ShapeDtypeStruct((256, 256), np.float32), jax.ShapeDtypeStruct((8192, 256), np.float32)
    placements = (P(), P(a=Shard(0)))
    program = spmd.jit(accumulated, mesh=Mesh(a=4), in_placements=placements, fallback="error").lower(*args)
    assert [c.count for c in program.collectives if c.name == "all_reduce"] == [1]
    assert {c.count for c in program.collectives} == {1}
    agree(accumulated, [0.3 * signed(16, 16), signed(8, 16)], placements, SOME, gradient=False)


def test_d7_typed_keys_move_like_arrays() -> None:
    """Split, sharded, gathered, reversed, folded in: keys stay keys."""
    keys = jax.random.split(jax.random.key(7), 4)
    for mesh in SOME:
        placed = spmd.distribute(keys, P(a=Shard(0)), mesh)
        assert placed.dtype == keys.dtype
        moved = spmd.jit(lambda k: jnp.flip(k), mesh=mesh, out_placements=P(), fallback="allow")(placed)
        assert moved.dtype == keys.dtype
        np.testing.assert_array_equal(jax.random.key_data(moved.full()), jax.random.key_data(jnp.flip(keys)))
        drawn = spmd.jit(lambda k: jax.vmap(lambda k: jax.random.normal(k, (3,)))(k), mesh=mesh, fallback="error")(
            placed
        )
        np.testing.assert_array_equal(drawn.full(), jax.vmap(lambda k: jax.random.normal(k, (3,)))(keys))


def test_d9_callbacks_on_sharded_arrays_are_never_silent() -> None:
    """A pure callback sees whole arrays, a print happens once; what is gathered for them is named in a warning."""

    def function(x: Any) -> Any:
        jax.debug.print("rows {n}", n=x.shape[0])
        found = jax.pure_callback(lambda v: np.sort(np.asarray(v), 0), jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return found * 2

    x = signed(5, 3)
    decorated = spmd.jit(function, mesh=FEW[-1], in_placements=P(a=Shard(0)))
    with pytest.warns(spmd.PlacementWarning, match=r"(?s)pure_callback .*\d+ bytes moved"):
        found = decorated(x)
    np.testing.assert_array_equal(found.full(), np.sort(x, 0) * 2)
    with pytest.raises(spmd.FallbackError, match="pure_callback"):
        spmd.jit(function, mesh=FEW[-1], in_placements=P(a=Shard(0)), fallback="error").lower(x)
