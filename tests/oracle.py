"""The oracle of numerical tests: the undecorated function on whole arrays, compared on every rank.

`agree` places the arguments, runs the decorated function (first op by op, with `compiled=True` again as one executable),
and compares every shard and the gathered result; then the gradient of a weighted sum of the results, in the same way.
The tolerance is stated here, once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from collectives.launch import launch
from collectives.process import held_coordinates, is_simulated
from placements import Mesh, P

LAUNCH = launch()
"""Where this runs on real ranks, the meshes of a test are those of the job's size; others are simulated on every rank."""


def fit(mesh: Mesh) -> Mesh:
    """The mesh, on the processes of the job if it has their number, else simulated."""
    if LAUNCH is None or mesh.size == LAUNCH.size or mesh.rank_list is not None:
        return mesh
    return Mesh(dict(mesh.axes), backend="simulated")


def fitting(*meshes: Mesh) -> tuple[Mesh, ...]:
    """In a lone process all meshes, on real ranks those that fit."""
    return tuple(mesh for mesh in meshes if LAUNCH is None or mesh.size == LAUNCH.size)


RANKS = fitting(*(Mesh(a=n) for n in range(1, 6)))
"""One axis, one to five ranks."""
FEW = fitting(Mesh(a=2), Mesh(a=3), Mesh(a=4))
"""One axis, for tests that compile much."""
GRIDS = fitting(Mesh(a=2, b=2), Mesh(b=2, a=2), Mesh(a=2, b=3), Mesh(b=3, a=2))
"""Two axes, in both orders."""


def tolerance(dtype: Any, mesh: Mesh) -> float:
    """The relative error allowed to a sum over the ranks of a mesh: some roundings more than on one rank."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    return float(jnp.finfo(dtype).eps) * 32 * (1 + math.log2(mesh.size))


def same(found: Any, expected: Any, mesh: Mesh, exact: bool = False) -> None:
    """Assert that a DArray holds `expected`, on every rank and gathered."""
    assert isinstance(found, spmd.DArray)
    expected = np.asarray(expected)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), (found, expected.dtype, expected.shape)
    bound = 0.0 if exact else tolerance(expected.dtype, mesh)
    _close(found.full(), expected, bound)
    if not found.layout.partial:
        for coordinate, shard in found.shards.items():
            _close(shard, expected[found.layout.index(found.shape, coordinate)], bound)


def _close(found: Any, expected: Any, bound: float) -> None:
    wide = np.complex128 if np.iscomplexobj(expected) else np.float64
    a, b = np.asarray(found).astype(wide), np.asarray(expected).astype(wide)
    assert a.shape == b.shape
    finite = np.abs(b[np.isfinite(b)])
    scale = float(finite.max()) if finite.size else 0.0
    np.testing.assert_allclose(a, b, rtol=bound, atol=bound * scale)


def agree(
    function: Callable[..., Any],
    args: Sequence[Any],
    placements: Sequence[Any],
    meshes: Sequence[Mesh] = RANKS,
    *,
    out: Any = None,
    exact: bool = False,
    gradient: bool = True,
    compiled: bool = False,
    fallback: str = "allow",
) -> list[Any]:
    """Assert that a function gives the same under placements as on whole arrays. Returns the Programs, one per mesh."""
    plain = function(*jax.tree.map(jnp.asarray, tuple(args)))
    programs = []
    for mesh in meshes:
        decorated = spmd.jit(
            function, mesh=mesh, in_placements=tuple(placements), out_placements=out, fallback=fallback
        )
        for _ in range(2 if compiled else 1):
            result = decorated(*args)
            jax.tree.map(lambda f, e: same(f, e, mesh, exact), result, plain)  # noqa: B023
        programs.append(decorated.lower(*args))
        if gradient:
            _same_gradient(function, decorated, args, mesh)
    return programs


def weigh(results: Any) -> jax.Array:
    """A scalar of any results: a sum with position-dependent weights of both signs."""
    total = jnp.zeros(())
    for leaf in jax.tree.leaves(results):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            weights = ((jnp.arange(leaf.size) * 5) % 7 - 2.5).reshape(leaf.shape)
            total += jnp.sum(jnp.real(leaf * weights.astype(leaf.dtype))).astype(total.dtype)
    return total


def _same_gradient(function: Callable[..., Any], decorated: Any, args: Sequence[Any], mesh: Mesh) -> None:
    numbers = [i for i, arg in enumerate(args) if jnp.issubdtype(jnp.result_type(arg), jnp.floating)]
    if not numbers:
        return

    def scalar(inner: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: weigh(inner(*args))

    expected = jax.grad(scalar(function), numbers)(*map(jnp.asarray, args))
    found = spmd.jit(spmd.grad(scalar(decorated), numbers), mesh=mesh, fallback="allow")(*args)
    for f, e in zip(found, expected, strict=True):
        same(f, e, mesh)


def from_pieces(pieces: Sequence[Any], placements: P, mesh: Mesh, **options: Any) -> spmd.DArray:
    """`spmd.from_local` of every rank's piece: the list in the simulator, on a real rank its own."""
    held = held_coordinates(mesh)
    given = list(pieces) if is_simulated(mesh) else pieces[mesh.position(held[0])]
    return spmd.from_local(given, placements, mesh, **options)


def parts_of(whole: Any, n: int, op: str = "sum") -> list[np.ndarray]:
    """n unequal parts of both signs whose reduction by `op` is `whole` (exactly, for small integers)."""
    whole = np.asarray(whole)
    rng = np.random.default_rng(n)
    if op in ("max", "min"):
        sign = -1 if op == "max" else 1
        parts = [(whole + sign * rng.integers(1, 5, whole.shape)).astype(whole.dtype) for _ in range(n)]
        for index in np.ndindex(whole.shape):
            parts[int(rng.integers(n))][index] = whole[index]
        return parts
    parts = [rng.integers(-9, 10, whole.shape).astype(whole.dtype) for _ in range(n - 1)]
    goal = whole * n if op == "mean" else whole
    return [*parts, (goal - sum(parts)).astype(whole.dtype)]
