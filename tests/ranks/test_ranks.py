"""What only real ranks can show. Run by `tests/test_mpi.py`, every test on every rank of one job."""

from __future__ import annotations

import os
import threading
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from local_functions import TABLE, check
from oracle import agree, same

import collectives
import spmd
from collectives import ffi, process, testing
from collectives.launch import launch
from placements import Mesh, P, Partial, Shard

WORLD = collectives.world()
RANK, SIZE = WORLD.rank, WORLD.size
MESH = Mesh(a=SIZE)
ROWS = P(a=Shard(0))
X = (np.arange(21, dtype=np.float32) * 7 % 11 - 5).reshape(7, 3)


def test_the_communicator_conforms() -> None:
    """The suite that the simulator passes."""
    assert testing.check_communicator(WORLD) > 400
    WORLD.barrier()


def test_the_process_is_prepared() -> None:
    """Launcher found, affinity narrowed to this process's share, dispatch synchronous."""
    found = launch()
    assert found is not None
    assert (found.size, found.rank) == (SIZE, RANK)
    if found.local_size <= (os.cpu_count() or 1):
        assert len(os.sched_getaffinity(0)) < (os.cpu_count() or 2)
    assert jax.config.values["jax_cpu_enable_async_dispatch"] is False


def test_shards_are_this_processs() -> None:
    """One coordinate, its shard; reading it whole raises; full is collective."""
    x = spmd.distribute(X, ROWS, MESH)
    assert list(x.shards) == [(RANK,)]
    np.testing.assert_array_equal(x.local, X[x.layout.index(X.shape, (RANK,))])
    with pytest.raises(spmd.NotReplicatedError):
        np.asarray(x)
    assert f"on {MESH!r}" in repr(x)
    np.testing.assert_array_equal(x.full(), X)
    np.testing.assert_array_equal(np.asarray(x.redistribute(P())), X)


def test_functions_run_as_in_the_simulator() -> None:
    """Values, gradients, both runs; the Program is the same, and communicates what it says."""
    programs = agree(lambda x, w: jnp.tanh(x @ w) @ w.T, [X, X[:3]], [ROWS, P(a=Shard(1))], [MESH], compiled=True)
    simulated = spmd.jit(
        lambda x, w: jnp.tanh(x @ w) @ w.T,
        mesh=Mesh(a=SIZE, backend="simulated"),
        in_placements=(ROWS, P(a=Shard(1))),
    )
    expected = [(c.name, c.bytes) for c in simulated.lower(X, X[:3]).collectives]
    assert [(c.name, c.bytes) for c in programs[0].collectives] == expected


DTYPES = (
    "bool", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32",
    "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "complex64",
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: str) -> None:
    """Movement and reductions of every dtype that jnp.zeros takes, as in the simulator."""
    values = jnp.asarray((np.arange(10) * 5 % 7 - 3).reshape(5, 2)).astype(dtype)
    ops = ["sum", "prod", "max", "min"]
    if dtype == "bool":
        ops = ["and", "or", "xor", "prod", "max", "min"]
    elif dtype == "complex64":
        ops = ["sum", "prod", "mean"]
    elif "int" in dtype:
        ops += ["and", "or", "xor"]
    x = spmd.distribute(values, ROWS, MESH)
    for target in (P(), P(a=Shard(1))):
        assert np.asarray(x.redistribute(target).full()).tobytes() == np.asarray(values).tobytes()
    for op in ops:
        pieces = [jnp.roll(values, rank) for rank in range(SIZE)]
        mine = spmd.from_local(pieces[RANK], P(a=Partial(op)), MESH)
        model = Mesh(a=SIZE, backend="simulated")
        expected = spmd.from_local(pieces, P(a=Partial(op)), model).full()
        np.testing.assert_array_equal(np.asarray(mine.full()), np.asarray(expected))


