"""Computations along a sharded dim in two phases: each rank its own part, then what others need of it.

A running sum is that of the rank's piece, and the totals of the pieces before it. The place of the largest element is the first
one that equals the largest of all ranks. What travels is one number for each row and rank, or for each row, in place of the
rows. The planner asks here first; where the dim is whole, the table of rules has the row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from collectives import jax_compat
from collectives.jax_compat import JaxprEqn, Primitive, Var, inline_function, shaped_like
from collectives.simulated import identity
from spmd.factors import Rule
from spmd.plan import PlannedEqn

if TYPE_CHECKING:
    from spmd.propagate import Planner

totals_p: Final = Primitive("totals")
"""The totals of the pieces of a dim over the axes that shard it: the dim has one element for each piece. In plans alone."""

RUNNING: Final[dict[str, tuple[str, Callable[[Any, Any], Any]]]] = {
    "cumlogsumexp": ("max", jnp.logaddexp),
    "cummax": ("max", lax.max),
    "cummin": ("min", lax.min),
    "cumprod": ("prod", lax.mul),
    "cumsum": ("sum", lax.add),
}
"""Of what runs along a dim: the op whose identity it begins with, and how two totals become one."""


def _total(name: str, value: Any, axis: int) -> Any:
    """The total along a dim, which stays with one element; of nothing it is the identity."""
    op, combine = RUNNING[name]
    if name == "cumlogsumexp" and value.shape[axis]:
        return jax.nn.logsumexp(value, axis, keepdims=True)
    return lax.expand_dims(lax.reduce(value, identity(op, value.dtype), combine, (axis,)), (axis,))


def _cumulative(planner: Planner, eqn: JaxprEqn) -> list[PlannedEqn] | None:
    """A scan of each piece, and of the totals of the pieces before it."""
    (operand,), (result,), axis, name = eqn.invars, eqn.outvars, eqn.params["axis"], eqn.primitive.name
    layout = planner.settled(operand)
    axes, shape = layout.dims[axis], operand.aval.shape
    ordered = RUNNING[name][0] in ("max", "min") and jnp.issubdtype(operand.aval.dtype, jnp.complexfloating)
    if not axes or ordered:
        return None
    count = planner.mesh.group_size(axes)
    totals = Var(shaped_like(operand.aval, (*shape[:axis], count, *shape[axis + 1 :])))
    whole = layout.with_dim(axis, ())
    op, combine = RUNNING[name]
    dims = tuple((dim,) for dim in range(len(shape)))

    def total(call: Any, operands: list[Any]) -> list[Any]:
        return [_total(name, operands[0], axis)]

    def scan(call: Any, operands: list[Any]) -> list[Any]:
        value, all_totals = operands
        here, others = call.place.flat_index(axes), lax.broadcasted_iota(np.int32, all_totals.shape, axis)
        before = others > here if eqn.params["reverse"] else others < here
        until = jnp.where(before, all_totals, identity(op, value.dtype))
        start = lax.broadcast_in_dim(_total(name, until, axis), value.shape, tuple(range(len(shape))))
        return [combine(jax_compat.bind(eqn, [value], eqn.params)[0], start)]

    flops = float(operand.aval.size)
    planner.require(operand, layout, f"operand 0 of {name} as {layout}")
    planner.define(totals, layout)
    first = PlannedEqn(
        eqn.replace(primitive=totals_p, outvars=[totals], params={"axis": axis}),
        Rule((dims,), (dims,), shape, local=total, flops=flops),
        (layout,),
        (layout,),
        tuple(planner.moves),
    )
    planner.moves = []
    planner.require(totals, whole, f"the totals of other ranks, for {name}")
    planner.define(result, layout)
    others = tuple((factor,) for factor in (*range(axis), len(shape), *range(axis + 1, len(shape))))
    rule = Rule((dims, others), (dims,), (*shape, count), replicated=(len(shape),), local=scan, flops=2 * flops)
    second = PlannedEqn(eqn.replace(invars=[operand, totals]), rule, (layout, whole), (layout,), tuple(planner.moves))
    return [first, second]


def _place_of(eqn: JaxprEqn) -> list[JaxprEqn]:
    """argmax and argmin as reductions: the first place, counted over all ranks, of what is as large as the largest, or NaN."""
    (axis,), dtype = eqn.params["axes"], eqn.params["index_dtype"]
    reduce = lax.reduce_max if eqn.primitive.name == "argmax" else lax.reduce_min

    def place(value: Any) -> Any:
        kept = [dim for dim in range(value.ndim) if dim != axis]
        found = lax.eq(value, lax.broadcast_in_dim(reduce(value, axes=(axis,)), value.shape, kept))
        if jnp.issubdtype(value.dtype, jnp.floating):
            found = lax.bitwise_or(found, lax.ne(value, value))
        index = lax.broadcasted_iota(dtype, value.shape, axis)
        return lax.reduce_min(lax.select(found, index, lax.full_like(index, value.shape[axis] - 1)), axes=(axis,))

    return inline_function(place, eqn)


def _chosen(planner: Planner, eqn: JaxprEqn) -> list[PlannedEqn] | None:
    layout = planner.settled(eqn.invars[0])
    if not layout.dims[eqn.params["axes"][0]] or eqn.invars[0].aval.dtype == jnp.bool_:
        return None
    return planner.instead(eqn, _place_of)


def _fourier(planner: Planner, eqn: JaxprEqn) -> list[PlannedEqn] | None:
    """A transform of several dims, some of them sharded, dim by dim: whole ones first, then each of the others when its shards
    have gone to another dim. Real transforms begin or end with the last dim."""
    kind, lengths = eqn.params["fft_type"], eqn.params["fft_lengths"]
    layout = planner.settled(eqn.invars[0])
    last = len(layout.dims) - 1
    dims = list(range(last + 1 - len(lengths), last + 1))
    if len(dims) == 1 or not any(layout.dims[dim] for dim in dims):
        return None
    order = sorted(dims, key=lambda dim: bool(layout.dims[dim]))
    if kind in (lax.FftType.RFFT, lax.FftType.IRFFT):
        order.remove(last)
        order = [last, *order] if kind == lax.FftType.RFFT else [*order, last]
    others = lax.FftType.FFT if kind in (lax.FftType.FFT, lax.FftType.RFFT) else lax.FftType.IFFT

    def by_dims(value: Any) -> Any:
        for dim in order:
            moved = lax.transpose(value, [*(d for d in range(last + 1) if d != dim), dim])
            here = {"fft_type": kind if dim == last else others, "fft_lengths": (lengths[dim - dims[0]],)}
            (found,) = jax_compat.bind(eqn, [moved], {**eqn.params, **here})
            value = lax.transpose(found, [*range(dim), last, *range(dim, last)])
        return value

    return planner.instead(eqn, lambda eqn: inline_function(by_dims, eqn))


def _largest(planner: Planner, eqn: JaxprEqn) -> list[PlannedEqn] | None:
    """The k largest of each piece, and then of what all pieces gave, where that is less than half of all there is.

    The last piece is filled up with the least value there is: it comes after its equals, so it is never chosen before one.
    """
    (operand,), k, axis = eqn.invars, eqn.params["k"], eqn.params["axis"]
    axes, shape, dtype = planner.settled(operand).dims[axis], operand.aval.shape, operand.aval.dtype
    count = planner.mesh.group_size(axes)
    length = -(-shape[axis] // count)
    if not axes or not 0 < k <= length or 2 * count * k >= shape[axis]:
        return None
    others = tuple(dim for dim in range(len(shape)) if dim != axis)
    numbers = lax.GatherDimensionNumbers((), (axis,), (axis,), others, others)

    def in_turn(value: Any) -> Any:
        fill = [(0, (count * length - shape[axis]) * (dim == axis), 0) for dim in range(len(shape))]
        pieces = lax.reshape(lax.pad(value, _least(dtype), fill), (*shape[:axis], count, length, *shape[axis + 1 :]))
        values, places = jax_compat.bind(eqn, [pieces], {**eqn.params, "axis": axis + 1})
        places += lax.broadcasted_iota(places.dtype, places.shape, axis) * length
        few = (*shape[:axis], count * k, *shape[axis + 1 :])
        values, at = jax_compat.bind(eqn, [lax.reshape(values, few)], eqn.params)
        ones, mode = (1,) * len(shape), lax.GatherScatterMode.PROMISE_IN_BOUNDS
        return values, lax.gather(lax.reshape(places, few), lax.expand_dims(at, [len(shape)]), numbers, ones, mode=mode)

    return planner.instead(eqn, lambda eqn: inline_function(in_turn, eqn))


def _least(dtype: Any) -> Any:
    """What `top_k` chooses last: of floats the NaN whose bits are all set."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return np.False_
    if jnp.issubdtype(dtype, jnp.floating):
        return np.frombuffer(b"\xff" * dtype.itemsize, dtype)[0]
    return np.asarray(jnp.iinfo(dtype).min, dtype)[()]


PHASES: Final[dict[str, Callable[[Planner, JaxprEqn], list[PlannedEqn] | None]]] = {
    "argmax": _chosen,
    "argmin": _chosen,
    **dict.fromkeys(RUNNING, _cumulative),
    "fft": _fourier,
    "top_k": _largest,
}
"""By the name of a primitive how it is planned along a sharded dim; None where it is not sharded along it."""
