"""The NCCL back end, through cupy: collectives on GPUs, one process for each.

Arrays of cupy's and of JAX's on a GPU stay where they are (DLPack, no copies); what lies in host memory goes over the host's
communicator, as do objects. An eager call is put on cupy's current stream and returns when it is done there; `async_op=True`
returns at once. In an executable of XLA the call is put on XLA's own stream, and nothing waits. One communicator has one order
of operations: use one stream, or let one wait for the other.

NCCL knows no timeouts: a thread of the process looks at what is underway. An operation that fails, or is not done within
`SPMD_TIMEOUT`, aborts the communicator; in a program it ends the job, whose results would be garbage. What NCCL does not reduce
(bitwise ops, products of complex numbers) is gathered and reduced by the members. Numbers of 16 bits are reduced in 32, as
everywhere here.

This module is the only one that imports cupy. It uses of it what `Library` and `Device` say; tests put others in their places.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from collectives import watch
from collectives.communicator import Communicator, Receive, Send
from collectives.errors import BackendError, CollectiveTimeout, InvalidCollective, TransportError
from collectives.launch import launch
from collectives.wire import Piece, Transfer, pieces_of
from collectives.work import Pending, Work

REDUCED: Final = {
    "int32": "NCCL_INT32", "int64": "NCCL_INT64", "uint8": "NCCL_UINT8", "uint32": "NCCL_UINT32", "uint64": "NCCL_UINT64",
    "float32": "NCCL_FLOAT32", "float64": "NCCL_FLOAT64",
}  # fmt: skip
"""The dtypes that are reduced; all are moved, as bytes."""
OPS: Final = {"sum": "NCCL_SUM", "prod": "NCCL_PROD", "max": "NCCL_MAX", "min": "NCCL_MIN", "mean": "NCCL_AVG"}
LOOK_S: Final = 0.02
"""Seconds between two looks at what is underway."""


class Library(Protocol):
    """What is used of `cupy.cuda.nccl`: its constants `NCCL_...` besides."""

    NcclCommunicator: Any

    def get_unique_id(self) -> bytes:
        """What the members of a new communicator meet by."""

    def groupStart(self) -> None:
        """From here on calls are collected."""

    def groupEnd(self) -> None:
        """Put what was collected on its streams, at once."""


class Event(Protocol):
    """A point in a stream."""

    @property
    def done(self) -> bool:
        """Whether the stream has come there. Raises what the device says is wrong."""


class Device(Protocol):
    """The memory and the streams of this process's GPU."""

    def owns(self, array: Any) -> bool:
        """Whether an array, of whatever library, lies there."""

    def adopted(self, array: Any) -> Any:
        """A JAX array as one of the device's own library, without a copy, if that knows its dtype; else the JAX array."""

    def as_jax(self, array: Any) -> jax.Array:
        """An array of the device as one of JAX's, without a copy."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """A new array."""

    def pointer(self, array: Any) -> int:
        """Where an array begins."""

    def stream(self) -> int:
        """The current stream."""

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Put a copy within the device on a stream."""

    def record(self, stream: int) -> Event:
        """The point that a stream has come to."""


class CupyDevice:
    """The GPU of this process, by cupy."""

    def __init__(self, index: int) -> None:
        import cupy

        self.cupy = cupy
        self.index = index
        cupy.cuda.Device(index).use()

    def owns(self, array: Any) -> bool:
        """See `Device`."""
        if isinstance(array, jax.Array):
            return all(device.platform == "gpu" for device in array.devices())
        return isinstance(array, self.cupy.ndarray)

    def adopted(self, array: Any) -> Any:
        """See `Device`. By its address: DLPack would mark it as read-only."""
        if array.dtype.isbuiltin != 1:
            return array
        if array.size == 0:
            return self.cupy.empty(array.shape, array.dtype)
        memory = self.cupy.cuda.UnownedMemory(array.unsafe_buffer_pointer(), array.nbytes, array, self.index)
        return self.cupy.ndarray(array.shape, array.dtype, self.cupy.cuda.MemoryPointer(memory, 0))

    def as_jax(self, array: Any) -> jax.Array:
        """See `Device`."""
        if array.size == 0:
            return jnp.zeros(array.shape, array.dtype)
        return jax.dlpack.from_dlpack(array if array.flags.c_contiguous else array.copy())

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """See `Device`."""
        return self.cupy.empty(shape, dtype)

    def pointer(self, array: Any) -> int:
        """See `Device`."""
        return array.unsafe_buffer_pointer() if isinstance(array, jax.Array) else array.data.ptr

    def stream(self) -> int:
        """See `Device`."""
        return self.cupy.cuda.get_current_stream().ptr

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """See `Device`."""
        runtime = self.cupy.cuda.runtime
        runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDeviceToDevice, stream)

    def record(self, stream: int) -> Event:
        """See `Device`."""
        with self.cupy.cuda.Device(self.index):
            event = self.cupy.cuda.Event(disable_timing=True)
            event.record(self.cupy.cuda.ExternalStream(stream))
        return event