def test_64_bit_dtypes() -> None:
    """With x64 on."""
    with jax.enable_x64(True):
        for dtype in ("int64", "uint64", "float64", "complex128"):
            values = jnp.asarray(np.arange(10).reshape(5, 2) - 3, dtype)
            same(
                spmd.jit(lambda x: (x.sum(0), x.T @ x)[1], mesh=MESH, in_placements=ROWS)(values),
                values.T @ values,
                MESH,
            )


def test_max_and_min_carry_nan_to_every_rank() -> None:
    """Whichever rank holds it; signed zeros and infinities in order."""
    for holder in range(SIZE):
        piece = np.float32([np.nan if holder == RANK else RANK, -RANK, np.inf if RANK else -np.inf])
        for op, rest in (("max", [0, np.inf if SIZE > 1 else -np.inf]), ("min", [1 - SIZE, -np.inf])):
            found = spmd.from_local(piece, P(a=Partial(op)), MESH).full()
            assert np.isnan(found[0])
            assert found[1:].tolist() == rest


def test_typed_keys_move() -> None:
    """split, shard, gather, broadcast: the dtype is kept."""
    keys = jax.random.split(jax.random.key(3), 5)
    placed = spmd.distribute(keys, ROWS, MESH)
    assert np.array_equal(jax.random.key_data(placed.full()), jax.random.key_data(keys))
    mine = jax.random.key(RANK)
    first = spmd.distribute(mine, P(), MESH, source=0)
    assert np.array_equal(jax.random.key_data(first.full()), jax.random.key_data(jax.random.key(0)))


def test_making_arrays() -> None:
    """from_local, uneven and moved; from_callback; a source; errors alike on every rank."""
    piece = X[:2] + RANK
    whole = np.concatenate([X[:2] + rank for rank in range(SIZE)])
    same(spmd.from_local(piece, ROWS, MESH), whole, MESH)
    pieces = np.split(whole, np.cumsum([1] * (SIZE - 1)))
    if SIZE > 2:
        with pytest.raises(spmd.ArgumentError, match="exchange=True"):
            spmd.from_local(pieces[RANK], ROWS, MESH)
    same(spmd.from_local(pieces[RANK], ROWS, MESH, exchange=True), whole, MESH)
    if SIZE > 1:
        with pytest.raises(spmd.ArgumentError, match="should hold the same values"):
            spmd.from_local(piece, P(), MESH)
        with pytest.raises(spmd.ArgumentError, match="differ in dtype"):
            spmd.from_local(piece.astype(np.float32 if RANK else np.int32), ROWS, MESH)
    same(spmd.distribute(X + RANK, ROWS, MESH, source=SIZE - 1), X + SIZE - 1, MESH)
    seen = []
    same(spmd.from_callback(lambda index: (seen.append(index), X[index])[1], X.shape, ROWS, MESH), X, MESH)
    assert len(seen) == 1


def test_donation_d10() -> None:
    """Donate, constrain, return updated: the right value; the old handle raises."""
    step = spmd.jit(lambda s: spmd.constrain(s + 1, ROWS), mesh=MESH, donate_argnums=0, in_placements=ROWS)
    state = spmd.distribute(X, ROWS, MESH)
    new = state
    for _ in range(3):
        new = step(new)
    same(new, X + 3, MESH)
    with pytest.raises(spmd.DeletedError):
        state.full()


