"""Convolutions and reductions over windows: a piece of the result is computed from a window of the operand, halos included.

Each rank puts what it has of the operand where it belongs, into an array of the fill value (zero, or the reduction's identity)
that is as long as its windows need, and computes without padding. So the ends of the array need no case of their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax import lax

from collectives import jax_compat
from collectives.jax_compat import JaxprEqn
from collectives.simulated import identity
from placements.intervals import Reach
from spmd.factors import Rule
from spmd.rules.indexing import FactorList

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Sliding:
    """A window that slides over one dim of an operand, as in `lax.reduce_window`.

    `size` elements of it, `dilation` apart, at every multiple of `stride` of the operand, which is spread by `spread` and
    padded by `low` and `high` elements.
    """

    size: int
    stride: int = 1
    low: int = 0
    high: int = 0
    spread: int = 1
    dilation: int = 1

    @property
    def is_trivial(self) -> bool:
        """Whether each element of the result is made of the one at its place."""
        return (self.size, self.stride, self.low, self.high, self.spread) == (1, 1, 0, 0, 1)

    def reach(self, out: int) -> Reach:
        """What of the operand an interval of the result, of size `out`, is computed from."""
        last = (self.size - 1) * self.dilation - self.low
        return Reach(out, self.stride, self.spread - 1 - self.low, last, self.spread)

    def turned(self, out: int) -> Sliding:
        """The same with window and result in each other's place: the gradient of a convolution slides over the result."""
        return Sliding(out, self.dilation, self.low, self.high, self.spread, self.stride)


def _filled(call: Any, value: Any, fill: Any, dim: int, size: int, sliding: Sliding, count: int) -> Any:
    """This rank's window of a dim of `size`, spread, in an array of the fill value that `count` results are computed from."""
    window = call.window(0, (*(1,) * dim, size, *(1,) * (value.ndim - dim - 1)), dim)
    spread = lax.pad(value, fill, [(0, 0, sliding.spread - 1 if d == dim else 0) for d in range(value.ndim)])
    length = max((count - 1) * sliding.stride + (sliding.size - 1) * sliding.dilation + 1, 0)
    shape = tuple(length if d == dim else here for d, here in enumerate(spread.shape))
    if not spread.shape[dim]:
        return lax.broadcast(fill, shape)
    low = call.place.start(window.reach.of, window.axes) * sliding.stride - sliding.low
    start = call.place.reached(window)[1] * sliding.spread - low
    room = lax.broadcast(fill, tuple(n + spread.shape[d] * (d == dim) for d, n in enumerate(shape)))
    starts = [start if d == dim else np.int32(0) for d in range(value.ndim)]
    return lax.slice_in_dim(jax_compat.dynamic_update_slice(room, spread, starts), 0, length, axis=dim)


def _reduce_window(op: str) -> Callable[[JaxprEqn], Rule | None]:
    """`reduce_window_max` and its kin."""

    def maker(eqn: JaxprEqn) -> Rule | None:
        (operand,), (result,), params = eqn.invars, eqn.outvars, eqn.params
        shape, after, dtype = operand.aval.shape, result.aval.shape, result.aval.dtype
        count = len(shape)
        ones = (1,) * count
        slidings = [
            Sliding(size, stride, low, high, spread, dilation)
            for size, stride, (low, high), spread, dilation in zip(
                params["window_dimensions"],
                params["window_strides"] or ones,
                params["padding"],
                params["base_dilation"] or ones,
                params["window_dilation"] or ones,
                strict=True,
            )
        ]
        windows = [(0, dim, each.reach(after[dim])) for dim, each in enumerate(slidings) if not each.is_trivial]
        dims = tuple((dim,) for dim in range(count))

        def local(call: Any, operands: list[Any]) -> list[Any]:
            (value,) = operands
            padding, spreads = list(params["padding"]), list(params["base_dilation"] or ones)
            fill = jnp.asarray(identity(op, dtype))
            if 0 in call.result_shapes[0]:
                return [lax.full(call.result_shapes[0], identity(op, dtype))]
            for dim, sliding in enumerate(slidings):
                if call.window(0, shape, dim) is not None:
                    value = _filled(call, value, fill, dim, shape[dim], sliding, call.result_shapes[0][dim])
                    padding[dim], spreads[dim] = (0, 0), 1
            changed = {"padding": tuple(padding), "base_dilation": tuple(spreads)}
            return jax_compat.bind(eqn, [value], {**params, **changed})

        flops = float(math.prod(after) * math.prod(params["window_dimensions"]))
        return Rule((dims,), (dims,), after, windows=tuple(windows), local=local, flops=flops)

    return maker


