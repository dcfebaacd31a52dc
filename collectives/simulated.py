"""The simulator's side: every collective on the tuple of all members' buffers, as plain array code.

`GROUP` maps a collective's name to a function from the members' arrays to the members' results, with the arguments of
`Communicator`. Deterministic; works on any platform, eagerly and under `jax.jit`, for uneven and empty shards. Members
that receive the same value share one array.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from collectives.errors import InvalidCollective
from placements.intervals import Bounds, cover

Arrays = Sequence[jax.Array]


def is_small_float(dtype: Any) -> bool:
    """Whether a dtype is a float of 16 bits or fewer."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and np.dtype(dtype).itemsize < 4


def reduction_dtype(dtype: Any) -> Any:
    """The dtype in which parts are reduced: 32 bits for floats and integers of 16 or fewer, else their own.

    A sum in 16-bit floats loses digits, and Open MPI's sums of short integers saturate where they should wrap.
    """
    if is_small_float(dtype):
        return np.dtype(np.float32)
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 32:
        return np.dtype(np.int32 if jnp.issubdtype(dtype, jnp.signedinteger) else np.uint32)
    return dtype


def kind_of(dtype: Any) -> str:
    """What an op of parts needs to know of a dtype: bool, integer, float, complex, or key."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return "key"
    kinds = {"bool": np.bool_, "integer": np.integer, "float": np.floating, "complex": np.complexfloating}
    return next(name for name, kind in kinds.items() if jnp.issubdtype(dtype, kind))


def identity(op: str, dtype: Any) -> np.ndarray[Any, Any]:
    """The 0-d array that leaves any value unchanged under `op`. For floats that of a sum is -0.0: +0.0 loses its sign.

    `mean` has none; zero is returned, which is right where the other value was multiplied by the number of ranks.
    """
    dtype = np.dtype(dtype)
    if op in ("sum", "mean"):
        return np.array(-0.0 if jnp.issubdtype(dtype, jnp.inexact) else 0, dtype)
    if op in ("prod", "and", "or", "xor"):
        unit = {"prod": 1, "and": True if dtype == np.bool_ else -1, "or": 0, "xor": 0}[op]
        return np.asarray(unit).astype(dtype)
    if dtype == np.bool_:
        return np.array(op == "min")
    if jnp.issubdtype(dtype, jnp.floating):
        finite = jnp.finfo(dtype)
        bound = {"max": finite.min, "min": finite.max}[op]
        infinite = np.array({"max": -np.inf, "min": np.inf}[op]).astype(dtype)
        return np.array(bound, dtype) if np.isnan(infinite.astype(np.float32)) else infinite
    limits = jnp.iinfo(dtype)
    return np.array({"max": limits.min, "min": limits.max}[op], dtype)


def _binary(op: str, dtype: Any) -> Callable[[Any, Any], Any]:
    """The two-argument form of a reduction. max and min carry NaN, as in JAX."""
    if dtype == jnp.bool_:
        names = {"prod": lax.bitwise_and, "max": lax.bitwise_or, "min": lax.bitwise_and}
        if op in names:
            return names[op]
    table = {
        "sum": lax.add, "mean": lax.add, "prod": lax.mul, "max": lax.max, "min": lax.min,
        "and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor,
    }  # fmt: skip
    return table[op]


def reduce_parts(arrays: Arrays, op: str) -> jax.Array:
    """The reduction of equally shaped arrays, in order, in their `reduction_dtype`."""
    dtype = arrays[0].dtype
    wide = reduction_dtype(dtype)
    if wide != dtype:
        return reduce_parts([lax.convert_element_type(a, wide) for a in arrays], op).astype(dtype)
    total = functools.reduce(_binary(op, dtype), arrays)
    return lax.div(total, lax.full_like(total, len(arrays))) if op == "mean" else total


def all_reduce(arrays: Arrays, *, op: str) -> list[jax.Array]:
    """See `Communicator.all_reduce`."""
    return [reduce_parts(arrays, op)] * len(arrays)


def all_gather(arrays: Arrays, *, dim: int, sizes: Sequence[int]) -> list[jax.Array]:
    """See `Communicator.all_gather`."""
    _check_sizes("all_gather", [array.shape[dim] for array in arrays], sizes)
    return [lax.concatenate(list(arrays), dim)] * len(arrays)


def reduce_scatter(arrays: Arrays, *, op: str, dim: int, sizes: Sequence[int]) -> list[jax.Array]:
    """See `Communicator.reduce_scatter`."""
    _check_sizes("reduce_scatter", [array.shape[dim] for array in arrays], [sum(sizes)] * len(arrays))
    return _split(reduce_parts(arrays, op), dim, sizes)


def all_to_all(
    arrays: Arrays, *, dim: int, sizes: Sequence[int], to_dim: int, to_sizes: Sequence[int]
) -> list[jax.Array]:
    """See `Communicator.all_to_all`."""
    _check_sizes("all_to_all", [array.shape[dim] for array in arrays], sizes)
    columns = zip(*(_split(array, to_dim, to_sizes) for array in arrays), strict=True)
    return [lax.concatenate(list(column), dim) for column in columns]


def exchange(arrays: Arrays, *, dim: int, have: Sequence[Bounds], want: Sequence[Bounds]) -> list[jax.Array]:
    """See `Communicator.exchange`."""
    _check_sizes("exchange", [array.shape[dim] for array in arrays], [high - low for low, high in have])
    results: dict[tuple[tuple[int, Bounds], ...], jax.Array] = {}
    out = []
    for member, wanted in enumerate(want):
        parts = cover(tuple(have), wanted, member)
        if parts not in results:
            slices = [
                lax.slice_in_dim(arrays[i], low - have[i][0], high - have[i][0], axis=dim) for i, (low, high) in parts
            ]
            empty = lax.slice_in_dim(arrays[member], 0, 0, axis=dim)
            results[parts] = lax.concatenate(slices, dim) if slices else empty
        out.append(results[parts])
    return out


def broadcast(arrays: Arrays, *, root: int) -> list[jax.Array]:
    """See `Communicator.broadcast`."""
    if not 0 <= root < len(arrays):
        raise InvalidCollective(f"broadcast: root {root} is outside a group of {len(arrays)}.")
    return [arrays[root]] * len(arrays)


def permute(arrays: Arrays, *, pairs: Sequence[tuple[int, int]]) -> list[jax.Array]:
    """See `Communicator.permute`."""
    n = len(arrays)
    if any(not (0 <= i < n and 0 <= j < n) for i, j in pairs) or len({j for _, j in pairs}) != len(pairs):
        raise InvalidCollective(
            f"permute: {tuple(pairs)} on {n} members: members exist, and destinations are distinct."
        )
    sources = {destination: source for source, destination in pairs}
    return [arrays[sources[member]] if member in sources else lax.full_like(arrays[member], 0) for member in range(n)]


def _split(array: jax.Array, dim: int, sizes: Sequence[int]) -> list[jax.Array]:
    ends = np.cumsum(sizes).tolist()
    return [lax.slice_in_dim(array, end - size, end, axis=dim) for end, size in zip(ends, sizes, strict=True)]


def _check_sizes(name: str, found: Sequence[int], stated: Sequence[int]) -> None:
    if list(found) != list(stated):
        raise InvalidCollective(f"{name}: the members hold {list(found)} indices, but {list(stated)} are stated.")


GROUP: Final[dict[str, Callable[..., list[jax.Array]]]] = {
    "all_gather": all_gather,
    "all_reduce": all_reduce,
    "all_to_all": all_to_all,
    "broadcast": broadcast,
    "exchange": exchange,
    "permute": permute,
    "reduce_scatter": reduce_scatter,
}