def test_divergence_is_an_error_on_every_rank_and_the_job_goes_on() -> None:
    """F3: other programs, shapes, dtypes, orders of axes, cached or not; dict keys in another order are none."""
    if SIZE == 1:
        pytest.skip("one rank cannot diverge")
    sums = spmd.jit(lambda x: x.sum(), mesh=MESH, in_placements=ROWS)
    means = spmd.jit(lambda x: x.mean(), mesh=MESH, in_placements=ROWS)
    for _ in range(2):
        with pytest.raises(collectives.DivergenceError, match=r"(?s)first line that differs.*rank 0.*rank 1"):
            (means if RANK == 1 else sums)(X)
        with pytest.raises(
            collectives.DivergenceError, match=r"(?s)argument x: float32\[7,3\].*float32\[6,3\].*spmd.from_local"
        ):
            sums(X[:6] if RANK == 1 else X)
        with pytest.raises(collectives.DivergenceError):
            sums(X.astype(np.int32) if RANK == 0 else X)
        assert float(sums(X)) == X.sum()
    tree = {"p": X, "q": X + 1} if RANK else {"q": X + 1, "p": X}
    same(spmd.jit(lambda t: t["p"] - t["q"], mesh=MESH)(tree), -np.ones_like(X), MESH)


def test_values_that_should_be_equal_are_compared() -> None:
    """Another whole array on one rank is an error on all, at a program's first run and at some later ones: it names the
    function and the argument; so does one that is closed over, small or large."""
    if SIZE == 1:
        pytest.skip("one rank cannot differ")
    last = RANK == SIZE - 1
    f = spmd.jit(lambda x, y: x * 2 + y["b"], mesh=MESH, in_placements=(ROWS, P()))
    for other in (last, 0, 0, last):
        if other is last:
            with pytest.raises(
                collectives.DivergenceError, match=r"<lambda>: .*different values(.|\n)*argument y\['b'\]"
            ):
                f(X, {"a": X, "b": X + last})
        else:
            same(f(X, {"a": X, "b": X}), 3 * X, MESH)

    def closing_over(constant: Any) -> Any:
        return spmd.jit(lambda x: x.sum() + jnp.asarray(constant).sum(), mesh=MESH)

    small, large = np.arange(4) + last, np.arange(300_000.0) + last
    for constant, what in ((small, r"closed-over array int\d\d\[4\]"), (large, "argument closure0")):
        with (
            pytest.raises(collectives.DivergenceError, match=f"<lambda>: (.|\n)*{what}"),
            warnings.catch_warnings(action="ignore"),
        ):
            closing_over(constant)(X)


def test_meshes_that_do_not_fit() -> None:
    """F19: more coordinates than processes, or a rank that does not exist, is an error when something runs."""
    with pytest.raises(collectives.BackendError, match=f"is of size {SIZE + 1}, and the job has {SIZE} processes"):
        spmd.zeros(4, ROWS, Mesh(a=SIZE + 1))
    with pytest.raises(collectives.BackendError, match="no back end is called"):
        spmd.zeros(4, ROWS, Mesh(a=SIZE, backend="smoke"))
    if SIZE > 1:
        part = Mesh(a=SIZE - 1, ranks=range(SIZE - 1))
        if RANK == SIZE - 1:
            with pytest.raises(collectives.BackendError, match="is not on"):
                spmd.zeros(4, ROWS, part)
        else:
            same(spmd.jit(lambda x: x @ x.T, mesh=part, in_placements=ROWS)(X), X @ X.T, part)


