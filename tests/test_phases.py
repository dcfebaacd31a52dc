"""Running sums, places of extremes, Fourier transforms and sorts along sharded dims."""

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

S = Shard
ROWS, COLUMNS, NESTED = P(a=S(0)), P(a=S(1)), P(b=S(0), a=S(0))
SOME, TWO = fitting(Mesh(a=2), Mesh(a=3), Mesh(a=10)), fitting(Mesh(b=2, a=2))
WIDE = jax.ShapeDtypeStruct((4096, 64), np.float32)
ROW = 64 * 4


def numbers(*shape: int) -> Any:
    """Position-dependent, of both signs, with ties."""
    values = (np.sin(np.arange(np.prod(shape)) * 1.7) * 1.3).astype(np.float32).reshape(shape)
    values[2, 2] = values[-1, 2] = values.max() + 1
    return values


CASES: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "running sum": (lambda x: jnp.cumsum(x, 0), {"all_gather": 1, "max_bytes": 3 * ROW}),
    "of all": (lambda x: jnp.cumsum(x), {"all_gather": 1, "max_bytes": 64}),
    "from the end": (lambda x: lax.cumsum(x, 0, reverse=True), {"all_gather": 1, "max_bytes": 3 * ROW}),
    "of integers": (lambda x: jnp.cumsum((x * 5).astype(np.int32), 0), {"all_gather": 1, "max_bytes": 3 * ROW}),
    "product": (lambda x: jnp.cumprod(x, 0), {"all_gather": 1, "max_bytes": 3 * ROW}),
    "largest so far": (lambda x: lax.cummax(x, 0), {"all_gather": 1, "max_bytes": 3 * ROW}),
    "least so far": (lambda x: lax.cummin(x, 0, reverse=True), {"all_gather": 1, "max_bytes": 3 * ROW}),
    "logarithms": (lambda x: lax.cumlogsumexp(x, 0), {"all_gather": 1, "max_bytes": 3 * ROW}),
    "largest": (lambda x: x.argmax(0), {"all_reduce": 2, "max_bytes": 4 * ROW}),
    "least": (lambda x: x.argmin(0), {"all_reduce": 2, "max_bytes": 4 * ROW}),
    "largest of all": (lambda x: jnp.argmax(x), {"all_reduce": 2, "max_bytes": 64}),
    "of small integers": (lambda x: (x * 3).astype(np.int8).argmax(0), {"all_reduce": 2, "max_bytes": 4 * ROW}),
    "sorted": (lambda x: jnp.sort(x, 0), {"all_to_all": 1}),
    "order": (lambda x: jnp.argsort(x, 0), {"all_to_all": 1}),
    "median": (lambda x: jnp.median(x, 0), {"all_to_all": 1, "all_reduce": ...}),
    "several largest": (lambda x: lax.top_k(x.T, 2), {"all_to_all": 2, "max_bytes": 4 * ROW}),
    "largest of a line": (lambda x: lax.top_k(x[:, 0], 3), {"all_gather": 1, "all_reduce": 1, "max_bytes": 64}),
    "spectrum": (lambda x: jnp.abs(jnp.fft.fft(x, axis=0)), {"all_to_all": 1}),
    "spectrum of both": (lambda x: jnp.abs(jnp.fft.fft2(x)), {"all_to_all": 1}),
    "real spectrum": (lambda x: jnp.abs(jnp.fft.rfft2(x)), {"all_to_all": 1}),
    "there and back": (lambda x: jnp.fft.irfft2(jnp.fft.rfft2(x), x.shape), {"all_to_all": 2}),
    "rows": (lambda x: jnp.linalg.qr(jnp.einsum("ri,rj->rij", x[:, :2], x[:, 2:4]) + jnp.eye(2))[1], {}),
}
"""A function, and what it sends with rows sharded, on four ranks."""


@pytest.mark.parametrize("name", sample(CASES, 2))
def test_along_a_sharded_dim(name: str, everything: bool) -> None:
    function, sent = CASES[name]
    more = ((ROWS, SOME[:2]), (COLUMNS, SOME[:1])) if everything else ()
    for placement, meshes in ((ROWS, SOME[2:]), (NESTED, TWO), *more):
        agree(function, [numbers(9, 4)], [placement], meshes, fallback="error", gradient=name != "product")
    spmd.jit(function, mesh=Mesh(a=4), in_placements=ROWS, fallback="error").lower(WIDE).check(**sent)


def test_the_first_of_equals_and_of_nans() -> None:
    """argmax and argmin are those of JAX: the first place, counted over all ranks; that of the first NaN where there is one."""
    values = numbers(9, 4)
    values[3, 1] = values[7, 1] = np.nan
    for function in (
        lambda x: x.argmax(0),
        lambda x: x.argmin(0),
        lambda x: jnp.nanargmax(x, 0),
        lambda x: jnp.argmax(x),
    ):
        agree(function, [values], [ROWS], SOME, fallback="error", gradient=False)
    agree(lambda x: (x > 0).argmax(0), [values], [ROWS], SOME, gradient=False)


