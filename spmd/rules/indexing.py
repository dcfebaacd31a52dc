"""Indexing by values: gather, the scatters, slices at traced positions.

A dim that is taken whole, a batch dim of the indices, and a dim that both share are factors like any other. An indexed dim may
be sharded too: each rank looks up what it has, at indices shifted by its offset, and what it lacks is nobody's: a gather then
yields parts (the identity where the element is another rank's), a scatter drops it. So a table is sharded by rows or by
features, and its gradient is placed as it is, without a word sent for either. Updates that are sharded with their indices
give parts of the same op, the operand counted once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax import lax

from collectives import jax_compat
from collectives.jax_compat import JaxprEqn, Literal
from collectives.simulated import identity
from placements.intervals import Reach
from spmd.factors import ANY_OP, Dims, Passes, Rule
from spmd.rules.elementwise import linear_ops

Shape = tuple[int, ...]


class FactorList:
    """Factors under construction: `new` makes one, with what is known of it."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.replicated: list[int] = []
        self.reductions: list[tuple[int, str]] = []

    def new(self, size: int, whole: bool = False, op: str | None = None) -> int:
        """A factor: `whole` where it must not be sharded, `op` where sharding it yields parts."""
        factor = len(self.sizes)
        self.sizes.append(size)
        if whole:
            self.replicated.append(factor)
        if op is not None:
            self.reductions.append((factor, op))
        return factor

    def rule(self, operands: tuple[Dims, ...], result: Dims, eqn: JaxprEqn, **rest: Any) -> Rule:
        """The rule with these factors."""
        flops = float(math.prod(eqn.outvars[0].aval.shape))
        sizes, reductions, replicated = tuple(self.sizes), tuple(self.reductions), tuple(self.replicated)
        return Rule(operands, (result,), sizes, reductions, replicated, flops=flops, **rest)


def _sum_op(dtype: Any) -> str | None:
    """The op under which elements that each come from one rank alone are put together; None for keys."""
    if dtype == jnp.bool_:
        return "or"
    return "sum" if isinstance(dtype, np.dtype) else None


def _gather(eqn: JaxprEqn) -> Rule:
    operand, indices, result = (atom.aval.shape for atom in (*eqn.invars, *eqn.outvars))
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    factors, op = FactorList(), _sum_op(eqn.outvars[0].aval.dtype)
    of_indices = [factors.new(size) for size in indices[:-1]] + [factors.new(indices[-1], whole=True)]
    batched = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    of_operand, windows = [], []
    for dim, size in enumerate(operand):
        if dim in batched:
            of_operand.append(of_indices[batched[dim]])
        elif dim in numbers.collapsed_slice_dims:
            is_looked_up = dim in numbers.start_index_map and op is not None
            of_operand.append(factors.new(size, whole=not is_looked_up, op=op if is_looked_up else None))
        else:
            whole = sizes[dim] == size and dim not in numbers.start_index_map
            of_operand.append(factors.new(size, whole=not whole))
            windows.append(of_operand[-1] if whole else factors.new(sizes[dim], whole=True))
    outer = iter(of_indices[:-1])
    inner = iter(windows)
    of_result = tuple((next(inner if dim in numbers.offset_dims else outer),) for dim in range(len(result)))
    dims = tuple((factor,) for factor in of_operand), tuple((factor,) for factor in of_indices)
    fills = "FILL" in eqn.params["mode"].name  # what is filled in would count once for every part
    moves = () if fills else (Passes(ANY_OP, (0,)),)

    def local(call: Any, operands: list[Any]) -> list[Any]:
        return [_gather_here(eqn, call, *operands)]

    return factors.rule(dims, of_result, eqn, passes=moves, local=local)


