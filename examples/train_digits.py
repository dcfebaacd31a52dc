"""Train a small network on handwritten digits, data-parallel: one global batch, split over the `dp` axis.

The step is written for whole arrays, as for one machine. The placements say that the batch is sharded and the rest
replicated; from them follow the all_reduce of each gradient and of the loss, which `--program` prints.

    mpiexec -n 4 python examples/train_digits.py # on four processes
    python examples/train_digits.py              # four ranks, simulated in this process
    python examples/train_digits.py --ranks 3    # 256 rows over 3 ranks: shards need not be equal
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from tqdm import tqdm

import collectives
import spmd
from placements import Mesh, P, Shard

LAYERS = (64, 256, 128, 10)
Params = list[tuple[jax.Array, jax.Array]]


@dataclass(frozen=True)
class Data:
    """Images of 64 pixels in [0, 1] and their digits; a fifth is held out."""

    train_images: np.ndarray
    train_digits: np.ndarray
    test_images: np.ndarray
    test_digits: np.ndarray


def load(dtype: str = "float32", seed: int = 0) -> Data:
    """The 1,797 digits that scikit-learn ships, in a fixed random order."""
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.data))
    images, labels = (digits.data[order] / 16).astype(dtype), digits.target[order]
    held_out = len(images) // 5
    return Data(images[held_out:], labels[held_out:], images[:held_out], labels[:held_out])


def batches(data: Data, size: int, epochs: int, seed: int = 1) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Global batches, the same on every rank; each epoch in another order, a last short batch left out."""
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        order = rng.permutation(len(data.train_images))
        for start in range(0, len(order) - size + 1, size):
            rows = order[start : start + size]
            yield data.train_images[rows], data.train_digits[rows]


def initial_params(dtype: str = "float32", seed: int = 2) -> Params:
    """He-initialised weights `[in, out]` and zero biases `[out]`, the same on every rank."""
    rng = np.random.default_rng(seed)
    shapes = itertools.pairwise(LAYERS)
    return [(jnp.asarray(rng.normal(size=(m, n)) * np.sqrt(2 / m), dtype), jnp.zeros(n, dtype)) for m, n in shapes]


def logits(params: Params, images: jax.Array) -> jax.Array:
    """Scores `[batch, 10]`."""
    x = images
    for weight, bias in params[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    weight, bias = params[-1]
    return x @ weight + bias


def loss(params: Params, images: jax.Array, digits: jax.Array) -> jax.Array:
    """The mean cross-entropy over the batch."""
    scores = logits(params, images)
    wanted = jax.nn.one_hot(digits, LAYERS[-1], dtype=scores.dtype)
    return optax.softmax_cross_entropy(scores, wanted).mean()


OPTIMIZER = optax.adam(1e-3)


def step(params: Params, state: optax.OptState, images: jax.Array, digits: jax.Array):
    """One step of Adam: whole arrays in, whole arrays out."""
    value, gradient = jax.value_and_grad(loss)(params, images, digits)
    updates, state = OPTIMIZER.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, value


def correct(params: Params, images: jax.Array, digits: jax.Array) -> jax.Array:
    """How many images are recognised."""
    return jnp.sum(logits(params, images).argmax(1) == digits)


@dataclass(frozen=True)
class Result:
    """The loss of every step, and the part of the held-out images that is recognised."""

    losses: list[float]
    accuracy: float


def parallelize(mesh: Mesh) -> tuple[spmd.SpmdFunction, spmd.SpmdFunction]:
    """The step and the count of right answers on a mesh with one axis, `dp`: nothing but placements is added."""
    rows = P(dp=Shard(0))
    parallel_step = spmd.jit(
        step, mesh=mesh, in_placements=(P(), P(), rows, rows), out_placements=P(), donate_argnums=(0, 1)
    )
    return parallel_step, spmd.jit(correct, mesh=mesh, in_placements=(P(), rows, rows), out_placements=P())


def train(mesh: Mesh, data: Data, epochs: int, batch: int, steps: int | None = None, quiet: bool = False) -> Result:
    """Train on a mesh with one axis, `dp`."""
    parallel_step, parallel_correct = parallelize(mesh)
    params = initial_params(str(data.train_images.dtype))
    state = OPTIMIZER.init(params)
    count = epochs * (len(data.train_images) // batch) if steps is None else steps
    losses: list[float] = []
    with tqdm(total=count, desc=f"{mesh.size} ranks", unit="step", disable=quiet) as progress:
        for _, (images, digits) in zip(range(count), batches(data, batch, epochs), strict=False):
            params, state, value = parallel_step(params, state, images, digits)
            losses.append(float(value))
            progress.update()
            progress.set_postfix(loss=f"{losses[-1]:.4f}")
    right = parallel_correct(params, data.test_images, data.test_digits)
    return Result(losses, int(right) / len(data.test_images))


def main(arguments: Sequence[str] | None = None) -> Result:
    """Parse the command line, train, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="ranks to simulate in a lone process (default: 4)")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch", type=int, default=256, help="rows of the global batch (default: 256)")
    parser.add_argument("--steps", type=int, help="stop after so many steps")
    parser.add_argument("--float64", action="store_true", help="compute in double precision")
    parser.add_argument("--program", action="store_true", help="print the step's Program and stop")
    options = parser.parse_args(arguments)
    if options.float64:
        jax.config.update("jax_enable_x64", True)
    world = collectives.world()
    mesh = Mesh(dp=world.size if world.size > 1 else options.ranks)
    data = load("float64" if options.float64 else "float32")
    if options.program:
        params = initial_params(str(data.train_images.dtype))
        print(parallelize(mesh)[0].lower(params, OPTIMIZER.init(params), *next(batches(data, options.batch, 1))))
        return Result([], 0.0)
    result = train(mesh, data, options.epochs, options.batch, options.steps, quiet=world.rank > 0)
    if world.rank == 0:
        print(f"{result.accuracy:.1%} of {len(data.test_images)} held-out digits recognised by {mesh.size} ranks")
    return result


if __name__ == "__main__":
    main()
