"""The parallelisms of the textbooks, by placements alone: what each communicates, and that it computes the same.

One training step of residual MLP blocks, with layers in a Python loop and in a scan. The counts are those of the literature:
Megatron-LM (arXiv 1909.08053, and 2205.05198 for the sequence-sharded form), ZeRO (1910.02054), FSDP (2304.11277).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from oracle import agree, fit

import spmd
from placements import Mesh, P, Shard

GOLDEN = Path(__file__).parent / "golden"
LAYERS, WIDTH, HIDDEN, LENGTH = 3, 256, 1024, 64
MANY, FEW = 32, 4
"""Sequences in a batch: activations larger than weights, and smaller."""


def block(h: Any, w: Any) -> Any:
    """A residual MLP block: `[..., WIDTH]`."""
    return h + jnp.sin(h @ w[0]) @ w[1]


def unrolled(ws: Any, x: Any) -> Any:
    for w in ws:
        x = block(x, w)
    return x


def scanned(ws: Any, x: Any) -> Any:
    return lax.scan(lambda h, w: (block(h, w), None), x, ws)[0]


def sgd(apply: Callable[..., Any]) -> Callable[..., Any]:
    """One step of gradient descent on the mean squared error."""

    def step(ws: Any, x: Any, y: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda ws: jnp.mean((apply(ws, x) - y) ** 2))(ws)
        return jax.tree.map(lambda w, g: w - 0.5 * g, ws, gradient), loss

    return step


def weights(scan: bool, make: Callable[..., Any]) -> Any:
    shapes = (WIDTH, HIDDEN), (HIDDEN, WIDTH)
    if scan:
        return tuple(make(LAYERS, *shape) for shape in shapes)
    return [tuple(make(*shape) for shape in shapes) for _ in range(LAYERS)]


def placed(scan: bool, *layer: P) -> Any:
    """The placements of one layer's two weights, for all layers."""
    if not scan:
        return [layer] * LAYERS
    return tuple(P(**{axis: Shard(placement.dim + 1) for axis, placement in each.named}) for each in layer)


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)


def numbers(*shape: int) -> np.ndarray:
    """Both signs, varying with position; products of matrices of them stay of size 1."""
    values = np.random.default_rng(sum(shape)).normal(size=shape) / np.sqrt(shape[-2] if len(shape) > 1 else 1)
    return values.astype(np.float32)


S = Shard
ONE, GRID = Mesh(dp=4), Mesh(dp=2, tp=2)
Counts = dict[str, int]

