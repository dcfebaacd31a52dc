"""Random bits: a function of the key and of the global index, so every rank draws its own shard.

That is how JAX's default generator counts (threefry, `jax_threefry_partitionable`): element i of an array is the hash of the
key and i. The same array for every placement, mesh and number of ranks. Other generators, and arrays of 2^32 elements or
more, are drawn whole on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from collectives import jax_compat
from collectives.jax_compat import JaxprEqn, threefry
from spmd.factors import Rule

LARGEST: Final = 2**32
"""Elements up to which an index is one word."""


def _random_bits(eqn: JaxprEqn) -> Rule | None:
    (key,), shape = eqn.invars, eqn.params["shape"]
    batch = key.aval.shape
    if not jax_compat.draws_by_index(key.aval) or math.prod(shape) >= LARGEST:
        return None
    sizes = (*batch, *shape)
    of_key = tuple((dim,) for dim in range(len(batch)))
    of_result = tuple((dim,) for dim in range(len(sizes)))

    def local(call: Any, operands: list[Any]) -> list[Any]:
        (layout,) = call.result_layouts
        offsets = [call.offset(layout, sizes, dim) for dim in range(len(batch), len(sizes))]
        if all(offset is None for offset in offsets):
            return jax_compat.bind(eqn, operands, eqn.params)
        here = call.result_shapes[0][len(batch) :]

        def draw(words: Any) -> Any:
            return _bits(words, eqn.params["bit_width"], shape, here, offsets)

        for _ in batch:
            draw = jax.vmap(draw)
        return [draw(jax.random.key_data(operands[0]))]

    return Rule((of_key,), (of_result,), sizes, local=local, flops=30.0 * math.prod(sizes))


def _bits(words: Any, width: int, shape: tuple[int, ...], here: tuple[int, ...], offsets: list[Any]) -> Any:
    """The bits at this rank's indices of an array of global `shape`."""
    index = jnp.zeros(here, np.uint32)
    for dim, offset in enumerate(offsets):
        stride = np.uint32(math.prod(shape[dim + 1 :]) % LARGEST)
        along = lax.broadcasted_iota(np.uint32, here, dim)
        along = along if offset is None else along + lax.convert_element_type(offset, np.uint32)
        index = index + along * stride
    high, low = threefry(words[0], words[1], jnp.zeros_like(index), index)
    dtype = np.dtype(f"uint{width}")
    if width == 64:
        return lax.shift_left(high.astype(dtype), jnp.full(here, 32, dtype)) | low.astype(dtype)
    return (high ^ low).astype(dtype)


def _fold_in(eqn: JaxprEqn) -> Rule | None:
    """Each key with its own number, or one of both for all of the others."""
    shapes = [atom.aval.shape for atom in eqn.invars]
    after = eqn.outvars[0].aval.shape
    if any(shape not in ((), after) for shape in shapes):
        return None
    dims = tuple((dim,) for dim in range(len(after)))
    operands = tuple(dims if shape else () for shape in shapes)
    return Rule(operands, (dims,), after, flops=30.0 * math.prod(after))


def _split(eqn: JaxprEqn) -> Rule:
    """New keys from each key: those of one key are made together."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    dims = tuple((dim,) for dim in range(len(after)))
    new = tuple(range(len(before), len(after)))
    return Rule((dims[: len(before)],), (dims,), after, replicated=new, flops=30.0 * math.prod(after))


def _gamma(eqn: JaxprEqn) -> Rule | None:
    """Each key with its own array of parameters, which is drawn whole: the numbers of one key come from one loop."""
    keys, shape = (atom.aval.shape for atom in eqn.invars)
    if not keys or shape[: len(keys)] != keys:
        return None
    dims = tuple((dim,) for dim in range(len(shape)))
    whole = tuple(range(len(keys), len(shape)))

    def local(call: Any, operands: list[Any]) -> list[Any]:
        if 0 in call.result_shapes[0]:
            return [lax.full(call.result_shapes[0], 0, eqn.outvars[0].aval.dtype)]
        return jax_compat.bind(eqn, operands, eqn.params)

    return Rule(
        (dims[: len(keys)], dims), (dims,), shape, replicated=whole, local=local, flops=1000.0 * math.prod(shape)
    )


TABLE: Final[dict[str, Callable[[JaxprEqn], Rule | None]]] = {
    "random_bits": _random_bits,
    "random_fold_in": _fold_in,
    "random_gamma": _gamma,
    "random_split": _split,
}