def connect(host: Communicator) -> NcclCommunicator:
    """The communicator of all processes, over NCCL. Raises `BackendError` where cupy, NCCL or a GPU is missing."""
    try:
        from cupy.cuda import nccl, runtime
    except ImportError as error:
        raise BackendError(f"the nccl back end needs cupy: pip install 'spmd[nccl]' ({error}).") from error
    if not nccl.available:
        raise BackendError("the nccl back end: cupy finds no NCCL library: pip install 'spmd[nccl]'.")
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise BackendError(f"the nccl back end: this process has no GPU ({error}).") from error
    found = launch()
    local_rank = 0 if found is None else found.local_rank
    if found is not None and found.local_size > count > 1:
        raise BackendError(f"the nccl back end: {found.local_size} processes on this node, and {count} GPUs; one each.")
    return NcclCommunicator(host, nccl, CupyDevice(local_rank % count))


class NcclCommunicator(Communicator):
    """A communicator over one of NCCL's, beside the host's of the same members."""

    def __init__(self, host: Communicator, library: Any, device: Device, nccl: Any = None) -> None:
        super().__init__(host.world_ranks, host.local_rank)
        self.host, self.library, self.device = host, library, device
        if nccl is None:
            key = np.frombuffer(library.get_unique_id(), np.uint8) if host.rank == 0 else np.empty(0, np.uint8)
            key = host.broadcast_object(key.tobytes())
            with watch.ends_job(f"making NCCL's communicator of world ranks {host.world_ranks}", self._end_job):
                nccl = library.NcclCommunicator(host.size, key, host.rank)
        self.nccl = nccl
        self.underway: list[tuple[Any, float, Callable[[], str], bool]] = []
        """What is on a stream: its end, when it has to be there, what it is, and whether a program waits for it."""
        self._lock = threading.RLock()

    @property
    def rank(self) -> int:
        """The index of this process in the group."""
        return self.host.rank

    @property
    def size(self) -> int:
        """The number of members."""
        return self.host.size

    def barrier(self) -> None:
        """Return when every member has called it, and what each had put on its streams is done."""
        self.check_usable()
        self.drain()
        self.host.barrier()

    def drain(self) -> None:
        """Return once nothing is underway."""
        super().drain()
        self.host.drain()
        watch.wait(self._is_idle, lambda: "what programs have put on a stream", list)

    def reduces(self, dtype: np.dtype[Any], op: str) -> bool:
        """See `Communicator.reduces`."""
        return op in OPS and dtype.name in REDUCED and (op != "mean" or dtype.kind == "f")

    def taken(self, name: str, leaf: Any) -> Any:
        """See `Communicator.taken`. Raises `InvalidCollective` for what does not lie on the device."""
        if not self.device.owns(leaf):
            raise InvalidCollective(
                f"{name}: {type(leaf).__name__} lies in host memory, beside others on a device; one call takes one kind."
            )
        if not isinstance(leaf, jax.Array):
            return leaf
        leaf.block_until_ready()  # XLA's stream is another
        return self.device.adopted(leaf)

    def room(self, shape: tuple[int, ...], dtype: np.dtype[Any], like: Any) -> Any:
        """See `Communicator.room`."""
        return self.device.empty(shape, dtype)

    def arrived(self, received: Any, like: Any) -> Any:
        """See `Communicator.arrived`."""
        return self.device.as_jax(received) if isinstance(like, jax.Array) else received

    def delivered(self, result: Any, leaf: Any) -> Any:
        """See `Communicator.delivered`."""
        return (
            self.device.as_jax(result) if isinstance(leaf, jax.Array) and not isinstance(result, jax.Array) else result
        )

    def begin(self, transfer: Transfer, sent: Any, received: Any, what: Callable[[], str]) -> Pending:
        """See `Communicator.begin`: put on the current stream at once."""
        if isinstance(sent, jax.Array):
            sent.block_until_ready()
        stream = self.device.stream()
        self.enqueue(transfer, self.device.pointer(sent), self.device.pointer(received), stream, what)
        event = self.device.record(stream)
        self._watched(event, what, False)
        return Enqueued(self, event, (sent, received), what)

    def prepare(self, transfer: Transfer, what: Callable[[], str]) -> Callable[..., None]:
        """See `Communicator.prepare`: called with a stream as well."""

        def run(source: int, target: int, stream: int = 0) -> None:
            self.check_usable()
            self.enqueue(transfer, source, target, stream, what)
            self._watched(self.device.record(stream), what, True)

        return run

    def _watched(self, event: Event, what: Callable[[], str], in_program: bool) -> None:
        """Let the watcher look after what was put on a stream."""
        with self._lock:
            self.underway.append((event, time.monotonic() + watch.timeout_s(), what, in_program))
        _look_after(self)

    def enqueue(self, transfer: Transfer, source: int, target: int, stream: int, what: Callable[[], str]) -> None:
        """Put a transfer on a stream."""
        self._put(CALLS[transfer.kind](self, transfer, source, target, stream), what)

    def _put(self, calls: Iterable[Call], what: Callable[[], str]) -> None:
        """Make calls of NCCL's, several as one group. A failure gives the communicator up."""
        try:
            made = list(calls)
            if len(made) > 1:
                self.library.groupStart()
            try:
                for call in made:
                    call()
            finally:
                if len(made) > 1:
                    self.library.groupEnd()
        except Exception as error:
            raise self.failed(what, error) from error

    def failed(self, what: Callable[[], str], error: BaseException) -> TransportError:
        """Give the communicator up; the error to raise."""
        kind = CollectiveTimeout if isinstance(error, CollectiveTimeout) else TransportError
        words = str(error) if isinstance(error, CollectiveTimeout) else f"{type(error).__name__}: {error}"
        found = kind(f"{what()}: {words}")
        self.fail(found)
        return found

    def fail(self, error: BaseException) -> None:
        """See `Communicator.fail`; what is on streams ends too."""
        if self.poison is None:
            self.poison = error
            self.nccl.abort()

    def begin_messages(self, sends: Sequence[Send], receives: Sequence[Receive]) -> list[Pending]:
        """See `Communicator.begin_messages`: one group of NCCL's. Each `out` says what comes; there are no tags."""
        if any(message.tag for message in sends) or any(message.tag for message in receives):
            raise InvalidCollective("message: between devices there are no tags.")
        for message in receives:
            out = message.out
            if out is None or isinstance(out, jax.Array) or not self.device.owns(out) or not out.flags.c_contiguous:
                raise InvalidCollective(
                    "recv: between devices no shapes travel: `out` is a contiguous array there, not JAX's."
                )
        stream, pointer = self.device.stream(), self.device.pointer
        calls = [
            self._send(pointer(each.array), each.array.nbytes, each.to, stream) for each in sends if each.array.size
        ]
        calls += [
            self._recv(pointer(each.out), each.out.nbytes, each.source, stream) for each in receives if each.out.size
        ]
        what = functools.partial(str, "messages between devices")
        self._put(calls, what)
        event = self.device.record(stream)
        found: list[Pending] = [Enqueued(self, event, (each.array,), what, counts=False) for each in sends]
        for message in receives:
            found.append(Enqueued(self, event, (), what, message.out, counts=False))
        return found

    def subgroup(self, ranks: tuple[int, ...], name: str) -> NcclCommunicator:
        """See `Communicator.subgroup`: the members meet by a new key."""
        return NcclCommunicator(self.host.subgroup(ranks, name), self.library, self.device)

    def partition(self, groups: Sequence[tuple[int, ...]], name: str) -> Communicator | None:
        """See `Communicator.partition`: by ncclCommSplit."""
        self.drain()
        self.check_usable()
        own = next((number for number, ranks in enumerate(groups) if self.rank in ranks), -1)
        host = self.host.partition(groups, name)
        with watch.ends_job(f"{name}: splitting NCCL's communicator", self._end_job):
            nccl = self.nccl.commSplit(own, groups[own].index(self.rank) if own >= 0 else 0)
        return None if host is None else NcclCommunicator(host, self.library, self.device, nccl)

    def absent(self) -> list[int]:
        """The members, by world rank, that have left and will not come to the next operation."""
        return self.host.absent()

    def close(self) -> None:
        """See `Communicator.close`."""
        if self.is_world and not self._process_ends():
            return
        if not self.is_closed and self.poison is None:
            self.drain()
            self.is_closed, self.poison = True, TransportError("closed")
            self.nccl.destroy()
        self.host.close()

    def look(self) -> bool:
        """Look at what is on a stream; whether nothing is left. What failed, or is late, gives the communicator up, and ends
        the job if a program waits for it."""
        with self._lock:
            if self.poison is not None:
                return True
            what = self.underway[0][2] if self.underway else functools.partial(str, "a collective")
            try:
                self.nccl.check_async_error()
                while self.underway and self.underway[0][0].done:
                    del self.underway[0]
                if self.underway and time.monotonic() > self.underway[0][1]:
                    what = self.underway[0][2]
                    raise CollectiveTimeout(
                        f"not done after {watch.timeout_s():g} s (SPMD_TIMEOUT). Some rank did not come to it, or came to "
                        "another."
                    )
            except Exception as error:
                found = self.failed(what, error)
                if any(in_program for _, _, _, in_program in self.underway):
                    world_rank = self.world_ranks[self.rank]
                    print(
                        f"rank {world_rank}: {type(found).__name__}: {found}; the job ends", file=sys.stderr, flush=True
                    )
                    self._end_job(1)
            return self.poison is not None or not self.underway

    def _process_ends(self) -> bool:
        return bool(getattr(getattr(self.host, "job", None), "ends", False))

    def _is_idle(self) -> bool:
        return not self.underway or self.look()

    def _end_job(self, status: int) -> None:
        from collectives.process import end_job

        end_job(self.host, status)

    def _call(self, name: str, tree: Any, out: Any, async_op: bool, only: int | None = None, **arguments: Any) -> Any:
        leaves = jax.tree.leaves(tree)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            raise InvalidCollective(
                f"{name}: a ShapeDtypeStruct lies nowhere; give an array on the device, or on the host."
            )
        if not any(map(self.device.owns, leaves)):
            return self.host._call(name, tree, out, async_op, only, **arguments)
        return super()._call(name, tree, out, async_op, only, **arguments)

    def _exchanged(self, messages: Sequence[Send | Receive], alone: bool = False) -> Work:
        arrays = [
            getattr(each, "array", None) if isinstance(each, Send) else getattr(each, "out", None) for each in messages
        ]
        if not any(array is not None and self.device.owns(array) for array in arrays):
            return self.host._exchanged(messages, alone)
        return super()._exchanged(messages, alone)

    def _kind(self, name: str) -> int:
        return int(getattr(self.library, name))

    def _send(self, source: int, nbytes: int, member: int, stream: int) -> Callable[[], None]:
        return functools.partial(self.nccl.send, int(source), int(nbytes), self._kind("NCCL_UINT8"), member, stream)

    def _recv(self, target: int, nbytes: int, member: int, stream: int) -> Callable[[], None]:
        return functools.partial(self.nccl.recv, int(target), int(nbytes), self._kind("NCCL_UINT8"), member, stream)


