"""Communicators between real ranks: messages, work underway, objects, groups. Run by `tests/test_mpi.py` on every rank."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import collectives
from collectives import Receive, Send

WORLD = collectives.world()
RANK, SIZE = WORLD.rank, WORLD.size
BEFORE, AFTER = (RANK - 1) % SIZE, (RANK + 1) % SIZE


def numbers(rank: int, *shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    """Of both signs, other ones on every rank."""
    return ((np.arange(np.prod(shape, dtype=int)) * 7 + 5 * rank) % 11 - 5).reshape(shape).astype(dtype)


def total(*shape: int) -> np.ndarray[Any, Any]:
    return np.sum([numbers(rank, *shape) for rank in range(SIZE)], 0)


def test_trees_of_any_kind() -> None:
    """One message for each dtype; every leaf comes back as it came in."""
    tree = {"a": numbers(RANK, 3), "b": [jnp.asarray(numbers(RANK, 2, 2)), numbers(RANK, 4, dtype=np.int32)], "c": None}
    found = WORLD.all_reduce(tree)
    np.testing.assert_array_equal(found["a"], total(3))
    assert isinstance(found["b"][0], jax.Array)
    np.testing.assert_array_equal(found["b"][0], total(2, 2))
    assert found["b"][1].dtype == np.int32
    assert found["c"] is None


def test_in_place_and_scaled() -> None:
    x, out = numbers(RANK, 5), np.empty(5, np.float32)
    assert WORLD.all_reduce(x, out=out) is out
    np.testing.assert_array_equal(out, total(5))
    np.testing.assert_array_equal(x, numbers(RANK, 5))
    WORLD.all_reduce(x, out=x)
    np.testing.assert_array_equal(x, total(5))
    np.testing.assert_allclose(WORLD.all_reduce(numbers(RANK, 5), factor=0.5), total(5) / 2)
    parts = WORLD.reduce_scatter(numbers(RANK, 2 * SIZE + 1))
    np.testing.assert_array_equal(WORLD.all_gather(parts, sizes=[3] + [2] * (SIZE - 1)), total(2 * SIZE + 1))


CALLS: dict[str, Any] = {
    "all_reduce": {}, "all_reduce mean": {"op": "mean"}, "all_reduce max": {"op": "max"}, "reduce": {"root": SIZE - 1},
    "reduce mean": {"op": "mean"}, "broadcast": {"root": 1}, "all_gather": {}, "all_gather last": {"dim": -1},
    "all_gather sizes": {"sizes": [2 * SIZE] * SIZE}, "gather": {"root": 1}, "scatter": {}, "scatter last": {"dim": 1},
    "reduce_scatter": {}, "reduce_scatter mean": {"op": "mean"}, "all_to_all": {"to_dim": 1}, "all_to_all_rows": {},
    "all_to_all_rows told": {"sends": (2,) * SIZE, "receives": [2] * SIZE}, "permute": {"pairs": [(0, 1), (1, 0)]},
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "int16", "bool", "complex64"])
@pytest.mark.parametrize("name", sorted(CALLS))
def test_out_of_every_kind(name: str, dtype: str) -> None:
    """The same result in a new array, in a contiguous one, in a strided one, in the argument itself, and underway."""
    method, arguments = getattr(WORLD, name.split()[0]), CALLS[name]
    op = arguments.get("op", "sum" if "reduce" in name else "")
    if (
        (dtype == "bool" and op in ("sum", "mean"))
        or (dtype == "int16" and op == "mean")
        or (dtype[0] == "c" and op == "max")
    ):
        with pytest.raises(collectives.InvalidCollective, match="is not"):
            method(numbers(RANK, 2 * SIZE, SIZE).astype(dtype), **arguments)
        return
    x = numbers(RANK, 2 * SIZE, SIZE).astype(dtype)
    given = x.copy()
    expected = method(jnp.asarray(x), **arguments)
    for _ in range(2):  # the second call of its kind is ready
        found = method(x, **arguments)
        assert (found is None) == (expected is None)
        if found is not None:
            np.testing.assert_array_equal(found, expected)
            assert found.dtype == x.dtype
    np.testing.assert_array_equal(x, given)
    shape = (1,) if expected is None else expected.shape
    strided = np.zeros((2, *shape), x.dtype).transpose(*range(1, len(shape) + 1), 0)[..., 0]
    for out in (np.zeros(shape, x.dtype), strided, np.zeros((*shape, 2), x.dtype)[..., 1]):
        assert method(x, out=out, **arguments) is (None if expected is None else out)
        assert method(x, out=out, async_op=True, **arguments).wait() is (None if expected is None else out)
        if expected is not None:
            np.testing.assert_array_equal(out, expected)
    turned = np.asfortranarray(x)  # an argument that does not lie in order
    if expected is not None:
        np.testing.assert_array_equal(method(turned, **arguments), expected)
    else:
        method(turned, **arguments)
    if name.split()[0] in ("all_reduce", "reduce", "broadcast", "permute", "all_to_all_rows"):
        memory = np.concatenate([x.reshape(-1), x.reshape(-1)])
        whole = memory[: x.size].reshape(x.shape)
        method(whole, out=whole, **arguments)
        if expected is not None:
            np.testing.assert_array_equal(whole, expected)
        return
    wrong = np.zeros((5, 5), x.dtype)
    if expected is None:
        assert method(x, out=wrong, **arguments) is None
    else:
        with pytest.raises(collectives.InvalidCollective, match="and out"):
            method(x, out=wrong, **arguments)
    method(x, **arguments)


def test_long_arrays() -> None:
    """Beyond every size at which another way is taken: reductions on each root, chunks that do not divide."""
    for items in (5_000, 40_001, 700_003):
        x = numbers(RANK, items)
        expected = total(items)
        np.testing.assert_array_equal(WORLD.all_reduce(x), expected)
        for root in {0, SIZE - 1}:
            found = WORLD.reduce(x, root=root)
            assert (found is None) == (root != RANK)
            if found is not None:
                np.testing.assert_array_equal(found, expected)
            found = WORLD.gather(x, root=root)
            if found is not None:
                np.testing.assert_array_equal(found, np.concatenate([numbers(rank, items) for rank in range(SIZE)]))
        parts = np.array_split(expected, SIZE)
        np.testing.assert_array_equal(WORLD.reduce_scatter(x), parts[RANK])
        np.testing.assert_array_equal(WORLD.scatter(expected), parts[RANK])
        rows = WORLD.all_to_all_rows(x)
        np.testing.assert_array_equal(
            rows, np.concatenate([np.array_split(numbers(r, items), SIZE)[RANK] for r in range(SIZE)])
        )


def test_communicators_are_closed() -> None:
    """Far more of them than MPI libraries have at a time, if each is closed; a closed one says so."""
    for _ in range(30):
        group = WORLD.group(range(SIZE))
        assert group is not None
        assert group.all_reduce(np.ones(1)) == SIZE
        group.close()
        group.close()
    with pytest.raises(collectives.TransportError, match="was closed"):
        group.all_reduce(np.ones(1))


def test_out_that_overlaps_the_argument() -> None:
    """Memory that is sent from is not received into before it has been read."""
    memory = np.arange(3.0 * 4000) * (RANK + 1)
    sent = memory[:4000].copy()
    WORLD.all_reduce(memory[:4000], out=memory[2000:6000])
    np.testing.assert_array_equal(memory[2000:6000], np.arange(4000.0) * sum(range(1, SIZE + 1)))
    np.testing.assert_array_equal(memory[:2000], sent[:2000])
    assert not WORLD.poison


def test_work_goes_on_in_order() -> None:
    """Three operations at once, waited for in another order; one on a rank that comes late."""
    first = WORLD.all_reduce(numbers(RANK, 300_000), async_op=True)
    second = WORLD.all_gather(numbers(RANK, 2), async_op=True)
    third = WORLD.all_reduce(numbers(RANK, 4), "max", async_op=True)
    assert third.wait().shape == (4,)
    assert first.is_completed()
    assert first.exception() is None
    np.testing.assert_array_equal(first.wait(), total(300_000))
    assert second.wait(timeout=5).shape == (2 * SIZE,)
    if RANK == 0:
        time.sleep(0.3)
    late = WORLD.all_reduce(numbers(RANK, 3), async_op=True)
    if RANK == 1:
        with pytest.raises(collectives.CollectiveTimeout, match="it goes on"):
            late.wait(timeout=0.01)
    np.testing.assert_array_equal(late.wait(), total(3))


@pytest.mark.parametrize("dtype", ["float32", "bool", "int8", "complex64", "bfloat16"])
def test_messages(dtype: str) -> None:
    """Any shape and dtype, known to the sender alone; several of one tag, in order; 0-d and empty."""
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    for shape in ((), (3,), (2, 0), (4, 5)):
        found = WORLD.batch([Receive(BEFORE), Send(numbers(RANK, *shape, dtype=kind), AFTER)])[0]
        assert (found.shape, found.dtype) == (shape, kind)
        np.testing.assert_array_equal(found, numbers(BEFORE, *shape, dtype=kind))
    one, two = WORLD.recv(BEFORE, async_op=True), WORLD.recv(BEFORE, async_op=True)
    WORLD.all_reduce(np.ones(3))
    WORLD.send(np.full(200_000, RANK), AFTER, async_op=True)
    WORLD.send(np.full((2, 2), RANK), AFTER)
    out = np.zeros((30, 50))
    into = WORLD.batch([Send(np.full((30, 50), RANK, float), AFTER, 4), Receive(BEFORE, 4, out)])[0]
    assert into is out
    assert (out == BEFORE).all()
    assert two.wait().shape == (2, 2)
    assert one.wait()[-1] == BEFORE
    WORLD.drain()


def test_messages_do_not_deadlock() -> None:
    """All to all, each far larger than what a library buffers; arrays of different shapes."""
    arrays = [np.full((RANK + 1, 50_000 + to), 10 * RANK + to) for to in range(SIZE)]
    for source, found in enumerate(WORLD.all_to_all_arrays(arrays)):
        assert found.shape == (source + 1, 50_000 + RANK)
        assert (found == 10 * source + RANK).all()


def test_objects() -> None:
    value = {"rank": RANK, "text": "x" * RANK, "array": numbers(RANK, 3)}
    everyone = WORLD.all_gather_object(value)
    assert [each["rank"] for each in everyone] == list(range(SIZE))
    np.testing.assert_array_equal(everyone[BEFORE]["array"], numbers(BEFORE, 3))
    assert WORLD.broadcast_object(value if RANK == SIZE - 1 else None, root=SIZE - 1)["rank"] == SIZE - 1
    assert WORLD.scatter_object([i * i for i in range(SIZE)] if RANK == 0 else None) == RANK**2
    gathered = WORLD.gather_object(RANK, root=1)
    assert gathered == (list(range(SIZE)) if RANK == 1 else None)


def test_groups() -> None:
    """By color and key, by a list, without some; ranks are translated both ways."""
    halves = WORLD.split(RANK % 2, -RANK)
    assert halves is not None
    same = [rank for rank in reversed(range(SIZE)) if rank % 2 == RANK % 2]
    assert halves.world_ranks == tuple(same)
    assert halves.all_gather(np.array([RANK])).tolist() == same
    assert halves.world_rank(0) == same[0]
    assert halves.rank_of(RANK) == halves.rank
    assert halves.rank_of((RANK + 1) % 2 + SIZE * 2) is None
    assert WORLD.split(None if RANK == 0 else 7) is not None or RANK == 0
    ends = WORLD.group([SIZE - 1, 0])
    assert (ends is None) == (RANK not in (0, SIZE - 1))
    if ends is not None:
        assert ends.all_gather(np.array([RANK])).tolist() == [SIZE - 1, 0]
    rest = WORLD.shrink([0])
    assert (rest is None) == (RANK == 0)
    if rest is not None:
        assert rest.size == SIZE - 1
        rest.barrier()
    assert 0 <= WORLD.local_rank < SIZE


def test_what_does_not_fit() -> None:
    """Refused before anything is sent, on every rank; the next call works."""
    x, read_only = numbers(RANK, 4), np.zeros(4, np.float32)
    read_only.flags.writeable = False
    for call, words in (
        (lambda: WORLD.all_gather(x, sizes=[4]), "1 sizes, for"),
        (lambda: WORLD.all_gather(x, sizes=[3] * SIZE), "has 4 indices, and 3 are stated"),
        (lambda: WORLD.reduce_scatter(x, sizes=[1] * SIZE), "are stated" if SIZE != 4 else None),
        (lambda: WORLD.broadcast(x, root=SIZE), f"member {SIZE} of {SIZE}"),
        (lambda: WORLD.all_gather(x, dim=1), "dim=1"),
        (lambda: WORLD.all_reduce(x, "max", factor=2), "is for sums"),
        (lambda: WORLD.all_reduce(x, out=np.empty(3)), "and out"),
        (lambda: WORLD.send(x, SIZE), "member"),
        (lambda: WORLD.send(x, 0, tag=5000), "tags are below"),
        (lambda: WORLD.group([0, 0]), "different members"),
        (lambda: WORLD.broadcast(None), "broadcast: None has no array"),
        (lambda: WORLD.scatter([]), "has no array"),
        (lambda: WORLD.all_gather(np.float64(3)), r"x\[None\] has a dim"),
        (lambda: WORLD.all_to_all(numbers(0, SIZE, SIZE), to_dim=-2), "dim and to_dim are both 0"),
        (lambda: WORLD.all_reduce(np.array(["a"])), "an array of <U1; what travels is numbers"),
        (lambda: WORLD.broadcast({"a": x, "b": object()}), "broadcast: object; what travels"),
        (lambda: WORLD.send({"a": x}, 0), "send: dict; .*send_object"),
        (lambda: WORLD.all_reduce(np.zeros(2, "M8[s]")), "datetime64"),
        (lambda: WORLD.all_reduce(np.zeros(2, np.longdouble)), "float128"),
        (lambda: WORLD.all_reduce(np.ma.masked_array(x, x > 0)), "masked"),
        (lambda: WORLD.broadcast(x, root="0"), "'0' is no integer"),
        (lambda: WORLD.recv(None), "recv from: member=None is no integer"),
        (lambda: WORLD.scatter(x, sizes=[-1, 5, *[0] * (SIZE - 2)]), "no size is below zero"),
        (lambda: WORLD.scatter(x, sizes=4), "one for each member"),
        (lambda: WORLD.permute(x, pairs=[(0, SIZE)]), "members exist"),
        (lambda: WORLD.all_to_all_rows(x, sends=[4] * SIZE, receives=[4] * SIZE), "are stated"),
        (lambda: WORLD.batch([(x, 1)]), "neither a Send nor a Receive"),
        (lambda: WORLD.all_reduce(np.arange(3), factor=0.5), "cast first"),
        (lambda: WORLD.all_reduce({"w": x, "steps": np.arange(2)}, "mean"), r"leaf \['steps'\]: .* mean of int64"),
        (lambda: WORLD.all_reduce({"b": x, "a": x}, out=[x.copy(), x.copy()]), "out is PyTreeDef"),
        (lambda: WORLD.all_reduce(x, out=jnp.zeros(4)), "no array that can be written to"),
        (lambda: WORLD.all_reduce(x, out=read_only), "read-only"),
        (lambda: WORLD.recv(0, out=read_only), "read-only"),
    ):
        if words is not None:
            with pytest.raises(collectives.InvalidCollective, match=words):
                call()
    np.testing.assert_array_equal(WORLD.all_reduce(x), total(4))


def test_bytes_of_another_order() -> None:
    """As in files of other machines: results are in this one's."""
    x = numbers(RANK, 4).astype(">f8")
    found = WORLD.batch([Send(x, AFTER), Receive(BEFORE)])[0]
    np.testing.assert_array_equal(found, numbers(BEFORE, 4))
    np.testing.assert_array_equal(WORLD.all_reduce(x), total(4))
    assert WORLD.all_gather(x).dtype.isnative


