"""This process: its world. Here a world of one; launchers, ranks and back ends join with the MPI back end."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from collectives import simulated
from collectives.communicator import Communicator
from placements.intervals import Bounds


class Alone(Communicator):
    """The communicator of a lone process: rank 0 of 1."""

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def size(self) -> int:
        """Always 1."""
        return 1

    def all_reduce(self, array: Any, *, op: str) -> Any:
        """See `Communicator.all_reduce`."""
        return simulated.all_reduce([array], op=op)[0]

    def all_gather(self, array: Any, *, dim: int, sizes: Sequence[int]) -> Any:
        """See `Communicator.all_gather`."""
        return simulated.all_gather([array], dim=dim, sizes=sizes)[0]

    def reduce_scatter(self, array: Any, *, op: str, dim: int, sizes: Sequence[int]) -> Any:
        """See `Communicator.reduce_scatter`."""
        return simulated.reduce_scatter([array], op=op, dim=dim, sizes=sizes)[0]

    def all_to_all(self, array: Any, *, dim: int, sizes: Sequence[int], to_dim: int, to_sizes: Sequence[int]) -> Any:
        """See `Communicator.all_to_all`."""
        return simulated.all_to_all([array], dim=dim, sizes=sizes, to_dim=to_dim, to_sizes=to_sizes)[0]

    def exchange(self, array: Any, *, dim: int, have: Sequence[Bounds], want: Sequence[Bounds]) -> Any:
        """See `Communicator.exchange`."""
        return simulated.exchange([array], dim=dim, have=have, want=want)[0]

    def broadcast(self, array: Any, *, root: int) -> Any:
        """See `Communicator.broadcast`."""
        return simulated.broadcast([array], root=root)[0]

    def permute(self, array: Any, *, pairs: Sequence[tuple[int, int]]) -> Any:
        """See `Communicator.permute`."""
        return simulated.permute([array], pairs=pairs)[0]

    def barrier(self) -> None:
        """Return at once."""


@functools.cache
def world() -> Communicator:
    """The communicator of all processes of this job. Communication: none.

    >>> world().rank, world().size
    (0, 1)
    """
    return Alone()
