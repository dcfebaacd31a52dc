"""The contract of a communicator: one method per collective, on the buffers of one process.

A communicator connects the `size` members of one group; the caller is member `rank`. Every method is collective: all
members call it, in the same order, with the same arguments but for the array. Arrays are returned, never changed.
`sizes`, `have` and `want` list one entry per member and are the same on all of them, so no sizes travel.

`collectives.testing` states each method's result case by case; a back end conforms if it passes.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from placements.intervals import Bounds


class Communicator(abc.ABC):
    """A group of processes, seen from one of them. Sizes are in elements along one dim, bounds are half-open."""

    @property
    @abc.abstractmethod
    def rank(self) -> int:
        """The index of this process in the group."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """The number of members."""

    @abc.abstractmethod
    def all_reduce(self, array: Any, *, op: str) -> Any:
        """The reduction over all members, on every one. Numbers of 16 bits or fewer are reduced in 32."""

    @abc.abstractmethod
    def all_gather(self, array: Any, *, dim: int, sizes: Sequence[int]) -> Any:
        """All members' arrays, joined along `dim`; member i contributes `sizes[i]` indices."""

    @abc.abstractmethod
    def reduce_scatter(self, array: Any, *, op: str, dim: int, sizes: Sequence[int]) -> Any:
        """The reduction over all members, of which member i keeps the i-th run of `sizes[i]` indices along `dim`."""

    @abc.abstractmethod
    def all_to_all(self, array: Any, *, dim: int, sizes: Sequence[int], to_dim: int, to_sizes: Sequence[int]) -> Any:
        """Member i holds `sizes[i]` indices of `dim`, all of `to_dim`; afterwards all of `dim`, `to_sizes[i]` of `to_dim`."""

    @abc.abstractmethod
    def exchange(self, array: Any, *, dim: int, have: Sequence[Bounds], want: Sequence[Bounds]) -> Any:
        """Member i holds the indices `have[i]` along `dim`; afterwards the indices `want[i]`. Wants may overlap."""

    @abc.abstractmethod
    def broadcast(self, array: Any, *, root: int) -> Any:
        """The array of member `root`, on every member."""

    @abc.abstractmethod
    def permute(self, array: Any, *, pairs: Sequence[tuple[int, int]]) -> Any:
        """For every pair (source, destination) the source's array; zeros where no pair leads. Destinations are distinct."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Return when every member has called it."""
