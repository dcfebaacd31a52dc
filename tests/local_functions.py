"""A table of local functions: what each does to a shard, and what that is on whole arrays. For simulated and real ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import collectives as c
import spmd
from placements import Mesh, P, Shard

Axes = tuple[str, ...]


def stacked(x: Any, n: int) -> Any:
    """The shards of dim 0, one after the other along a new dim."""
    return x.reshape(n, x.shape[0] // n, *x.shape[1:])


def rows(axes: Axes, dim: int = 0) -> P:
    """A dim sharded over axes, the first major."""
    return P(**{axis: Shard(dim) for axis in axes})


def whole(axes: Axes) -> P:
    """The same on all ranks."""
    return P()


@dataclass(frozen=True)
class Local:
    """`local(shard, axes)` of rows over `axes`, its result as `placed(axes)`, and `expected(x, n)` of the whole."""

    local: Callable[[Any, Axes], Any]
    placed: Callable[[Axes], P]
    expected: Callable[[Any, int], Any]
    smooth: bool = True


def columns(axes: Axes) -> P:
    """Dim 1 sharded."""
    return rows(axes, 1)


def only(x: Any, index: int, n: int) -> Any:
    """Shards of which all but one are zeros."""
    return jnp.concatenate([x if at == index else jnp.zeros_like(x) for at in range(n)])


def padded(x: Any, n: int, mode: str) -> Any:
    """Every shard with a row of its neighbours on both sides."""
    around = jnp.pad(x, ((1, 1), (0, 0)), mode=mode)
    size = x.shape[0] // n
    return jnp.concatenate([around[at * size : (at + 1) * size + 2] for at in range(n)])


def crossed(x: Any, n: int) -> Any:
    """all_to_all along one dim: every shard has the columns that are its own of all."""
    pieces = stacked(x, n).reshape(n, x.shape[0] // n, n, -1)
    return pieces.transpose(2, 1, 0, 3).reshape(x.shape)


TABLE: dict[str, Local] = {
    **{
        f"all_reduce {op}": Local(
            lambda x, axes, op=op: c.all_reduce(x, axes, op),
            whole,
            lambda x, n, op=op: getattr(jnp, op)(stacked(x, n), 0),
        )
        for op in ("sum", "mean", "max", "min", "prod")
    },
    "all_reduce and": Local(
        lambda x, axes: c.all_reduce(x.astype(int), axes, "and"),
        whole,
        lambda x, n: lax.reduce_and(stacked(x.astype(int), n), (0,)),
        smooth=False,
    ),
    "all_reduce or": Local(
        lambda x, axes: c.all_reduce(x > 2, axes, "or"), whole, lambda x, n: jnp.any(stacked(x > 2, n), 0), smooth=False
    ),
    "all_reduce xor": Local(
        lambda x, axes: c.all_reduce(x.astype(int), axes, "xor"),
        whole,
        lambda x, n: lax.reduce_xor(stacked(x.astype(int), n), (0,)),
        smooth=False,
    ),
    "all_gather": Local(lambda x, axes: c.all_gather(x, axes), whole, lambda x, n: x),
    "all_gather of dim 1": Local(
        lambda x, axes: c.all_gather(x, axes, dim=-1), whole, lambda x, n: jnp.concatenate(list(stacked(x, n)), 1)
    ),
    "reduce_scatter": Local(
        lambda x, axes: c.reduce_scatter(x, axes, dim=1), columns, lambda x, n: stacked(x, n).sum(0)
    ),
    "reduce_scatter mean": Local(
        lambda x, axes: c.reduce_scatter(x, axes, 1, "mean"), columns, lambda x, n: stacked(x, n).mean(0)
    ),
    "all_to_all": Local(lambda x, axes: c.all_to_all(x, axes, 1, 0), columns, lambda x, n: x),
    "all_to_all along one dim": Local(lambda x, axes: c.all_to_all(x, axes, 1, 1), rows, crossed),
    "broadcast": Local(
        lambda x, axes: c.broadcast(x, axes, c.axis_size(axes) - 1), whole, lambda x, n: stacked(x, n)[n - 1]
    ),
    "reduce": Local(
        lambda x, axes: c.reduce(x, axes, root=c.axis_size(axes) - 1),
        rows,
        lambda x, n: only(stacked(x, n).sum(0), n - 1, n),
    ),
    "gather": Local(lambda x, axes: c.gather(x, axes), rows, lambda x, n: only(x, 0, n)),
    "scatter": Local(
        lambda x, axes: c.scatter(x, axes, 1, c.axis_size(axes) - 1), columns, lambda x, n: stacked(x, n)[n - 1]
    ),
    "permute": Local(
        lambda x, axes: c.permute(x, axes, [(i, (i + 2) % c.axis_size(axes)) for i in range(c.axis_size(axes) - 1)]),
        rows,
        lambda x, n: jnp.concatenate([stacked(x, n)[(at - 2) % n] * ((at - 2) % n != n - 1) for at in range(n)]),
    ),
    "one to all": Local(
        lambda x, axes: c.permute(x, axes, [(0, i) for i in range(c.axis_size(axes))]),
        rows,
        lambda x, n: jnp.concatenate([stacked(x, n)[0]] * n),
    ),
    "shift": Local(lambda x, axes: c.shift(x, axes), rows, lambda x, n: jnp.roll(x, x.shape[0] // n, 0)),
    "shift open": Local(
        lambda x, axes: c.shift(x, axes, -1, periodic=False),
        rows,
        lambda x, n: jnp.concatenate([x[x.shape[0] // n :], jnp.zeros_like(x[: x.shape[0] // n])]),
    ),
    "send_recv": Local(
        lambda x, axes: c.send_recv(x, axes, c.axis_size(axes) - 1, 0),
        rows,
        lambda x, n: only(stacked(x, n)[n - 1], 0, n),
    ),
    **{
        f"halo {fill}": Local(
            lambda x, axes, fill=fill: c.halo_exchange(x, {axes[0]: 0}, 1, fill) if len(axes) == 1 else None,
            rows,
            lambda x, n, mode=mode: padded(x, n, mode),
        )
        for fill, mode in (("periodic", "wrap"), ("edge", "edge"), ("zeros", "constant"))
    },
    "axis_index": Local(
        lambda x, axes: x * c.axis_index(axes),
        rows,
        lambda x, n: (stacked(x, n) * jnp.arange(n)[:, None, None]).reshape(x.shape),
    ),
    "psum": Local(lambda x, axes: lax.psum(x, axes), whole, lambda x, n: stacked(x, n).sum(0)),
    "pmax": Local(lambda x, axes: lax.pmax(x, axes), whole, lambda x, n: stacked(x, n).max(0), smooth=False),
    "pmean": Local(lambda x, axes: lax.pmean(x, axes), whole, lambda x, n: stacked(x, n).mean(0)),
    "lax.all_gather": Local(
        lambda x, axes: lax.all_gather(x, axes).sum(0), rows, lambda x, n: jnp.tile(stacked(x, n).sum(0), (n, 1))
    ),
    "lax.all_gather invarying": Local(
        lambda x, axes: lax.all_gather(x, axes, axis=1, to="invarying"),
        whole,
        lambda x, n: stacked(x, n).swapaxes(0, 1),
    ),
    "psum_scatter": Local(
        lambda x, axes: lax.psum_scatter(x.reshape(x.shape[0], c.axis_size(axes), -1), axes, scatter_dimension=1),
        columns,
        lambda x, n: stacked(x, n).sum(0),
    ),
    "lax.all_to_all": Local(
        lambda x, axes: lax.all_to_all(x.reshape(x.shape[0], c.axis_size(axes), -1), axes, 1, 0),
        lambda axes: rows(axes, 0),
        lambda x, n: (
            stacked(x, n).reshape(n, x.shape[0] // n, n, -1).transpose(2, 0, 1, 3).reshape(n * n, x.shape[0] // n, -1)
        ),
        smooth=False,  # JAX's own derivative refuses its shape
    ),
    "lax.all_to_all stacked last": Local(
        lambda x, axes: lax.all_to_all(x.reshape(x.shape[0], c.axis_size(axes), -1), axes, 1, 2),
        lambda axes: rows(axes, 0),
        lambda x, n: stacked(x, n).reshape(n, x.shape[0] // n, n, -1).transpose(2, 1, 3, 0).reshape(x.shape[0], -1, n),
        smooth=False,
    ),
    "ppermute": Local(
        lambda x, axes: lax.ppermute(x, axes, [(i, (i + 1) % c.axis_size(axes)) for i in range(c.axis_size(axes))]),
        rows,
        lambda x, n: jnp.roll(x, x.shape[0] // n, 0),
    ),
}


def values(n: int) -> Any:
    """Mixed signs, ties between shards, rows and columns that n divides; no two neighbours alike."""
    x = ((np.arange(2 * n * 12) * 7) % 11 - 5).reshape(2 * n, 12).astype(np.float32)
    x[::2] = x[0]
    return x[:, : 12 if 12 % n == 0 else 2 * n]


def check(name: str, mesh: Mesh, axes: Axes) -> None:
    """Values on every rank, in the first run and the second; and the gradient of a weighted sum."""
    case, n = TABLE[name], mesh.group_size(axes)
    x = values(n)
    out = case.placed(axes)
    local = spmd.shard_map(
        lambda shard: case.local(shard, axes), mesh=mesh, in_placements=rows(axes), out_placements=out, axes=axes
    )
    expected = np.asarray(case.expected(jnp.asarray(x), n))
    for _ in range(2):
        found = local(x)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype), name
        np.testing.assert_allclose(found.full(), expected, rtol=1e-5, atol=1e-5, err_msg=name)
        for coordinate, shard in found.shards.items():
            index = found.layout.index(found.shape, coordinate)
            np.testing.assert_allclose(shard, expected[index], rtol=1e-5, atol=1e-5, err_msg=name)
    if case.smooth:
        weights = jnp.cos(jnp.arange(expected.size, dtype=jnp.float32)).reshape(expected.shape)

        def total(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
            return jax.grad(lambda x: (function(x) * weights).sum())

        gradient = spmd.jit(total(local), mesh=mesh, in_placements=rows(axes))(x)
        other = total(lambda x: case.expected(x, n))(jnp.asarray(x))
        np.testing.assert_allclose(gradient.full(), other, rtol=1e-4, atol=1e-3, err_msg=f"gradient of {name}")
