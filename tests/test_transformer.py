"""What a transformer is made of, and the example: what each sends, without a fallback, and the same values as on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import load_example, sample
from jax import lax
from oracle import agree

import spmd
from placements import Mesh, P, Shard

S = Shard
ONE, TWO = Mesh(tp=4), [Mesh(tp=2), Mesh(tp=3)]
Counts = dict[str, int]


def struct(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def numbers(*shape: int) -> Any:
    """Position-dependent, of both signs."""
    return (np.sin(np.arange(np.prod(shape)) * 1.7) * 1.3).astype(np.float32).reshape(shape)


def lower(function: Callable[..., Any], placements: Any, *args: Any, out: Any = None, mesh: Mesh = ONE) -> spmd.Program:
    decorated = spmd.jit(function, mesh=mesh, in_placements=placements, out_placements=out, fallback="error")
    return decorated.lower(*args)


@pytest.mark.parametrize(
    ("table", "tokens", "forward", "backward"),
    [
        (P(), P(tp=S(0)), {}, {"all_reduce": 1}),  # rows of the batch: one reduction of the table's gradient
        (P(tp=S(0)), P(), {"all_reduce": 1}, {}),  # by vocabulary: parts of the looked-up rows; its gradient is local
        (P(tp=S(1)), P(), {}, {}),  # by feature: nothing
    ],
    ids=["batch", "vocabulary", "feature"],
)
def test_embedding(table: P, tokens: P, forward: Counts, backward: Counts) -> None:
    """A lookup, and its scatter gradient."""

    def lookup(table: Any, tokens: Any) -> Any:
        return table[tokens]

    def gradient(table: Any, tokens: Any, cotangent: Any) -> Any:
        return jax.vjp(lambda table: table[tokens], table)[1](cotangent)[0]

    arguments = struct(5000, 64), struct(8, 16, dtype=np.int32)
    lower(lookup, (table, tokens), *arguments).check(**forward)
    rows = P(tp=S(0)) if tokens != P() else P(tp=S(2)) if table == P(tp=S(1)) else P()
    lower(gradient, (table, tokens, rows), *arguments, struct(8, 16, 64), out=table).check(**backward)
    ids = (np.arange(10) * 7 % 11).reshape(5, 2)
    agree(lambda table, ids: jnp.sin(lookup(table, ids)), [numbers(11, 5), ids], [table, tokens], TWO)


def attention(query: Any, key: Any, value: Any) -> Any:
    """Causal attention of `[batch, position, head, size]`."""
    scores = jnp.einsum("bqhk,bshk->bhqs", query, key) / np.sqrt(query.shape[-1])
    causal = jnp.tril(jnp.ones((query.shape[1], key.shape[1]), bool))
    return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)), value)


@pytest.mark.parametrize(
    ("placements", "counts"),
    [
        ((P(tp=S(0)),) * 3, {}),  # batch
        ((P(tp=S(2)),) * 3, {}),  # heads
        ((P(tp=S(1)), P(), P()), {}),  # the queries' positions
        ((P(tp=S(3)),) * 3, {"all_reduce": 1}),  # features: the scores are sums
    ],
    ids=["batch", "heads", "positions", "features"],
)
def test_attention(placements: tuple[P, ...], counts: Counts) -> None:
    """Forward and backward, sharded on every dim; keys and values sharded by position are reduced, never wrong."""
    lower(attention, placements, *[struct(4, 64, 8, 32)] * 3).check(**counts)
    agree(
        attention, [numbers(2, 5, 3, 4), numbers(2, 5, 3, 4)[::-1].copy(), numbers(2, 5, 3, 4) + 0.5], placements, TWO
    )
    agree(attention, [numbers(2, 5, 3, 4)] * 3, [P(), P(tp=S(1)), P(tp=S(1))], TWO)


def test_a_fused_weight_that_is_cut_along_its_sharded_dim() -> None:
    """Queries, keys and values of one product: cut along the sharded dim each rank fetches its heads of them, in one message,
    and the Program says how to avoid it; with a dim of their own nothing moves."""

    def cut(x: Any, w: Any) -> Any:
        query, key, value = jnp.split(x @ w, 3, -1)
        return query * key + value

    def apart(x: Any, w: Any) -> Any:
        query, key, value = jnp.moveaxis(jnp.einsum("bsd,dck->bsck", x, w), 2, 0)
        return query * key + value

    args = struct(4, 16, 32), struct(32, 96)
    program = lower(cut, (P(), P(tp=S(1))), *args)
    program.check(exchange=3, max_bytes=4 * 16 * 96 * 4 // 4, max_messages=1)
    assert "give what is cut a dim of its own" in str(program)
    lower(apart, (P(), P(tp=S(2))), args[0], struct(32, 3, 32)).check()
    agree(cut, [numbers(2, 3, 4), numbers(4, 15)], [P(), P(tp=S(1))], TWO)
    agree(apart, [numbers(2, 3, 4), numbers(4, 3, 5)], [P(), P(tp=S(2))], TWO)


def layer_norm(x: Any, gain: Any, bias: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-6) * gain + bias


def rms_norm(x: Any, gain: Any, bias: Any) -> Any:
    return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * gain + bias


def gelu(x: Any, gain: Any, bias: Any) -> Any:
    return jax.nn.gelu(x * gain) + jax.nn.silu(x) * bias


@pytest.mark.parametrize(("function", "sums"), [(layer_norm, 2), (rms_norm, 1), (gelu, 0)])
def test_layers(function: Callable[..., Any], sums: int) -> None:
    """Rows are local; features cost one number per row for each mean."""
    for at, expected in ((P(tp=S(0)), 0), (P(tp=S(1)), 0), (P(tp=S(2)), sums)):
        features = P(tp=S(0)) if at == P(tp=S(2)) else P()
        program = lower(function, (at, features, features), struct(8, 16, 64), struct(64), struct(64))
        program.check(all_reduce=expected)
        agree(function, [numbers(2, 3, 7), numbers(7) + 2, numbers(7)], [at, features, features], TWO)


def cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def test_cross_entropy_over_sharded_classes() -> None:
    """No logits are gathered: a maximum, a sum and the label's own logit, one number per row each. C16: the gradient too."""
    placements = P(tp=S(2)), P()
    for function in (cross_entropy, jax.grad(cross_entropy)):
        program = lower(function, placements, struct(8, 16, 5000), struct(8, 16, dtype=np.int32))
        assert {c.name for c in program.collectives} == {"all_reduce"}
        assert all(np.prod(c.shape) <= 8 * 16 for c in program.collectives)
    labels = np.array([[1, 0, 6], [5, 3, 2]])
    agree(lambda x: cross_entropy(x, labels), [numbers(2, 3, 7)], [P(tp=S(2))], TWO)
    agree(lambda x: jax.nn.logsumexp(x, -1), [numbers(2, 3, 7)], [P(tp=S(2))], TWO)
    tied = np.float32([[1, 3, 3, -2, 3], [0, 0, -1, 0, 0]])
    agree(lambda x: x.max(1), [tied], [P(tp=S(1))], TWO)  # a tie shares the gradient, as in jnp