def _gather_here(eqn: JaxprEqn, call: Any, table: Any, indices: Any) -> Any:
    """Look up what this rank has; elsewhere the identity. An index out of bounds is the first rank's, where it is filled."""
    numbers, shape = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
    single = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    triples = enumerate(zip(eqn.params["slice_sizes"], shape, table.shape, strict=True))
    sizes = (1 if dim in single else here if size == whole else size for dim, (size, whole, here) in triples)
    params = {**eqn.params, "slice_sizes": tuple(sizes)}
    layout, dtype = call.operand_layouts[0], eqn.outvars[0].aval.dtype
    shifted = _shifts(call, layout, shape, numbers.collapsed_slice_dims)
    if not shifted:
        return jax_compat.bind(eqn, [table, indices], params)[0]
    result_shape = call.result_shapes[0]
    nothing = lax.full(result_shape, identity(_sum_op(dtype) or "sum", dtype))
    fills = "FILL" in params["mode"].name
    columns, mine, inside = [], True, True
    for at, dim in enumerate(numbers.start_index_map):
        column = _signed(indices[..., at], shape[dim])
        if dim in shifted:
            inside &= (column >= 0) & (column < shape[dim])
            column = (column if fills else jnp.clip(column, 0, shape[dim] - 1)) - shifted[dim]
            mine &= (column >= 0) & (column < table.shape[dim])
            column = jnp.clip(column, 0, max(table.shape[dim] - 1, 0))
        columns.append(column)
    axes = tuple(axis for dim in shifted for axis in layout.dims[dim])
    first = call.place.flat_index(axes) == 0
    outer = [dim for dim in range(len(result_shape)) if dim not in numbers.offset_dims]

    def spread(mask: Any) -> Any:
        return lax.broadcast_in_dim(mask, result_shape, outer)

    if 0 in (table.shape[dim] for dim in shifted):
        found = nothing
    else:
        found = jax_compat.bind(eqn, [table, jnp.stack(columns, -1)], params)[0]
        found = lax.select(spread(mine), found, nothing)
    if fills:
        filled = lax.full(result_shape, np.asarray(params["fill_value"]).astype(dtype))
        found = lax.select(spread(~inside & first), filled, found)
    return found


def _shifts(call: Any, layout: Any, shape: Shape, dims: Iterable[int]) -> dict[int, Any]:
    """Those of `dims` that are sharded, with where this rank's part begins."""
    offsets = {dim: call.offset(layout, shape, dim) for dim in dims}
    return {dim: offset for dim, offset in offsets.items() if offset is not None}


def _signed(column: Any, size: int) -> Any:
    """Indices as signed integers of at least 32 bits; unsigned ones beyond the dim stay beyond it."""
    if jnp.issubdtype(column.dtype, jnp.unsignedinteger) and jnp.iinfo(column.dtype).max > size:
        column = jnp.minimum(column, np.asarray(size, column.dtype))
    return column.astype(jnp.int64 if column.dtype.itemsize == 8 else jnp.int32)


COMBINES: Final = {
    "scatter-add": "sum",
    "scatter-max": "max",
    "scatter-min": "min",
    "scatter-mul": "prod",
    "scatter-sub": "sum",
}
"""The op by which a scatter puts elements and updates together. One that overwrites has none."""


def _scatter(eqn: JaxprEqn) -> Rule:
    operand, indices, updates = (atom.aval.shape for atom in eqn.invars)
    numbers, op = eqn.params["dimension_numbers"], COMBINES.get(eqn.primitive.name)
    dtype = eqn.outvars[0].aval.dtype
    op = None if dtype == jnp.bool_ or not isinstance(dtype, np.dtype) else op
    factors = FactorList()
    batched = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    shared = set(batched.values())
    of_indices = [
        factors.new(size, whole=op is None and dim not in shared, op=None if dim in shared else op)
        for dim, size in enumerate(indices[:-1])
    ]
    of_indices.append(factors.new(indices[-1], whole=True))
    covered = _windows(numbers, len(operand), updates)
    of_operand, windows = [], []
    for dim, size in enumerate(operand):
        if dim in batched:
            of_operand.append(of_indices[batched[dim]])
        elif dim in numbers.inserted_window_dims:
            of_operand.append(factors.new(size, whole=dim not in numbers.scatter_dims_to_operand_dims))
        else:
            whole = covered[dim] == size and dim not in numbers.scatter_dims_to_operand_dims
            of_operand.append(factors.new(size, whole=not whole))
            windows.append(of_operand[-1] if whole else factors.new(covered[dim], whole=True))
    outer, inner = iter(of_indices[:-1]), iter(windows)
    of_updates = [next(inner if dim in numbers.update_window_dims else outer) for dim in range(len(updates))]
    result = tuple((factor,) for factor in of_operand)
    dims = result, tuple((factor,) for factor in of_indices), tuple((factor,) for factor in of_updates)
    passes = (Passes(linear_ops(dtype), (0, 2)),) if op == "sum" else ()
    batch = [dim for dim in range(len(indices) - 1) if dim not in shared]

    def local(call: Any, operands: list[Any]) -> list[Any]:
        return [_scatter_here(eqn, call, op, batch, *operands)]

    return factors.rule(dims, result, eqn, passes=passes, local=local)


