"""The cheapest list of steps from one layout to another.

A step is one collective over one axis or a group of axes, or a local act; `STEPS` is the table of them. The planner is
Dijkstra's algorithm over layouts: by cost under the machine model, then bytes, then the number of steps, then the order
of the table. Invariants: axes that keep their placement do not move unless they share a dim with one that does; every step
leads towards the target (an axis becomes replicated, or goes to a dim or to parts where the target has it), so the search
stays small for any number of axes; the result depends on the arguments alone, so every rank plans the same.

Bytes are what the busiest coordinate receives (n ranks, array of B bytes before the step is split over other axes):
all_gather B(n-1)/n, all_reduce 2B(n-1)/n, reduce_scatter B(n-1)/n, all_to_all B(n-1)/n², exchange the indices wanted and
not held, local steps nothing; with exact piece sizes. Source: Chan et al., Collective communication: theory, practice,
and experience, 2007.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from placements.cost import DEFAULT, LOCAL_STEP_US, Machine
from placements.errors import RedistributionError
from placements.intervals import Split, busiest_exchange, busiest_gather, busiest_transpose, longest
from placements.layout import Layout, Shape

LOCAL: Final = frozenset({"slice", "mask", "pad"})


@dataclass(frozen=True, slots=True)
class Step:
    """One step from `source` to `target`: its name in `STEPS`, the axes it acts over, the first major.

    `dim` is the dim that is gathered, split or exchanged (`all_to_all`: the one that becomes whole), `to_dim` the one
    that `all_to_all` splits, `op` that of the parts. `elements` is what the busiest coordinate receives.
    """

    name: str
    axes: tuple[str, ...]
    source: Layout
    target: Layout
    elements: int
    dim: int | None = None
    to_dim: int | None = None
    op: str | None = None

    @property
    def communicates(self) -> bool:
        """Whether the step sends anything."""
        return self.name not in LOCAL


@dataclass(frozen=True, slots=True)
class ItemSizes:
    """Bytes per element: as the array is stored and moved, and as its parts are reduced."""

    moved: int
    reduced: int

    def of(self, step: Step) -> int:
        """The bytes per element that travel in a step."""
        return self.reduced if step.name in ("all_reduce", "reduce_scatter") else self.moved


def step_bytes(step: Step, sizes: ItemSizes) -> int:
    """The bytes that the busiest coordinate receives in a step."""
    return step.elements * sizes.of(step)


def step_us(step: Step, sizes: ItemSizes, machine: Machine = DEFAULT) -> float:
    """The cost of a step in microseconds."""
    return machine.collective_us(step.axes, step_bytes(step, sizes)) if step.communicates else LOCAL_STEP_US


@functools.cache
def plan_steps(
    source: Layout, target: Layout, shape: Shape, sizes: ItemSizes, machine: Machine = DEFAULT
) -> tuple[Step, ...]:
    """The cheapest steps that bring an array of global `shape` from `source` to `target`.

    Raises `RedistributionError` for layouts of different meshes or numbers of dims.
    """
    if source == target:
        return ()
    _check_pair(source, target, shape)
    movable = movable_axes(source, target)
    order = itertools.count()
    queue: list[tuple[float, int, int, int, Layout, tuple[Step, ...]]] = [(0.0, 0, 0, next(order), source, ())]
    done: set[Layout] = set()
    while queue:
        cost, received, count, _, layout, path = heapq.heappop(queue)
        if layout == target:
            return path
        if layout in done:
            continue
        done.add(layout)
        for step in steps_from(layout, target, movable, shape):
            if step.target not in done:
                total = round(cost + step_us(step, sizes, machine), 6), received + step_bytes(step, sizes), count + 1
                heapq.heappush(queue, (*total, next(order), step.target, (*path, step)))
    raise AssertionError(f"no steps lead from {source} to {target}: gathering and slicing always does")


def path_us(source: Layout, target: Layout, shape: Shape, sizes: ItemSizes, machine: Machine = DEFAULT) -> float:
    """The cost of `plan_steps` in microseconds."""
    return sum(step_us(step, sizes, machine) for step in plan_steps(source, target, shape, sizes, machine))


def is_free(source: Layout, target: Layout, shape: Shape, sizes: ItemSizes, machine: Machine = DEFAULT) -> bool:
    """Whether `plan_steps` sends nothing."""
    return not any(step.communicates for step in plan_steps(source, target, shape, sizes, machine))


def movable_axes(source: Layout, target: Layout) -> tuple[str, ...]:
    """The axes that may move on the way, in mesh order: those whose placement differs, and those that share a dim with one."""
    moving: set[str] = {axis for axis, _ in set(source.partial) ^ set(target.partial)}
    for before, after in zip(source.dims, target.dims, strict=True):
        if before != after:
            moving.update(before, after)
    return tuple(axis for axis in source.mesh.axis_names if axis in moving)


def steps_from(layout: Layout, target: Layout, movable: tuple[str, ...], shape: Shape) -> Iterator[Step]:
    """Every step of the table that leads away from `layout`. Parts are made only where `target` has them.

    Windows are made last, dim by dim: by an exchange from the pieces of the same axes, or where the dim is whole by a slice.
    """
    if target.windows and layout.partial == target.partial:
        yield from _windows(layout, target, shape)
    if not layout.windows:
        for steps in STEPS.values():
            yield from steps(layout, target, movable, shape)


def _windows(layout: Layout, target: Layout, shape: Shape) -> Iterator[Step]:
    """The next step to windows, where all other dims are as the target has them, or whole and to be sliced to windows."""
    waiting = [pair for pair in target.windows if pair not in layout.windows]
    windowed = {dim for dim, _ in target.windows}
    for dim, axes in enumerate(target.dims):
        if layout.dims[dim] != axes and not (dim in windowed and not layout.dims[dim]):
            return
    for dim, reach in waiting[:1]:
        axes = target.dims[dim]
        after = layout.with_dim(dim, axes, reach)
        if not layout.dims[dim]:
            yield Step("slice", axes, layout, after, 0, dim)
            continue
        have, want = layout.intervals(dim, shape[dim]), after.intervals(dim, shape[dim])
        missing = busiest_exchange(layout.mesh, have, want)
        group = tuple(axis for axis in layout.mesh.axis_names if axis in axes)
        received = missing * _others(layout, shape, dim)
        yield Step("exchange" if missing else "slice", group, layout, after, received, dim)


def _check_pair(source: Layout, target: Layout, shape: Shape) -> None:
    if source.mesh != target.mesh:
        raise RedistributionError(
            f"redistribute: from {source.mesh!r} to {target.mesh!r}: both layouts are on one mesh."
        )
    if not source.ndim == target.ndim == len(shape):
        raise RedistributionError(f"redistribute: {source} to {target} for shape {shape}: the numbers of dims differ.")


def _suffixes(axes: tuple[str, ...], movable: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yield `(rest, suffix)` for every non-empty suffix of movable axes."""
    for cut in range(len(axes) - 1, -1, -1):
        if axes[cut] not in movable:
            return
        yield axes[:cut], axes[cut:]