def test_halves_of_the_world_are_independent_f8() -> None:
    """Two meshes over disjoint ranks run other programs, of other sizes, at once; submeshes of one too."""
    if SIZE < 4:
        pytest.skip("needs four ranks")
    half = Mesh(a=2, ranks=[0, 1] if RANK < 2 else [2, 3])
    x = X if RANK < 2 else X[:5]
    for _ in range(3 + RANK // 2):
        same(spmd.jit(lambda x: x.T @ x, mesh=half, in_placements=ROWS)(x), x.T @ x, half)
    grid = Mesh(a=2, b=2)
    row = grid.submesh("b", a=RANK // 2)
    same(
        spmd.jit(lambda x: x.sum(0), mesh=row, in_placements=P(b=Shard(0)))(X + RANK // 2), (X + RANK // 2).sum(0), row
    )


def test_uneven_gathers_on_an_inner_axis_b10() -> None:
    """A 2-D mesh, an odd size on the inner axis: the gather ends, with the right size."""
    if SIZE < 4:
        pytest.skip("needs four ranks")
    grid = Mesh(a=2, b=2)
    for placements in (P(b=Shard(0)), P(a=Shard(1), b=Shard(0)), P(a=Shard(0), b=Shard(0)), P(b=Shard(0), a=Shard(0))):
        assert spmd.distribute(X, placements, grid).full().shape == X.shape
        same(spmd.distribute(X, placements, grid).redistribute(P(a=Shard(1))), X, grid, exact=True)


def test_permuted_ranks() -> None:
    """Coordinates in reverse order of the ranks."""
    mesh = Mesh(a=SIZE, ranks=range(SIZE)[::-1])
    x = spmd.distribute(X, ROWS, mesh)
    assert list(x.shards) == [(SIZE - 1 - RANK,)]
    same(x, X, mesh)
    agree(lambda x: x.T @ x, [X], [ROWS], [mesh])


def test_a_users_own_traffic_is_apart_f7() -> None:
    """Messages on COMM_WORLD with our tag, between and during our programs, from another thread too."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    other = np.empty(3)
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    pending = comm.Irecv(other, left, 7)
    threaded = np.empty(2)
    traffic = threading.Thread(target=lambda: comm.Sendrecv(np.full(2, RANK + 0.5), right, 9, threaded, left, 9))
    traffic.start()
    f = spmd.jit(lambda x: x.sum(0), mesh=MESH, in_placements=ROWS)
    for _ in range(3):
        same(f(X), X.sum(0), MESH)
    comm.Send(np.full(3, float(RANK)), right, 7)
    pending.Wait()
    traffic.join(30)
    assert other.tolist() == [float(left)] * 3
    assert threaded.tolist() == [left + 0.5] * 2


def reduce_in(token: Any, x: Any, scale: float = 1.0) -> tuple[Any, Any]:
    """A sum over the world, as a custom call."""
    world: Any = WORLD
    prepare = lambda transfer: world.prepare(transfer, lambda: "test")  # noqa: E731
    token, (found,) = ffi.collective(token, [x * scale], "all_reduce", RANK, SIZE, prepare, [{"op": "sum"}])
    return token, found


SUM = float(sum(range(1, SIZE + 1)))


def test_the_token_keeps_count_and_order() -> None:
    """Equal calls are not merged, unused ones not dropped, and independent ones stay in order: else ranks would deadlock."""

    @jax.jit
    def f(token: Any, x: Any) -> Any:
        token, a = reduce_in(token, x)
        token, b = reduce_in(token, x)
        token, _ = reduce_in(token, x * 3)  # unused
        token, c = reduce_in(token, jnp.sin(x))
        return token, a, b, c

    before = len(ffi._RUNS)
    calls: list[int] = []
    compiled = f.lower(ffi.new_token(), jnp.ones(4)).compile()
    text = compiled.as_text()
    assert text.count('custom_call_target="spmd_collective"') == 4
    runs = ffi._RUNS[before:]
    for number, run in enumerate(runs, before):
        ffi._RUNS[number] = lambda a, b, run=run, number=number: (calls.append(number), run(a, b))[1]
    _, a, b, _ = compiled(ffi.new_token(), jnp.ones(4) * (RANK + 1))
    assert calls == list(range(before, before + 4))
    assert a.tolist() == b.tolist() == [SUM] * 4


def test_loops_stay_compiled() -> None:
    """Collectives in scan, fori_loop, while (condition and body), cond and switch run as often as they should."""

    @jax.jit
    def f(token: Any, x: Any) -> Any:
        def body(carry: Any, row: Any) -> Any:
            token, total = reduce_in(carry[0], row)
            return (token, carry[1] + total), total.sum()

        (token, total), ys = lax.scan(body, (token, jnp.zeros(3)), x)

        def step(i: Any, carry: Any) -> Any:
            return reduce_in(carry[0], carry[1] / SIZE)

        token, mean = lax.fori_loop(0, 5, step, (token, jnp.float32(7)))

        def condition(carry: Any) -> Any:
            return carry[1] < 100

        def grow(carry: Any) -> Any:
            token, value = reduce_in(carry[0], carry[1])
            return token, value + 1

        token, grown = lax.while_loop(condition, grow, (token, jnp.float32(1)))
        token, chosen = lax.cond(total.sum() > -1e9, reduce_in, lambda t, x: (t, x), token, jnp.ones(2))
        token, switched = lax.switch(1, [lambda t, x: (t, x), reduce_in, lambda t, x: (t, -x)], token, jnp.ones(2))
        return token, total, ys, mean, grown, chosen, switched

    rows = jnp.arange(12.0).reshape(4, 3) + RANK
    expected_rows = sum(np.arange(12.0).reshape(4, 3) + rank for rank in range(SIZE))
    _, total, ys, mean, grown, chosen, switched = f(ffi.new_token(), rows)
    np.testing.assert_allclose(total, expected_rows.sum(0))
    np.testing.assert_allclose(ys, expected_rows.sum(1))
    value = 1.0
    while value < 100:
        value = value * SIZE + 1
    assert (float(mean), float(grown)) == (pytest.approx(7), value)
    assert chosen.tolist() == switched.tolist() == [SIZE] * 2


def test_a_condition_with_a_collective() -> None:
    """The predicate of a while is itself a sum over the ranks."""

    @jax.jit
    def f(token: Any, x: Any) -> Any:
        def condition(carry: Any) -> Any:
            return carry[2]

        def body(carry: Any) -> Any:
            token, total = reduce_in(carry[0], carry[1])
            return token, carry[1] + 1, total < 50

        return lax.while_loop(condition, body, (token, x, jnp.bool_(True)))

    _, x, _ = f(ffi.new_token(), jnp.float32(RANK))
    steps = next(n for n in range(100) if sum(range(SIZE)) + n * SIZE >= 50)
    assert float(x) == RANK + steps + 1


def test_empty_buffers_and_donation_of_the_token() -> None:
    """Arrays without elements; the token is aliased from input to output, and may be donated."""
    f = jax.jit(reduce_in, donate_argnums=0)
    token = ffi.new_token()
    for _ in range(3):
        token, empty = f(token, jnp.zeros((0, 3)))
    assert empty.shape == (0, 3)
    same(spmd.jit(lambda x: (x.sum(0), x @ x.T)[0], mesh=MESH, in_placements=ROWS)(X[:1]), X[:1].sum(0), MESH)
    same(
        spmd.jit(lambda x: x.max(0, initial=-9.0), mesh=MESH, in_placements=ROWS)(X[:0]),
        np.full(3, -9.0, np.float32),
        MESH,
    )


def test_merged_messages() -> None:
    """Several of a kind in one message, with empty pieces between some members of some: every rank chooses the same way."""
    moves = spmd.jit(
        lambda *xs: tuple(2 * x for x in xs),
        mesh=MESH,
        in_placements=(ROWS, ROWS, ROWS),
        out_placements=(P(a=Shard(1)),) * 3,
    )
    arrays = [np.arange(n * m, dtype=np.float32).reshape(n, m) - 7 for n, m in ((5, 2), (2, 5), (4, 4))]
    for _ in range(2):
        for found, array in zip(moves(*arrays), arrays, strict=True):
            same(found, 2 * array, MESH, exact=True)
    for out in (P(), P(a=Shard(1))):
        parts = [spmd.from_local(array[:, :2] * (RANK + 1), P(a=Partial()), MESH) for array in arrays]
        sums = spmd.jit(lambda *xs: tuple(jnp.negative(x) for x in xs), mesh=MESH, out_placements=(out,) * 3)
        program = sums.lower(*parts)
        assert SIZE == 1 or len(program.messages) == 1
        for found, array in zip(sums(*parts), arrays, strict=True):
            same(found, -array[:, :2] * sum(range(1, SIZE + 1)), MESH, exact=True)


def test_large_messages_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paths for counts beyond the limit of one MPI call, with the limit lowered."""
    from collectives import mpi_transfers

    monkeypatch.setattr(mpi_transfers, "LIMIT", 4)
    assert testing.check_communicator(WORLD) > 400


def test_compiled_loops_stay_one_executable() -> None:
    """A training-like loop in Python reuses one executable; nothing is registered anew."""
    f = spmd.jit(
        lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), mesh=MESH, in_placements=(P(), ROWS)
    )
    w = np.float32([1, -2, 3])
    expected = jnp.asarray(w)
    count = None
    placed: Any = w
    for _ in range(4):
        placed = f(placed, X)
        expected = expected - 0.1 * jax.grad(lambda w: jnp.mean((X @ w) ** 2))(expected)
        count = len(ffi._RUNS) if count is None else count
    np.testing.assert_allclose(placed.full(), expected, rtol=1e-4)
    assert len(ffi._RUNS) <= count + 2
    assert process.on_mesh(MESH).poison is None


def test_neighbours_exchange() -> None:
    """Stencils, shifts and updates, in a loop too; empty shards; two windows of one array in a message."""

    def steps(u: Any) -> Any:
        return lax.fori_loop(0, 3, lambda i, u: u.at[1:-1].add(0.1 * (u[2:] - 2 * u[1:-1] + u[:-2])), u)

    for function in (steps, lambda u: jnp.roll(u, 1, 0) * u[::-1], lambda u: jnp.pad(u[1::2], ((1, 2), (0, 0)))):
        for x in (X, X[:2]):
            if x.shape[0] > 2 or function is not steps:
                agree(function, [x], [ROWS], [MESH], compiled=True, fallback="error")
    agree(lambda u: u.reshape(-1, 7) * 2, [X], [ROWS], [MESH], compiled=True, fallback="error")
    agree(lambda u: (jnp.cumsum(u, 0), u.argmax(0)), [X], [ROWS], [MESH], compiled=True, fallback="error")
    agree(lambda u: jnp.abs(jnp.fft.fft2(u)), [X], [ROWS], [MESH], compiled=True, fallback="error")


def test_neighbours_exchange_along_two_dims() -> None:
    """A stencil on a grid: windows along both dims share a message for each; corners are right."""
    if SIZE not in (2, 4):
        pytest.skip("a grid needs two or four ranks")

    def steps(u: Any) -> Any:
        def step(u: Any, _: Any) -> Any:
            near = u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] + u[2:, 2:] - 5 * u[1:-1, 1:-1]
            return u.at[1:-1, 1:-1].add(0.1 * near), u.sum()

        return lax.scan(step, u, length=3)

    grid = (np.arange(63, dtype=np.float32) * 7 % 11 - 5).reshape(7, 9)
    mesh = Mesh(a=2, b=SIZE // 2)
    agree(steps, [grid], [P(a=Shard(0), b=Shard(1))], [mesh], compiled=True, fallback="error")


def test_callbacks_happen_on_the_first_rank() -> None:
    """With whole values, in order, in loops too; what a callback returns is the same everywhere."""
    seen: list[Any] = []

    def function(x: Any) -> Any:
        def step(carry: Any, row: Any) -> tuple[Any, Any]:
            io_callback(lambda v: seen.append(float(v)), None, carry, ordered=True)
            return carry + row.sum(), row

        last, _ = lax.scan(step, jnp.float32(0), x)
        jax.debug.callback(lambda v: seen.append(v.shape), x)
        result = jax.ShapeDtypeStruct(x.shape, x.dtype)
        y = io_callback(lambda v: (seen.append("asked"), np.asarray(v) * (1 + RANK))[1], result, x, ordered=True)
        return last, y

    decorated = spmd.jit(function, mesh=MESH, in_placements=ROWS, fallback="allow")
    for _ in range(2):
        seen.clear()
        last, y = decorated(X)
        same(y, X, MESH)
        same(last, X.sum(), MESH)
        jax.effects_barrier()
        sums = [float(value) for value in np.cumsum([0, *X.sum(1)[:-1]])]
        assert [value for value in seen if value != (7, 3)] == ([*sums, "asked"] if RANK == 0 else [])
        assert seen.count((7, 3)) == (RANK == 0)


@pytest.mark.parametrize("name", sorted(TABLE)[SIZE % 3 :: 3])
def test_local_functions(name: str) -> None:
    """A third of the table, another one for each number of ranks: values and gradients."""
    check(name, MESH, ("a",))


def test_local_functions_over_two_axes() -> None:
    """Halos with corners from up to eight neighbours, in one call; ranks that decide differently and do not meet."""
    mesh, placed = Mesh(a=SIZE // 2 or 1, b=2) if SIZE % 2 == 0 else Mesh(a=1, b=SIZE), P(a=Shard(0), b=Shard(1))
    x = (np.arange(4 * 12) * 7 % 11 - 5).reshape(4, 12).astype(np.float32)

    def exchanged(field: Any) -> Any:
        return collectives.halo_exchange((field, 2 * field), {"a": 0, "b": 1}, 2, "periodic")

    local = spmd.shard_map(exchanged, mesh=mesh, in_placements=placed, out_placements=placed)
    assert len(local.lower(x).messages) == 1
    height, width = 4 // mesh.shape["a"], 12 // mesh.shape["b"]
    for factor, found in zip((1, 2), local(x), strict=True):
        around = np.pad(factor * x, 2, mode="wrap")
        ((i, j), shard), *_ = found.shards.items()
        top, left = i * height, j * width
        np.testing.assert_array_equal(shard, around[top : top + height + 4, left : left + width + 4])

    def decided(field: Any) -> Any:
        return lax.while_loop(
            lambda v: collectives.all_reduce(jnp.abs(v).sum(), "a") < 200 * (1 + lax.axis_index("b")),
            lambda v: 2 * v + collectives.shift(v, "a"),
            field,
        )

    ends = spmd.shard_map(decided, mesh=mesh, in_placements=placed, out_placements=placed)(x)
    for j in range(mesh.shape["b"]):
        block = x[:, j * width : (j + 1) * width]
        while np.abs(block).sum() < 200 * (1 + j):
            block = 2 * block + np.roll(block, height, 0)
        for (i, column), shard in ends.shards.items():
            if column == j:
                np.testing.assert_array_equal(shard, block[i * height : (i + 1) * height])


def test_what_a_local_function_gets_wrong_is_an_error_on_every_rank() -> None:
    """And nothing is sent: the next call works (B11, C6, D1)."""
    x = np.arange(2.0 * SIZE, dtype=np.float32)

    def local(function: Any, out: P = ROWS) -> Any:
        return spmd.shard_map(function, mesh=MESH, in_placements=ROWS, out_placements=out)

    with pytest.raises(spmd.ArgumentError, match="does not divide"):
        local(lambda x: 2 * x)(np.arange(2.0 * SIZE + 1, dtype=np.float32))
    with pytest.raises(collectives.InvalidCollective, match="same on all ranks"):
        local(lambda x: collectives.all_reduce(collectives.all_reduce(x, "a"), "a"), P())(x)
    with pytest.raises(spmd.TransformationError, match="would wait for others"):
        local(lambda x: lax.cond(x[0] > 1, lambda: collectives.shift(x, "a"), lambda: x))(x)
    assert float(local(lambda x: collectives.all_reduce(x.sum(), "a"), P())(x)) == x.sum()