def _scatter_here(
    eqn: JaxprEqn, call: Any, op: str | None, batch: list[int], target: Any, indices: Any, updates: Any
) -> Any:
    """Scatter to what this rank has. Where the updates are sharded, one rank holds the operand, others the identity."""
    numbers, shape, params = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape, eqn.params
    layouts = call.operand_layouts
    axes = tuple(axis for dim in batch for axis in layouts[1].dims[dim])
    if axes and op in ("sum", "prod"):
        first = call.place.flat_index(axes) == 0
        target = lax.select(first, target, lax.full_like(target, identity(op, target.dtype)))
    shifted = _shifts(call, layouts[0], shape, numbers.inserted_window_dims)
    if not shifted:
        return jax_compat.bind(eqn, [target, indices, updates], params)[0]
    if 0 in (target.shape[dim] for dim in shifted):
        return target
    clips = "CLIP" in params["mode"].name
    windows = _windows(numbers, len(shape), updates.shape)
    columns = []
    for at, dim in enumerate(numbers.scatter_dims_to_operand_dims):
        column = _signed(indices[..., at], shape[dim])
        if clips:
            column = jnp.clip(column, 0, shape[dim] - windows[dim])
        if dim in shifted:
            column = column - shifted[dim]
            column = jnp.where((column >= 0) & (column < target.shape[dim]), column, target.shape[dim])
        columns.append(column)
    drop = type(params["mode"]).FILL_OR_DROP
    params = {**params, "mode": drop, "indices_are_sorted": False, "unique_indices": False}
    return jax_compat.bind(eqn, [target, jnp.stack(columns, -1), updates], params)[0]


def _windows(numbers: Any, ndim: int, updates: Shape) -> list[int]:
    """The size of the window that an update covers, per dim of the operand."""
    sizes = iter([updates[dim] for dim in numbers.update_window_dims])
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    return [1 if dim in gone else next(sizes) for dim in range(ndim)]


def _literal(atom: Any) -> int | None:
    """A start that is known when tracing."""
    return int(np.asarray(atom.val)) if isinstance(atom, Literal) else None


