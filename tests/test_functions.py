"""The table of functions, under placements, meshes and rank counts drawn by a seed: values on every rank, and gradients."""

from __future__ import annotations

import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import sample
from functions import FUNCTIONS, Case
from oracle import weigh

import spmd
from placements import Mesh, P, Partial, Replicate, Shard
from spmd.rules import REPLICATED

FALLS_BACK: dict[str, str] = {}
"""Functions of the table that need whole operands for an operation without a rule, with the operation: none now."""

MESHES = [*(Mesh(a=n) for n in range(1, 6)), Mesh(a=2, b=2), Mesh(a=2, b=3), Mesh(b=3, a=2)]
CASES, SHARE = 24, 5
"""The default run takes 24 cases of a fifth of the functions, about 2,000; `--all` half as many of all, about 5,000."""


def drawn(case: Case, rng: np.random.Generator) -> tuple[Mesh, tuple[P, ...]]:
    """A mesh, and placements for every operand: each axis replicates, shards any dim, or has parts of a sum."""
    mesh = MESHES[rng.integers(len(MESHES))]
    placements = []
    for arg in case.args:
        named: dict[str, Any] = {}
        for axis in rng.permutation(list(mesh.axis_names)):
            options: list[Any] = [Replicate(), *map(Shard, range(np.ndim(arg))), *map(Shard, range(np.ndim(arg)))]
            options += [Partial()] if np.asarray(arg).dtype != np.bool_ else []
            named[str(axis)] = options[rng.integers(len(options))]
        placements.append(P(**named))
    return mesh, tuple(placements)


def close(found: Any, expected: Any, what: str) -> None:
    """Equal for integers, and near for floats, relative to the largest element."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), what
    if expected.dtype.kind in "biu":
        np.testing.assert_array_equal(found, expected, what)
        return
    finite = np.abs(expected[np.isfinite(expected)])
    scale = float(finite.max()) if finite.size else 0.0
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=5e-5 * max(scale, 1e-3), err_msg=what)


def check(name: str, seed: int) -> None:
    """One case of one function."""
    case = FUNCTIONS[name]
    rng = np.random.default_rng([zlib.crc32(name.encode()), seed])
    mesh, placements = drawn(case, rng)
    what = f"{name} on {mesh!r} with {placements}"
    function = spmd.jit(case.function, mesh=mesh, in_placements=placements, fallback="allow")
    program = function.lower(*case.args)
    lacking = {fallback.primitive for fallback in program.fallbacks}
    assert lacking <= {FALLS_BACK.get(name)} & set(REPLICATED), f"{what}: {lacking}"
    expected = case.function(*map(jnp.asarray, case.args))
    result = function(*case.args)
    for array, whole in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        close(array.full(), whole, what)
        for coordinate, shard in array.shards.items():
            close(shard, np.asarray(whole)[array.layout.index(array.shape, coordinate)], what)
    numbers = [at for at, arg in enumerate(case.args) if np.asarray(arg).dtype.kind == "f"]
    if case.smooth and numbers and seed % 2 == 0:
        gradient = jax.grad(lambda *args: weigh(case.function(*args)), numbers)
        found = spmd.jit(gradient, mesh=mesh, in_placements=placements, fallback="allow")(*case.args)
        for array, whole in zip(found, gradient(*map(jnp.asarray, case.args)), strict=True):
            close(array.full(), whole, f"gradient of {what}")


@pytest.mark.parametrize("name", sample(FUNCTIONS, SHARE))
def test_function(name: str, everything: bool) -> None:
    for seed in range(CASES // 2 if everything else CASES):
        check(name, seed)


def test_the_table_is_large() -> None:
    assert len(FUNCTIONS) >= 250
    assert set(FALLS_BACK) <= set(FUNCTIONS)
    assert sum(math.prod(np.shape(arg)) for case in FUNCTIONS.values() for arg in case.args) < 100_000
