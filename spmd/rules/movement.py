"""Data movement: results are elements of the operands. Parts of every op pass, wherever nothing else is mixed in.

Along a sharded dim only what keeps the chunks where they are: a slice, pad, concatenation, reversal along a dim keeps that
dim replicated (an exchange is the general way; a later table).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from jax import lax

from collectives.jax_compat import JaxprEqn, Literal
from spmd.factors import ANY_OP, LINEAR, Dims, Passes, Rule

Shape = tuple[int, ...]
MOVES: Final = (Passes(ANY_OP, (0,), movement=True),)


def _size(eqn: JaxprEqn) -> float:
    return float(math.prod(eqn.outvars[0].aval.shape))


def _singles(ndim: int) -> Dims:
    return tuple((dim,) for dim in range(ndim))


def _set(name: str) -> Callable[[dict[str, Any], list[Shape], list[Shape]], dict[str, Any]]:
    """A `resize` that sets the parameter `name` to the local shape of the result."""
    return lambda params, operands, results: {**params, name: results[0]}


def _broadcast_in_dim(eqn: JaxprEqn) -> Rule | None:
    if len(eqn.invars) != 1:
        return None
    shape, sizes = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    to = eqn.params["broadcast_dimensions"]
    operand = tuple((int(to[dim]),) if size == sizes[to[dim]] else () for dim, size in enumerate(shape))
    return Rule((operand,), (_singles(len(sizes)),), sizes, passes=MOVES, resize=_set("shape"), flops=_size(eqn))


def _transpose(eqn: JaxprEqn) -> Rule:
    shape, permutation = eqn.invars[0].aval.shape, eqn.params["permutation"]
    result = tuple((dim,) for dim in permutation)
    return Rule((_singles(len(shape)),), (result,), shape, passes=MOVES, flops=_size(eqn))


def _squeeze(eqn: JaxprEqn) -> Rule:
    shape = eqn.invars[0].aval.shape
    gone = eqn.params["dimensions"]
    result = tuple((dim,) for dim in range(len(shape)) if dim not in gone)
    return Rule((_singles(len(shape)),), (result,), shape, replicated=gone, passes=MOVES, flops=_size(eqn))


def factorize(before: Shape, after: Shape) -> tuple[Dims, Dims, Shape, tuple[int, ...]]:
    """The common factors of two shapes of one size: dims before, dims after, sizes, and which must stay replicated.

    >>> factorize((2, 3, 4), (6, 4))
    (((0,), (1,), (2,)), ((0, 1), (2,)), (2, 3, 4), ())
    """
    sizes: list[int] = []
    replicated: list[int] = []
    dims: tuple[list[list[int]], list[list[int]]] = ([[] for _ in before], [[] for _ in after])
    left = [list(before), list(after)]

    def give(size: int, *places: tuple[int, int]) -> None:
        """A new factor, next in the given dims (side, dim)."""
        for side, dim in places:
            dims[side][dim].append(len(sizes))
            left[side][dim] //= size
        sizes.append(size)

    i = j = 0
    locked = 0 in before
    while i < len(before) and j < len(after) and not locked:
        if left[0][i] == 1:
            i += 1
        elif left[1][j] == 1:
            j += 1
        else:
            common = math.gcd(left[0][i], left[1][j])
            locked = common == 1
            if not locked:
                divides = common in (left[0][i], left[1][j])
                give(common, (0, i), (1, j))
                locked = not divides
    for side, shape in enumerate((before, after)):
        for dim in range(len(shape)):
            if left[side][dim] != 1:
                replicated.append(len(sizes))
                give(left[side][dim] or 1, (side, dim)) if left[side][dim] else _give_zero(dims[side][dim], sizes)
    as_dims = tuple(tuple(tuple(factors) for factors in side) for side in dims)
    return as_dims[0], as_dims[1], tuple(sizes), tuple(replicated)


def _give_zero(factors: list[int], sizes: list[int]) -> None:
    factors.append(len(sizes))
    sizes.append(0)


def _reshape(eqn: JaxprEqn) -> Rule | None:
    if len(eqn.invars) != 1 or eqn.params.get("dimensions") is not None:
        return None
    operand, result, sizes, replicated = factorize(eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape)
    return Rule(
        (operand,), (result,), sizes, replicated=replicated, passes=MOVES, resize=_set("new_sizes"), flops=_size(eqn)
    )


def _cut(before: Shape, after: tuple[Shape, ...], untouched: list[bool]) -> tuple[Dims, tuple[Dims, ...], Shape, Shape]:
    """Factors of an operand and its results: shared along untouched dims, replicated ones of their own along others."""
    sizes = list(before)
    replicated = [dim for dim, whole in enumerate(untouched) if not whole]
    results = []
    for shape in after:
        dims = []
        for dim, size in enumerate(shape):
            if untouched[dim]:
                dims.append((dim,))
            else:
                replicated.append(len(sizes))
                dims.append((len(sizes),))
                sizes.append(size)
        results.append(tuple(dims))
    return _singles(len(before)), tuple(results), tuple(sizes), tuple(replicated)


def _slice(eqn: JaxprEqn) -> Rule:
    shape, params = eqn.invars[0].aval.shape, eqn.params
    strides = params["strides"] or (1,) * len(shape)
    untouched = [
        (start, limit, stride) == (0, size, 1)
        for start, limit, stride, size in zip(
            params["start_indices"], params["limit_indices"], strides, shape, strict=True
        )
    ]
    operand, results, sizes, replicated = _cut(shape, (eqn.outvars[0].aval.shape,), untouched)

    def resize(params: dict[str, Any], operands: list[Shape], results: list[Shape]) -> dict[str, Any]:
        limits = tuple(
            size if whole else limit
            for whole, size, limit in zip(untouched, operands[0], params["limit_indices"], strict=True)
        )
        return {**params, "limit_indices": limits}

    return Rule((operand,), results, sizes, replicated=replicated, passes=MOVES, resize=resize, flops=_size(eqn))


def _split(eqn: JaxprEqn) -> Rule:
    shape = eqn.invars[0].aval.shape
    untouched = [dim != eqn.params["axis"] for dim in range(len(shape))]
    operand, results, sizes, replicated = _cut(shape, tuple(out.aval.shape for out in eqn.outvars), untouched)
    return Rule((operand,), results, sizes, replicated=replicated, passes=MOVES, flops=float(math.prod(shape)))


def _pad(eqn: JaxprEqn) -> Rule:
    shape = eqn.invars[0].aval.shape
    untouched = [config == (0, 0, 0) for config in eqn.params["padding_config"]]
    operand, results, sizes, replicated = _cut(shape, (eqn.outvars[0].aval.shape,), untouched)
    fill = eqn.invars[1]
    zero = isinstance(fill, Literal) and np.asarray(fill.val).dtype != np.bool_ and not np.any(np.asarray(fill.val))
    passes = (Passes(LINEAR, (0,), movement=True),) if zero else ()
    return Rule((operand, ()), results, sizes, replicated=replicated, passes=passes, flops=_size(eqn))


def _concatenate(eqn: JaxprEqn) -> Rule:
    along, shape = eqn.params["dimension"], eqn.outvars[0].aval.shape
    sizes, operands = list(shape), []
    replicated = [along]
    for atom in eqn.invars:
        replicated.append(len(sizes))
        operands.append(tuple((len(sizes),) if dim == along else (dim,) for dim in range(len(shape))))
        sizes.append(atom.aval.shape[along])
    passes = (Passes(ANY_OP, tuple(range(len(eqn.invars))), movement=True),)
    return Rule(tuple(operands), (_singles(len(shape)),), tuple(sizes), (), tuple(replicated), passes, flops=_size(eqn))


def _stack(eqn: JaxprEqn) -> Rule:
    """A new dim, one index for each operand; it is in no operand, and stays whole."""
    along, shape = eqn.params["axis"], eqn.outvars[0].aval.shape
    operand = tuple((dim,) for dim in range(len(shape)) if dim != along)
    passes = (Passes(ANY_OP, tuple(range(len(eqn.invars))), movement=True),)
    results = (_singles(len(shape)),)
    return Rule((operand,) * len(eqn.invars), results, shape, (), (along,), passes, flops=_size(eqn))


def _unstack(eqn: JaxprEqn) -> Rule:
    along, shape = eqn.params["axis"], eqn.invars[0].aval.shape
    result = tuple((dim,) for dim in range(len(shape)) if dim != along)
    results = (result,) * len(eqn.outvars)
    return Rule((_singles(len(shape)),), results, shape, (), (along,), MOVES, flops=float(math.prod(shape)))


def _tile(eqn: JaxprEqn) -> Rule | None:
    shape, repetitions = eqn.invars[0].aval.shape, eqn.params["reps"]
    if len(repetitions) != len(shape):
        return None
    untouched = [count == 1 for count in repetitions]
    operand, results, sizes, replicated = _cut(shape, (eqn.outvars[0].aval.shape,), untouched)
    return Rule((operand,), results, sizes, replicated=replicated, passes=MOVES, flops=_size(eqn))


def _reverse(eqn: JaxprEqn) -> Rule:
    shape = eqn.invars[0].aval.shape
    dims = _singles(len(shape))
    replicated = tuple(eqn.params["dimensions"])
    return Rule((dims,), (dims,), shape, replicated=replicated, passes=MOVES, flops=_size(eqn))


def _iota(eqn: JaxprEqn) -> Rule | None:
    """Nothing to move: each coordinate counts from its global offset."""
    if eqn.invars:
        return None
    shape, dimension = eqn.outvars[0].aval.shape, eqn.params["dimension"]

    def local(call: Any, operands: list[Any]) -> list[Any]:
        dtype = eqn.params["dtype"]
        count = lax.broadcasted_iota(dtype, call.result_shapes[0], dimension)
        offset = call.offset(call.result_layouts[0], shape, dimension)
        return [count if offset is None else lax.add(count, lax.convert_element_type(offset, dtype))]

    return Rule((), (_singles(len(shape)),), shape, local=local, flops=_size(eqn))


def _bitcast(eqn: JaxprEqn) -> Rule:
    """The bits as they are: to a narrower dtype with a new last dim, from one with the last dim gone; it stays whole."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    sizes = max(before, after, key=len)
    whole = () if len(before) == len(after) else (len(sizes) - 1,)
    dims = _singles(len(before)), _singles(len(after))
    return Rule((dims[0],), (dims[1],), sizes, replicated=whole, flops=_size(eqn))


def _device_put(eqn: JaxprEqn) -> Rule | None:
    """A copy; in a lowered program memory kinds and devices are the process's own."""
    if len(eqn.invars) != 1:
        return None
    shape = eqn.invars[0].aval.shape
    dims = _singles(len(shape))
    return Rule((dims,), (dims,), shape, passes=MOVES, local=lambda call, operands: operands, flops=0.0)


def _barrier(eqn: JaxprEqn) -> Rule | None:
    if len(eqn.invars) != 1:
        return None
    shape = eqn.invars[0].aval.shape
    dims = _singles(len(shape))
    return Rule((dims,), (dims,), shape, passes=MOVES)


TABLE: Final[dict[str, Callable[[JaxprEqn], Rule | None]]] = {
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "device_put": _device_put,
    "iota": _iota,
    "optimization_barrier": _barrier,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _reverse,
    "slice": _slice,
    "split": _split,
    "squeeze": _squeeze,
    "stack": _stack,
    "tile": _tile,
    "transpose": _transpose,
    "unstack": _unstack,
}
