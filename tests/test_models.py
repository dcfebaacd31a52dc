"""Models of other libraries, unchanged, under `spmd.jit`: an Equinox and a Flax MLP, trained by optax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import spmd
from placements import Mesh, P, Shard

ROWS = P(dp=Shard(0))
OPTIMIZER = optax.adam(1e-2)
Model = tuple[Any, Callable[[Any, Any], Any]]


def sharded(path: str, leaf: Any) -> P:
    """fsdp, for a tree of any kind: what has dims is sharded along the first, a count is replicated."""
    return ROWS if leaf.ndim else P()


def equinox_mlp(width: int) -> Model:
    """Parameters, and the model as a function of them."""
    model = equinox.nn.MLP(8, 3, width, 2, key=jax.random.key(0))
    params, static = equinox.partition(model, equinox.is_array)
    return params, lambda params, x: jax.vmap(equinox.combine(params, static))(x)


class FlaxMLP(linen.Module):
    """Dense layers with a LayerNorm."""

    width: int

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.relu(linen.Dense(self.width)(x))
        return linen.Dense(3)(linen.LayerNorm()(linen.gelu(linen.Dense(self.width)(x))))


def flax_mlp(width: int) -> Model:
    model = FlaxMLP(width)
    return model.init(jax.random.key(0), jnp.zeros((1, 8))), model.apply


def make_step(apply: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda params: jnp.mean((apply(params, x) - y) ** 2))(params)
        updates, state = OPTIMIZER.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


@pytest.mark.parametrize(
    ("make", "places", "ranks"),
    [
        pytest.param(flax_mlp, P(), 4, id="flax-dp"),
        pytest.param(equinox_mlp, sharded, 3, id="equinox-fsdp-3"),
        pytest.param(equinox_mlp, P(), 4, id="equinox-dp", marks=pytest.mark.slow),
        pytest.param(flax_mlp, sharded, 3, id="flax-fsdp-3", marks=pytest.mark.slow),
        pytest.param(flax_mlp, sharded, 4, id="flax-fsdp-4", marks=pytest.mark.slow),
        pytest.param(equinox_mlp, sharded, 4, id="equinox-fsdp-4", marks=pytest.mark.slow),
    ],
)
def test_a_model_trains_as_on_one_rank(make: Callable[[int], Model], places: Any, ranks: int) -> None:
    """Ten steps of Adam: losses and parameters are those of the undecorated step."""
    params, apply = make(16)
    step, mesh = make_step(apply), Mesh(dp=ranks)
    rng = np.random.default_rng(1)
    x, y = (rng.normal(size=shape).astype(np.float32) for shape in ((10, 8), (10, 3)))
    parallel = spmd.jit(
        step,
        mesh=mesh,
        in_placements=(places, places, ROWS, ROWS),
        out_placements=(places, places, P()),
        fallback="error",
    )
    init = spmd.jit(OPTIMIZER.init, mesh=mesh, in_placements=(places,), out_placements=places)
    plain, plain_state = params, OPTIMIZER.init(params)
    placed: Any = params
    state = init(params)
    plain_step = jax.jit(step)
    for _ in range(10):
        plain, plain_state, expected = plain_step(plain, plain_state, x, y)
        placed, state, loss = parallel(placed, state, x, y)
        np.testing.assert_allclose(float(loss), expected, rtol=1e-4)
    assert jax.tree.structure(placed) == jax.tree.structure(plain)
    for found, leaf in zip(jax.tree.leaves(placed), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(found.full(), leaf, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("make", [equinox_mlp, flax_mlp])
def test_its_plan_is_the_textbooks(make: Callable[[int], Model]) -> None:
    """One reduction for each gradient and the loss; fsdp: a gather and a reduce_scatter for each parameter."""
    params, apply = make(256)
    step, leaves = make_step(apply), len(jax.tree.leaves(params))
    shapes = jax.eval_shape(lambda: params), jax.eval_shape(OPTIMIZER.init, params)
    batch = [jax.ShapeDtypeStruct((8192, n), np.float32) for n in (8, 3)]
    for places, counts in (
        (P(), {"all_reduce": leaves + 1}),
        (sharded, {"all_gather": leaves, "reduce_scatter": leaves, "all_reduce": 1}),
    ):
        decorated = spmd.jit(
            step, mesh=Mesh(dp=4), in_placements=(places, places, ROWS, ROWS), out_placements=(places, places, P())
        )
        decorated.lower(*shapes, *batch).check(**counts)


class ConvNet(linen.Module):
    """Convolutions, batch norm, pools, a dense layer."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.relu(linen.BatchNorm(use_running_average=False)(linen.Conv(8, (3, 3))(x)))
        x = linen.relu(linen.Conv(6, (3, 3), strides=(2, 2))(linen.max_pool(x, (2, 2), (2, 2))))
        return linen.Dense(5)(linen.avg_pool(x, (2, 2)).reshape(x.shape[0], -1))