def _convolution(eqn: JaxprEqn) -> Rule | None:
    """Sharded over the batch, features (those that are summed give parts), or along the result's spatial dims; along those of
    the kernel where it is larger than the result, as in the gradient of a kernel."""
    left, right = (atom.aval.shape for atom in eqn.invars)
    after, params = eqn.outvars[0].aval.shape, eqn.params
    numbers, strides, padding = params["dimension_numbers"], params["window_strides"], params["padding"]
    of_left, of_right, of_result = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    grouped, batched = params["feature_group_count"] > 1, params["batch_group_count"] > 1
    factors = FactorList()
    dims: list[dict[int, int]] = [{}, {}, {}]
    if batched:
        dims[0][of_left[0]], dims[2][of_result[0]] = (
            factors.new(left[of_left[0]], True),
            factors.new(after[of_result[0]], True),
        )
    else:
        dims[0][of_left[0]] = dims[2][of_result[0]] = factors.new(left[of_left[0]])
    if grouped:
        dims[0][of_left[1]], dims[1][of_right[1]] = (
            factors.new(left[of_left[1]], True),
            factors.new(right[of_right[1]], True),
        )
    else:
        dims[0][of_left[1]] = dims[1][of_right[1]] = factors.new(left[of_left[1]], op="sum")
    dims[1][of_right[0]] = dims[2][of_result[1]] = factors.new(right[of_right[0]], grouped or batched)
    windows, slidings = [], {}
    for at, (d, r, o) in enumerate(zip(of_left[2:], of_right[2:], of_result[2:], strict=True)):
        low, high = padding[at]
        sliding = Sliding(right[r], strides[at], low, high, params["lhs_dilation"][at], params["rhs_dilation"][at])
        turned = right[r] > after[o]
        if turned:
            sliding = sliding.turned(after[o])
            dims[0][d] = dims[1][r] = factors.new(right[r], op="sum")
            dims[2][o] = factors.new(after[o], True)
        else:
            dims[0][d] = dims[2][o] = factors.new(after[o])
            dims[1][r] = factors.new(right[r], True)
        slidings[d] = at, sliding, (1, r) if turned else (2, o)
        if turned or not sliding.is_trivial:
            windows.append((0, d, sliding.reach(right[r] if turned else after[o])))

    def local(call: Any, operands: list[Any]) -> list[Any]:
        value, kernel = operands
        here, spreads = list(padding), list(params["lhs_dilation"])
        if 0 in (*value.shape, *kernel.shape, *call.result_shapes[0]) and 0 not in (*left, *right):
            return [lax.full(call.result_shapes[0], 0, eqn.outvars[0].aval.dtype)]
        for dim, (at, sliding, (which, other)) in slidings.items():
            if call.window(0, left, dim) is not None:
                count = kernel.shape[other] if which == 1 else call.result_shapes[0][other]
                value = _filled(call, value, jnp.zeros((), value.dtype), dim, left[dim], sliding, count)
                here[at], spreads[at] = (0, 0), 1
        changed = {"padding": tuple(here), "lhs_dilation": tuple(spreads)}
        return jax_compat.bind(eqn, [value, kernel], {**params, **changed})

    singles = [tuple((each[dim],) for dim in range(len(left))) for each in dims]
    flops = 2.0 * math.prod(after) * math.prod(right[dim] for dim in of_right[1:])
    rule = factors.rule((singles[0], singles[1]), singles[2], eqn, windows=tuple(windows), local=local)
    return dataclasses.replace(rule, flops=flops)


def _select_and_scatter(eqn: JaxprEqn) -> Rule | None:
    """Along dims over which the window does not slide, or moves on by its own size: then blocks are apart."""
    source, operand = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    params = eqn.params
    given = (params["window_dimensions"], params["window_strides"], params["padding"])
    factors = FactorList()
    outer, inner = [], []
    for before, after, size, stride, pad in zip(operand, source, *given, strict=True):
        if size == stride and tuple(pad) == (0, 0) and before == after * size:
            block = factors.new(after)
            outer.append((block,) if size == 1 else (block, factors.new(size, True)))
            inner.append((block,))
        else:
            outer.append((factors.new(before, True),))
            inner.append((factors.new(after, True),))

    def local(call: Any, operands: list[Any]) -> list[Any]:
        if 0 in call.result_shapes[0]:
            return [lax.full(call.result_shapes[0], 0, eqn.outvars[0].aval.dtype)]
        return jax_compat.bind(eqn, operands, params)

    return factors.rule((tuple(inner), tuple(outer)), tuple(outer), eqn, local=local)


TABLE: Final[dict[str, Callable[[JaxprEqn], Rule | None]]] = {
    "conv_general_dilated": _convolution,
    "reduce_window_max": _reduce_window("max"),
    "reduce_window_min": _reduce_window("min"),
    "reduce_window_sum": _reduce_window("sum"),
    "select_and_scatter_add": _select_and_scatter,
}
