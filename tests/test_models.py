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
