"""The NCCL back end against a stand-in for cupy's NCCL (`tests/standin.py`), on real ranks without a GPU."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import collectives
import placements
import spmd
from collectives import Receive, Send, process, testing
from collectives.nccl import NcclCommunicator
from collectives.wire import Transfer
from placements import Mesh, P, Partial, Replicate, Shard

sys.path.insert(0, str(Path(__file__).parents[1]))
import standin

HOST = collectives.world("mpi")
RANK, SIZE = HOST.rank, HOST.size
BEFORE, AFTER = (RANK - 1) % SIZE, (RANK + 1) % SIZE
if "standin" not in process._BACKENDS:
    collectives.register_backend("standin", lambda host: NcclCommunicator(host, standin, standin.Device()))
WORLD: Any = collectives.world("standin")
MESH = Mesh(x=SIZE, backend="standin")


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    standin.calls.clear()
    yield
    assert not standin.failing
    standin.stuck.clear()


def on_device(array: Any) -> Any:
    return np.ascontiguousarray(array).reshape(np.shape(array)).view(standin.DeviceArray)


def numbers(rank: int, *shape: int, dtype: Any = np.float32) -> Any:
    return ((np.arange(np.prod(shape, dtype=int)) * 7 + 5 * rank) % 11 - 5).reshape(shape).astype(dtype)


def total(*shape: int) -> Any:
    return np.sum([numbers(rank, *shape) for rank in range(SIZE)], 0)


@pytest.mark.parametrize("kind", ["device", "jax", "host"])
def test_conforms(kind: str) -> None:
    """Every case of the suite, on arrays of the device, on JAX's there, and on the host's: these do not meet NCCL."""
    put = {"device": on_device, "jax": jnp.asarray, "host": np.asarray}[kind]
    count = 0
    for case, arguments, array in testing.member_cases(WORLD):
        given = put(array)
        if kind == "device" and given.dtype.isbuiltin != 1:
            continue  # cupy knows no such dtype
        result = getattr(WORLD, case.name)(given, **arguments)
        assert result is None or isinstance(result, jax.Array) == (kind == "jax")
        testing.compare(case, RANK, result)
        count += 1
    assert count > 800
    nothing = {"allReduce", "send", "broadcast", "reduceScatter", "allGather", "reduce"} & set(standin.calls)
    assert (kind == "host") == (not nothing)


def test_calls_of_nccl() -> None:
    """One call where NCCL has one; no copies between JAX and the device's arrays; AVG for means."""
    x = jnp.asarray(numbers(RANK, 6))
    np.testing.assert_array_equal(WORLD.all_reduce(x), total(6))
    np.testing.assert_allclose(WORLD.all_reduce(x, "mean"), total(6) / SIZE, rtol=1e-6)
    WORLD.all_gather(x)
    WORLD.reduce_scatter(jnp.arange(2.0 * SIZE))
    WORLD.broadcast(x, root=1)
    assert standin.calls == ["allReduce", "allReduce", "allGather", "reduceScatter", "broadcast"]
    device = standin.Device()
    assert device.pointer(device.adopted(x)) == device.pointer(x)
    tree = {"a": x, "b": jnp.ones((2, 2)), "c": jnp.arange(3)}
    standin.calls.clear()
    found = WORLD.all_reduce(tree)
    assert standin.calls == ["allReduce"] * 2  # by dtype
    np.testing.assert_array_equal(found["b"], np.full((2, 2), SIZE))


def test_messages_between_devices() -> None:
    """One group: no order of them can deadlock. Shapes do not travel; there are no tags; the host's messages still go."""
    out = on_device(np.zeros(4))
    found = WORLD.batch([Send(on_device(numbers(RANK, 4, dtype=np.float64)), AFTER), Receive(BEFORE, out=out)])[0]
    assert found is out
    np.testing.assert_array_equal(out, numbers(BEFORE, 4, dtype=np.float64))
    with pytest.raises(collectives.InvalidCollective, match="`out` is a contiguous array there"):
        WORLD.batch([Send(out, AFTER), Receive(BEFORE)])
    for wrong in (np.zeros(4), out[::2], jnp.zeros(4), np.zeros((2, 2), order="F").view(standin.DeviceArray)):
        with pytest.raises(collectives.InvalidCollective, match=r"`out` is a contiguous array there|can be written to"):
            WORLD.batch([Send(out, AFTER), Receive(BEFORE, out=wrong)])
    with pytest.raises(collectives.InvalidCollective, match="lies nowhere"):
        WORLD.scatter(jax.ShapeDtypeStruct((4,), np.float32))
    half = jnp.asarray(numbers(RANK, 4), jnp.bfloat16)
    bits = on_device(np.zeros(4, np.uint16))
    WORLD.batch([Send(half, AFTER), Receive(BEFORE, out=bits)])
    np.testing.assert_array_equal(bits.view(ml_dtypes.bfloat16).astype(np.float32), numbers(BEFORE, 4))
    WORLD.batch([Send(on_device(np.zeros(0)), AFTER), Receive(BEFORE, out=on_device(np.zeros(0)))])
    with pytest.raises(collectives.InvalidCollective, match="no tags"):
        WORLD.send(out, AFTER, tag=3)
    with pytest.raises(collectives.InvalidCollective, match="lies in host memory"):
        WORLD.all_reduce([out, np.ones(2)])
    assert WORLD.batch([Send(np.full(2, RANK), AFTER, 5), Receive(BEFORE, 5)])[0].tolist() == [BEFORE] * 2
    assert WORLD.all_gather_object({"rank": RANK})[-1] == {"rank": SIZE - 1}


