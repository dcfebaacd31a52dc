"""Peak resident memory of a training step on real ranks: parameters and Adam's state whole or sharded, with and without remat.

    for kind in dp fsdp; do for remat in "" --remat; do
        mpiexec -bind-to core -n 2 python benchmarks/memory.py --kind $kind $remat
    done; done

A residual MLP of 12 scanned layers, 512 to 2048 and back, 4096 rows. Peak memory only grows, so each kind is a job of its own.
Megabytes: what the shards of parameters and state take, the growth of the peak from before they exist to after three steps,
and the peak of live values by the Program's own analysis.
"""

from __future__ import annotations

import argparse
import resource
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import collectives
import spmd
from placements import Mesh, P, Shard

LAYERS, WIDTH, HIDDEN, ROWS = 12, 512, 2048, 4096
OPTIMIZER = optax.adam(1e-3)


def make_step(remat: bool) -> Any:
    """A step of Adam on the mean squared error."""

    def block(h: Any, w: Any) -> Any:
        return h + jnp.tanh(h @ w[0]) @ w[1], None

    def loss(ws: Any, x: Any) -> Any:
        return jnp.mean(lax.scan(jax.checkpoint(block) if remat else block, x, ws)[0] ** 2)

    def step(ws: Any, state: Any, x: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(ws, x)
        updates, state = OPTIMIZER.update(gradient, state, ws)
        return optax.apply_updates(ws, updates), state, value

    return step


def peak_mb() -> float:
    """Peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main() -> None:
    """Print one line on each rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=("dp", "fsdp"), default="dp")
    parser.add_argument("--remat", action="store_true")
    options = parser.parse_args()
    world = collectives.world()
    mesh, rows = Mesh(dp=world.size), P(dp=Shard(0))
    place = P() if options.kind == "dp" else P(dp=Shard(1))
    shapes = tuple(
        jax.ShapeDtypeStruct(shape, np.float32) for shape in ((LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH))
    )
    states = spmd.placements_like(jax.eval_shape(OPTIMIZER.init, shapes), shapes, place)
    step = spmd.jit(
        make_step(options.remat),
        mesh=mesh,
        in_placements=(place, states, rows),
        out_placements=(place, states, P()),
        donate_argnums=(0, 1),
    )
    x = spmd.from_callback(
        lambda index: np.full([s.stop - s.start for s in index], 0.5), (ROWS, WIDTH), rows, mesh, np.float32
    )
    jax.block_until_ready(jnp.ones((8, 8)) @ jnp.ones((8, 8)))
    before = peak_mb()
    ws = tuple(spmd.full(shape.shape, 0.01, place, mesh) for shape in shapes)
    state: Any = spmd.jit(OPTIMIZER.init, mesh=mesh, in_placements=(place,), out_placements=states)(ws)
    held = sum(shard.nbytes for leaf in jax.tree.leaves((ws, state)) for shard in leaf.shards.values()) / 1e6
    live = step.lower(ws, state, x).memory_analysis().peak_bytes / 1e6
    for _ in range(3):
        ws, state, value = step(ws, state, x)
    name = f"{options.kind}{', remat' * options.remat}"
    print(
        f"rank {world.rank}, {name}: parameters and state {held:.0f} MB, peak grows by {peak_mb() - before:.0f} MB, "
        f"live by analysis {live:.0f} MB; loss {float(value):.6f}"
    )


if __name__ == "__main__":
    main()
