"""A stand-in for `cupy.cuda.nccl` and for a GPU: method signatures are cupy's, memory is the host's, messages are MPI's.

What NCCL demands is checked: every member makes the same calls, in the same order, with the same arguments; sends and receives
of a group meet; handles are integers. A call is done when it returns; `failing` lets the next ones fail, `stuck` keeps events
from coming.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = range(5)
NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = range(6)
NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = range(6, 10)

DTYPES = {
    NCCL_INT8: np.int8, NCCL_UINT8: np.uint8, NCCL_INT32: np.int32, NCCL_UINT32: np.uint32, NCCL_INT64: np.int64,
    NCCL_UINT64: np.uint64, NCCL_FLOAT32: np.float32, NCCL_FLOAT64: np.float64,
}  # fmt: skip
REDUCE: dict[int, Any] = {
    NCCL_SUM: np.add, NCCL_PROD: np.multiply, NCCL_MAX: np.maximum, NCCL_MIN: np.minimum, NCCL_AVG: np.add,
}  # fmt: skip

available = True
calls: list[str] = []
"""The names of the calls that this process made."""
streams: list[int] = []
"""The streams of everything that was put on one."""
failing: list[str] = []
"""The next calls of these names fail, each once."""
stuck: list[bool] = []
"""While there is something here no event comes."""

_ids = iter(range(1, 10_000))
_group: list[Callable[[], list[Any]]] | None = None


class NcclError(RuntimeError):
    """What NCCL gives back."""


def get_unique_id() -> bytes:
    """128 bytes, as NCCL's: which process made it, and its number there."""
    return np.array([MPI.COMM_WORLD.rank, next(_ids)], np.int64).tobytes().ljust(128, b"\0")


def groupStart() -> None:
    global _group
    assert _group is None, "a group within a group"
    _group = []


def groupEnd() -> None:
    global _group
    assert _group is not None, "no group was begun"
    started, _group = _group, None
    requests = [request for start in started for request in start()]
    MPI.Request.Waitall(requests)
    for start in started:
        getattr(start, "finish", lambda: None)()


def _submit(name: str, start: Any) -> None:
    calls.append(name)
    if name in failing:
        failing.remove(name)
        raise NcclError(f"NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error ({name})")
    if _group is not None:
        _group.append(start)
        return
    MPI.Request.Waitall(start())
    getattr(start, "finish", lambda: None)()


def _on(stream: int) -> None:
    assert type(stream) is int
    streams.append(stream)


def _memory(address: int, count: int, datatype: int) -> Any:
    assert type(address) is int
    assert type(count) is int
    assert count > 0
    dtype = np.dtype(DTYPES[datatype])
    return np.frombuffer(MPI.memory.fromaddress(address, count * dtype.itemsize), dtype)


class _Gathered:
    """Everybody's memory to everybody: what a reduction is made of."""

    def __init__(self, comm: Any, sent: Any, checked: tuple[Any, ...], finish: Callable[[Any], None]) -> None:
        self.comm, self.sent, self.checked, self.finish_with = comm, sent, checked, finish
        self.all = np.empty((comm.size, sent.size), sent.dtype)

    def __call__(self) -> list[Any]:
        assert len(set(self.comm.allgather(self.checked))) == 1, "members make different calls"
        return [self.comm.Iallgather([self.sent, MPI.BYTE], [self.all, MPI.BYTE])]

    def finish(self) -> None:
        self.finish_with(self.all)