def test_objects_that_cannot_be_pickled() -> None:
    """All who wait for one get the error, and the next call works."""
    value: Any = (lambda: 1) if RANK == 0 else RANK
    for call in (
        lambda: WORLD.all_gather_object(value),
        lambda: WORLD.broadcast_object(value),
        lambda: WORLD.scatter_object([lambda: 1] * SIZE if RANK == 0 else None),
        lambda: WORLD.split(value),
    ):
        with pytest.raises(collectives.InvalidCollective, match="cannot be pickled"):
            call()
    with pytest.raises(collectives.InvalidCollective, match="and not a list of"):
        WORLD.scatter_object([1])
    if RANK == 0:
        with pytest.raises(collectives.InvalidCollective, match="cannot be pickled"):
            WORLD.gather_object(value, root=1)
    elif RANK == 1:
        with pytest.raises(collectives.InvalidCollective, match="gather_object: a member's object cannot be pickled"):
            WORLD.gather_object(value, root=1)
    else:
        assert WORLD.gather_object(value, root=1) is None
    WORLD.send(np.zeros(3, np.uint8), AFTER)
    with pytest.raises(collectives.InvalidCollective, match="no object but an array"):
        WORLD.recv_object(BEFORE)
    assert WORLD.all_gather_object(RANK) == list(range(SIZE))


