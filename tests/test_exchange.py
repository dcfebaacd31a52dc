"""Slices, shifts, stencils and updates along sharded dims: neighbours exchange the overlap, and nothing is gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import sample
from jax import lax
from oracle import agree, fitting

import spmd
from placements import Mesh, P, Shard
from spmd.testing import check_rule

S = Shard
ROWS, COLUMNS, NESTED, GRID = P(a=S(0)), P(a=S(1)), P(b=S(0), a=S(0)), P(a=S(1), b=S(0))
SOME, TWO = fitting(Mesh(a=2), Mesh(a=3), Mesh(a=7)), fitting(Mesh(a=2, b=2), Mesh(b=3, a=2))
WIDE = jax.ShapeDtypeStruct((4096, 64), np.float32)
ROW = 64 * 4
"""The bytes of a row of `WIDE`."""


def signed(*shape: int) -> Any:
    """Position-dependent, of both signs."""
    return (np.sin(np.arange(np.prod(shape)) * 1.7) * 1.3).astype(np.float32).reshape(shape)


def laplacian(u: Any) -> Any:
    return u[2:] - 2 * u[1:-1] + u[:-2]


def halo_by_hand(u: Any) -> Any:
    """A chain of pad, slice and concatenate, periodic and with a fill, as people write it."""
    periodic = jnp.concatenate([u[-1:], u, u[:1]])
    filled = jnp.pad(u, ((1, 1), (0, 0)), constant_values=2.0)
    return laplacian(periodic) + laplacian(filled)


STENCILS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "difference": (lambda u: u[1:] - u[:-1], 1),
    "laplacian": (laplacian, 4),
    "in an interval": (lambda u: u[3:-5] * 2, 8),
    "every second": (lambda u: u[1::2] * 2, 0),
    "every third": (lambda u: u[2:-2:3], 4),
    "padded": (lambda u: jnp.pad(u, ((2, 1), (0, 3))), 2),
    "cut and spread": (lambda u: lax.pad(u, 1.5, ((-2, 3, 2), (1, -1, 1))), 2),
    "backward in steps": (lambda u: u[jnp.arange(u.shape[0] - 1, -1, -2)], 32),
    "set backward": (lambda u: u.at[::-2].set(jnp.sin(u[::2])), 32),
    "rolled": (lambda u: jnp.roll(u, 1, 0), 2),
    "rolled back": (lambda u: jnp.roll(u, -3, 0), 12),
    "rolled along both": (lambda u: jnp.roll(u, (1, -2), (0, 1)), 2),
    "periodic": (lambda u: jnp.pad(u, ((1, 1), (0, 0)), mode="wrap"), 6),
    "by hand": (halo_by_hand, 16),
    "set inside": (lambda u: u.at[1:-1].set(jnp.sin(u)[2:]), 4),
    "added to a corner": (lambda u: u.at[2:-2, 1:].add(jnp.cos(u)[:-4, :-1]), 8),
    "ends": (lambda u: u.at[0].set(1.0).at[-1].set(2.0), 0),
    "red and black": (lambda u: u.at[::2].multiply(2.0).at[1::2].add(1.0), 0),
    "largest and least": (lambda u: u.at[2:-2].max(0.1).at[:, 1:3].min(0.0), 4),
    "flags": (lambda u: (u > 0).at[1:3].set(False).at[::2].set(True) * u, 4),
    "cut": (lambda u: jnp.split(u, (1, u.shape[0] - 1))[1], 2),
    "steps": (
        lambda u: lax.fori_loop(0, 3, lambda i, u: u.at[1:-1].add(0.1 * laplacian(u)), u),
        18,
    ),
    "waves": (lambda u: lax.scan(lambda u, _: (jnp.roll(u, 1, 0) * 0.9, u.sum()), u, length=3), 6),
    "smoothed": (lambda u: jnp.convolve(u[:, 0], jnp.array([0.25, 0.5, 0.25]), mode="same"), 2),
}
"""A function, and the rows that a rank receives at most, on any mesh."""


@pytest.mark.parametrize("name", sample(STENCILS, 2))
def test_stencils(name: str, everything: bool) -> None:
    """The values of whole arrays, and gradients, for either dim sharded, uneven and empty shards, two axes in both orders."""
    function, _ = STENCILS[name]
    more = ((ROWS, SOME[:1]), (COLUMNS, SOME[:1]), (GRID, TWO[1:])) if everything else ()
    for placement, meshes in ((ROWS, SOME[1:]), (NESTED, TWO[:1]), *more):
        agree(function, [signed(9, 5)], [placement], meshes, fallback="error")


@pytest.mark.parametrize("name", sorted(STENCILS))
def test_stencils_exchange_the_overlap_alone(name: str) -> None:
    """Nothing but messages between neighbours, of the overlap: no gather, forward or backward, on any number of ranks."""
    function, rows = STENCILS[name]
    gathers: dict[str, Any] = {"exchange": ..., "all_reduce": ...}  # sums of the results that are sums
    for mesh in (Mesh(a=64),):
        forward = spmd.jit(function, mesh=mesh, in_placements=ROWS, fallback="error").lower(WIDE)
        forward.check(**gathers, max_bytes=rows * ROW + 64)
        gradient = jax.grad(lambda u: sum(jnp.sum(y**2) for y in jax.tree.leaves(function(u))))
        backward = spmd.jit(gradient, mesh=mesh, in_placements=ROWS, out_placements=ROWS, fallback="error")
        backward.lower(WIDE).check(**gathers, max_bytes=5 * rows * ROW + 64)


def test_functions_applied_at_known_places() -> None:
    """`x.at[i].apply(f)` is a scatter without updates: no update of a slice."""
    for function in (
        lambda u: u.at[1:4].apply(jnp.exp),
        lambda u: u.at[2].apply(jnp.exp),
        lambda u: u.at[::2].apply(lambda v: v * v),
        lambda u: u.at[jnp.array([1, 3, 5])].apply(jnp.sin),
        lambda u: u.at[2:5].power(2.0) + u.at[1:3].divide(3.0),
    ):
        agree(function, [signed(9, 5)], [ROWS], SOME[1:2], fallback="error", gradient=False)


def test_the_slices_of_a_stencil_share_a_message() -> None:
    program = spmd.jit(laplacian, mesh=Mesh(a=4), in_placements=ROWS).lower(WIDE)
    program.check(exchange=3, max_messages=1)
    assert "exchange[a] u" in str(program)


def test_blocks_of_a_pool_are_apart() -> None:
    """Where windows do not overlap, the gradient of a maximum over them needs of a rank's block nothing from others."""

    def pooled(x: Any) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 3, 1), (1, 2, 3, 1), "VALID")

    gradient = jax.grad(lambda x: jnp.sum(pooled(x) ** 2))
    for placement in (P(a=S(1)), P(a=S(2)), P(a=S(0))):
        spmd.jit(gradient, mesh=Mesh(a=2), in_placements=placement, fallback="error").lower(
            jax.ShapeDtypeStruct((2, 8, 12, 3), np.float32)
        ).check()
        agree(pooled, [signed(3, 12, 9, 2)], [placement], SOME[1:2], fallback="error")


