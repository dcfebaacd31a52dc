"""Shard arithmetic on one dim.

The one formula: piece i of n of a dim of `size` is `[ceil(i*size/n), ceil((i+1)*size/n))`. At most two lengths occur,
and boundaries over `a*b` pieces contain those over `a`: nested splits are flat ones. `Split` is that formula over mesh
axes, optionally widened by a halo; `Pieces` is an explicit table. Both give the half-open bounds that a coordinate of
the mesh holds, which is all that an exchange needs to know.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from placements.errors import InvalidPlacement
from placements.mesh import Coordinate, Mesh

Bounds = tuple[int, int]


def boundary(size: int, n: int, i: int) -> int:
    """Where piece i of n begins: `ceil(i * size / n)`."""
    return -(-i * size // n)


def piece(size: int, n: int, i: int) -> Bounds:
    """The half-open bounds of piece i of n of a dim of `size`.

    >>> [piece(5, 4, i) for i in range(4)]
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    return boundary(size, n, i), boundary(size, n, i + 1)


def longest(size: int, n: int) -> int:
    """The length of the longest of n pieces."""
    return -(-size // n)


def overlap(a: Bounds, b: Bounds) -> Bounds:
    """The common part of two intervals; empty ones have equal ends."""
    low = max(a[0], b[0])
    return low, max(low, min(a[1], b[1]))


def length(bounds: Bounds) -> int:
    """The number of indices in an interval."""
    return bounds[1] - bounds[0]


@dataclass(frozen=True, slots=True)
class Split:
    """The pieces of a dim of `size` over mesh axes, the first major, each widened by `before` and `after` inside the dim."""

    size: int
    axes: tuple[str, ...]
    before: int = 0
    after: int = 0

    def bounds(self, mesh: Mesh, coordinate: Coordinate) -> Bounds:
        """The interval that belongs to a coordinate."""
        low, high = piece(self.size, mesh.group_size(self.axes), mesh.flat_index(coordinate, self.axes))
        return max(0, low - self.before), min(self.size, high + self.after)


@dataclass(frozen=True, slots=True)
class Pieces:
    """An explicit table of bounds over mesh axes, the first major; entry i belongs to flat index i.

    Raises `InvalidPlacement` where an interval is negative.
    """

    axes: tuple[str, ...]
    table: tuple[Bounds, ...]

    def __post_init__(self) -> None:
        if any(low < 0 or high < low for low, high in self.table):
            raise InvalidPlacement(f"Pieces({self.table!r}): bounds are 0 <= low <= high.")

    @classmethod
    def of_lengths(cls, axes: tuple[str, ...], lengths: tuple[int, ...]) -> Pieces:
        """Consecutive pieces of the given lengths, from 0 on."""
        ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
        return cls(axes, tuple((end - size, end) for end, size in zip(ends, lengths, strict=True)))

    def bounds(self, mesh: Mesh, coordinate: Coordinate) -> Bounds:
        """The interval that belongs to a coordinate."""
        return self.table[mesh.flat_index(coordinate, self.axes)]


@dataclass(frozen=True, slots=True, order=True)
class Reach:
    """From which indices of a dim an interval of another dim is computed; `of` is the size of that other dim.

    [low, high) needs from `(low * step + first) // per` to `((high - 1) * step + last) // per`, both included, as far as the
    dim goes, or `within` if bounds are given; an empty interval needs nothing. `flipped`: the other dim is counted from its
    end. So `x[3::2]` is `Reach(of, 2, 3, 3)`, and a convolution with a window of 3 and padding 1 is `Reach(of, 1, -1, 1)`.
    """

    of: int
    step: int = 1
    first: int = 0
    last: int = 0
    per: int = 1
    flipped: bool = False
    within: tuple[()] | Bounds = ()

    def limits(self, size: int) -> Bounds:
        """The bounds that nothing outside is needed of, of a dim of `size`."""
        return self.within or (0, size)

    def bounds(self, interval: Bounds, size: int) -> Bounds:
        """What `interval` needs of a dim of `size`.

        >>> Reach(5, 1, -1, 1).bounds((0, 2), 5)
        (0, 3)
        """
        low, high = (self.of - interval[1], self.of - interval[0]) if self.flipped else interval
        if high <= low:
            return 0, 0
        first, last = (low * self.step + self.first) // self.per, ((high - 1) * self.step + self.last) // self.per
        begin, end = self.limits(size)
        start = min(max(first, begin), end)
        return start, max(start, min(last + 1, end))


@dataclass(frozen=True, slots=True)
class Window:
    """Of a dim of `size` what each piece of another dim, over mesh axes, is computed from."""

    size: int
    axes: tuple[str, ...]
    reach: Reach

    def bounds(self, mesh: Mesh, coordinate: Coordinate) -> Bounds:
        """The interval that belongs to a coordinate."""
        at = piece(self.reach.of, mesh.group_size(self.axes), mesh.flat_index(coordinate, self.axes))
        return self.reach.bounds(at, self.size)


Intervals = Split | Pieces | Window


def cover(haves: tuple[Bounds, ...], want: Bounds, own: int | None = None) -> tuple[tuple[int, Bounds], ...]:
    """Who supplies `want`: pairs (holder, interval) in ascending order that tile it.

    What `own` holds comes from `own`; the rest from whoever reaches furthest, the lowest among equals. Raises
    `InvalidPlacement` where nobody holds an index of `want`.
    """
    at, parts = want[0], []
    while at < want[1]:
        holders = [i for i, (low, high) in enumerate(haves) if low <= at < high]
        if not holders:
            raise InvalidPlacement(f"exchange: nobody holds index {at} of {want}; the intervals held are {haves}.")
        holder = own if own in holders else max(holders, key=lambda i: (haves[i][1], -i))
        reach = min(haves[holder][1], want[1])
        parts.append((holder, (at, reach)))
        at = reach
    return tuple(parts)


@functools.cache
def busiest_gather(size: int, outer: int, inner: int) -> int:
    """The most indices that a coordinate receives when pieces over `outer * inner` are gathered to those over `outer`."""
    n = outer * inner
    return max(length(piece(size, outer, i // inner)) - length(piece(size, n, i)) for i in range(n))


@functools.cache
def busiest_transpose(size_from: int, outer_from: int, size_to: int, outer_to: int, n: int) -> int:
    """The most elements (of a plane of two dims) received when n ranks turn pieces of one dim into pieces of another."""

    def missing(i: int) -> int:
        return max(
            length(piece(size_from, outer_from, o)) - length(piece(size_from, outer_from * n, o * n + i))
            for o in range(outer_from)
        )

    def wanted(i: int) -> int:
        return max(length(piece(size_to, outer_to * n, o * n + i)) for o in range(outer_to))

    return max(missing(i) * wanted(i) for i in range(n))


@functools.cache
def longest_window(size: int, n: int, reach: Reach) -> int:
    """The length of the longest of the windows of n pieces."""
    return max(length(reach.bounds(piece(reach.of, n, i), size)) for i in range(n))


@functools.cache
def busiest_exchange(mesh: Mesh, have: Intervals, want: Intervals) -> int:
    """The most indices of one dim that a coordinate wants and does not have."""
    axes = {axis: mesh.axis_size(axis) for axis in (*have.axes, *want.axes)}
    small = Mesh(axes)
    pairs = ((have.bounds(small, at), want.bounds(small, at)) for at in small.coordinates())
    return max(length(w) - length(overlap(h, w)) for h, w in pairs)