# name: mesh, first and second weight, activations, sequences; per axis the collectives for three unrolled layers, and of a scan
TEXTBOOK: dict[str, tuple[Mesh, P, P, P, int, dict[str, Counts], dict[str, Counts]]] = {
    # a reduction for each gradient, and one for the loss
    "dp": (
        ONE, P(), P(), P(dp=S(0)), MANY,
        {"dp": {"all_reduce": 7}},
        {"dp": {"all_reduce": 3}},
    ),
    # each weight gathered once (in a scan: forward and backward), each gradient scattered
    "fsdp": (
        ONE, P(dp=S(0)), P(dp=S(0)), P(dp=S(0)), MANY,
        {"dp": {"all_gather": 6, "reduce_scatter": 6, "all_reduce": 1}},
        {"dp": {"all_gather": 4, "reduce_scatter": 2, "all_reduce": 1}},
    ),
    # one all_reduce per block forward, one backward; the first block's input needs no gradient, in a scan it has one
    "tp": (
        Mesh(tp=4), P(tp=S(1)), P(tp=S(0)), P(), MANY,
        {"tp": {"all_reduce": 5}},
        {"tp": {"all_reduce": 2}},
    ),
    # all_gather and reduce_scatter in place of each all_reduce; and the loss
    "sequence_tp": (
        Mesh(tp=4), P(tp=S(1)), P(tp=S(0)), P(tp=S(1)), FEW,
        {"tp": {"all_gather": 6, "reduce_scatter": 5, "all_reduce": 1}},
        {"tp": {"all_gather": 3, "reduce_scatter": 2, "all_reduce": 1}},
    ),
    "dp_tp": (
        GRID, P(tp=S(1)), P(tp=S(0)), P(dp=S(0)), MANY,
        {"dp": {"all_reduce": 7}, "tp": {"all_reduce": 5}},
        {"dp": {"all_reduce": 3}, "tp": {"all_reduce": 2}},
    ),
    "fsdp_tp": (
        GRID, P(tp=S(1), dp=S(0)), P(tp=S(0), dp=S(1)), P(dp=S(0)), MANY,
        {"dp": {"all_gather": 6, "reduce_scatter": 6, "all_reduce": 1}, "tp": {"all_reduce": 5}},
        {"dp": {"all_gather": 4, "reduce_scatter": 2, "all_reduce": 1}, "tp": {"all_reduce": 2}},
    ),
    # both axes on one dim of each weight, the gathered one minor
    "fsdp_tp_one_dim": (
        GRID, P(tp=S(1), dp=S(1)), P(tp=S(0), dp=S(0)), P(dp=S(0)), MANY,
        {"dp": {"all_gather": 6, "reduce_scatter": 6, "all_reduce": 1}, "tp": {"all_reduce": 5}},
        {"dp": {"all_gather": 4, "reduce_scatter": 2, "all_reduce": 1}, "tp": {"all_reduce": 2}},
    ),
    # shards within, replicas across: gradients are scattered within, then reduced across
    "hybrid": (
        Mesh(replica=2, dp=2), P(dp=S(0)), P(dp=S(0)), P(replica=S(0), dp=S(0)), MANY,
        {"dp": {"all_gather": 6, "reduce_scatter": 6, "all_reduce": 1}, "replica": {"all_reduce": 7}},
        {"dp": {"all_gather": 4, "reduce_scatter": 2, "all_reduce": 1}, "replica": {"all_reduce": 3}},
    ),
    "fsdp_over_two_axes": (
        Mesh(a=2, b=2), P(a=S(0), b=S(0)), P(a=S(0), b=S(0)), P(a=S(0), b=S(0)), MANY,
        {axis: {"all_gather": 6, "reduce_scatter": 6, "all_reduce": 1} for axis in "ab"},
        {axis: {"all_gather": 4, "reduce_scatter": 2, "all_reduce": 1} for axis in "ab"},
    ),
}  # fmt: skip


def case(name: str, scan: bool) -> tuple[Any, ...]:
    """The step, mesh, placements of arguments and results, and the counts."""
    mesh, first, second, rows, sequences, unscanned_counts, scanned_counts = TEXTBOOK[name]
    shards = placed(scan, first, second)
    step = sgd(scanned if scan else unrolled)
    return step, mesh, (shards, rows, rows), (shards, P()), sequences, scanned_counts if scan else unscanned_counts


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
@pytest.mark.parametrize("name", list(TEXTBOOK))
def test_textbook(name: str, scan: bool) -> None:
    """What a step communicates over each axis, by count."""
    step, mesh, arguments, results, sequences, counts = case(name, scan)
    decorated = spmd.jit(step, mesh=mesh, in_placements=arguments, out_placements=results, fallback="error")
    x = struct(sequences, LENGTH, WIDTH)
    program = decorated.lower(weights(scan, struct), x, x)
    for axis, expected in counts.items():
        program.check(axis=axis, **expected)


@pytest.mark.parametrize("name", list(TEXTBOOK))
def test_textbook_values(name: str) -> None:
    """The same step computes what the undecorated function does, with layers unrolled or scanned by turns."""
    scan = list(TEXTBOOK).index(name) % 2 == 0
    step, mesh, arguments, results, _, _ = case(name, scan)
    ws, x, y = weights(scan, numbers), numbers(5, 7, WIDTH), numbers(5, 7, WIDTH)[::-1].copy()
    agree(step, [ws, x, y], arguments, [mesh], out=results, gradient=False)