class Enqueued:
    """A transfer on a stream. Its memory is kept until the stream has passed it."""

    def __init__(
        self, owner: NcclCommunicator, event: Event, arrays: tuple[Any, ...], what: Callable[[], str], array: Any = None,
        counts: bool = True,
    ) -> None:  # fmt: skip
        self.owner, self.event, self.arrays, self.what, self.array = owner, event, arrays, what, array
        self.counts = counts

    def poll(self) -> bool:
        """Whether it is done. Raises what went wrong on the communicator."""
        self.owner.check_usable()
        try:
            self.owner.nccl.check_async_error()
            if not self.event.done:
                return False
        except Exception as error:
            raise self.owner.failed(self.what, error) from error
        if self.counts:
            self.owner.host.done += 1  # the host's communicator tells those who wait how far this rank came
        self.arrays = ()
        return True

    def absent(self) -> list[int]:
        """The members that have left and will not take part."""
        return self.owner.absent()


Call = Callable[[], None]


def _all_reduce(c: NcclCommunicator, t: Transfer, source: int, target: int, stream: int) -> Iterator[Call]:
    if t.items_in:
        kind, op = c._kind(REDUCED[t.dtype.name]), c._kind(OPS[t.op])
        yield functools.partial(c.nccl.allReduce, source, target, t.items_in, kind, op, stream)