def test_slices_that_are_joined_again_move_once() -> None:
    """Both parts of a roll, and both ends of a periodic halo, come straight from the array, in one message for each axis."""

    def periodic(u: Any) -> Any:
        return jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0) + jnp.roll(u, 3, 1) - jnp.roll(u, -1, 1)

    program = spmd.jit(lambda u: jnp.roll(u, 5, 0), mesh=Mesh(a=4), in_placements=ROWS).lower(WIDE)
    program.check(exchange=2, max_messages=1)
    for function in (
        lambda u: jnp.pad(u, ((2, 1), (0, 0)), mode="wrap"),
        lambda u: jnp.roll(u, 1, 0) - jnp.roll(u, -1, 0),
    ):
        spmd.jit(function, mesh=Mesh(a=4), in_placements=ROWS).lower(WIDE).check(exchange=..., max_messages=1)
    spmd.jit(periodic, mesh=Mesh(a=4, b=4), in_placements=GRID).lower(WIDE).check(exchange=..., max_messages=2)
    looped = spmd.jit(
        lambda u: lax.scan(lambda u, _: (periodic(u), None), u, length=3)[0], mesh=TWO[0], in_placements=GRID
    )
    assert "bounds=((8, 9), (0, 8))" in str(looped.lower(signed(9, 5)))
    agree(periodic, [signed(9, 5)], [GRID], TWO, compiled=True, fallback="error")


def test_a_stencil_of_two_dims_sends_a_message_for_each_dim() -> None:
    """Five windows of one array, along two sharded dims: a message for each dim; the update two more. Values in a loop too."""

    def steps(u: Any) -> Any:
        def step(u: Any, _: Any) -> Any:
            near = u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1]
            return u.at[1:-1, 1:-1].add(0.1 * near), u.sum()

        return lax.scan(step, u, length=3)

    large = jax.ShapeDtypeStruct((10_000, 10_001), np.float32)
    lowered = spmd.jit(steps, mesh=Mesh(a=64, b=64), in_placements=P(a=S(0), b=S(1))).lower(large)
    lowered.check(exchange=12, all_reduce=1, max_messages=5)
    agree(steps, [signed(7, 9)], [P(a=S(0), b=S(1))], TWO, compiled=True, fallback="error")