class NcclCommunicator:
    """A communicator of stand-ins."""

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:
        assert len(commId) == 128
        world = MPI.COMM_WORLD
        root, number = np.frombuffer(commId[:16], np.int64).tolist()
        tag = 20_000 + number % 10_000
        if world.rank == root:
            assert rank == 0, "the id is made by the first member"
            ranks = {0: root}
            for _ in range(ndev - 1):
                status = MPI.Status()
                member = world.recv(source=MPI.ANY_SOURCE, tag=tag, status=status)
                ranks[member] = status.source
            members = [ranks[i] for i in range(ndev)]
            for member in members[1:]:
                world.send(members, dest=member, tag=tag)
        else:
            world.send(rank, dest=root, tag=tag)
            members = world.recv(source=root, tag=tag)
        self._made(world.Create_group(world.Get_group().Incl(members), tag), rank, ndev)

    def _made(self, mpi: Any, rank: int, size: int) -> None:
        self.mpi = mpi
        assert (mpi.rank, mpi.size) == (rank, size)
        self.is_aborted = self.is_destroyed = False
        self.async_error: str | None = None
        """What it says when it is asked."""

    def commSplit(self, color: int, key: int, config: Any = None) -> NcclCommunicator | None:
        calls.append("commSplit")
        mpi = self.mpi.Split(MPI.UNDEFINED if color == -1 else color, key)
        if mpi == MPI.COMM_NULL:
            return None
        made = object.__new__(NcclCommunicator)
        made._made(mpi, mpi.rank, mpi.size)
        return made

    def size(self) -> int:
        return self.mpi.size

    def rank_id(self) -> int:
        return self.mpi.rank

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        out = _memory(recvbuf, count, datatype)

        def finish(parts: Any) -> None:
            out[:] = self._reduced(parts, op)

        self._collect("allReduce", _memory(sendbuf, count, datatype), (count, datatype, op), finish, stream)

    def reduce(
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int
    ) -> None:  # fmt: skip
        def finish(parts: Any) -> None:
            if self.mpi.rank == root:
                _memory(recvbuf, count, datatype)[:] = self._reduced(parts, op)

        self._collect("reduce", _memory(sendbuf, count, datatype), (count, datatype, op, root), finish, stream)

    def reduceScatter(
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
    ) -> None:  # fmt: skip
        n, rank = self.mpi.size, self.mpi.rank
        out = _memory(recvbuf, recvcount, datatype)

        def finish(parts: Any) -> None:
            out[:] = self._reduced(parts, op)[rank * recvcount : (rank + 1) * recvcount]

        sent = _memory(sendbuf, n * recvcount, datatype)
        self._collect("reduceScatter", sent, (recvcount, datatype, op), finish, stream)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        out = _memory(recvbuf, count * self.mpi.size, datatype)

        def finish(parts: Any) -> None:
            out[:] = parts.reshape(-1)

        self._collect("allGather", _memory(sendbuf, count, datatype), (count, datatype), finish, stream)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        out = _memory(recvbuff, count, datatype)
        sent = _memory(sendbuff, count, datatype) if self.mpi.rank == root else np.zeros_like(out)

        def finish(parts: Any) -> None:
            out[:] = parts[root]

        self._collect("broadcast", sent, (count, datatype, root), finish, stream)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        _on(stream)
        memory = _memory(sendbuf, count, datatype)
        _submit("send", lambda: [self.mpi.Issend([memory, MPI.BYTE], peer)])

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        _on(stream)
        memory = _memory(recvbuf, count, datatype)
        _submit("recv", lambda: [self.mpi.Irecv([memory, MPI.BYTE], peer)])

    def check_async_error(self) -> None:
        if self.async_error is not None:
            raise NcclError(self.async_error)

    def abort(self) -> None:
        self.is_aborted = True

    def destroy(self) -> None:
        assert not self.is_aborted
        self.is_destroyed = True

    def _collect(self, name: str, sent: Any, checked: tuple[Any, ...], finish: Any, stream: int) -> None:
        assert not self.is_aborted
        assert not self.is_destroyed
        _on(stream)
        _submit(name, _Gathered(self.mpi, sent, (name, *checked), finish))

    def _reduced(self, parts: Any, op: int) -> Any:
        total = functools.reduce(REDUCE[op], parts)
        return (total / self.mpi.size).astype(total.dtype) if op == NCCL_AVG else total


class DeviceArray(np.ndarray):  # type: ignore[type-arg]
    """What stands for an array of cupy's."""


class Event:
    """What stands for a point in a stream."""

    @property
    def done(self) -> bool:
        return not stuck


class Device:
    """What stands for a GPU: JAX arrays and `DeviceArray`s lie on it, numpy's do not."""

    def owns(self, array: Any) -> bool:
        return isinstance(array, (DeviceArray, jax.Array))

    def adopted(self, array: Any) -> Any:
        return array if array.dtype.isbuiltin != 1 else np.from_dlpack(array).view(DeviceArray)

    def as_jax(self, array: Any) -> jax.Array:
        memory = array.copy() if not array.flags.writeable or np.ndim(array) == 0 else np.ascontiguousarray(array)
        return jax.dlpack.from_dlpack(np.asarray(memory))

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return np.full(shape, np.array(77).astype(dtype), dtype).view(DeviceArray)

    def pointer(self, array: Any) -> int:
        return array.unsafe_buffer_pointer() if isinstance(array, jax.Array) else array.ctypes.data

    current = 0

    def stream(self) -> int:
        return self.current

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        _on(stream)
        MPI.memory.fromaddress(target, nbytes)[:] = MPI.memory.fromaddress(source, nbytes)

    def record(self, stream: int) -> Event:
        _on(stream)
        return Event()
