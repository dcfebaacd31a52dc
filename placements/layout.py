"""`Layout`: a mesh and the placements of one array, in canonical form.

Invariants: `dims[d]` names the axes that shard dim d, major first; `partial` pairs an axis with its op, in mesh order,
all of one op; an axis occurs once at most; axes of size 1 and replicated axes do not occur. So two layouts are equal
exactly if every coordinate holds the same part of the array. A layout knows the number of dims but no sizes: shapes are
arguments, and bounds always come from the flat coordinate and the global size.

`windows` pairs a sharded dim with a `Reach`, in the order of dims: there a coordinate holds not its piece of the dim but what
its piece of another one is computed from. Such a layout is what one equation needs of an operand; arrays of users have none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from placements.errors import InvalidPlacement
from placements.intervals import Bounds, Reach, Split, Window, longest, longest_window, piece
from placements.mesh import Coordinate, Mesh
from placements.placement import P, Partial, Placement, Shard

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Which part of an array each coordinate of `mesh` holds. Made by `Layout.of`; see the module for the invariants."""

    mesh: Mesh
    dims: tuple[tuple[str, ...], ...]
    partial: tuple[tuple[str, str], ...] = ()
    windows: tuple[tuple[int, Reach], ...] = ()
    _hash: int = field(default=0, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.mesh, self.dims, self.partial, self.windows)))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def replicated(cls, mesh: Mesh, ndim: int) -> Self:
        """Every coordinate holds the whole array."""
        return cls(mesh, ((),) * ndim)

    @classmethod
    def of(cls, placements: P, mesh: Mesh, ndim: int) -> Layout:
        """The layout of an array with `ndim` dims. `None` counts as `Replicate()`.

        Raises `InvalidPlacement` for an unknown axis, an axis used twice, a dim out of range, parts of different ops;
        `MeshError` never. Axes of size 1 are validated like any other.

        >>> str(Layout.of(P(tp=Shard(-1), dp=Shard(1)), Mesh(dp=2, tp=2), 2))
        'P(tp=S(1), dp=S(1))'
        """
        dims: list[tuple[str, ...]] = [()] * ndim
        partial: list[tuple[str, str]] = []
        for axis, placement in resolve(placements, mesh, ndim).items(mesh.axis_names):
            if isinstance(placement, Shard):
                dims[placement.dim] += (axis,)
            elif isinstance(placement, Partial):
                partial.append((axis, placement.op))
        _check_one_op(placements, partial)
        wide = {axis for axis, size in mesh.axes if size > 1}
        sharded = tuple(tuple(axis for axis in axes if axis in wide) for axes in dims)
        return cls(mesh, sharded).with_partial(pair for pair in partial if pair[0] in wide)

    @property
    def ndim(self) -> int:
        """The number of dims of the array."""
        return len(self.dims)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which coordinates hold different values: those that shard, then those of parts."""
        return tuple(axis for axes in self.dims for axis in axes) + tuple(axis for axis, _ in self.partial)

    @property
    def is_replicated(self) -> bool:
        """Whether every coordinate holds the whole array."""
        return not self.partial and not any(self.dims)

    @property
    def plain(self) -> Layout:
        """The same layout with pieces in place of windows."""
        return Layout(self.mesh, self.dims, self.partial) if self.windows else self

    @property
    def placements(self) -> P:
        """The placements in canonical order: that of the mesh, and major first among the axes that share a dim."""
        named: dict[str, Placement | None] = {}
        for axis in self.mesh.axis_names:
            for dim, axes in enumerate(self.dims):
                if axis in axes:
                    named.update({name: Shard(dim) for name in axes})
            named.update({name: Partial(op) for name, op in self.partial if name == axis})
        return P(**named)

    def __str__(self) -> str:
        return repr(self.placements) + " in windows" * bool(self.windows)

    def dim_of(self, axis: str) -> int | None:
        """The dim that `axis` shards, or None."""
        return next((dim for dim, axes in enumerate(self.dims) if axis in axes), None)

    def op_of(self, axis: str) -> str | None:
        """The op of the parts along `axis`, or None."""
        return next((op for name, op in self.partial if name == axis), None)

    def restrict(self, axes: Iterable[str]) -> Layout:
        """The same layout with all axes but `axes` replicated."""
        kept = tuple(axes)
        dims = tuple(tuple(axis for axis in names if axis in kept) for names in self.dims)
        windows = tuple(pair for pair in self.windows if dims[pair[0]])
        return Layout(self.mesh, dims, tuple(pair for pair in self.partial if pair[0] in kept), windows)

    def with_dim(self, dim: int, axes: tuple[str, ...], reach: Reach | None = None) -> Layout:
        """The same layout with dim `dim` sharded over `axes`, in pieces or in windows."""
        windows = dict(self.windows)
        windows.pop(dim, None)
        if reach is not None:
            windows[dim] = reach
        dims = (*self.dims[:dim], axes, *self.dims[dim + 1 :])
        return Layout(self.mesh, dims, self.partial, tuple(sorted(windows.items())))

    def with_partial(self, partial: Iterable[tuple[str, str]]) -> Layout:
        """The same layout with other parts."""
        ops = dict(partial)
        parts = tuple((axis, ops[axis]) for axis in self.mesh.axis_names if axis in ops)
        return Layout(self.mesh, self.dims, parts, self.windows)

    def intervals(self, dim: int, size: int) -> Split | Window:
        """What coordinates hold of a dim of `size`."""
        reach = dict(self.windows).get(dim)
        return Split(size, self.dims[dim]) if reach is None else Window(size, self.dims[dim], reach)

    def bounds(self, shape: Shape, coordinate: Coordinate) -> tuple[Bounds, ...]:
        """The half-open bounds, per dim, of what `coordinate` holds of an array of global `shape`."""
        found = [
            piece(size, self.mesh.group_size(axes), self.mesh.flat_index(coordinate, axes)) if axes else (0, size)
            for size, axes in zip(shape, self.dims, strict=True)
        ]
        for dim, _ in self.windows:
            found[dim] = self.intervals(dim, shape[dim]).bounds(self.mesh, coordinate)
        return tuple(found)

    def local_shape(self, shape: Shape, coordinate: Coordinate) -> Shape:
        """The shape of what `coordinate` holds of an array of global `shape`."""
        return tuple(high - low for low, high in self.bounds(shape, coordinate))

    def offset(self, shape: Shape, coordinate: Coordinate) -> Shape:
        """Where, per dim, the part of `coordinate` begins."""
        return tuple(low for low, _ in self.bounds(shape, coordinate))

    def index(self, shape: Shape, coordinate: Coordinate) -> tuple[slice, ...]:
        """The slices of the global array that `coordinate` holds."""
        return tuple(slice(low, high) for low, high in self.bounds(shape, coordinate))

    def largest_local_shape(self, shape: Shape) -> Shape:
        """The largest local shape over all coordinates (one coordinate has it: distinct dims use distinct axes)."""
        found = [
            longest(size, self.mesh.group_size(axes)) if axes else size
            for size, axes in zip(shape, self.dims, strict=True)
        ]
        for dim, reach in self.windows:
            found[dim] = longest_window(shape[dim], self.mesh.group_size(self.dims[dim]), reach)
        return tuple(found)

    def largest_local_size(self, shape: Shape) -> int:
        """The number of elements of the largest local shape."""
        return math.prod(self.largest_local_shape(shape))

    def to_spec(self) -> tuple[str | tuple[str, ...] | None, ...]:
        """The arguments of the JAX `PartitionSpec` that says the same. Raises `InvalidPlacement` for parts.

        >>> Layout.of(P(dp=Shard(1)), Mesh(dp=2), 2).to_spec()
        (None, 'dp')
        """
        if self.partial:
            raise InvalidPlacement(f"{self}: a PartitionSpec cannot say Partial. Redistribute to Replicate or Shard.")
        return tuple(None if not axes else axes[0] if len(axes) == 1 else axes for axes in self.dims)


def _check_one_op(placements: P, partial: Iterable[tuple[str, str]]) -> None:
    ops = list(dict.fromkeys(op for _, op in partial))
    if len(ops) > 1:
        raise InvalidPlacement(
            f"{placements!r}: parts of different ops do not mix ({', '.join(ops)}). Reduce over one of the axes first."
        )


@functools.cache
def resolve(placements: P, mesh: Mesh, ndim: int) -> P:
    """`placements` by axis name, negative dims resolved against `ndim`, validated against `mesh`; `None` kept.

    Raises `InvalidPlacement` for an unknown axis, an axis used twice or a dim out of range.
    """
    named: dict[str, Placement | None] = {}
    for axis, placement in placements.items(mesh.axis_names):
        if axis not in mesh.axis_names:
            raise InvalidPlacement(
                f"{placements!r}: axis {axis!r} is not on {mesh!r}; its axes are {', '.join(mesh.axis_names) or '(none)'}."
            )
        if axis in named:
            raise InvalidPlacement(
                f"{placements!r}: axis {axis!r} is placed twice. An axis does one thing to an array."
            )
        named[axis] = _resolve_dim(placements, placement, ndim)
    return P(**named)


def _resolve_dim(placements: P, placement: Placement | None, ndim: int) -> Placement | None:
    if not isinstance(placement, Shard):
        return placement
    if ndim == 0:
        raise InvalidPlacement(f"{placements!r}: a 0-d array has no dim to shard. Use Replicate().")
    if not -ndim <= placement.dim < ndim:
        raise InvalidPlacement(
            f"{placements!r}: dim {placement.dim} is out of range for an array with {ndim} dims ({-ndim} to {ndim - 1})."
        )
    return Shard(placement.dim % ndim)


def merge(stated: P, current: Layout, free_dims: tuple[int, ...] = ()) -> Layout:
    """The layout that `stated` asks of an array placed as `current`.

    An axis stated as `None` keeps its placement, and so does one that shards a dim of `free_dims` and is not stated.
    Axes that keep a dim stay major to those that are stated for it.
    """
    mesh = current.mesh
    named = dict(resolve(stated, mesh, current.ndim).items(mesh.axis_names))
    kept = {axis for axis in current.axes if axis in named and named[axis] is None}
    kept |= {axis for dim in free_dims for axis in current.dims[dim] if axis not in named}
    target = Layout.of(stated, mesh, current.ndim)
    if not kept:
        return target
    dims = tuple(
        tuple(axis for axis in old if axis in kept) + new for old, new in zip(current.dims, target.dims, strict=True)
    )
    parts = (*target.partial, *(pair for pair in current.partial if pair[0] in kept))
    _check_one_op(stated, parts)
    return Layout(mesh, dims).with_partial(parts)


def partial_fault(op: str, kind: str) -> str | None:
    """Why parts of `op` are not defined for a kind of dtype (bool, integer, float, complex, key), or None if they are.

    The text has a place for the `{dtype}`.
    """
    if kind == "key":
        return "a key has no parts. Use Replicate or Shard."
    if kind == "bool" and op in ("sum", "mean"):
        return f"the {op} of {{dtype}} is not defined. Use Partial('or') or Partial('and'), or cast to an integer."
    if kind == "integer" and op == "mean":
        return "the mean of {dtype} is not an integer. Use Partial('sum'), or cast to a float."
    if kind in ("float", "complex") and op in ("and", "or", "xor"):
        return f"{op} is for bool and integers, not {{dtype}}."
    if kind == "complex" and op in ("max", "min"):
        return f"{op} of complex numbers is not defined. Use the real and imaginary parts."
    return None