def test_tied_embeddings_are_reduced_once() -> None:
    """The table is the first layer and the last: the sum of both gradients is one reduction."""

    def loss(table: Any, tokens: Any) -> Any:
        return cross_entropy(jnp.tanh(table[tokens]) @ table.T, tokens)

    lower(jax.grad(loss), (P(), P(tp=S(0))), struct(512, 64), struct(64, 16, dtype=np.int32)).check(all_reduce=1)
    ids = (np.arange(10) * 7 % 11).reshape(5, 2)
    agree(loss, [numbers(11, 5), ids], [P(), P(tp=S(0))], TWO)
    agree(loss, [numbers(11, 5), ids], [P(tp=S(0)), P()], TWO)


DISTRIBUTIONS: dict[str, Callable[[Any], Any]] = {
    "normal": lambda key: jax.random.normal(key, (12, 10)),
    "uniform": lambda key: jax.random.uniform(key, (12, 10), minval=-1),
    "bernoulli": lambda key: jax.random.bernoulli(key, 0.3, (5, 7)),
    "randint": lambda key: jax.random.randint(key, (5, 7), -3, 9),
    "bits": lambda key: jax.random.bits(key, (5, 7), "uint16"),
    "categorical": lambda key: jax.random.categorical(key, jnp.zeros((5, 4)), axis=-1),
    "truncated_normal": lambda key: jax.random.truncated_normal(key, -1, 1, (5, 7)),
    "exponential": lambda key: jax.random.exponential(key, (5, 7)),
    "gumbel": lambda key: jax.random.gumbel(key, (5, 7)),
    "laplace": lambda key: jax.random.laplace(key, (5, 7)),
    "normal of split keys": lambda key: jax.vmap(lambda k: jax.random.normal(k, (4,)))(jax.random.split(key, 5)),
}