def _reduce(c: NcclCommunicator, t: Transfer, source: int, target: int, stream: int) -> Iterator[Call]:
    if t.items_in:
        kind, op = c._kind(REDUCED[t.dtype.name]), c._kind(OPS[t.op])
        yield functools.partial(c.nccl.reduce, source, target, t.items_in, kind, op, t.root, stream)


def _reduce_scatter(c: NcclCommunicator, t: Transfer, source: int, target: int, stream: int) -> Iterator[Call]:
    kind, op = c._kind(REDUCED[t.dtype.name]), c._kind(OPS[t.op])
    if len(set(t.counts)) == 1:
        if t.items_in:
            yield functools.partial(c.nccl.reduceScatter, source, target, t.counts[0], kind, op, stream)
        return
    start = 0
    for member, count in enumerate(t.counts):  # parts of other lengths: one reduction each
        if count:
            part = source + start * t.dtype.itemsize
            yield functools.partial(c.nccl.reduce, part, target, count, kind, op, member, stream)
        start += count


def _broadcast(c: NcclCommunicator, t: Transfer, source: int, target: int, stream: int) -> Iterator[Call]:
    if t.items_in:
        nbytes = t.items_in * t.dtype.itemsize
        yield functools.partial(c.nccl.broadcast, source, target, nbytes, c._kind("NCCL_UINT8"), t.root, stream)