def _dynamic_slice(eqn: JaxprEqn) -> Rule:
    """Along a dim that is cut at a traced position each rank takes what it has of the slice: parts. At a known one a window."""
    array, starts, window = eqn.invars[0].aval.shape, eqn.invars[1:], eqn.params["slice_sizes"]
    op, factors = _sum_op(eqn.outvars[0].aval.dtype), FactorList()
    outer, inner, windows = [], [], []
    for dim, (size, part, atom) in enumerate(zip(array, window, starts, strict=True)):
        known = _literal(atom)
        if size == part or known is not None:
            outer.append(factors.new(part))
            inner.append(outer[-1])
            start = min(max(known or 0, 0), size - part)
            windows += [(0, dim, Reach(part, 1, start, start))] if size != part else []
        else:
            outer.append(factors.new(size, whole=op is None, op=op))
            inner.append(factors.new(part, whole=True))

    def local(call: Any, operands: list[Any]) -> list[Any]:
        value, *at = operands
        mine: Any = True
        whole = [
            size != part and not axes
            for size, part, axes in zip(array, window, call.operand_layouts[0].dims, strict=True)
        ]
        sizes = tuple(part if cut else here for part, here, cut in zip(window, value.shape, whole, strict=True))
        value = jax_compat.dynamic_slice(
            value, [start if cut else jnp.zeros_like(start) for start, cut in zip(at, whole, strict=True)], sizes
        )
        for dim, (size, part, here) in enumerate(zip(array, window, call.result_shapes[0], strict=True)):
            if size == part or whole[dim]:
                continue
            if call.window(0, array, dim) is None:
                index = jnp.clip(_signed(at[dim], size), 0, size - part) - call.offset(
                    call.operand_layouts[0], array, dim
                )
                index = index + jnp.arange(here, dtype=index.dtype)
                inside = (index >= 0) & (index < value.shape[dim])
                mine = mine & inside.reshape(-1, *(1,) * (len(array) - dim - 1))
                value = _rows(value, index, dim)
        if mine is True:
            return [value]
        return [jnp.where(mine, value, identity(op or "sum", value.dtype))]

    singles = tuple((factor,) for factor in outer), tuple((factor,) for factor in inner)
    dims: tuple[Dims, ...] = (singles[0], *(() for _ in starts))
    passes = (Passes(ANY_OP, (0,), movement=True),)
    return factors.rule(dims, singles[1], eqn, passes=passes, windows=tuple(windows), local=local)


def _rows(value: Any, index: Any, dim: int) -> Any:
    """The elements at some indices of a dim, and anything where these are out of bounds; of nothing the zero."""
    if not value.shape[dim]:
        return jnp.zeros((*value.shape[:dim], index.shape[0], *value.shape[dim + 1 :]), value.dtype)
    return jnp.take(value, jnp.clip(index, 0, value.shape[dim] - 1), axis=dim)


def _dynamic_update_slice(eqn: JaxprEqn) -> Rule:
    """Each rank writes what of the update is its own: at a known position that is a window of it, at a traced one it looks."""
    (array, update), starts = (atom.aval.shape for atom in eqn.invars[:2]), eqn.invars[2:]
    factors = FactorList()
    outer = tuple((factors.new(size),) for size in array)
    inner, windows = [], []
    for dim, (size, part, atom) in enumerate(zip(array, update, starts, strict=True)):
        known = _literal(atom)
        inner.append(outer[dim] if size == part or known is not None else (factors.new(part, whole=True),))
        start = min(max(known or 0, 0), size - part)
        windows += [(1, dim, Reach(size, 1, -start, -start))] if size != part and known is not None else []

    def local(call: Any, operands: list[Any]) -> list[Any]:
        target, new, *at = operands
        mine: Any = True
        places = []
        for dim, (size, part) in enumerate(zip(array, update, strict=True)):
            window = call.window(1, update, dim)
            offset = call.offset(call.operand_layouts[0], array, dim)
            start = jnp.clip(_signed(jnp.asarray(at[dim]), size), 0, size - part)
            if size == part or offset is None:
                places.append(start if offset is None else np.int32(0))
            elif window is not None:
                places.append(call.place.reached(window)[1] + start - offset)
            else:
                index = jnp.arange(target.shape[dim], dtype=start.dtype) + offset - start
                inside = (index >= 0) & (index < part)
                mine = mine & inside.reshape(-1, *(1,) * (len(array) - dim - 1))
                new = _rows(new, index, dim)
                places.append(np.int32(0))
        if 0 in new.shape:
            return [target]
        if mine is not True:
            new = jnp.where(mine, new, jax_compat.dynamic_slice(target, places, new.shape))
        return [jax_compat.dynamic_update_slice(target, new, places)]

    dims: tuple[Dims, ...] = (outer, tuple(inner), *(() for _ in starts))
    passes = (Passes(ANY_OP, (0, 1), movement=True),)
    return factors.rule(dims, outer, eqn, passes=passes, windows=tuple(windows), local=local)


TABLE: Final[dict[str, Callable[[JaxprEqn], Rule | None]]] = {
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "scatter": _scatter,
    "scatter_add": _scatter,
    "scatter_max": _scatter,
    "scatter_min": _scatter,
    "scatter_mul": _scatter,
    "scatter_sub": _scatter,
}
