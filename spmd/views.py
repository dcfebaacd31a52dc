"""Values that a reshape joined, and what equations do to the values behind them.

A `View` says which value was joined and how; `EXPAND` how an equation of joined values is one of the values behind: the same
numbers in the same order. Along dims that are joined an equation may be elementwise, contract, reduce, or leave the dim alone;
along the others it may do anything.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from collectives.jax_compat import Atom, JaxprEqn, Primitive, Var, primitive, shaped_like
from spmd.rules import elementwise

Groups = tuple[tuple[int, ...], ...]
"""Per dim of a joined value the dims of the one that it was made of, in order: all of them, each once."""


Pattern = list[tuple[int, ...]]
"""Per dim the sizes of the dims behind."""


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """A value as a reshape that joins dims of another."""

    of: Var
    groups: Groups

    def dims(self, dims: Iterable[int]) -> tuple[int, ...]:
        """The dims behind some dims."""
        return tuple(inner for dim in dims for inner in self.groups[dim])

    def sizes(self, dim: int) -> tuple[int, ...]:
        """The sizes behind a dim."""
        return tuple(self.of.aval.shape[inner] for inner in self.groups[dim])

    @property
    def pattern(self) -> Pattern:
        """The sizes behind every dim."""
        return [self.sizes(dim) for dim in range(len(self.groups))]


def groups_of(pattern: Sequence[Sequence[int]]) -> Groups:
    """Groups of consecutive dims, of these lengths."""
    counter = itertools.count()
    return tuple(tuple(next(counter) for _ in sizes) for sizes in pattern)


def joined(var: Var, pattern: Sequence[tuple[int, ...]]) -> View:
    """A variable as a join of a new one, whose dims have the sizes of a pattern."""
    return View(Var(shaped_like(var.aval, tuple(itertools.chain(*pattern)))), groups_of(pattern))


class Expanded(NamedTuple):
    """An equation of joined values as one of the values behind: its parameters; the pattern of its results; those that its
    operands must have, where they are not what they are. An operand that is not joined so is made so, if it can be."""

    params: dict[str, Any]
    pattern: Pattern
    operands: list[Pattern] | None = None


def _elementwise(eqn: JaxprEqn, views: Sequence[View | None]) -> Expanded:
    """A dim is joined as some operand has it."""
    pattern: Pattern = []
    for dim, size in enumerate(eqn.outvars[0].aval.shape):
        found = (view.sizes(dim) for view in views if view is not None and math.prod(view.sizes(dim)) == size)
        pattern.append(max(found, key=len, default=(size,)))
    return Expanded(dict(eqn.params), pattern, [fitting(pattern, atom) for atom in eqn.invars])


def _bitcast(eqn: JaxprEqn, views: Sequence[View | None]) -> Expanded | None:
    """Elementwise, where the width is the same."""
    return _elementwise(eqn, views) if eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape else None


def fitting(pattern: Pattern, atom: Atom) -> Pattern:
    """The pattern of an operand of an elementwise equation: its dims of size 1 are joins of such."""
    return [(1,) * len(sizes) if size == 1 else sizes for size, sizes in zip(atom.aval.shape, pattern, strict=False)]


def _as_view(atom: Atom, view: View | None) -> View:
    """A value that is not joined, as a view of itself."""
    return view or View(atom, tuple((dim,) for dim in range(len(atom.aval.shape))))


def _dot_general(eqn: JaxprEqn, views: Sequence[View | None]) -> Expanded | None:
    """Dims that are contracted or batched are joined alike on both sides; the others as they like."""
    contract, batch = eqn.params["dimension_numbers"]
    both = left, right = [_as_view(atom, view) for atom, view in zip(eqn.invars, views, strict=True)]
    for ours, theirs in ((contract[0], contract[1]), (batch[0], batch[1])):
        if any(left.sizes(a) != right.sizes(b) for a, b in zip(ours, theirs, strict=True)):
            return None
    numbers = tuple(tuple(view.dims(dims) for view, dims in zip(both, pair, strict=True)) for pair in (contract, batch))
    kept = [left.sizes(dim) for dim in batch[0]]
    for view, used in ((left, (*contract[0], *batch[0])), (right, (*contract[1], *batch[1]))):
        kept += [view.sizes(dim) for dim in range(len(view.groups)) if dim not in used]
    return Expanded({**eqn.params, "dimension_numbers": numbers}, kept)


def _reduce(eqn: JaxprEqn, views: Sequence[View | None]) -> Expanded | None:
    (view,) = views
    assert view is not None
    axes = eqn.params["axes"]
    kept = [view.sizes(dim) for dim in range(len(view.groups)) if dim not in axes]
    return Expanded({**eqn.params, "axes": view.dims(axes)}, kept)


def _transpose(eqn: JaxprEqn, views: Sequence[View | None]) -> Expanded | None:
    (view,) = views
    assert view is not None
    permutation = eqn.params["permutation"]
    kept = [view.sizes(dim) for dim in permutation]
    return Expanded({**eqn.params, "permutation": view.dims(permutation)}, kept)


def _broadcast_in_dim(eqn: JaxprEqn, views: Sequence[View | None]) -> Expanded | None:
    """Where no joined dim is stretched."""
    (view, *rest), (atom, *_) = views, eqn.invars
    if rest or view is None:
        return None
    shape, to = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    at = {dim: index for index, dim in enumerate(to)}
    if any(len(view.groups[i]) > 1 and atom.aval.shape[i] != shape[dim] for dim, i in at.items()):
        return None
    kept = [
        view.sizes(at[dim]) if dim in at and len(view.groups[at[dim]]) > 1 else (size,)
        for dim, size in enumerate(shape)
    ]
    groups = groups_of(kept)
    dims = tuple(inner for dim in to for inner in groups[dim])
    return Expanded({**eqn.params, "shape": tuple(itertools.chain(*kept)), "broadcast_dimensions": dims}, kept)


def _kept(view: View, dims: Iterable[int], to: Sequence[int]) -> Pattern | None:
    """The pattern of a value whose dims are now of the sizes `to`, where of `dims`, which may change, none is joined."""
    if any(len(view.groups[dim]) != 1 for dim in dims):
        return None
    changed = set(dims)
    return [(to[dim],) if dim in changed else sizes for dim, sizes in enumerate(view.pattern)]


def _slice(eqn: JaxprEqn, views: Sequence[View | None]) -> Expanded | None:
    (view,), params, shape = views, eqn.params, eqn.invars[0].aval.shape
    assert view is not None
    starts, limits, strides = params["start_indices"], params["limit_indices"], params["strides"] or (1,) * len(shape)
    cut = [dim for dim, size in enumerate(shape) if (starts[dim], limits[dim], strides[dim]) != (0, size, 1)]
    kept = _kept(view, cut, eqn.outvars[0].aval.shape)
    if kept is None:
        return None
    each = [(dim, inner) for dim, group in enumerate(view.groups) for inner in group]
    changed = {
        "start_indices": tuple(starts[dim] if dim in cut else 0 for dim, _ in each),
        "limit_indices": tuple(limits[dim] if dim in cut else view.of.aval.shape[inner] for dim, inner in each),
        "strides": None if params["strides"] is None else tuple(strides[dim] for dim, _ in each),
    }
    return Expanded({**params, **changed}, kept)


def _pad(eqn: JaxprEqn, views: Sequence[View | None]) -> Expanded | None:
    view, config = views[0], eqn.params["padding_config"]
    if view is None or views[1] is not None:
        return None
    kept = _kept(view, [dim for dim, each in enumerate(config) if each != (0, 0, 0)], eqn.outvars[0].aval.shape)
    if kept is None:
        return None
    spread = tuple(config[dim] for dim, group in enumerate(view.groups) for _ in group)
    return Expanded({**eqn.params, "padding_config": spread}, kept)


def _along(parameter: str) -> Callable[[JaxprEqn, Sequence[View | None]], Expanded | None]:
    """Along one dim, which `parameter` names; operands are joined alike."""

    def expand(eqn: JaxprEqn, views: Sequence[View | None]) -> Expanded | None:
        dim, view = eqn.params[parameter], next(view for view in views if view is not None)
        kept = _kept(view, [dim], eqn.outvars[0].aval.shape)
        if kept is None:
            return None
        return Expanded({**eqn.params, parameter: view.groups[dim][0]}, kept, [view.pattern] * len(views))

    return expand


def _concatenate(eqn: JaxprEqn, views: Sequence[View | None]) -> Expanded | None:
    along = eqn.params["dimension"]
    view = next(view for view in views if view is not None)
    kept = _kept(view, [along], eqn.outvars[0].aval.shape)
    if kept is None:
        return None
    operands = [[*kept[:along], (atom.aval.shape[along],), *kept[along + 1 :]] for atom in eqn.invars]
    return Expanded({**eqn.params, "dimension": view.groups[along][0]}, kept, operands)


def _chosen(eqn: JaxprEqn, views: Sequence[View | None]) -> Expanded | None:
    """argmax, argmin: the dim is gone."""
    (view,), (axis,) = views, eqn.params["axes"]
    assert view is not None
    if len(view.groups[axis]) != 1:
        return None
    kept = [sizes for dim, sizes in enumerate(view.pattern) if dim != axis]
    return Expanded({**eqn.params, "axes": view.groups[axis]}, kept)


def _rev(eqn: JaxprEqn, views: Sequence[View | None]) -> Expanded | None:
    """A joined dim is reversed as all its factors are."""
    (view,) = views
    assert view is not None
    return Expanded({**eqn.params, "dimensions": view.dims(eqn.params["dimensions"])}, view.pattern)


def _squeeze(eqn: JaxprEqn, views: Sequence[View | None]) -> Expanded | None:
    (view,), gone = views, eqn.params["dimensions"]
    assert view is not None
    kept = [sizes for dim, sizes in enumerate(view.pattern) if dim not in gone]
    return Expanded({**eqn.params, "dimensions": view.dims(gone)}, kept)


def _top_k(eqn: JaxprEqn, views: Sequence[View | None]) -> Expanded | None:
    (view,), axis = views, eqn.params["axis"]
    assert view is not None
    kept = _kept(view, [axis], eqn.outvars[0].aval.shape)
    return None if kept is None else Expanded({**eqn.params, "axis": view.groups[axis][0]}, kept)


def _gather(eqn: JaxprEqn, views: Sequence[View | None]) -> Expanded | None:
    """Lookups along dims that are not joined; batched dims are joined alike, others are taken whole."""
    table, indices = (_as_view(atom, view) for atom, view in zip(eqn.invars, views, strict=True))
    numbers, sizes, shape = eqn.params["dimension_numbers"], eqn.params["slice_sizes"], eqn.outvars[0].aval.shape
    batched = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    if any(table.sizes(dim) != indices.sizes(at) for dim, at in batched.items()):
        return None
    if not _looks_up_single(table, indices, numbers.start_index_map, numbers.collapsed_slice_dims):
        return None
    windows = [dim for dim in range(len(sizes)) if dim not in (*numbers.collapsed_slice_dims, *batched)]
    if any(len(table.groups[dim]) > 1 and sizes[dim] != eqn.invars[0].aval.shape[dim] for dim in windows):
        return None
    outer, inner = iter(indices.pattern[:-1]), iter(windows)
    kept: Pattern = []
    for dim, size in enumerate(shape):
        if dim in numbers.offset_dims:
            at = next(inner)
            kept.append(table.sizes(at) if len(table.groups[at]) > 1 else (size,))
        else:
            kept.append(next(outer))
    groups = groups_of(kept)
    numbers = numbers._replace(
        offset_dims=tuple(at for dim in numbers.offset_dims for at in groups[dim]),
        collapsed_slice_dims=table.dims(numbers.collapsed_slice_dims),
        start_index_map=table.dims(numbers.start_index_map),
        operand_batching_dims=table.dims(batched.keys()),
        start_indices_batching_dims=indices.dims(batched.values()),
    )
    taken: list[int] = []
    for dim, size in enumerate(sizes):
        joined_dim = len(table.groups[dim]) > 1
        taken += (1,) * len(table.groups[dim]) if dim in batched else table.sizes(dim) if joined_dim else (size,)
    return Expanded({**eqn.params, "dimension_numbers": numbers, "slice_sizes": tuple(taken)}, kept)


def _scatter(eqn: JaxprEqn, views: Sequence[View | None]) -> Expanded | None:
    """As for gathers. The operand and the updates become as the indices are."""
    numbers = eqn.params["dimension_numbers"]
    table, indices = (_as_view(atom, view) for atom, view in zip(eqn.invars[:2], views[:2], strict=True))
    batched = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    pattern = [indices.sizes(batched[dim]) if dim in batched else sizes for dim, sizes in enumerate(table.pattern)]
    outside = [dim for dim in range(len(pattern)) if dim not in (*numbers.inserted_window_dims, *batched)]
    for dim, at in zip(numbers.update_window_dims, outside, strict=True):
        if views[2] is not None and views[0] is None and math.prod(views[2].sizes(dim)) == math.prod(pattern[at]):
            pattern[at] = views[2].sizes(dim)
    table = View(table.of, groups_of(pattern))
    if not _looks_up_single(table, indices, numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims):
        return None
    windows = iter(outside)
    outer, updates = iter(indices.pattern[:-1]), []
    for dim, size in enumerate(eqn.invars[2].aval.shape):
        if dim not in numbers.update_window_dims:
            updates.append(next(outer))
        elif len(table.groups[at := next(windows)]) == 1:
            updates.append((size,))
        elif math.prod(pattern[at]) == size:
            updates.append(pattern[at])
        else:
            return None
    groups = groups_of(updates)
    numbers = numbers._replace(
        update_window_dims=tuple(at for dim in numbers.update_window_dims for at in groups[dim]),
        inserted_window_dims=table.dims(numbers.inserted_window_dims),
        scatter_dims_to_operand_dims=table.dims(numbers.scatter_dims_to_operand_dims),
        operand_batching_dims=table.dims(batched.keys()),
        scatter_indices_batching_dims=indices.dims(batched.values()),
    )
    params = {**eqn.params, "dimension_numbers": numbers}
    return Expanded(params, pattern, [pattern, indices.pattern, updates])


def _looks_up_single(table: View, indices: View, looked_up: Iterable[int], single: Iterable[int]) -> bool:
    """Whether what is looked up, and the columns of the indices, are not joined dims."""
    return len(indices.groups[-1]) == 1 and all(len(table.groups[dim]) == 1 for dim in (*looked_up, *single))


EXPAND: Final[dict[Primitive, Callable[[JaxprEqn, Sequence[View | None]], Expanded | None]]] = {
    found: maker
    for name, maker in {
        **dict.fromkeys(elementwise.TABLE, _elementwise),
        "optimization_barrier": _elementwise,
        "bitcast_convert_type": _bitcast,
        "broadcast_in_dim": _broadcast_in_dim,
        "dot_general": _dot_general,
        **{f"reduce_{op}": _reduce for op in ("and", "max", "min", "or", "prod", "sum", "xor")},
        "transpose": _transpose,
        "argmax": _chosen,
        "argmin": _chosen,
        "concatenate": _concatenate,
        "gather": _gather,
        **dict.fromkeys(
            ("scatter", "scatter_add", "scatter_max", "scatter_min", "scatter_mul", "scatter_sub"), _scatter
        ),
        "pad": _pad,
        "slice": _slice,
        "sort": _along("dimension"),
        "rev": _rev,
        "squeeze": _squeeze,
        "top_k": _top_k,
        **{f"cum{op}": _along("axis") for op in ("logsumexp", "max", "min", "prod", "sum")},
    }.items()
    if (found := primitive(name)) is not None
}
"""How an equation is done to the values behind joined ones. Others get the joined value."""
