"""Data movement: results are elements of the operands. Parts of every op pass, wherever nothing else is mixed in.

A slice, a pad, a concatenation, a reversal along a sharded dim needs of an operand a window: what the rank's piece of the
result is made of, most of which it has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from jax import lax

from collectives import jax_compat
from collectives.jax_compat import JaxprEqn, Literal
from placements.intervals import Reach
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


LARGEST: Final = 2**31
"""Elements from which on an offset is more than an int32."""


def _groups(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]]:
    """The dims of both shapes, those of size 1 left out, in the shortest runs that hold the same elements."""
    left, right = ([dim for dim, size in enumerate(shape) if size != 1] for shape in (before, after))
    found = []
    while left:
        run = [left.pop(0)], [right.pop(0)]
        while (ours := math.prod(before[dim] for dim in run[0])) != (theirs := math.prod(after[dim] for dim in run[1])):
            (run[0] if ours < theirs else run[1]).append((left if ours < theirs else right).pop(0))
        found.append(run)
    return found


def _reshape(eqn: JaxprEqn) -> Rule | None:
    """Where boundaries do not line up, a piece of the result is made of a window of rows of the operand, cut out of them."""
    if len(eqn.invars) != 1 or eqn.params.get("dimensions") is not None:
        return None
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    operand, result, sizes, replicated = factorize(before, after)
    groups = [] if 0 in before else _groups(before, after)
    windows: dict[int, Reach] = {}
    uneven: dict[int, Reach] = {}
    for ours, theirs in groups:
        first, to = ours[0], theirs[0]
        row, part = math.prod(before[dim] for dim in ours[1:]), math.prod(after[dim] for dim in theirs[1:])
        if operand[first] == result[to] or row * before[first] >= LARGEST:
            continue
        reach = Reach(after[to], part, 0, part - 1, row)
        if operand[first][0] == result[to][0]:
            uneven[first] = reach
        else:
            operand = (*operand[:first], (len(sizes),), *operand[first + 1 :])
            result = (*result[:to], (len(sizes),), *result[to + 1 :])
            sizes = (*sizes, after[to])
            windows[first] = reach

    def local(call: Any, operands: list[Any]) -> list[Any]:
        (value,), (layout,), (shape,) = operands, call.result_layouts, call.result_shapes
        if any(call.window(0, before, dim) for dim in range(len(before))) and 0 not in shape:
            here = value.shape
            value = lax.reshape(value, [math.prod(here[dim] for dim in ours) for ours, _ in groups])
            for at, (ours, theirs) in enumerate(groups):
                window = call.window(0, before, ours[0])
                if window is not None:
                    row_start = call.place.reached(window)[1] * window.reach.per
                    start = call.offset(layout, after, theirs[0]) * window.reach.step - row_start
                    value = lax.dynamic_slice_in_dim(value, start, math.prod(shape[dim] for dim in theirs), at)
        return [lax.reshape(value, shape)] if 0 not in shape else [lax.full(shape, 0, value.dtype)]

    return Rule(
        (operand,),
        (result,),
        sizes,
        replicated=replicated,
        passes=MOVES,
        windows=tuple((0, dim, reach) for dim, reach in windows.items()),
        uneven=tuple((0, dim, reach) for dim, reach in uneven.items()),
        local=local if windows or uneven else None,
        resize=_set("new_sizes"),
        flops=_size(eqn),
    )


def _windows(reaches: Sequence[Reach | None]) -> tuple[tuple[int, int, Reach], ...]:
    """The windows of operand 0 along the dims that have a reach."""
    return tuple((0, dim, reach) for dim, reach in enumerate(reaches) if reach is not None)


def _slice(eqn: JaxprEqn) -> Rule:
    (operand,), (result,), params = eqn.invars, eqn.outvars, eqn.params
    shape, after = operand.aval.shape, result.aval.shape
    strides = params["strides"] or (1,) * len(shape)
    bounds = list(zip(params["start_indices"], params["limit_indices"], strides, strict=True))
    reaches = [
        None if each == (0, size, 1) else Reach(to, each[2], each[0], each[0])
        for each, size, to in zip(bounds, shape, after, strict=True)
    ]
    dims, windows = _singles(len(shape)), _windows(reaches)

    def local(call: Any, operands: list[Any]) -> list[Any]:
        here = operands[0].shape
        shards = [bool(axes) for axes in call.operand_layouts[0].dims]
        starts = [0 if shard else each[0] for each, shard in zip(bounds, shards, strict=True)]
        whole = zip(bounds, here, shards, reaches, strict=True)
        limits = [size if shard or reach is None else each[1] for each, size, shard, reach in whole]
        return [lax.slice(operands[0], starts, limits, strides)]

    return Rule((dims,), (dims,), after, passes=MOVES, windows=windows, local=local, flops=_size(eqn))


def _pad(eqn: JaxprEqn) -> Rule:
    """Interior padding spreads the elements; a negative one cuts. Each rank places what it has of them where it belongs."""
    shape, after, config = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, eqn.params["padding_config"]
    reaches = [
        None if each == (0, 0, 0) else Reach(to, 1, each[2] - each[0], -each[0], each[2] + 1)
        for each, to in zip(config, after, strict=True)
    ]
    dims, windows = _singles(len(shape)), _windows(reaches)
    fill = eqn.invars[1]
    zero = isinstance(fill, Literal) and np.asarray(fill.val).dtype != np.bool_ and not np.any(np.asarray(fill.val))
    passes = (Passes(LINEAR, (0,), movement=True),) if zero else ()

    def local(call: Any, operands: list[Any]) -> list[Any]:
        value, filling = operands
        held = [call.window(0, shape, dim) for dim in range(len(shape))]
        here = [(0, 0, each[2]) if window else each for each, window in zip(config, held, strict=True)]
        value = lax.pad(value, filling, here)
        if not any(held):
            return [value]
        starts = [
            np.int32(0) if window is None else call.place.reached(window)[1] * (each[2] + 1) + each[0] - offset
            for dim, (window, each) in enumerate(zip(held, config, strict=True))
            for offset in [call.offset(call.result_layouts[0], after, dim)]
        ]
        if 0 in value.shape:
            return [lax.broadcast(filling, call.result_shapes[0])]
        return [jax_compat.dynamic_update_slice(lax.broadcast(filling, call.result_shapes[0]), value, starts)]

    return Rule((dims, ()), (dims,), after, passes=passes, windows=windows, local=local, flops=_size(eqn))


def _concatenate(eqn: JaxprEqn) -> Rule:
    """The windows of all operands, in order, are a rank's piece of the result. `bounds` are what it takes of each operand."""
    along, after = eqn.params["dimension"], eqn.outvars[0].aval.shape
    dims = _singles(len(after))
    bounds = eqn.params.get("bounds") or [(0, atom.aval.shape[along]) for atom in eqn.invars]
    ends = list(itertools.accumulate(high - low for low, high in bounds))
    windows = tuple(
        (at, along, Reach(after[along], 1, high - end, high - end, within=(low, high)))
        for at, ((low, high), end) in enumerate(zip(bounds, ends, strict=True))
    )
    passes = (Passes(ANY_OP, tuple(range(len(eqn.invars))), movement=True),)

    def local(call: Any, operands: list[Any]) -> list[Any]:
        layouts = call.operand_layouts
        parts = [
            value if layout.dims[along] else lax.slice_in_dim(value, low, high, axis=along)
            for value, layout, (low, high) in zip(operands, layouts, bounds, strict=True)
        ]
        return [lax.concatenate(parts, along)]

    return Rule(
        (dims,) * len(eqn.invars), (dims,), after, passes=passes, windows=windows, local=local, flops=_size(eqn)
    )


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
    """Dims that are repeated stay whole, before and after."""
    shape, after, repetitions = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, eqn.params["reps"]
    if len(repetitions) != len(shape):
        return None
    repeated = tuple(dim for dim, count in enumerate(repetitions) if count != 1)
    new = {dim: len(shape) + at for at, dim in enumerate(repeated)}
    result = tuple((new.get(dim, dim),) for dim in range(len(shape)))
    sizes = (*shape, *(after[dim] for dim in repeated))
    replicated = (*repeated, *new.values())
    return Rule((_singles(len(shape)),), (result,), sizes, replicated=replicated, passes=MOVES, flops=_size(eqn))


def _reverse(eqn: JaxprEqn) -> Rule:
    shape = eqn.invars[0].aval.shape
    dims = _singles(len(shape))
    windows = tuple((0, dim, Reach(shape[dim], flipped=True)) for dim in sorted(eqn.params["dimensions"]))
    return Rule((dims,), (dims,), shape, passes=MOVES, windows=windows, flops=_size(eqn))


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
    "iota": _iota,
    "optimization_barrier": _barrier,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _reverse,
    "slice": _slice,
    "squeeze": _squeeze,
    "stack": _stack,
    "tile": _tile,
    "transpose": _transpose,
    "unstack": _unstack,
}
