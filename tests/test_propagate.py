"""The planner's plain form: the precedence rule, parts, versions, remat, and what its plans communicate."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from oracle import RANKS, agree

import spmd
from placements import Mesh, P, Partial, Shard

MESH = Mesh(tp=4)
ROWS, COLUMNS = P(tp=Shard(0)), P(tp=Shard(1))


def struct(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def lower(function: Any, placements: Any, *args: Any, mesh: Mesh = MESH, out: Any = None) -> spmd.Program:
    return spmd.jit(function, mesh=mesh, in_placements=placements, out_placements=out, fallback="error").lower(*args)


def test_megatron_whatever_the_batch() -> None:
    """Column- then row-sharded weights: one all_reduce, though gathering small weights would be cheaper."""
    for batch in (1, 8, 100_000):
        program = lower(
            lambda x, a, b: jnp.tanh(x @ a) @ b, (P(), COLUMNS, ROWS), struct(batch, 8), struct(8, 16), struct(16, 8)
        )
        program.check(all_reduce=1)


def test_a_sharded_batch_stays_sharded() -> None:
    """Elementwise functions, softmax over another dim, batched products: nothing is sent."""
    functions = (
        lambda x: jax.nn.gelu(x) * 2 + 1,
        lambda x: jax.nn.softmax(x, axis=1),
        lambda x: jnp.einsum("bi,bj->bij", x, x).reshape(-1, 64),
        lambda x: jnp.sort(x, axis=1)[:, ::-1],
        lambda x: jnp.concatenate([x, x[:, :3]], axis=1),
        lambda x: jnp.where(x > 0, x, jnp.arange(8.0)),
        lambda x: jnp.pad(x, ((0, 0), (1, 2))).argmax(1),
    )
    for function in functions:
        lower(function, (ROWS,), struct(16, 8)).check()


def test_data_parallel_gradients() -> None:
    """One reduction for each gradient and one for the loss."""

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ w[0]) @ w[1]) ** 2)

    program = lower(jax.value_and_grad(loss), (P(), P(tp=Shard(0))), [struct(8, 16), struct(16, 4)], struct(64, 8))
    program.check(all_reduce=3)


def test_parts_pass_through_movement_and_are_reduced_once() -> None:
    """transpose, reshape, a widening cast keep parts; the first other use reduces them, and later ones share it."""

    def moves(x: Any) -> Any:
        return x.T.reshape(-1).astype(jnp.float32)

    kept = lower(moves, (P(tp=Partial()),), struct(4, 6, dtype=jnp.bfloat16), out=P(tp=Partial()))
    kept.check()
    used = lower(lambda x: (jnp.exp(moves(x)), jnp.sin(moves(x))), (P(tp=Partial()),), struct(4, 6, dtype=jnp.bfloat16))
    assert {c.dtype for c in used.collectives} == {"float32"}
    shared = lower(lambda x: (jnp.exp(x), jnp.sin(x), x + 1), (P(tp=Partial()),), struct(4, 6))
    shared.check(all_reduce=1)


def test_a_value_moves_once() -> None:
    """A gathered value serves every later use."""
    program = lower(lambda x, y: (x @ y, y.T @ x.T), (ROWS, P()), struct(8, 8), struct(8, 8), out=P())
    assert sum(c.name == "all_gather" for c in program.collectives) <= 2
    program = lower(
        lambda x: jnp.linalg.norm(jnp.cumsum(x, 0)) + jnp.cumsum(x, 0, dtype=x.dtype).max(), (ROWS,), struct(8, 8)
    )
    assert sum(c.shape == (8, 8) for c in program.collectives) <= 2


def test_a_reduced_value_serves_every_later_use() -> None:
    """Parts that one use has reduced do not pass on, to be reduced again; equal equations are one."""

    def uses(x: Any) -> Any:
        s = x.sum(0)
        return jnp.sin(s), s + s, s.reshape(1, -1)

    lower(uses, (ROWS,), struct(8, 3)).check(all_reduce=1)
    lower(lambda x: (x.mean(0), jnp.exp(x.sum(0)), x.sum(0) * 2), (ROWS,), struct(8, 3)).check(all_reduce=1)


def test_a_slice_for_one_use_does_not_shard_the_next() -> None:
    """A replicated weight that was sliced for a product is not updated in shards and gathered."""

    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)

    program = lower(step, (P(), COLUMNS), struct(8, 4), struct(16, 8))
    assert all(c.name != "all_gather" or c.shape != (8, 4) for c in program.collectives)


def test_axes_of_size_one_cost_nothing() -> None:
    """The same Program on a mesh with and without them."""
    args = (struct(6, 4), struct(4, 6))
    plain = lower(jnp.matmul, (P(tp=Shard(1)), P(tp=Shard(0))), *args)
    unit = lower(jnp.matmul, (P(one=Shard(0), tp=Shard(1)), P(tp=Shard(0))), *args, mesh=Mesh(one=1, tp=4))
    assert [(c.name, c.bytes) for c in plain.collectives] == [(c.name, c.bytes) for c in unit.collectives]


def test_rematerialised_code_stays_behind_a_barrier() -> None:
    """jax.checkpoint: the right gradient, and the recomputation is not merged with the forward pass."""

    @jax.checkpoint
    def block(x: Any, w: Any) -> Any:
        return jnp.sin(jnp.sin(x @ w))

    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(block(x, w) ** 2)

    x, w = np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3), np.linspace(1, -1, 9, dtype=np.float32).reshape(3, 3)
    agree(loss, [x, w], [P(a=Shard(0)), P()], RANKS)
    program = lower(jax.grad(loss), (ROWS, P()), struct(8, 3), struct(3, 3))
    names = [planned.eqn.primitive.name for planned in program.plan.eqns]
    assert "optimization_barrier" in names
    assert names.count("sin") == 3  # two forward, the inner one again


def test_custom_derivatives_and_library_calls_are_planned_in_place() -> None:
    """custom_vjp, custom_jvp, jitted library functions: rules see through them."""

    @jax.custom_vjp
    def clipped(x: Any) -> Any:
        return jnp.clip(x, -1, 1)

    clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (jnp.where(jnp.abs(x) < 2, g, 0 * g),))

    def f(x: Any) -> Any:
        return (
            clipped(x)
            + jax.nn.silu(x)
            + jax.nn.log_softmax(x, axis=1)
            + jax.scipy.special.logsumexp(x, axis=1)[:, None]
        )

    x = np.linspace(-3, 3, 15, dtype=np.float32).reshape(5, 3)
    for placement in (P(a=Shard(0)), P(a=Shard(1))):
        agree(f, [x], [placement], RANKS)
    lower(f, (ROWS,), struct(8, 3)).check()
    lower(f, (COLUMNS,), struct(8, 4)).check(all_reduce=...)


def test_unused_computation_is_dropped() -> None:
    """What no result needs costs nothing, collectives included."""
    lower(lambda x: (x + 1, x.sum() * 0)[0], (ROWS,), struct(8, 4)).check()