@pytest.mark.parametrize("name", sorted(DISTRIBUTIONS))
def test_random_arrays_are_the_same_everywhere_d5(name: str) -> None:
    """D5: one global array for every placement and rank count, typed keys and raw ones; each rank draws its shard alone."""
    draw = DISTRIBUTIONS[name]
    key, raw = jax.random.key(7), jax.random.PRNGKey(7)
    expected = draw(key)
    tolerance = 1e-6 if expected.dtype.kind == "f" else 0  # what follows the bits is compiled for other shapes

    def same(mesh: Mesh, out: P, key: Any = key) -> None:
        decorated = spmd.jit(draw, mesh=mesh, in_placements=P(), out_placements=out)
        np.testing.assert_allclose(decorated(key).full(), expected, rtol=tolerance, atol=tolerance)
        decorated.lower(key).check()

    for n in (1, 2, 3, 4):
        same(Mesh(a=n), P(a=S(0)))
    same(Mesh(a=3), P())
    same(Mesh(a=3), P(a=S(expected.ndim - 1)))
    same(Mesh(a=2, b=2), P(a=S(0), b=S(0)))
    same(Mesh(a=3), P(a=S(0)), raw)


def test_random_darrays() -> None:
    """`spmd.random`: what `jax.random` gives, in shards."""
    key, mesh = jax.random.key(3), Mesh(a=3)
    found = spmd.random.normal(key, (7, 4), P(a=S(0)), mesh)
    assert [shard.shape for shard in found.shards.values()] == [(3, 4), (2, 4), (2, 4)]
    np.testing.assert_allclose(found.full(), jax.random.normal(key, (7, 4)), rtol=1e-6, atol=1e-6)
    for name, options in (
        ("bernoulli", {"p": 0.3}), ("bits", {}), ("exponential", {}), ("gumbel", {}), ("laplace", {}),
        ("randint", {"minval": -3, "maxval": 9}), ("truncated_normal", {"lower": -1, "upper": 1}), ("uniform", {"minval": -1}),
    ):  # fmt: skip
        found = getattr(spmd.random, name)(key, 5, P(a=S(0)), mesh, **options)
        expected = getattr(jax.random, name)(key, shape=(5,), **options)
        assert (found.dtype, found.placements) == (expected.dtype, P(a=S(0)))
        np.testing.assert_allclose(found.full(), expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(spmd.ArgumentError, match="minval are numbers and dtypes"):
        spmd.random.uniform(key, 5, P(), mesh, minval=np.zeros(5))


def test_each_rank_draws_its_shard() -> None:
    """What is drawn for a sharded use is drawn in shards: dropout costs no rank the whole mask."""

    def dropout(x: Any, key: Any) -> Any:
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)

    program = lower(dropout, (P(tp=S(0)), P()), struct(64, 64), jax.random.key(0))
    program.check()
    assert max(np.prod(v.aval.shape) for eqn in program.jaxpr().eqns for v in eqn.outvars) == 64 * 64 // 4
    agree(lambda x: dropout(x, jax.random.key(3)), [numbers(7, 5)], [P(tp=S(0))], TWO)


def test_the_example_sends_what_the_textbook_says() -> None:
    """Two all_reduces over tp forward and two backward for each block, one over dp for each gradient and one of the loss."""
    example = load_example("transformer")
    text, vocabulary = example.load()
    params = example.initial_params(vocabulary)
    state = jax.eval_shape(example.OPTIMIZER.init, params)
    tokens = next(example.batches(text, 16, 1))
    program = example.parallelize(Mesh(dp=2, tp=2), params).step.lower(params, state, tokens)
    assert program.fallbacks == ()
    inside = [c for c in program.collectives if c.count == example.LAYERS]
    assert [(c.name, c.axes, c.shape) for c in inside] == [("all_reduce", ("tp",), (16, 64, 64))] * 4
    over_dp = [c for c in program.collectives if "dp" in c.axes]
    assert sorted(c.shape for c in over_dp) == sorted([(), *(leaf.shape for leaf in params.values())])
    assert {(c.name, c.count) for c in over_dp} == {("all_reduce", 1)}
    assert len({c.message for c in over_dp}) <= 4
    outside = [c for c in program.collectives if c not in inside and c not in over_dp]
    assert (
        len(outside) <= 5
    )  # the table or what it gives, and the loss: a maximum, a sum, the label's logit, the cotangent