def _all_gather(c: NcclCommunicator, t: Transfer, source: int, target: int, stream: int) -> Iterator[Call]:
    item, kind = t.dtype.itemsize, c._kind("NCCL_UINT8")
    if len(set(t.counts)) == 1:
        if t.items_in:
            yield functools.partial(c.nccl.allGather, source, target, t.items_in * item, kind, stream)
        return
    start = 0
    for member, count in enumerate(t.counts):
        if count:
            yield functools.partial(c.nccl.broadcast, source, target + start * item, count * item, kind, member, stream)
        start += count


def _all_to_all(c: NcclCommunicator, t: Transfer, source: int, target: int, stream: int) -> Iterator[Call]:
    yield from _pieces(c, t, source, target, stream, pieces_of(t.sends), pieces_of(t.counts))


def _exchange(c: NcclCommunicator, t: Transfer, source: int, target: int, stream: int) -> Iterator[Call]:
    yield from _pieces(c, t, source, target, stream, t.outgoing, t.incoming)


def _pieces(
    c: NcclCommunicator, t: Transfer, source: int, target: int, stream: int,
    outgoing: Sequence[Piece], incoming: Sequence[Piece],
) -> Iterator[Call]:  # fmt: skip
    """Runs of items to and from members; one's own are copied."""
    item, own = t.dtype.itemsize, c.rank
    copies = zip([p for p in outgoing if p.member == own], [p for p in incoming if p.member == own], strict=True)
    for a, b in copies:
        if a.count:
            c.device.copy(target + b.start * item, source + a.start * item, a.count * item, stream)
    for piece in outgoing:
        if piece.count and piece.member != own:
            yield c._send(source + piece.start * item, piece.count * item, piece.member, stream)
    for piece in incoming:
        if piece.count and piece.member != own:
            yield c._recv(target + piece.start * item, piece.count * item, piece.member, stream)


CALLS: Final[dict[str, Callable[..., Iterator[Call]]]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "exchange": _exchange,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
}
"""Per kind of transfer NCCL's calls that it takes, in one group."""

_WATCHED: Final[list[NcclCommunicator]] = []
_WATCHER: Final[list[threading.Thread]] = []


def _look_after(communicator: NcclCommunicator) -> None:
    """Let the watcher look at a communicator from now on."""
    if communicator not in _WATCHED:
        _WATCHED.append(communicator)
    if not _WATCHER:
        _WATCHER.append(threading.Thread(target=_watch, name="spmd nccl", daemon=True))
        _WATCHER[0].start()


def _watch() -> None:
    while True:
        time.sleep(LOOK_S)
        for each in list(_WATCHED):
            if each.poison is None and each.underway:
                each.look()
