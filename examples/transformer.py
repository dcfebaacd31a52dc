"""Train a small causal transformer on seven of Shakespeare's sonnets, data- and tensor-parallel by placements alone.

The model is written for whole arrays: embedding, rotary attention, a gated MLP, a scan over the layers, an output tied to the
embedding. Heads, hidden units and the vocabulary lie over `tp`, the batch over `dp`; `--program` prints what that sends.

    mpiexec -n 4 python examples/transformer.py               # Mesh(dp=2, tp=2), on four processes
    python examples/transformer.py --dp 1 --tp 3              # simulated in this process; heads need not divide
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from tqdm import tqdm

import collectives
import spmd
from placements import Mesh, P, Shard

TEXT = Path(__file__).parent / "data" / "sonnets.txt"
LAYERS, WIDTH, HEADS, HEAD, HIDDEN, LENGTH = 3, 64, 4, 16, 192, 64

Params = dict[str, jax.Array]

SHARDED = {
    "embedding": P(tp=Shard(0)),   # [vocabulary, width]
    "attention_gain": P(),         # [layer, width]
    "query": P(tp=Shard(2)),       # [layer, width, head, size]: heads are sharded
    "key": P(tp=Shard(2)),
    "value": P(tp=Shard(2)),
    "out": P(tp=Shard(1)),         # [layer, head, size, width]
    "mlp_gain": P(),
    "gate": P(tp=Shard(2)),        # [layer, width, hidden]: hidden units are
    "up": P(tp=Shard(2)),
    "down": P(tp=Shard(1)),        # [layer, hidden, width]
    "final_gain": P(),             # [width]
}  # fmt: skip
"""Where every parameter lies. The one thing that makes the model tensor-parallel."""


def initial_params(vocabulary: int, seed: int = 0) -> Params:
    """Normal weights, scaled by the number of inputs; the same on every rank."""
    shapes = {
        "embedding": (vocabulary, WIDTH),
        "attention_gain": (LAYERS, WIDTH),
        "query": (LAYERS, WIDTH, HEADS, HEAD),
        "key": (LAYERS, WIDTH, HEADS, HEAD),
        "value": (LAYERS, WIDTH, HEADS, HEAD),
        "out": (LAYERS, HEADS, HEAD, WIDTH),
        "mlp_gain": (LAYERS, WIDTH),
        "gate": (LAYERS, WIDTH, HIDDEN),
        "up": (LAYERS, WIDTH, HIDDEN),
        "down": (LAYERS, HIDDEN, WIDTH),
        "final_gain": (WIDTH,),
    }
    inputs = {"out": HEADS * HEAD, "down": HIDDEN}
    rng = np.random.default_rng(seed)
    return {
        name: jnp.ones(shape)
        if name.endswith("gain")
        else jnp.asarray(rng.normal(size=shape) / np.sqrt(inputs.get(name, WIDTH)), jnp.float32)
        for name, shape in shapes.items()
    }


def normalized(x: jax.Array, gain: jax.Array) -> jax.Array:
    """RMSNorm over the last dim."""
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * gain


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions for `[batch, position, head, size]`."""
    angles = jnp.arange(x.shape[1])[:, None] / 10_000 ** (jnp.arange(HEAD // 2) / (HEAD // 2))
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    left, right = jnp.split(x, 2, -1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def block(x: jax.Array, layer: Params) -> jax.Array:
    """Attention and MLP, each around a residual: `[batch, position, width]`."""
    h = normalized(x, layer["attention_gain"])
    query, key, value = (jnp.einsum("bsd,dhk->bshk", h, layer[name]) for name in ("query", "key", "value"))
    scores = jnp.einsum("bqhk,bshk->bhqs", rotated(query), rotated(key)) / np.sqrt(HEAD)
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    x = x + jnp.einsum("bhqs,bshk,hkd->bqd", weights, value, layer["out"])
    h = normalized(x, layer["mlp_gain"])
    return x + (jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]


def loss(params: Params, tokens: jax.Array) -> jax.Array:
    """The mean cross-entropy of each next token in `[batch, LENGTH + 1]`."""
    outside = {name: params[name] for name in ("embedding", "final_gain")}
    layers = {name: value for name, value in params.items() if name not in outside}
    x = outside["embedding"][tokens[:, :-1]]
    x, _ = lax.scan(lambda x, layer: (block(x, layer), None), x, layers)
    logits = normalized(x, outside["final_gain"]) @ outside["embedding"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


OPTIMIZER = optax.adam(3e-3)


def step(params: Params, state: optax.OptState, tokens: jax.Array):
    """One step of Adam: whole arrays in, whole arrays out."""
    value, gradient = jax.value_and_grad(loss)(params, tokens)
    updates, state = OPTIMIZER.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, value


@dataclass(frozen=True)
class Parallel:
    """The decorated functions, on one mesh."""

    mesh: Mesh
    init: spmd.SpmdFunction
    step: spmd.SpmdFunction


def parallelize(mesh: Mesh, params: Params) -> Parallel:
    """State the placements."""
    state = spmd.placements_like(jax.eval_shape(OPTIMIZER.init, params), params, SHARDED)
    init = spmd.jit(OPTIMIZER.init, mesh=mesh, in_placements=(SHARDED,), out_placements=state)
    places = {"in_placements": (SHARDED, state, P(dp=Shard(0))), "out_placements": (SHARDED, state, P())}
    return Parallel(mesh, init, spmd.jit(step, mesh=mesh, donate_argnums=(0, 1), fallback="error", **places))


def load() -> tuple[np.ndarray, int]:
    """The text as numbers of its characters, and how many kinds there are."""
    text = TEXT.read_text()
    kinds = sorted(set(text))
    return np.array([kinds.index(character) for character in text], np.int32), len(kinds)


def batches(text: np.ndarray, size: int, steps: int, seed: int = 1) -> Iterator[np.ndarray]:
    """Random pieces of the text, the same on every rank: `[size, LENGTH + 1]`."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        starts = rng.integers(0, len(text) - LENGTH, size)
        yield text[starts[:, None] + np.arange(LENGTH + 1)]


def train(mesh: Mesh, steps: int, batch: int = 16, quiet: bool = False) -> list[float]:
    """Train, and return the loss of every step."""
    text, vocabulary = load()
    params = initial_params(vocabulary)
    functions = parallelize(mesh, params)
    placed = spmd.distribute(params, SHARDED, mesh)
    state = functions.init(placed)
    losses = []
    with tqdm(total=steps, desc=f"{mesh!r}", unit="step", disable=quiet or None) as progress:
        for tokens in batches(text, batch, steps):
            placed, state, value = functions.step(placed, state, tokens)
            losses.append(float(value))
            progress.update()
            progress.set_postfix(loss=f"{losses[-1]:.3f}")
    return losses


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Parse the command line, train, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dp", type=int, help="ranks over the batch (default: what --tp leaves)")
    parser.add_argument("--tp", type=int, help="ranks over heads, hidden units and vocabulary (default: 2 where even)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16, help="rows of the global batch (default: 16)")
    parser.add_argument("--program", action="store_true", help="print the step's Program and stop")
    options = parser.parse_args(arguments)
    world = collectives.world()
    ranks = world.size if world.size > 1 else (options.dp or 2) * (options.tp or 2)
    tp = options.tp or (ranks // options.dp if options.dp else 2 - ranks % 2)
    if ranks % tp or (options.dp or ranks // tp) * tp != ranks:
        parser.error(f"--dp {options.dp} --tp {options.tp}: there are {ranks} ranks")
    mesh = Mesh(dp=ranks // tp, tp=tp)
    if options.program:
        text, vocabulary = load()
        params = initial_params(vocabulary)
        state = jax.eval_shape(OPTIMIZER.init, params)
        program = parallelize(mesh, params).step.lower(params, state, next(batches(text, options.batch, 1)))
        if world.rank == 0:
            print(program)
        return []
    losses = train(mesh, options.steps, options.batch, quiet=world.rank > 0)
    if world.rank == 0:
        first, last = np.mean(losses[:10]), np.mean(losses[-10:])
        print(f"loss {first:.3f} over the first ten steps, {last:.3f} over the last, on {mesh!r}")
    return losses


if __name__ == "__main__":
    main()