def test_reversal_sends_each_rank_its_mirror_image() -> None:
    program = agree(lambda u: u[::-1] * 2, [signed(9, 5)], [ROWS], SOME)
    assert program
    lowered = spmd.jit(lambda u: u[::-1], mesh=Mesh(a=4), in_placements=ROWS).lower(WIDE)
    lowered.check(exchange=1, max_bytes=4096 // 4 * ROW)


def test_positions_that_are_traced(everything: bool) -> None:
    """A slice at a traced position is put together from what ranks have of it; an update is written by those that it is of."""
    starts = jnp.asarray([-20, 0, 2, 7, 30])

    def read(u: Any) -> Any:
        return sum(lax.dynamic_slice(u, (at, at - 1), (4, 3)) for at in starts)

    def written(u: Any) -> Any:
        return sum((k + 1) * lax.dynamic_update_slice(u, u[:3, :2] * 2, (at, at - 1)) for k, at in enumerate(starts))

    def history(u: Any) -> Any:
        return lax.fori_loop(0, 5, lambda i, u: u.at[i].set(u[i + 1] * 2), u)

    for function in (read, written, history):
        for placement, meshes in ((ROWS, SOME if everything else SOME[1:2]), (NESTED, TWO[:1])):
            agree(function, [signed(9, 5)], [placement], meshes, fallback="error")
    for placement in (ROWS, COLUMNS):
        lowered = spmd.jit(
            lambda u, i, v: lax.dynamic_update_slice_in_dim(u, v, i, 0),
            mesh=Mesh(a=4),
            in_placements=(placement, P(), P()),
        ).lower(WIDE, np.int32(3), jax.ShapeDtypeStruct((5, 64), np.float32))
        lowered.check()


SHAPES = [
    ((6, 4), (8, 3)), ((9, 4), (4, 9)), ((9, 4), (12, 3)), ((63, 2), (126,)), ((7, 6), (42,)), ((42,), (7, 6)),
    ((5, 1, 4), (2, 10)), ((3, 4, 5), (12, 5)), ((3, 10, 2), (6, 5, 2)), ((60,), (3, 4, 5)), ((3, 4, 5, 7), (5, 12, 7)),
    ((1, 7, 4), (14, 2, 1)), ((2, 0, 3), (6, 0)), ((3, 4, 9, 2), (4, 3, 6, 3)),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after"), SHAPES)
def test_reshapes_whose_boundaries_do_not_line_up(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    values = signed(*before)
    counts = check_rule(lambda x: x.reshape(after), values, meshes=(Mesh(a=2), Mesh(a=5), Mesh(a=2, b=2)))
    assert counts["reshape"] > 10
    agree(lambda x: jnp.sin(x).reshape(after), [values], [ROWS], SOME[1:2], fallback="error")


def test_reshapes_with_windows_along_two_dims() -> None:
    """One dim whose pieces line up unevenly, and another that neighbours exchange, over two axes."""
    for before, after in (((6, 4, 5), (4, 6, 5)), ((6, 4, 6, 4), (4, 6, 4, 6)), ((9, 4, 5), (12, 3, 5))):
        for placement in (P(b=S(0), a=S(2)), P(a=S(0), b=S(2))):
            for mesh in fitting(Mesh(b=3, a=2), Mesh(b=2, a=3), Mesh(b=4, a=2)):
                agree(lambda x: x.reshape(after), [signed(*before)], [placement], [mesh], gradient=False)  # noqa: B023


def test_reshapes_move_what_crosses_a_boundary() -> None:
    """Rows of 63 over four ranks, as pairs: what a rank lacks is less than a row of each neighbour."""
    lowered = spmd.jit(lambda x: x.reshape(-1, 256), mesh=Mesh(a=4), in_placements=ROWS).lower(
        jax.ShapeDtypeStruct((63, 128, 256), np.float32)
    )
    lowered.check(exchange=1, max_bytes=128 * 256 * 4)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_pieces_with_room_around_them_b19(dtype: str) -> None:
    """Four pieces of two rows, each with one row before and two after it, and back, in chains that meet."""
    count, rows, low, high = 4, 2, 1, 2
    padded = rows + low + high

    def with_room(x: Any) -> Any:
        return jnp.concatenate([jnp.pad(x[rows * k : rows * (k + 1)], (low, high)) for k in range(count)])

    def compact(z: Any) -> Any:
        return jnp.concatenate([z[padded * k + low : padded * k + low + rows] for k in range(count)])

    def chains(x: Any, z: Any) -> Any:
        return compact(with_room(x) * z) + compact(with_room(compact(z)))

    with jax.enable_x64(dtype == "float64"):
        args = [signed(rows * count).astype(dtype), signed(padded * count).astype(dtype)]
        agree(chains, args, [ROWS, ROWS], fitting(Mesh(a=4), Mesh(a=3)), compiled=True, fallback="error")


def test_rolls_of_one_element_for_each_rank() -> None:
    """The transpose of a roll, which joins what is cut off by negative pads (jax#39301)."""

    def rolled_back(x: Any) -> Any:
        return jax.linear_transpose(lambda x: jnp.roll(x, 1) + 2 * jnp.roll(x, -2), x)(x)[0]

    def joined(x: Any) -> Any:
        first = [lax.pad(x, 0.0, [(-3, 0, 0)]), lax.pad(x, 0.0, [(0, -1, 0)])]
        second = [lax.pad(x, 0.0, [(-1, 0, 0)]), lax.pad(x, 0.0, [(0, -3, 0)])]
        return lax.concatenate(first, 0) + lax.concatenate(second, 0)

    for function in (rolled_back, joined):
        agree(function, [signed(4)], [ROWS], fitting(Mesh(a=4), Mesh(a=2)), compiled=True, fallback="error")
