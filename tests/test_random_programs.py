"""Random programs under random placements: values and gradients are those of the whole arrays.

Each seed draws a few operations over a pool of values, products, reductions, data movement, loops and branches among them, a
mesh, placements of arguments and results. `--all` draws thirteen times as many.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd
from placements import Mesh, P, Shard

SEEDS, MANY = 5, 125
MESHES = (Mesh(a=2), Mesh(a=3), Mesh(a=4), Mesh(a=2, b=2), Mesh(a=2, b=3))
SHAPES = ((5, 4), (4, 4), (7,), (6, 6), (4, 5), (3, 4))
LARGEST = 3000
Draw = random.Random


def _add(draw: Draw, pool: list[Any], x: Any) -> Any:
    return x + draw.choice([y for y in pool if y.shape == x.shape])


def _multiply(draw: Draw, pool: list[Any], x: Any) -> Any:
    if x.ndim != 2:
        return x * 0.5
    others = [y for y in pool if y.ndim == 2 and y.shape[0] == x.shape[1]]
    return x @ (draw.choice(others) if others else x.T) / 8


def _along(function: Callable[[Any, int], Any]) -> Callable[[Draw, list[Any], Any], Any]:
    """A function along one dim."""
    return lambda draw, pool, x: function(x, draw.randrange(x.ndim)) if x.ndim else x


def _scan(x: Any, dim: int) -> Any:
    """A carry of rows, and rows of outputs: both are used."""
    rows = jnp.moveaxis(x, dim, 0)
    carry, ys = lax.scan(lambda c, row: (c * 0.5 + row, jnp.sin(c) + row), jnp.zeros(rows.shape[1:]), rows)
    return ys + carry


def _accumulate(draw: Draw, pool: list[Any], x: Any) -> Any:
    if x.ndim != 2:
        return x
    size = x.shape[1]
    return lax.scan(lambda c, row: (c + jnp.outer(row, row) / 8, None), jnp.zeros((size, size)), x)[0]


def _power(draw: Draw, pool: list[Any], x: Any) -> Any:
    squares = [y for y in pool if x.ndim == y.ndim == 2 and y.shape == (x.shape[1],) * 2]
    w = draw.choice(squares) if squares else None
    return jnp.cos(x) if w is None else lax.fori_loop(0, 2, lambda i, v: jnp.tanh(v @ w / 4), x)


def _branch(draw: Draw, pool: list[Any], x: Any) -> Any:
    return lax.cond(jnp.sum(x**2) > 3, lambda v: v * 2 - 1, lambda v: v.sum() / 16 - v, x)


def _joined(draw: Draw, pool: list[Any], x: Any) -> Any:
    """Layers on rows that a reshape joins; the rows themselves are used too."""
    pairs = jnp.stack([x, 0.5 - x], draw.randrange(x.ndim + 1))
    rows = pairs.reshape(-1, pairs.shape[-1])
    return (jnp.sin(rows @ (rows.T @ rows) / 16) + rows[:1]).reshape(pairs.shape).sum(0) + jnp.cumsum(rows, 0)[
        -1
    ].sum() / 16


def _taken(x: Any, dim: int) -> Any:
    return jnp.take(x, (jnp.arange(x.shape[dim] + 1) * 3) % max(x.shape[dim], 1), axis=dim)


def _sorted(x: Any, dim: int) -> Any:
    """Indices that depend on the data."""
    return jnp.take_along_axis(x, jnp.argsort(x, axis=dim), axis=dim)


def _scattered(x: Any, dim: int) -> Any:
    rows = jnp.moveaxis(x, dim, 0)
    at = (jnp.arange(rows.shape[0]) * 2) % max(rows.shape[0], 1)
    return rows.at[at].add(0.5 * jnp.cos(rows)).at[at[:2]].max(rows[:2])


def _difference(x: Any, dim: int) -> Any:
    """A carry that is subtracted from, and one that a maximum is taken of."""
    rows = jnp.moveaxis(x, dim, 0)
    init = jnp.ones(rows.shape[1:]), jnp.zeros(rows.shape[1:])
    low, high = lax.scan(lambda c, row: ((c[0] - row / 4, jnp.maximum(c[1], row)), None), init, rows)[0]
    return low + high


def _halved(draw: Draw, pool: list[Any], x: Any) -> Any:
    """A loop of its own for every row; no gradient leads through it."""
    if x.ndim == 0:
        return x
    rows = lax.stop_gradient(x)
    return x + jax.vmap(lambda row: lax.while_loop(lambda v: jnp.sum(v**2) > 2, lambda v: v / 2, row))(rows)


OPERATIONS: tuple[Callable[[Draw, list[Any], Any], Any], ...] = (
    lambda draw, pool, x: jnp.tanh(x),
    _add,
    lambda draw, pool, x: x.T,
    _multiply,
    _multiply,
    _along(lambda x, dim: x.sum(dim) / 4),
    _along(lambda x, dim: x - x.mean(dim, keepdims=True)),
    _along(lambda x, dim: jax.nn.softmax(x, axis=dim)),
    _along(lambda x, dim: x.max(dim)),
    _along(lambda x, dim: jnp.concatenate([x, x * 2], dim)),
    _along(lambda x, dim: jnp.cumsum(x, dim) / 4),
    _along(_scan),
    lambda draw, pool, x: x.reshape(-1),
    _accumulate,
    _power,
    _branch,
    _halved,
    lambda draw, pool, x: x + jax.random.normal(jax.random.key(3), x.shape) / 2,
    lambda draw, pool, x: x[1:] if x.ndim else x,
    lambda draw, pool, x: _joined(draw, pool, x) if x.ndim == 2 else x,
    _along(_taken),
    _along(_sorted),
    _along(_scattered),
    _along(_difference),
    _along(lambda x, dim: lax.dynamic_index_in_dim(x, x.shape[dim] // 2, dim, keepdims=False)),
)


def program(seed: int) -> Callable[..., list[Any]]:
    """The last three values of a few operations; the same ones at every call."""

    def function(*args: Any) -> list[Any]:
        draw, pool = random.Random(seed), list(args)
        for _ in range(draw.randint(3, 9)):
            made = draw.choice(OPERATIONS)(draw, pool, draw.choice(pool))
            if made.size <= LARGEST:
                pool.append(made)
        return pool[len(args) :][-3:]

    return function


def placements(draw: Draw, mesh: Mesh, ndim: int) -> P:
    """Each axis shards some dim or replicates; axes that share a dim in any order."""
    axes = [axis for axis in mesh.axis_names if ndim and draw.random() < 0.6]
    draw.shuffle(axes)
    return P(**{axis: Shard(draw.randrange(ndim)) for axis in axes})


def check(seed: int) -> None:
    """One random program: values, and for every third seed gradients."""
    draw = random.Random(-seed - 1)
    function, mesh = program(seed), draw.choice(MESHES)
    shapes = [draw.choice(SHAPES) for _ in range(draw.randint(1, 3))]
    args = [np.random.default_rng([seed, i]).normal(size=shape).astype(np.float32) for i, shape in enumerate(shapes)]
    places = tuple(placements(draw, mesh, len(shape)) for shape in shapes)
    expected = function(*map(jnp.asarray, args))
    out = [draw.choice([None, P(), placements(draw, mesh, value.ndim)]) for value in expected]
    found = spmd.jit(function, mesh=mesh, in_placements=places, out_placements=out, fallback="allow")(*args)
    for value, whole in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(value.full()), whole, rtol=2e-3, atol=2e-4)
    if seed % 3:
        return
    gradient = jax.grad(lambda *args: sum(jnp.sum(jnp.sin(x)) for x in function(*args)), tuple(range(len(args))))
    found = spmd.jit(gradient, mesh=mesh, in_placements=places, fallback="allow")(*args)
    for value, whole in zip(found, gradient(*map(jnp.asarray, args)), strict=True):
        np.testing.assert_allclose(np.asarray(value.full()), whole, rtol=5e-3, atol=1e-3)


@pytest.mark.parametrize("seed", range(0, SEEDS, 5))
def test_random_programs(seed: int) -> None:
    """Five seeds a test."""
    for each in range(seed, seed + 5):
        check(each)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS, MANY, 40))
def test_more_random_programs(seed: int) -> None:
    """Forty seeds a test."""
    for each in range(seed, seed + 40):
        check(each)