@pytest.mark.parametrize("mesh", [Mesh(dp=1, tp=3), pytest.param(Mesh(dp=2, tp=2), marks=pytest.mark.slow)], ids=str)
def test_the_example_trains_as_on_one_rank(mesh: Mesh) -> None:
    """The first losses, on ranks that divide neither heads, batch nor vocabulary, and that divide them."""
    example = load_example("transformer")
    text, vocabulary = example.load()
    params = example.initial_params(vocabulary)
    state, step, expected = example.OPTIMIZER.init(params), jax.jit(example.step), []
    for tokens in example.batches(text, 5, 4):
        params, state, value = step(params, state, tokens)
        expected.append(float(value))
    np.testing.assert_allclose(example.train(mesh, 4, 5, quiet=True), expected, rtol=1e-4)


def flat_mlp(x: Any, into: Any, out: Any) -> Any:
    """Rows of `[batch, position, width]` as one dim, as layers of other libraries have them: a bias, a norm, a gate."""
    rows = x.reshape(-1, x.shape[-1])
    hidden = layer_norm(rows @ into + into[0], out[:, 0] + 2, out[:, 1])
    gate = jnp.where(hidden > 0, hidden, jax.nn.softmax(hidden) + jnp.zeros(hidden.shape))
    return (jax.nn.gelu(hidden) * gate @ out + out.sum(0)).reshape(x.shape)


def test_joined_dims_stay_sharded() -> None:
    """`[B, S, D]` with S sharded, `reshape(-1, D)`, layers, and back: nothing moves; one reduction for each gradient."""
    args = struct(8, 64, 32), struct(32, 48), struct(48, 32)
    for at in (P(tp=S(0)), P(tp=S(1))):
        lower(flat_mlp, (at, P(), P()), *args).check()
        gradient = jax.grad(lambda x, into, out: jnp.sum(flat_mlp(x, into, out) ** 2), (1, 2))
        lower(gradient, (at, P(), P()), *args).check(all_reduce=2)
    for at in (P(tp=S(0)), P(tp=S(1))):
        agree(flat_mlp, [numbers(3, 5, 4), numbers(4, 6), numbers(6, 4)], [at, P(), P()], [Mesh(tp=3)])


def joined_in_the_body(x: Any, weights: Any) -> Any:
    """What is stacked for the gradient is of rows."""

    def layer(h: Any, w: Any) -> Any:
        return flat_mlp(h, w, w.T) + h, h.reshape(-1, h.shape[-1]).sum(1).reshape(h.shape[:2])

    return lax.scan(layer, x, weights)


def joined_carry(x: Any, weights: Any) -> Any:
    """The carry is of rows, and so is what is stacked."""
    rows, stacked = lax.scan(lambda h, w: (jnp.tanh(h @ w + w[0]) + h, jnp.sin(h)), x.reshape(-1, x.shape[-1]), weights)
    return rows.reshape(x.shape), stacked.reshape(weights.shape[0], *x.shape)


def joined_scanned(x: Any, weights: Any) -> Any:
    """What is scanned is of rows, and a carry is not always: it is joined otherwise by the body."""
    start = weights[0][:1] * 0.0 + jnp.zeros((x.shape[1] * x.shape[2], x.shape[3]))
    joined = x.reshape(x.shape[0], -1, x.shape[3])
    return lax.scan(lambda h, row: (jnp.tanh(h + row), row.sum(0)), start, joined)[1] @ weights[0]


def joined_and_recomputed(x: Any, weights: Any) -> Any:
    return lax.scan(jax.checkpoint(lambda h, w: (flat_mlp(h, w, w.T), None)), x, weights)[0]


@pytest.mark.parametrize("function", [joined_in_the_body, joined_carry, joined_and_recomputed])
def test_joined_dims_in_a_scan(function: Callable[..., Any]) -> None:
    """Rows that a body, a carry or what a gradient stacks consists of: nothing moves; one reduction for each gradient."""
    for at in (P(tp=S(0)), P(tp=S(1))):
        lower(function, (at, P()), struct(8, 64, 32), struct(3, 32, 32)).check()
        gradient = jax.grad(lambda x, w: sum(jnp.sum(y**2) for y in jax.tree.leaves(function(x, w))), 1)
        lower(gradient, (at, P()), struct(8, 64, 32), struct(3, 32, 32)).check(all_reduce=1)
        agree(function, [numbers(3, 5, 4), numbers(2, 4, 4)], [at, P()], [Mesh(tp=3)])


