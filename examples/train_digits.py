"""Train a small network on handwritten digits, in parallel by placements alone.

The step is written for whole arrays, as for one machine. `--parallel` chooses where parameters, optimizer state and batch
lie, and nothing else; what has to be communicated follows, and `--program` prints it.

    mpiexec -n 4 python examples/train_digits.py                    # data-parallel, on four processes
    mpiexec -n 4 python examples/train_digits.py --parallel fsdp_tp # parameters sharded over both axes of a 2x2 mesh
    python examples/train_digits.py                                 # four ranks, simulated in this process
    python examples/train_digits.py --ranks 3                       # shards need not be equal
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
class Parallel:
    """Where everything lies: one `(weight, bias)` of placements per layer, for parameters and for what an optimizer keeps of
    them, and the placement of a batch."""

    mesh: Mesh
    params: list[tuple[P, P]]
    state: list[tuple[P, P]]
    rows: P


KINDS = ("dp", "fsdp", "zero1", "tp", "dp_tp", "fsdp_tp")


def parallel(kind: str, ranks: int) -> Parallel:
    """The placements of one kind of parallelism.

    dp shards the batch. fsdp shards parameters and state too, zero1 the state alone. tp shards the first layer's outputs and
    the second's inputs over an axis of its own, where the batch is replicated.
    """
    whole = [(P(), P())] * 3
    rows = P(dp=Shard(0))
    if kind in ("dp", "fsdp", "zero1"):
        sharded = [(P(dp=Shard(0)), P(dp=Shard(0)))] * 3
        params = sharded if kind == "fsdp" else whole
        return Parallel(Mesh(dp=ranks), params, whole if kind == "dp" else sharded, rows)
    tp = [(P(tp=Shard(1)), P(tp=Shard(0))), (P(tp=Shard(0)), P()), (P(), P())]
    if kind == "tp":
        return Parallel(Mesh(tp=ranks), tp, tp, P())
    mesh = Mesh(dp=ranks // 2, tp=2) if ranks % 2 == 0 else Mesh(dp=1, tp=ranks)
    if kind == "fsdp_tp":
        tp = [
            (P(tp=Shard(1), dp=Shard(0)), P(tp=Shard(0), dp=Shard(0))),
            (P(tp=Shard(0), dp=Shard(1)), P(dp=Shard(0))),
            (P(dp=Shard(0)), P(dp=Shard(0))),
        ]
    return Parallel(mesh, tp, tp, rows)


@dataclass(frozen=True)
class Functions:
    """The optimizer's initial state, the step, and the count of right answers, as they run on the mesh."""

    init: spmd.SpmdFunction
    step: spmd.SpmdFunction
    correct: spmd.SpmdFunction


def parallelize(places: Parallel, dtype: str = "float32") -> Functions:
    """Decorate: nothing but placements is added."""
    mesh, params, rows = places.mesh, places.params, places.rows
    shapes = initial_params(dtype)
    state = spmd.placements_like(jax.eval_shape(OPTIMIZER.init, shapes), shapes, places.state)
    return Functions(
        spmd.jit(OPTIMIZER.init, mesh=mesh, in_placements=(params,), out_placements=state),
        spmd.jit(
            step,
            mesh=mesh,
            in_placements=(params, state, rows, rows),
            out_placements=(params, state, P()),
            donate_argnums=(0, 1),
        ),
        spmd.jit(correct, mesh=mesh, in_placements=(params, rows, rows), out_placements=P()),
    )


@dataclass(frozen=True)
class Result:
    """The loss of every step, the part of the held-out images that is recognised, bytes of parameters and state per rank."""

    losses: list[float]
    accuracy: float
    bytes_per_rank: int


def largest_shards(tree: object) -> int:
    """The bytes of a tree's shards on this process, of the rank that holds most."""
    leaves = jax.tree.leaves(tree)
    return max(sum(leaf.shards[at].nbytes for leaf in leaves) for at in leaves[0].shards)


def train(
    places: Parallel, data: Data, epochs: int, batch: int, steps: int | None = None, quiet: bool = False
) -> Result:
    """Train with everything placed so."""
    dtype = str(data.train_images.dtype)
    functions = parallelize(places, dtype)
    params = spmd.distribute(initial_params(dtype), places.params, places.mesh)
    state = functions.init(params)
    size = largest_shards((params, state))
    count = epochs * (len(data.train_images) // batch) if steps is None else steps
    losses: list[float] = []
    with tqdm(total=count, desc=f"{places.mesh.size} ranks", unit="step", disable=quiet or None) as progress:
        for _, (images, digits) in zip(range(count), batches(data, batch, epochs), strict=False):
            params, state, value = functions.step(params, state, images, digits)
            losses.append(float(value))
            progress.update()
            progress.set_postfix(loss=f"{losses[-1]:.4f}")
    right = functions.correct(params, data.test_images, data.test_digits)
    return Result(losses, int(right) / len(data.test_images), size)


def main(arguments: Sequence[str] | None = None) -> Result:
    """Parse the command line, train, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parallel", choices=KINDS, default="dp", help="what is sharded (default: the batch alone)")
    parser.add_argument("--ranks", type=int, help="ranks to simulate in a lone process (default: 4)")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch", type=int, default=256, help="rows of the global batch (default: 256)")
    parser.add_argument("--steps", type=int, help="stop after so many steps")
    parser.add_argument("--float64", action="store_true", help="compute in double precision")
    parser.add_argument("--program", action="store_true", help="print the step's Program and stop")
    options = parser.parse_args(arguments)
    if options.float64:
        jax.config.update("jax_enable_x64", True)
    world = collectives.world()
    ranks = world.size if world.size > 1 else options.ranks or 4
    if options.ranks not in (None, ranks):
        parser.error(f"--ranks {options.ranks}: the launcher started {world.size} processes")
    places = parallel(options.parallel, ranks)
    data = load("float64" if options.float64 else "float32")
    if options.program:
        params = initial_params(str(data.train_images.dtype))
        images, digits = next(batches(data, options.batch, 1))
        program = parallelize(places).step.lower(params, OPTIMIZER.init(params), images, digits)
        if world.rank == 0:
            print(program)
        return Result([], 0.0, 0)
    result = train(places, data, options.epochs, options.batch, options.steps, quiet=world.rank > 0)
    if world.rank == 0:
        print(f"{result.accuracy:.1%} of {len(data.test_images)} held-out digits recognised by {places.mesh!r}")
        print(f"{result.bytes_per_rank / 1e3:.0f} kB of parameters and optimizer state per rank")
    return result


if __name__ == "__main__":
    main()