def test_calls_are_compared() -> None:
    """`SPMD_DEBUG=detail`: members that make different calls all get an error that shows two sides; nothing is sent."""
    group = WORLD.group(range(SIZE))
    assert group is not None
    group._compares = True
    x, own = numbers(RANK, 4), int(RANK == SIZE - 1)
    for call, words in (
        (lambda: group.all_reduce(x, ("sum", "max")[own]), "op=sum.*\n.*op=max"),
        (lambda: group.all_reduce(x[: 4 - own]), r"float32\[4\]\n.*float32\[3\]"),
        (lambda: group.all_gather(x[: 4 - own]), r"float32\[4\]\n.*float32\[3\]"),
        (lambda: group.broadcast(x.astype(("f4", "f8")[own])), "float32.*\n.*float64"),
        (lambda: group.broadcast(x, root=own), "root=0.*\n.*root=1"),
        (lambda: group.all_reduce({"ab"[own]: x}), "'a'.*\n.*'b'"),
        (lambda: group.barrier() if own else group.all_reduce(x), "all_reduce.*\n.*: barrier"),
        (lambda: group.all_gather(x) if own else group.all_reduce(x), "all_reduce.*\n.*all_gather"),
    ):
        with pytest.raises(collectives.DivergenceError, match=f"rank 0: .*{words}"):
            call()
    np.testing.assert_array_equal(group.all_reduce(x), total(4))
    parts = group.all_gather(numbers(RANK, RANK + 1), sizes=list(range(1, SIZE + 1)))
    assert parts.shape == (SIZE * (SIZE + 1) // 2,)
    assert group.all_to_all_rows(numbers(RANK, SIZE)).shape == (SIZE,)
    assert group.all_gather_object(RANK) == list(range(SIZE))
    group.barrier()
    group.close()
    assert group.rank == RANK
    assert "closed" in repr(group)
    for call in (lambda: group.barrier(), lambda: group.split(0), lambda: group.recv(0)):
        with pytest.raises(collectives.TransportError, match="was closed"):
            call()


def test_works_on_several_communicators() -> None:
    """Members wait for them in other orders: whoever waits for one lets all go on."""
    one, two = WORLD.group(range(SIZE)), WORLD.group(range(SIZE))
    assert one is not None
    assert two is not None
    for first, second in (
        (lambda: one.all_reduce(numbers(RANK, 100_000), async_op=True), lambda: two.all_reduce(np.ones(1))),
        (lambda: [one.all_reduce(np.ones(3), async_op=True) for _ in range(3)][-1], lambda: two.barrier()),
        (lambda: one.recv(BEFORE, async_op=True), lambda: two.group(range(SIZE))),
        (lambda: one.recv(BEFORE, async_op=True), lambda: one.barrier()),
    ):
        work = first()
        if RANK == 1:
            time.sleep(0.1)
        if isinstance(work._what(), str) and work._what().startswith("recv"):
            second()
            one.send(np.full(100_000, RANK), AFTER, async_op=True)
            assert work.wait()[-1] == BEFORE
        elif RANK == 0:
            second()
            work.wait()
        else:
            work.wait()
            second()
    one.drain()


def test_a_failure_stays_with_its_work() -> None:
    """A barrier, or another call, does not raise what is wrong with a work; a message of a user is not an object's."""
    work = WORLD.all_reduce(np.ones(3), out=np.zeros(4), async_op=True)
    WORLD.barrier()
    assert WORLD.all_reduce(np.ones(1)) == SIZE
    assert isinstance(work.exception(), collectives.InvalidCollective)
    assert "failed" in repr(work)
    sent = WORLD.send(np.full(2, RANK), AFTER, tag=998, async_op=True)
    assert WORLD.gather_object(RANK, root=0) == (list(range(SIZE)) if RANK == 0 else None)
    assert WORLD.recv(BEFORE, tag=998).tolist() == [BEFORE] * 2
    sent.wait()
    x = numbers(RANK, 4)
    have = [(4 * rank, 4 * rank + 4) for rank in range(SIZE)]
    kept = WORLD.exchange(x, dim=0, have=have, want=have)
    assert not np.shares_memory(kept, x)
    with pytest.raises(collectives.InvalidCollective, match="leaves of other lengths"):
        WORLD.all_to_all_rows([np.zeros(4), np.zeros(5)])
    for bounds in ([(0, 4)] * (SIZE + 1), [(0, 3)] * SIZE):
        with pytest.raises(collectives.InvalidCollective, match=r"bounds for each|are stated"):
            WORLD.exchange(x, dim=0, have=bounds, want=have)


def test_a_communicator_with_a_message_left_is_not_reused() -> None:
    """MPI would give the message to a communicator that is made later."""
    group = WORLD.group(range(SIZE))
    assert group is not None
    if RANK == 0:
        group.send(np.full(2, 100), 1)
    if RANK == 1:
        with pytest.raises(collectives.InvalidCollective, match="nobody received a message of member 0"):
            group.close()
    else:
        group.close()
    WORLD.close()  # the world stays open
    assert WORLD.all_reduce(np.ones(1)) == SIZE
