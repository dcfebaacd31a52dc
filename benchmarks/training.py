"""One data-parallel training step of an MLP 784-2048-2048-10, batch 256: ours over MPI, and JAX's own over gloo.

    mpiexec -bind-to core -n 2 python benchmarks/training.py

Both run in the same processes, in turn, with a barrier before each step; medians in milliseconds, and the largest relative
difference of the losses.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import collectives
import spmd
from placements import Mesh, P, Shard

LAYERS = (784, 2048, 2048, 10)
BATCH = 256


def loss(params: Any, x: Any, y: Any) -> Any:
    """Mean squared error of a ReLU network."""
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = params[-1]
    return jnp.mean((x @ w + b - y) ** 2)


def step(params: Any, x: Any, y: Any) -> Any:
    """One step of gradient descent."""
    value, gradient = jax.value_and_grad(loss)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradient), value


def initial() -> tuple[Any, np.ndarray, np.ndarray]:
    """Parameters and one batch, the same on every rank."""
    rng = np.random.default_rng(0)
    params = [
        (rng.normal(size=(m, n)).astype(np.float32) * np.float32(np.sqrt(2 / m)), np.zeros(n, np.float32))
        for m, n in zip(LAYERS[:-1], LAYERS[1:], strict=True)  # noqa: RUF007
    ]
    return (
        params,
        rng.normal(size=(BATCH, LAYERS[0])).astype(np.float32),
        rng.normal(size=(BATCH, 10)).astype(np.float32),
    )


def ours() -> Callable[[], float]:
    """A step of ours, with its own state."""
    world = collectives.world()
    mesh, rows = Mesh(dp=world.size), P(dp=Shard(0))
    run = spmd.jit(step, mesh=mesh, in_placements=(P(), rows, rows), out_placements=P(), donate_argnums=0)
    params, x, y = initial()
    state = {"params": spmd.distribute(params, P(), mesh)}
    x, y = spmd.distribute(x, rows, mesh), spmd.distribute(y, rows, mesh)

    def once() -> float:
        state["params"], value = run(state["params"], x, y)
        jax.block_until_ready([leaf.local for leaf in jax.tree.leaves(state["params"])])
        return float(value)

    return once


def gloo() -> Callable[[], float]:
    """The same step in JAX over gloo: arrays sharded over the devices of all processes."""
    mesh = jax.make_mesh((jax.device_count(),), ("dp",))
    spec = jax.sharding.PartitionSpec
    whole, rows = (jax.sharding.NamedSharding(mesh, s) for s in (spec(), spec("dp")))

    def place(x: np.ndarray, sharding: Any) -> Any:
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    params, x, y = initial()
    state = {"params": jax.tree.map(lambda leaf: place(leaf, whole), params)}
    x, y = place(x, rows), place(y, rows)
    run = jax.jit(step, in_shardings=(whole, rows, rows), out_shardings=whole, donate_argnums=0)

    def once() -> float:
        state["params"], value = run(state["params"], x, y)
        jax.block_until_ready(state["params"])
        return float(value)

    return once


def main() -> None:
    """Print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--port", type=int, default=45000 + os.getppid() % 10000)
    options = parser.parse_args()
    world: Any = collectives.world()
    port = int(world.broadcast(np.array([options.port]), root=0)[0])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", world.size, world.rank)
    sides = {"spmd over MPI": ours(), "JAX over gloo": gloo()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(options.repeat + 2):
        for name, once in sides.items():
            world.barrier()
            start = time.perf_counter()
            losses[name].append(once())
            if number > 1:
                times[name].append((time.perf_counter() - start) * 1e3)
    if world.rank == 0:
        a, b = (np.array(values) for values in losses.values())
        for name, values in times.items():
            low, high = min(values), max(values)
            print(f"  {name}: {statistics.median(values):.1f} ms (from {low:.1f} to {high:.1f})")
        mine, theirs = (statistics.median(values) for values in times.values())
        print(f"  ratio {mine / theirs:.2f}; losses differ by {np.max(np.abs(a - b) / np.abs(b)):.1e} at most")


if __name__ == "__main__":
    main()