def test_groups() -> None:
    """`split` by ncclCommSplit, `group` by a key of its own."""
    halves = WORLD.split(RANK % 2, -RANK)
    same = [rank for rank in reversed(range(SIZE)) if rank % 2 == RANK % 2]
    assert halves.world_ranks == tuple(same)
    assert halves.all_gather(jnp.array([RANK])).tolist() == same
    assert standin.calls.count("commSplit") == 1
    ends = WORLD.group([SIZE - 1, 0])
    if ends is not None:
        assert ends.all_gather(jnp.array([RANK])).tolist() == [SIZE - 1, 0]
    WORLD.barrier()


def test_work_on_a_stream() -> None:
    """Done when its event is; a limit of the call's own leaves it going."""
    work = WORLD.all_reduce(jnp.asarray(numbers(RANK, 3)), async_op=True)
    np.testing.assert_array_equal(work.wait(), total(3))
    standin.stuck.append(True)
    late = WORLD.all_reduce(jnp.asarray(numbers(RANK, 3)), async_op=True)
    assert not late.is_completed()
    with pytest.raises(collectives.CollectiveTimeout, match="it goes on"):
        late.wait(timeout=0.01)
    standin.stuck.clear()
    np.testing.assert_array_equal(late.wait(), total(3))


def test_everything_is_on_one_stream_f16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the kernels that made its argument: eager calls on the current stream, programs on XLA's; JAX's is waited for."""
    monkeypatch.setattr(WORLD.device, "current", 7)
    x = on_device(numbers(RANK, 2 * SIZE))
    ready = []
    monkeypatch.setattr(standin.Device, "adopted", lambda self, array: (ready.append(array.is_ready()), array)[1])
    standin.streams.clear()
    for given in (x, jnp.asarray(x)):
        WORLD.all_reduce(given)
        WORLD.all_gather(given, sizes=[2 * SIZE] * SIZE)
        WORLD.scatter(given)
        WORLD.all_to_all_rows(given, receives=[2] * SIZE)
    WORLD.batch([Send(x, AFTER), Receive(BEFORE, out=x.copy())])
    assert set(standin.streams) == {7}
    assert ready == [True] * 4
    standin.streams.clear()
    transfer = Transfer("all_to_all", np.dtype(np.float32), SIZE, SIZE, counts=(1,) * SIZE, sends=(1,) * SIZE)
    sent, received = np.arange(SIZE, dtype=np.float32) + 10 * RANK, np.zeros(SIZE, np.float32)
    WORLD.prepare(transfer, lambda: "a transfer")(sent.ctypes.data, received.ctypes.data, 5)
    assert received.tolist() == [10 * rank + RANK for rank in range(SIZE)]
    assert set(standin.streams) == {5}
    WORLD.drain()


def test_complex_numbers_f14() -> None:
    """Sums and means are right, max is refused: the same words as on MPI."""
    z = numbers(RANK, 4) + 1j * numbers(RANK + 1, 4)
    expected = np.sum([numbers(r, 4) + 1j * numbers(r + 1, 4) for r in range(SIZE)], 0)
    for world in (WORLD, HOST):
        given = jnp.asarray(z, jnp.complex64)
        np.testing.assert_allclose(world.all_reduce(given), expected, rtol=1e-6)
        np.testing.assert_allclose(world.all_reduce(given, "mean"), expected / SIZE, rtol=1e-6)
        with pytest.raises(collectives.InvalidCollective, match="max of complex numbers is not defined"):
            world.all_reduce(given, "max")
        with pytest.raises(collectives.InvalidCollective, match="and is for bool and integers"):
            world.all_reduce(jnp.ones(2), "and")
        with pytest.raises(collectives.InvalidCollective, match="the mean of int32 is not an integer"):
            world.all_reduce(jnp.arange(3), "mean")


def test_small_floats_are_reduced_in_32_bits() -> None:
    x = np.full(3, 1 + 2**-7, ml_dtypes.bfloat16)
    many = WORLD.all_reduce(jnp.concatenate([jnp.asarray(x)] * 3))
    assert many.dtype == jnp.bfloat16
    np.testing.assert_array_equal(many, np.asarray(np.float32(1 + 2**-7) * SIZE).astype(ml_dtypes.bfloat16))


def test_programs() -> None:
    """Decorated functions on a mesh of the back end: collectives inside XLA's executables, gradients, loops."""
    x = np.asarray(numbers(1, 2 * SIZE, 3))

    @spmd.jit(mesh=MESH, in_placements=P(x=Shard(0)), out_placements=(P(), P(x=Shard(0)), P(x=Shard(1))))
    def f(a: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            return carry - 0.1 * carry.mean(0), carry.sum()

        last, sums = jax.lax.scan(step, a, None, length=3)
        return (a * a).sum() + sums.sum(), last, a.T @ a

    plain = jax.jit(f.__wrapped__)(x)
    for found, expected in zip(f(x), plain, strict=True):
        np.testing.assert_allclose(found.full(), expected, rtol=2e-5, atol=1e-5)
    assert {"allReduce"} <= set(standin.calls)


def test_chains_of_halos_b19() -> None:
    """Pieces of two rows, each with one row before and two after it, and back: through NCCL's sends and receives."""

    def chains(x: Any, z: Any) -> Any:
        def with_room(x: Any) -> Any:
            return jnp.concatenate([jnp.pad(x[2 * k : 2 * k + 2], (1, 2)) for k in range(4)])

        def compact(z: Any) -> Any:
            return jnp.concatenate([z[5 * k + 1 : 5 * k + 3] for k in range(4)])

        return compact(with_room(x) * z) + compact(with_room(compact(z)))

    for dtype in ("float32", "float64"):
        with jax.enable_x64(dtype == "float64"):
            x, z = numbers(1, 8, dtype=dtype), numbers(2, 20, dtype=dtype)
            f = spmd.jit(chains, mesh=MESH, in_placements=P(x=Shard(0)), fallback="error")
            np.testing.assert_array_equal(f(x, z).full(), jax.jit(chains)(x, z))
    assert "send" in standin.calls


def test_every_move_between_placements() -> None:
    """From any placement to any other, through NCCL's calls."""
    x = numbers(2, 2 * SIZE + 1, 5)
    kinds = [P(), P(x=Shard(0)), P(x=Shard(1))]
    for source in kinds:
        for target in kinds:
            moved = spmd.distribute(x, source, MESH).redistribute(target)
            np.testing.assert_array_equal(np.asarray(moved.local), np.asarray(spmd.distribute(x, target, MESH).local))
    parts = spmd.from_local(jnp.asarray(numbers(RANK, 4)), P(x=Partial("sum")), MESH)
    np.testing.assert_allclose(parts.redistribute(P()).local, total(4))


def test_failures_give_the_communicator_up() -> None:
    """What NCCL says is raised, named, and every later call raises again; the memory is not used any more."""
    for plan in ("enqueued", "asynchronous"):
        made = NcclCommunicator(HOST.subgroup(tuple(range(SIZE)), f"failing {plan}"), standin, standin.Device())
        HOST.barrier()
        if plan == "enqueued":
            standin.failing.append("allReduce")
        else:
            made.nccl.async_error = "NCCL_ERROR_REMOTE: remote process exited or there was a network error"
        with pytest.raises(collectives.TransportError, match=r"all_reduce of float32\[3\]: .*NCCL_ERROR"):
            made.all_reduce(jnp.asarray(numbers(RANK, 3)))
        assert made.nccl.is_aborted
        with pytest.raises(collectives.TransportError, match="is poisoned"):
            made.all_reduce(jnp.asarray(numbers(RANK, 3)))
    np.testing.assert_array_equal(WORLD.all_reduce(jnp.asarray(numbers(RANK, 3))), total(3))


def test_the_stand_in_is_like_cupy() -> None:
    """Constants, names and parameters are those of cupy's NCCL, where that is installed."""
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("cupy is not installed: pip install '.[nccl]'")
    from cupy.cuda import nccl

    for name in dir(standin):
        if name.startswith("NCCL_"):
            assert getattr(standin, name) == getattr(nccl, name), name
    for name, method in inspect.getmembers(standin.NcclCommunicator, inspect.isfunction):
        if not name.startswith("_"):
            theirs = getattr(nccl.NcclCommunicator, name).__doc__.splitlines()[0]
            words = theirs[theirs.index("(") + 1 : theirs.rindex(")")].split(",")
            ours = list(inspect.signature(method).parameters)
            assert ours == [word.split("=")[0].split()[-1] for word in words], theirs


def test_backends_are_named() -> None:
    assert placements.Mesh(x=SIZE, backend="standin").backend == "standin"
    with pytest.raises(collectives.BackendError, match="already"):
        collectives.register_backend("nccl", lambda host: host)
    with pytest.raises(collectives.BackendError, match="no back end is called 'other'; there are"):
        spmd.distribute(np.ones(SIZE), P(x=Replicate()), Mesh(x=SIZE, backend="other"))