class Recurrent(linen.Module):
    """A GRU and an LSTM by scan."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(3)(linen.RNN(linen.GRUCell(7))(x) + linen.RNN(linen.OptimizedLSTMCell(7))(x))


class Block(linen.Module):
    """Attention and a dense part, with norms and residuals."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        y = linen.LayerNorm()(x)
        x = x + linen.MultiHeadDotProductAttention(num_heads=2)(y, y)
        return x + linen.Dense(8)(linen.gelu(linen.Dense(16)(linen.LayerNorm()(x))))


class UNet(linen.Module):
    """A block of a diffusion model: down and up again, with attention, group norms and the embedded time."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        time = x[:, 0, 0, 0]
        embedded = linen.Dense(8)(jnp.sin(time[:, None] * jnp.arange(1.0, 5.0)))
        wide = linen.swish(linen.GroupNorm(num_groups=2)(linen.Conv(8, (3, 3))(x))) + embedded[:, None, None]
        down = linen.Conv(8, (3, 3), strides=(2, 2))(wide)
        n, h, w, c = down.shape
        attended = linen.MultiHeadDotProductAttention(num_heads=2)(
            linen.GroupNorm(num_groups=2)(down).reshape(n, h * w, c)
        )
        up = jax.image.resize(down + attended.reshape(down.shape), (n, 2 * h, 2 * w, c), "nearest")
        return linen.ConvTranspose(3, (3, 3))(linen.swish(linen.Conv(8, (3, 3))(jnp.concatenate([up, wide], -1))))


PICTURES, SEQUENCES = (6, 8, 8, 3), (6, 5, 8)
MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "convolutions": (ConvNet(), PICTURES),
    "recurrent": (Recurrent(), SEQUENCES),
    "attention": (Block(), SEQUENCES),
    "u-net": (UNet(), PICTURES),
}


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        pytest.param(name, dim, marks=() if (name, dim) in (("convolutions", 0), ("u-net", 1)) else pytest.mark.slow)
        for name in MODELS
        for dim in (0, 1)
    ],
)
def test_models_that_people_have(name: str, dim: int) -> None:
    """Forward and gradient on ranks that do not divide. A batch that is sharded is never gathered: the gradients are reduced,
    in as many messages as follow one another."""
    module, shape = MODELS[name]
    x = (np.sin(np.arange(np.prod(shape)) * 1.7) * 1.3).astype(np.float32).reshape(shape)
    variables = module.init(jax.random.key(0), x)

    def loss(params: Any, x: Any) -> Any:
        found, state = module.apply({**variables, "params": params}, x, mutable=["batch_stats"])
        return jnp.mean(jnp.sin(found) ** 2), state

    function = jax.value_and_grad(loss, has_aux=True)
    mesh = Mesh(dp=4)
    parallel = spmd.jit(function, mesh=mesh, in_placements=(P(), P(dp=Shard(dim))), fallback="error")
    found, expected = parallel(variables["params"], x), function(variables["params"], x)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for array, whole in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(array.full(), whole, rtol=2e-4, atol=2e-6)
    if dim == 0:
        rounds = 4 if name == "convolutions" else 1  # a batch norm's statistics, and those of its gradient
        parallel.lower(variables["params"], x).check(all_reduce=..., max_messages=rounds)