@pytest.mark.parametrize("name", ["fsdp", "sequence_tp", "fsdp_tp"])
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
def test_golden_text(name: str, scan: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of one layer (a scan: of three), word for word."""
    if not scan:
        monkeypatch.setitem(globals(), "LAYERS", 1)
    step, mesh, arguments, results, sequences, _ = case(name, scan)
    x = struct(sequences, LENGTH, WIDTH)
    program = spmd.jit(step, mesh=mesh, in_placements=arguments, out_placements=results).lower(
        weights(scan, struct), x, x
    )
    text = str(program).replace("one_minus_square", "sub 1.0")
    path = GOLDEN / f"textbook_{name}{'_scan' if scan else ''}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text + "\n")
    assert text + "\n" == path.read_text()


LEAVES = [(struct(WIDTH, HIDDEN), struct(HIDDEN)), (struct(HIDDEN, WIDTH), struct(WIDTH))]
SHARDED = [(P(dp=S(0)), P(dp=S(0)))] * 2


def mse(params: Any, x: Any, y: Any) -> Any:
    (w1, b1), (w2, b2) = params
    return jnp.mean((jax.nn.relu(x @ w1 + b1) @ w2 + b2 - y) ** 2)


def adam(clip: float | None) -> Callable[..., Any]:
    """A step of Adam, with or without clipping by the global norm."""
    chain = [] if clip is None else [optax.clip_by_global_norm(clip)]
    optimizer = optax.chain(*chain, optax.adam(1e-2, eps=0.1))

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradient = jax.value_and_grad(mse)(params, x, y)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    step.init = optimizer.init  # type: ignore[attr-defined]
    return step


@pytest.mark.parametrize(
    ("params", "state", "clip", "counts"),
    [
        (P(), P(), None, {"all_reduce": 5}),
        (P(), SHARDED, None, {"reduce_scatter": 4, "all_gather": 4, "all_reduce": 1}),  # ZeRO-1
        (SHARDED, SHARDED, None, {"all_gather": 4, "reduce_scatter": 4, "all_reduce": 1}),
        # clipping: the norm is one number more, from the shards where there are any
        (P(), P(), 1.0, {"all_reduce": 5}),
        (P(), SHARDED, 1.0, {"reduce_scatter": 4, "all_gather": 4, "all_reduce": 2}),
        (SHARDED, SHARDED, 1.0, {"all_gather": 4, "reduce_scatter": 4, "all_reduce": 2}),
    ],
    ids=["dp", "zero1", "fsdp", "dp_clipped", "zero1_clipped", "fsdp_clipped"],
)
def test_optimizers(params: Any, state: Any, clip: float | None, counts: Counts) -> None:
    """Adam: replicated, with sharded state (ZeRO-1), wholly sharded; each with clipping by the global norm."""
    step: Any = adam(clip)
    shapes = jax.eval_shape(step.init, LEAVES)
    states = spmd.placements_like(shapes, LEAVES, state if state != P() else [(P(), P())] * 2)
    rows = P(dp=S(0))
    decorated = spmd.jit(
        step,
        mesh=ONE,
        in_placements=(params, states, rows, rows),
        out_placements=(params, states, P()),
        fallback="error",
    )
    decorated.lower(LEAVES, shapes, struct(2048, WIDTH), struct(2048, WIDTH)).check(**counts)
    leaves = jax.tree.map(lambda leaf: numbers(*leaf.shape), LEAVES)
    batch = numbers(9, WIDTH)
    arguments = [leaves, jax.tree.map(np.asarray, step.init(leaves)), batch, batch[::-1].copy()]
    agree(
        step, arguments, (params, states, rows, rows), [Mesh(dp=3)],
        out=(params, states, P()), gradient=False,
    )  # fmt: skip


@pytest.mark.parametrize("sharded", [False, True], ids=["dp", "fsdp"])
def test_gradients_are_accumulated_and_reduced_once(sharded: bool) -> None:
    """Microbatches in a scan: the sum of gradients stays in parts until after the last; so does the loss."""

    def step(params: Any, xs: Any, ys: Any) -> Any:
        def microbatch(total: Any, batch: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(mse)(params, *batch)), None

        zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        (loss, gradient), _ = lax.scan(microbatch, zero, (xs, ys))
        count = xs.shape[0]
        return jax.tree.map(lambda p, g: p - 0.1 * g / count, params, gradient), loss / count

    params, rows = (SHARDED, P(dp=S(1))) if sharded else (P(), P(dp=S(1)))
    decorated = spmd.jit(step, mesh=ONE, in_placements=(params, rows, rows), out_placements=(params, P()))
    program = decorated.lower(LEAVES, struct(4, 2048, WIDTH), struct(4, 2048, WIDTH))
    reductions = {"reduce_scatter": 4, "all_reduce": 1} if sharded else {"all_reduce": 5}
    program.check(**reductions, all_gather=4 if sharded else 0)
    assert {c.count for c in program.collectives} == {1}
    leaves = jax.tree.map(lambda leaf: numbers(*leaf.shape), LEAVES)
    batch = numbers(3, 7, WIDTH)
    agree(
        step, [leaves, batch, batch[::-1].copy()], (params, rows, rows), [Mesh(dp=3)], out=(params, P()), gradient=False
    )


@pytest.mark.parametrize("ranks", [3, 8])
def test_a_batch_split_in_the_step_stays_sharded(ranks: int) -> None:
    """Microbatches by a reshape whose boundaries do not line up: rows go where the reshape has them, then to the dim that is
    not scanned; each rank computes on rows of its own, and the accumulated gradient is reduced once."""

    def step(w: Any, rows: Any) -> Any:
        def microbatch(total: Any, x: Any) -> Any:
            loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
            return total + gradient, loss

        total, losses = lax.scan(microbatch, jnp.zeros_like(w), rows.reshape(4, -1, rows.shape[-1]))
        return w - 0.1 * total / 4, losses.mean()

    decorated = spmd.jit(step, mesh=Mesh(dp=ranks), in_placements=(P(), P(dp=S(0))), out_placements=P())
    program = decorated.lower(struct(WIDTH, HIDDEN), struct(2048, WIDTH))
    program.check(exchange=1, all_to_all=1, all_reduce=2)
    whole = spmd.jit(step, mesh=Mesh(dp=1)).lower(struct(WIDTH, HIDDEN), struct(2048, WIDTH))
    assert program.cost.compute_us < 1.2 * whole.cost.compute_us / ranks
    agree(step, [numbers(6, 5), numbers(28, 6)], (P(), P(dp=S(0))), [Mesh(dp=ranks)], out=P(), gradient=False)


@pytest.mark.parametrize(("width", "after"), [(64, True), (512, False)])
def test_adam_over_scanned_layers_scatters_gradients(width: int, after: bool) -> None:
    """FSDP of scanned layers: the gradient is scattered, never whole on a rank: layer by layer, or once after the loop where a
    message costs more than writing the stack."""
    optimizer = optax.adam(1e-2, eps=0.1)

    def step(ws: Any, state: Any, x: Any) -> Any:
        def loss(ws: Any) -> Any:
            return jnp.mean(lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, ws)[0] ** 2)

        updates, state = optimizer.update(jax.grad(loss)(ws), state, ws)
        return optax.apply_updates(ws, updates), state

    ws, sharded = struct(4, width, width), P(dp=S(1))
    state = jax.eval_shape(optimizer.init, ws)
    states = spmd.placements_like(state, ws, sharded)
    places = {"in_placements": (sharded, states, P(dp=S(0))), "out_placements": (sharded, states)}
    program = spmd.jit(step, mesh=ONE, **places).lower(ws, state, struct(16 * width, width))
    program.check(all_gather=2, reduce_scatter=1)
    assert [c.count for c in program.collectives if c.name == "reduce_scatter"] == [1 if after else 4]
    small = numbers(2, 6, 6)
    arguments = [small, jax.tree.map(np.asarray, optimizer.init(small)), numbers(7, 6)]
    agree(step, arguments, places["in_placements"], [Mesh(dp=3)], out=places["out_placements"], gradient=False)


def test_half_precision_weights_are_gathered_as_such() -> None:
    """Weights in bfloat16, arithmetic in float32: what is gathered is bfloat16, whatever loop or layer casts it."""

    def apply(ws: Any, x: Any) -> Any:
        return lax.scan(lambda h, w: (jnp.tanh(h @ w.astype(jnp.float32)), None), x, ws)[0]

    half = jax.ShapeDtypeStruct((4, 256, 256), jnp.bfloat16)
    program = spmd.jit(apply, mesh=ONE, in_placements=(P(dp=S(1)), P(dp=S(0)))).lower(half, struct(512, 256))
    program.check(all_gather=1)
    assert {c.dtype for c in program.collectives} == {"bfloat16"}
    wide = spmd.jit(lambda x, w: (x @ w).astype(jnp.float32), mesh=ONE, in_placements=(P(dp=S(1)), P(dp=S(0))))
    (reduction,) = wide.lower(
        half.update(shape=(256, 256)), half.update(shape=(256, 256))
    ).collectives  # parts are cast first: what is reduced is not rounded to 16 bits
    assert reduction.reason == "result leaves as P()"
    ws = numbers(2, 5, 5).astype(jnp.bfloat16)
    agree(apply, [ws, numbers(7, 5)], (P(dp=S(1)), P(dp=S(0))), [Mesh(dp=3)], gradient=False)


def test_a_shared_weight_is_reduced_once() -> None:
    """A weight used twice, attention-like: its gradient is a sum of parts, and one reduction."""

    def loss(ws: Any, x: Any) -> Any:
        query, key, value = ws
        mixed = (x @ query) * (x @ key) + jnp.tanh(x @ value) @ value.T
        return jnp.mean(mixed @ query.T)

    ws = [struct(64, 64)] * 3
    program = spmd.jit(jax.grad(loss), mesh=ONE, in_placements=(P(), P(dp=S(0)))).lower(ws, struct(4096, 64))
    program.check(all_reduce=3)


def test_many_small_parameters_share_messages_e8() -> None:
    """E8: a hundred leaves of ten elements: their reductions, and their gathers, are a few messages; the same values."""

    def loss(params: Any, x: Any) -> Any:
        return sum(jnp.mean(jnp.sin(x[:, :10] * p)) for p in params)

    params = [numbers(10) for _ in range(100)]
    x = numbers(7, 12)
    program = spmd.jit(jax.grad(loss), mesh=ONE, in_placements=(P(), P(dp=S(0)))).lower(params, x)
    program.check(all_reduce=100, max_messages=3)
    agree(jax.grad(loss), [params, x], (P(), P(dp=S(0))), [fit(Mesh(dp=n)) for n in (2, 3)], gradient=False)

    def together(params: Any) -> Any:
        return jax.tree.map(lambda p: p + 1, params)

    gathers = spmd.jit(together, mesh=ONE, in_placements=P(dp=S(0)), out_placements=P()).lower(params)
    gathers.check(all_gather=100, max_messages=3)
    agree(together, [params], (P(dp=S(0)),), [fit(Mesh(dp=n)) for n in (2, 3)], out=P(), gradient=False, exact=True)


@pytest.mark.parametrize("ranks", [3, 5])
def test_fsdp_on_ranks_that_do_not_divide_e13(ranks: int) -> None:
    """E13: a 16x16 layer with momentum on 3 and 5 ranks trains as on one."""
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(w: Any, state: Any, x: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        updates, state = optimizer.update(gradient, state, w)
        return optax.apply_updates(w, updates), state

    mesh, shards = fit(Mesh(dp=ranks)), P(dp=S(0))
    w, x = numbers(16, 16), numbers(8, 16)
    states = spmd.placements_like(jax.eval_shape(optimizer.init, w), w, shards)
    init = spmd.jit(optimizer.init, mesh=mesh, in_placements=shards, out_placements=states)
    parallel = spmd.jit(step, mesh=mesh, in_placements=(shards, states, shards), out_placements=(shards, states))
    placed = spmd.distribute(w, shards, mesh)
    state, plain, plain_state = init(placed), jnp.asarray(w), optimizer.init(jnp.asarray(w))
    (momentum,) = jax.tree.leaves(state)
    assert all(shard.shape == momentum.layout.local_shape((16, 16), at) for at, shard in momentum.shards.items())
    assert max(shard.shape[0] for shard in momentum.shards.values()) <= -(-16 // ranks)
    for _ in range(4):
        placed, state = parallel(placed, state, x)
        plain, plain_state = step(plain, plain_state, x)
    np.testing.assert_allclose(placed.full(), plain, rtol=1e-5, atol=1e-6)
