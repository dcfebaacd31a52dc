"""`Mesh`: named axes over ranks, as pure data.

Invariants: a coordinate is a tuple of ints in mesh order; position p of the mesh is its row-major index, outermost axis
first; `ranks[p]` is the world rank there. A mesh owns no communicator and no process: it is a value, equal and hashed by
its axes, ranks and backend.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from placements.errors import MeshError

Coordinate = tuple[int, ...]


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Mesh:
    """Named axes, outermost first: `Mesh(dp=2, tp=2)`, or `Mesh({"dp": 2, "tp": 2})`.

    `ranks` lists the world ranks in row-major order of the coordinates (default: 0, 1, 2, ...); it may permute them or
    take a part. `backend` forces one (`"simulated"`); by default the processes that exist decide. Both are part of the
    mesh's value; axes called `ranks` or `backend` need the mapping form.

    Raises `MeshError` for a size below 1, an axis without a name, ranks that are not one per coordinate.

    >>> mesh = Mesh(dp=2, tp=3)
    >>> mesh.size, mesh.coordinate(4), mesh.rank((1, 1))
    (6, (1, 1), 4)
    """

    axes: tuple[tuple[str, int], ...]
    rank_list: tuple[int, ...] | None
    backend: str | None
    _hash: int = field(compare=False)

    def __init__(
        self,
        axes: Mapping[str, int] | None = None,
        /,
        *more: object,
        ranks: Sequence[int] | None = None,
        backend: str | None = None,
        **named: int,
    ) -> None:
        if more or not (axes is None or isinstance(axes, Mapping)):
            raise MeshError("Mesh(...): axes have names, as in Mesh(dp=2, tp=2) or Mesh({'dp': 2, 'tp': 2}).")
        if axes is not None and named:
            raise MeshError("Mesh(...): give the axes as a mapping or as keywords, not both.")
        pairs = tuple((axes if axes is not None else named).items())
        for name, size in pairs:
            _check_axis(name, size)
        size = math.prod(size for _, size in pairs)
        rank_list = None if ranks is None else _check_ranks(ranks, size)
        if backend is not None and not isinstance(backend, str):
            raise MeshError(f"Mesh(...): backend is a name such as 'simulated', not {backend!r}.")
        object.__setattr__(self, "axes", tuple((name, int(size)) for name, size in pairs))
        object.__setattr__(self, "rank_list", rank_list)
        object.__setattr__(self, "backend", backend)
        object.__setattr__(self, "_hash", hash((self.axes, rank_list, backend)))

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        plain = all(name.isidentifier() and name not in ("ranks", "backend") for name, _ in self.axes)
        words = [f"{name}={size}" for name, size in self.axes] if plain else [repr(dict(self.axes))]
        words += [] if self.rank_list is None else [f"ranks={list(self.rank_list)}"]
        words += [] if self.backend is None else [f"backend={self.backend!r}"]
        return f"Mesh({', '.join(words)})"

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names of the axes, outermost first."""
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> Mapping[str, int]:
        """Axis name to size, outermost first."""
        return MappingProxyType(dict(self.axes))

    @property
    def size(self) -> int:
        """The number of coordinates."""
        return math.prod(size for _, size in self.axes)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The world rank at every coordinate, in row-major order."""
        return self.rank_list if self.rank_list is not None else tuple(range(self.size))

    def axis_size(self, axis: str) -> int:
        """The size of `axis`. Raises `MeshError` for one that the mesh does not have."""
        return self.axes[self.axis_index(axis)][1]

    def axis_index(self, axis: str) -> int:
        """The position of `axis` among the mesh's axes. Raises `MeshError` for one that the mesh does not have."""
        for index, (name, _) in enumerate(self.axes):
            if name == axis:
                return index
        raise MeshError(f"{self!r} has no axis {axis!r}; its axes are {', '.join(self.axis_names) or '(none)'}.")

    def group_size(self, axes: Iterable[str]) -> int:
        """The product of the sizes of `axes`."""
        return math.prod(self.axis_size(axis) for axis in axes)

    def coordinates(self) -> Iterator[Coordinate]:
        """Yield every coordinate in row-major order."""
        return (self.coordinate_at(position) for position in range(self.size))

    def coordinate_at(self, position: int) -> Coordinate:
        """The coordinate at a row-major position."""
        if not 0 <= position < self.size:
            raise MeshError(f"{self!r} has positions 0 to {self.size - 1}, not {position}.")
        digits = []
        for _, size in reversed(self.axes):
            position, digit = divmod(position, size)
            digits.append(digit)
        return tuple(reversed(digits))

    def position(self, coordinate: Coordinate) -> int:
        """The row-major position of a coordinate. Raises `MeshError` for one outside the mesh."""
        sizes = tuple(size for _, size in self.axes)
        if not isinstance(coordinate, tuple):
            raise MeshError(
                f"{self!r}: a coordinate is a tuple of {len(sizes)} ints in mesh order, not {coordinate!r}."
            )
        if len(coordinate) != len(sizes) or not all(0 <= i < n for i, n in zip(coordinate, sizes, strict=True)):
            raise MeshError(f"{self!r} has no coordinate {tuple(coordinate)!r}.")
        return functools.reduce(lambda flat, pair: flat * pair[1] + pair[0], zip(coordinate, sizes, strict=True), 0)

    def coordinate(self, rank: int) -> Coordinate:
        """The coordinate of a world rank. Raises `MeshError` for a rank outside the mesh."""
        try:
            return self.coordinate_at(rank if self.rank_list is None else self.rank_list.index(rank))
        except (ValueError, MeshError):
            raise MeshError(f"Rank {rank} is not in {self!r}.") from None

    def rank(self, coordinate: Coordinate) -> int:
        """The world rank at a coordinate."""
        position = self.position(coordinate)
        return position if self.rank_list is None else self.rank_list[position]

    def flat_index(self, coordinate: Coordinate, axes: Iterable[str]) -> int:
        """The index of a coordinate among the members of its group along `axes`, the first of them major."""
        flat = 0
        for axis in axes:
            index = self.axis_index(axis)
            flat = flat * self.axes[index][1] + coordinate[index]
        return flat

    def groups(self, axes: str | Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The groups of world ranks that differ along `axes` alone; members in order of `axes`, the first major.

        >>> Mesh(dp=2, tp=2).groups("dp")
        ((0, 2), (1, 3))
        """
        ranks = self.ranks
        return tuple(tuple(ranks[p] for p in group) for group in group_positions(self, _axes_tuple(axes)))

    def submesh(self, /, *keep: str, **fixed: int) -> Mesh:
        """The mesh of the axes `keep` at fixed coordinates of all the others: `mesh.submesh("tp", dp=0)`.

        Raises `MeshError` unless every axis is either kept or fixed.
        """
        named = (*keep, *fixed)
        if len(set(named)) != len(named) or set(named) != set(self.axis_names):
            raise MeshError(
                f"{self!r}.submesh: every axis is either kept or fixed once, as in mesh.submesh('tp', dp=0); "
                f"kept {', '.join(keep) or 'none'}, fixed {', '.join(fixed) or 'none'}."
            )
        inner = Mesh({axis: self.axis_size(axis) for axis in keep})
        ranks = [self.rank(self._join(keep, at, fixed)) for at in inner.coordinates()]
        return Mesh(dict(inner.axes), ranks=ranks, backend=self.backend)

    def _join(self, keep: tuple[str, ...], at: Coordinate, fixed: Mapping[str, int]) -> Coordinate:
        indices = dict(zip(keep, at, strict=True)) | dict(fixed)
        return tuple(indices[axis] for axis in self.axis_names)


@functools.cache
def group_positions(mesh: Mesh, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The groups along `axes` as row-major positions; groups in order of their first member."""
    if len(set(axes)) != len(axes):
        raise MeshError(f"{mesh!r}: an axis occurs twice in the group {axes!r}.")
    for axis in axes:
        mesh.axis_index(axis)
    rest = tuple(axis for axis in mesh.axis_names if axis not in axes)
    groups: dict[int, dict[int, int]] = {}
    for position, coordinate in enumerate(mesh.coordinates()):
        groups.setdefault(mesh.flat_index(coordinate, rest), {})[mesh.flat_index(coordinate, axes)] = position
    return tuple(tuple(group[i] for i in range(len(group))) for group in groups.values())


def _axes_tuple(axes: str | Iterable[str]) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _check_axis(name: object, size: object) -> None:
    if not isinstance(name, str) or not name:
        raise MeshError(f"Mesh(...): an axis has a name, a non-empty string; not {name!r}.")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise MeshError(f"Mesh(...): the size of axis {name!r} is an integer of at least 1, not {size!r}.")


def _check_ranks(given: Any, size: int) -> tuple[int, ...]:
    if not isinstance(given, Iterable):
        raise MeshError(
            f"Mesh(...): ranks lists the ranks, one per coordinate; got {given!r}. An axis of that name: Mesh({{...}})."
        )
    ranks = tuple(given)
    if len(ranks) != size or len(set(ranks)) != size or any(not isinstance(r, int) or r < 0 for r in ranks):
        raise MeshError(f"Mesh(...): ranks lists {size} different ranks, one per coordinate; got {list(ranks)}.")
    return ranks