def test_complex_numbers() -> None:
    """Sums and products in phases; what orders complex numbers is gathered."""
    values = (numbers(9, 4) + 1j * numbers(9, 4)[::-1]).astype(np.complex64)
    for function in (
        lambda z: jnp.cumsum(z, 0),
        lambda z: jnp.cumprod(z, 0),
        lambda z: lax.cummax(z, 0),
        lambda z: lax.cummin(z, 0),
        lambda z: lax.cumlogsumexp(z, 0),
    ):
        agree(function, [values], [ROWS], SOME[1:2], fallback="error", gradient=False)


def test_running_sums_in_a_loop() -> None:
    def steps(x: Any) -> Any:
        return lax.fori_loop(0, 3, lambda i, u: jnp.cumsum(u, 0) * 0.3 + u.argmax(0), x)

    agree(steps, [numbers(9, 4)], [ROWS], SOME, fallback="error")


def test_three_dims_by_slabs_and_pencils() -> None:
    """A transform of three dims, one of them sharded: one all_to_all; two of them sharded: one for each axis and dim."""
    agree(lambda x: jnp.abs(jnp.fft.fftn(x)), [numbers(6, 5, 4)], [P(a=S(1))], SOME[:2], fallback="error")
    cube = jax.ShapeDtypeStruct((32, 32, 32), np.complex64)
    slabs = spmd.jit(jnp.fft.fftn, mesh=Mesh(a=4), in_placements=P(a=S(0)), fallback="error").lower(cube)
    slabs.check(all_to_all=1)
    mesh = Mesh(a=2, b=2)
    pencils = spmd.jit(jnp.fft.fftn, mesh=mesh, in_placements=P(a=S(0), b=S(1)), fallback="error").lower(cube)
    pencils.check(all_to_all=...)
    assert len(pencils.collectives) <= 4


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int32, np.uint8, np.bool_])
def test_the_largest_of_pieces(dtype: Any) -> None:
    """Ties go to the lower index, a NaN is larger or smaller than all by its sign: as on whole arrays, sizes uneven or not."""
    for size, ranks, k in ((64, 4, 3), (17, 3, 2), (33, 5, 3), (30, 4, 3), (9, 2, 1)):
        x = (np.arange(size) * 7 % 5 - 2).astype(dtype)
        if np.issubdtype(dtype, np.floating) or dtype == jnp.bfloat16:
            x[[1, 5, size - 2, size - 1]] = np.array([-np.inf, np.nan, -np.nan, np.inf]).astype(dtype)
        mesh = Mesh(a=ranks)
        found = spmd.jit(lambda x: lax.top_k(x, k), mesh=mesh, in_placements=ROWS)(x)  # noqa: B023
        assert "pad" in str(spmd.jit(lambda x: lax.top_k(x, k), mesh=mesh, in_placements=ROWS).lower(x))  # noqa: B023
        for array, expected in zip(found, lax.top_k(jnp.asarray(x), k), strict=True):
            np.testing.assert_array_equal(
                np.asarray(array.full()).astype(np.float64), np.asarray(expected).astype(np.float64)
            )


def test_solvers_are_planned_inside() -> None:
    """A batch of systems, and right-hand sides, stay where they are; conjugate gradients send what its products need."""
    matrices = signed_matrices(6, 3)
    systems = jax.ShapeDtypeStruct((64, 3, 3), np.float32), jax.ShapeDtypeStruct((64, 3, 2), np.float32)
    for function, args, given in (
        (jnp.linalg.solve, systems, [matrices, numbers(6, 3, 2)]),
        (jnp.linalg.inv, systems[:1], [matrices]),
    ):
        placements = (ROWS,) * len(args)
        spmd.jit(function, mesh=Mesh(a=4), in_placements=placements, fallback="error").lower(*args).check()
        agree(function, given, placements, SOME[:1], fallback="error")
    agree(jnp.linalg.solve, [matrices[0], numbers(3, 6)], [P(), COLUMNS], SOME[:1], fallback="error")

    def solved(a: Any, b: Any) -> Any:
        return jax.scipy.sparse.linalg.cg(lambda x: a.T @ (a @ x) + x, b, maxiter=20)[0]

    wide = jax.ShapeDtypeStruct((64, 8), np.float32), jax.ShapeDtypeStruct((8,), np.float32)
    lowered = spmd.jit(solved, mesh=Mesh(a=4), in_placements=(ROWS, P()), fallback="error").lower(*wide)
    assert {c.name for c in lowered.collectives} <= {"all_reduce", "broadcast"}
    agree(solved, [numbers(7, 5), numbers(5, 5)[0]], [ROWS, P()], SOME[:1], fallback="error", compiled=True)


def signed_matrices(count: int, size: int) -> Any:
    """Well-conditioned, not symmetric."""
    return numbers(count, size, size) * 0.3 + 2 * np.eye(size, dtype=np.float32)