def _others(layout: Layout, shape: Shape, *dims: int) -> int:
    """The largest local number of elements over all dims but `dims`."""
    local = layout.largest_local_shape(shape)
    return math.prod(size for dim, size in enumerate(local) if dim not in dims)


def _free(layout: Layout, movable: tuple[str, ...]) -> tuple[str, ...]:
    """The movable axes along which the array is replicated now."""
    used = layout.axes
    return tuple(axis for axis in movable if axis not in used)


def _all_gather(layout: Layout, target: Layout, movable: tuple[str, ...], shape: Shape) -> Iterator[Step]:
    for dim, axes in enumerate(layout.dims):
        for rest, suffix in _suffixes(axes, movable):
            outer, inner = layout.mesh.group_size(rest), layout.mesh.group_size(suffix)
            received = busiest_gather(shape[dim], outer, inner) * _others(layout, shape, dim)
            yield Step("all_gather", suffix, layout, layout.with_dim(dim, rest), received, dim)


def _part_groups(layout: Layout, movable: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield `(op, axes)` for every group of movable axes with parts, axes in mesh order."""
    axes = tuple(axis for axis, _ in layout.partial if axis in movable)
    for count in range(1, len(axes) + 1):
        for group in itertools.combinations(axes, count):
            yield str(layout.op_of(group[0])), group


def _all_reduce(layout: Layout, target: Layout, movable: tuple[str, ...], shape: Shape) -> Iterator[Step]:
    size = layout.largest_local_size(shape)
    for op, group in _part_groups(layout, movable):
        n = layout.mesh.group_size(group)
        kept = layout.with_partial(pair for pair in layout.partial if pair[0] not in group)
        yield Step("all_reduce", group, layout, kept, -(-2 * size * (n - 1) // n), op=op)


def _reduce_scatter(layout: Layout, target: Layout, movable: tuple[str, ...], shape: Shape) -> Iterator[Step]:
    for op, group in _part_groups(layout, movable):
        dim = target.dim_of(group[0])
        if dim is None or any(target.dim_of(axis) != dim for axis in group):
            continue
        kept = layout.with_partial(pair for pair in layout.partial if pair[0] not in group)
        order = tuple(axis for axis in target.dims[dim] if axis in group)
        axes = layout.dims[dim]
        n = layout.mesh.group_size(order)
        pieces = longest(shape[dim], layout.mesh.group_size(axes) * n)
        received = (n - 1) * pieces * _others(layout, shape, dim)
        yield Step("reduce_scatter", order, layout, kept.with_dim(dim, axes + order), received, dim, op=op)


def _all_to_all(layout: Layout, target: Layout, movable: tuple[str, ...], shape: Shape) -> Iterator[Step]:
    mesh = layout.mesh
    for dim, axes in enumerate(layout.dims):
        for rest, suffix in _suffixes(axes, movable):
            to_dim = target.dim_of(suffix[0])
            if to_dim in (None, dim) or any(target.dim_of(axis) != to_dim for axis in suffix):
                continue
            assert to_dim is not None
            to_axes = layout.dims[to_dim]
            sizes = mesh.group_size(rest), shape[to_dim], mesh.group_size(to_axes), mesh.group_size(suffix)
            received = busiest_transpose(shape[dim], *sizes) * _others(layout, shape, dim, to_dim)
            after = layout.with_dim(dim, rest).with_dim(to_dim, to_axes + suffix)
            yield Step("all_to_all", suffix, layout, after, received, dim, to_dim)


def _slice(layout: Layout, target: Layout, movable: tuple[str, ...], shape: Shape) -> Iterator[Step]:
    for axis in _free(layout, movable):
        dim = target.dim_of(axis)
        if dim is not None:
            yield Step("slice", (axis,), layout, layout.with_dim(dim, (*layout.dims[dim], axis)), 0, dim)


def _mask(layout: Layout, target: Layout, movable: tuple[str, ...], shape: Shape) -> Iterator[Step]:
    for axis in _free(layout, movable):
        op = target.op_of(axis)
        if op is not None and all(other == op for _, other in layout.partial):
            yield Step("mask", (axis,), layout, layout.with_partial((*layout.partial, (axis, op))), 0, op=op)


def _pad(layout: Layout, target: Layout, movable: tuple[str, ...], shape: Shape) -> Iterator[Step]:
    for dim, axes in enumerate(layout.dims):
        op = target.op_of(axes[-1]) if axes else None
        if op is not None and axes[-1] in movable and all(other == op for _, other in layout.partial):
            after = layout.with_dim(dim, axes[:-1]).with_partial((*layout.partial, (axes[-1], op)))
            yield Step("pad", axes[-1:], layout, after, 0, dim, op=op)


def _exchange(layout: Layout, target: Layout, movable: tuple[str, ...], shape: Shape) -> Iterator[Step]:
    """Along one dim: to the axes that stay there, in the target's order, then those that leave; or to the former alone."""
    free = _free(layout, movable)
    for dim, axes in enumerate(layout.dims):
        if not axes or any(axis not in movable for axis in axes):
            continue
        leaving = tuple(axis for axis in axes if axis not in target.dims[dim])
        there = tuple(axis for axis in target.dims[dim] if axis in axes)
        joined = tuple(axis for axis in target.dims[dim] if axis in axes or axis in free)
        for wanted in dict.fromkeys((there, joined, there + leaving, joined + leaving)):
            if not wanted or wanted[: len(axes)] == axes[: len(wanted)]:
                continue  # a gather, a slice, or nothing
            have, want = Split(shape[dim], axes), Split(shape[dim], wanted)
            received = busiest_exchange(layout.mesh, have, want) * _others(layout, shape, dim)
            group = tuple(axis for axis in layout.mesh.axis_names if axis in (*axes, *wanted))
            yield Step("exchange", group, layout, layout.with_dim(dim, wanted), received, dim)


STEPS: Final[dict[str, Callable[[Layout, Layout, tuple[str, ...], Shape], Iterator[Step]]]] = {
    "slice": _slice,
    "mask": _mask,
    "pad": _pad,
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "exchange": _exchange,
}
"""Every step, local ones first: layout, target, movable axes and global shape to the steps that lead away."""