def test_joined_dims_that_are_scanned() -> None:
    for at in (P(tp=S(1)), P(tp=S(2)), P(tp=S(0))):
        agree(joined_scanned, [numbers(2, 3, 5, 4), numbers(2, 4, 4)], [at, P()], TWO)


LOOKUPS: dict[str, Callable[..., Any]] = {
    "one of each row": lambda x, t: -jax.nn.log_softmax(x)[jnp.arange(x.shape[0]), t[:, 0]],
    "by a closed-over arange": lambda x, t: x[np.arange(x.shape[0]), t[:, 0]],
    "by columns": lambda x, t: x.T[t[:, 0], jnp.arange(x.shape[0])],
    "added to": lambda x, t: x.at[jnp.arange(x.shape[0]), t[:, 0]].add(x[:, 0]),
    "set": lambda x, t: x.at[jnp.arange(x.shape[0])[:, None], t].set(7.0),
    "several of each row": lambda x, t: x[jnp.arange(x.shape[0])[:, None], t],
    "in three dims": lambda x, t: jnp.stack([x, -x], 1)[jnp.arange(x.shape[0])[:, None], jnp.arange(2), t],
    "in a loop": lambda x, t: lax.scan(
        lambda h, i: (jnp.sin(h), h[jnp.arange(x.shape[0]), t[:, i % 2]]), x, jnp.arange(3)
    ),
}
"""A row of a table for every row of the result, which JAX writes as indices that count."""


@pytest.mark.parametrize("name", sorted(LOOKUPS))
def test_lookups_in_the_own_row(name: str) -> None:
    """Where indices count along a dim, table and result are sharded along it, and nothing moves, in the gradient either."""
    args, placements = (struct(16, 6), struct(16, 2, dtype=np.int32)), (P(tp=S(0)), P(tp=S(0)))
    lower(LOOKUPS[name], placements, *args).check()
    gradient = jax.grad(lambda x, t: sum(jnp.sum(y**2) for y in jax.tree.leaves(LOOKUPS[name](x, t))))
    lower(gradient, placements, *args, out=P(tp=S(0))).check()
    agree(LOOKUPS[name], [numbers(5, 6), np.arange(10).reshape(5, 2) % 11 - 5], list(placements), TWO, fallback="error")


def test_lookups_that_do_not_count_along() -> None:
    """Fewer rows than the table has, its diagonal, the same row twice, other orders: right, whatever moves."""
    rows = np.arange(5) % 6 - 3
    for function in (
        lambda x: x[jnp.arange(3), rows[:3]],
        lambda x: x[jnp.arange(5), jnp.arange(5)],
        lambda x: x[jnp.arange(5)[::-1], rows],
        lambda x: x[jnp.arange(1, 5), rows[1:]],
        lambda x: x[jnp.arange(5) - 1, rows],
        lambda x: x[jnp.arange(5)],
        lambda x: x.at[jnp.zeros(5, int), jnp.arange(5)].add(2.0),
        lambda x: x.at[jnp.arange(7), 1].set(2.0),
    ):
        agree(function, [numbers(5, 6)], [P(tp=S(0))], TWO)


STAYS: dict[str, Callable[[Any], Any]] = {
    "where": lambda r: jnp.where(r > 0, r, 0.0),
    "not a number": lambda r: jnp.where(jnp.isnan(r), 0, r),
    "variance": lambda r: (r - r.mean(-1, keepdims=True)) / jnp.sqrt(r.var(-1, keepdims=True) + 1),
    "deviation": lambda r: r / r.std(),
    "heads": lambda r: jax.nn.softmax(r.reshape(-1, 4, 8)).reshape(r.shape),
    "columns": lambda r: jnp.concatenate([r[:, 8:], jnp.sort(r, 1)[:, :8]], 1),
    "pairs": lambda r: jnp.roll(r, 1, 1) * jnp.cumsum(r, 1) + r.argmax(1, keepdims=True),
    "taken": lambda r: jnp.take(r, jnp.arange(31, -1, -1), 1),
    "dropout": lambda r: jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, r.shape), r, 0.0),
}
"""What layers of other libraries do to rows."""


@pytest.mark.parametrize("name", sorted(STAYS))
def test_joined_dims_of_any_size_stay_sharded(name: str) -> None:
    """Sizes that do not divide cost what those cost that do, in a scan and its gradient too."""

    def through(x: Any, w: Any) -> Any:
        layer = STAYS[name]
        return lax.scan(lambda h, w: ((layer(h.reshape(-1, 32)) @ w).reshape(h.shape), None), x, w)[0]

    bytes_received = []
    for rows in (64, 63):
        args = struct(rows, 12, 32), struct(2, 32, 32)
        for at in (P(tp=S(0)), P(tp=S(1))):
            gradient = jax.grad(lambda x, w: jnp.sum(through(x, w) ** 2), 1)
            for program in (lower(through, (at, P()), *args), lower(gradient, (at, P()), *args)):
                program.check(all_reduce=...)
                bytes_received.append(program.bytes)
    assert bytes_received[:4] == bytes_received[4:]


JOINED: dict[str, Callable[[Any], Any]] = {
    "itself": lambda x: x.reshape(-1, 4),
    "all of it": lambda x: x.reshape(-1),
    "reductions": lambda x: (x.reshape(-1, 4).sum(0), x.reshape(-1, 4).max(1), x.reshape(3, -1).mean()),
    "sorted": lambda x: jnp.sort(x.reshape(-1, 4), 0),
    "a part": lambda x: x.reshape(-1, 4)[2:9] * 2,
    "with itself": lambda x: x.reshape(-1, 4) * x.reshape(-1, 4)[:1] + x.reshape(-1, 4),
    "transposed": lambda x: x.reshape(-1, 4).T @ x.reshape(-1, 4),
    "rows by rows": lambda x: x.reshape(-1, 4) @ x.reshape(-1, 4).T,
    "batched": lambda x: jnp.einsum("rk,rk->r", x.reshape(-1, 4), jnp.sin(x.reshape(-1, 4))).reshape(3, 5),
    "taken apart otherwise": lambda x: jnp.tanh(x.reshape(-1, 4)).reshape(5, 3, 2, 2),
    "through a stretched row": lambda x: jnp.broadcast_to(x.reshape(-1, 4)[None], (2, 15, 4)).sum(1),
    "in a loop": lambda x: lax.scan(
        lambda h, _: (jnp.sin(h.reshape(-1, 4)).reshape(h.shape), h.reshape(-1).sum()), x, length=2
    ),
    "where": lambda x: jnp.where(x.reshape(-1, 4) > 0, x.reshape(-1, 4), 0.5),
    "nothing": lambda x: x[:0].reshape(-1, 4).sum(0),
    "columns": lambda x: jnp.concatenate([x.reshape(-1, 4)[:, 1:3], x.reshape(-1, 4)[:, ::-1], jnp.ones((15, 2))], 1),
    "padded": lambda x: jnp.pad(x.reshape(-1, 4), ((0, 0), (1, 2))),
    "padded rows": lambda x: jnp.pad(x.reshape(-1, 4), ((1, 0), (0, 0))),
    "sorted columns": lambda x: (jnp.sort(x.reshape(-1, 4), 1), jnp.argsort(x.reshape(-1, 4), 1)),
    "sums so far": lambda x: jnp.cumsum(x.reshape(-1, 4), 1) + jnp.cumsum(x.reshape(-1, 4), 0),
    "largest": lambda x: (x.reshape(-1, 4).argmax(1), x.reshape(-1, 4).argmin(0), lax.top_k(x.reshape(-1, 4), 2)),
    "taken columns": lambda x: jnp.take(x.reshape(-1, 4), jnp.array([2, 0, 0]), 1),
    "taken rows": lambda x: jnp.take(x.reshape(-1, 4), jnp.array([2, 0, 14]), 0),
    "one of each": lambda x: jnp.take_along_axis(x.reshape(-1, 4), jnp.arange(15)[:, None] % 4, 1),
    "heads": lambda x: jnp.einsum("rhd,rhd->rh", x.reshape(-1, 2, 2), jnp.sin(x.reshape(-1, 2, 2))).reshape(3, 5, 2),
    "counted": lambda x: x.reshape(-1, 4) * jnp.arange(60).reshape(15, 4) + jnp.arange(4) * jnp.ones((15, 4)),
    "variance": lambda x: x.reshape(-1, 4) / (x.reshape(-1, 4).std(1, keepdims=True) + x.reshape(-1, 4).var(0)),
    "dropout": lambda x: jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, (15, 4)), x.reshape(-1, 4), 0.0),
}


@pytest.mark.parametrize("name", sample(JOINED, 2))
def test_joined_dims(name: str, everything: bool) -> None:
    """Whatever is done to a joined value, sharded on either dim: the same values, and gradients."""
    for at in (P(tp=S(0)), P(tp=S(1))):
        agree(JOINED[name], [numbers(3, 5, 4)], [at], TWO if everything else TWO[1:])
