"""Microseconds per step of the shallow water of `examples/shallow_water.py`, in one compiled loop, on blocks of several sizes.

    mpiexec -bind-to core -n 2 python benchmarks/stencil.py                # beside JAX over gloo, and mpi4jax if installed

Sides: ours in local view (one halo exchange a step) and in global view (rolls of whole arrays); the same rolls under plain
`jax.jit` on one block, without communication; the same algorithm with mpi4jax (fields stacked, two sendrecvs a step); JAX's
shard_map over gloo (two ppermutes a step). All in one job, in turn, with a barrier before each call; medians over calls, the
results compared. Ranks in a row: blocks are periodic in themselves along y.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

SPACING, DT = 1e3, 5.0
ALONE = "one block"
Fields = tuple[Any, Any, Any]


def initial(size: int, ranks: int) -> Fields:
    """Height and velocities of `ranks` blocks of size x size in a row, float32."""
    import numpy as np

    y, x = np.meshgrid(np.arange(size) / size, np.arange(size * ranks) / size, indexing="ij")
    wave = np.sin(2 * np.pi * y) * np.cos(2 * np.pi * x / ranks)
    fields = (100 + wave, 0.1 * np.cos(2 * np.pi * y), 0.1 * np.sin(4 * np.pi * x / ranks))
    return tuple(field.astype(np.float32) for field in fields)  # type: ignore[return-value]


def padded_along_y(block: Any) -> Any:
    """A block with its own far rows around it."""
    import jax.numpy as jnp

    return jnp.concatenate([block[..., -2:, :], block, block[..., :2, :]], -2)


def stepped(state: Fields, padded: Fields) -> Fields:
    """One step, by plain forward differences: the runs are short."""
    from shallow_water import changes

    height, east, north = changes(padded, SPACING, DT)
    return height, state[1] + DT * east, state[2] + DT * north


def looped(one: Callable[[Fields], Fields], steps: int) -> Callable[[Any, Any, Any], Any]:
    """Many steps in one loop."""
    from jax import lax

    return lambda h, u, v: lax.fori_loop(0, steps, lambda _, state: one(state), (h, u, v))


def local_view(size: int, steps: int) -> Callable[[], Any]:
    """Ours: `spmd.shard_map` and one halo exchange."""

    import collectives
    import spmd
    from placements import Mesh, P, Shard

    mesh, placed = Mesh(y=1, x=collectives.world().size), P(y=Shard(0), x=Shard(1))

    def one(state: Fields) -> Fields:
        return stepped(state, collectives.halo_exchange(state, {"y": 0, "x": 1}, 2))

    run = spmd.shard_map(looped(one, steps), mesh=mesh, in_placements=placed, out_placements=(placed,) * 3)
    return ours(run, [spmd.distribute(field, placed, mesh) for field in initial(size, mesh.size)])


def ours(run: Any, state: list[Any]) -> Callable[[], Any]:
    def once() -> Any:
        found = run(*state)
        for field in found:
            field.local.block_until_ready()
        return found[0].local

    return once


def rolled(state: Fields) -> Fields:
    """One step on whole arrays, by `jnp.roll`."""
    import jax.numpy as jnp
    from shallow_water import CORIOLIS, GRAVITY

    def to(field: Any, down: int = 0, right: int = 0) -> Any:
        return jnp.roll(field, -(down or right), 0 if down else 1)

    h, u, v = state
    before, after, u_before, v_after = to(h, 0, -1), to(h, 0, 1), to(u, 0, -1), to(v, 0, 1)  # one message
    below, corner = to(h, 1), to(after, 1)
    flux_east, flux_north = (h + after) / 2 * u, (h + below) / 2 * v
    spin = (v_after - v - to(u, 1) + u) / SPACING
    potential = (CORIOLIS + spin) / ((h + after + below + corner) / 4)
    kinetic = (u**2 + u_before**2 + v**2 + to(v, -1) ** 2) / 4
    outflow = flux_east - (before + h) / 2 * u_before + flux_north - to(flux_north, -1)
    height = h - DT / SPACING * outflow
    energy = kinetic + GRAVITY * height
    north = potential * (flux_north + (after + corner) / 2 * v_after)
    east = potential * (flux_east + to(flux_east, 1))
    return (
        height,
        u + DT * ((north + to(north, -1)) / 4 - (to(energy, 0, 1) - energy) / SPACING),
        v - DT * ((east + to(east, 0, -1)) / 4 + (to(energy, 1) - energy) / SPACING),
    )


def global_view(size: int, steps: int) -> Callable[[], Any]:
    """Ours: the rolls, decorated."""
    import collectives
    import spmd
    from placements import Mesh, P, Shard

    mesh, placed = Mesh(x=collectives.world().size), P(x=Shard(1))
    run = spmd.jit(looped(rolled, steps), mesh=mesh, in_placements=placed, out_placements=placed)
    return ours(run, [spmd.distribute(field, placed, mesh) for field in initial(size, mesh.size)])


def one_block(size: int, steps: int) -> Callable[[], Any]:
    """The rolls under `jax.jit`, on one block alone: what they cost in XLA. Its result is another."""
    import jax
    import jax.numpy as jnp

    run = jax.jit(looped(rolled, steps))
    state = [jnp.asarray(field) for field in initial(size, 1)]
    return lambda: jax.block_until_ready(run(*state))[0]


def mpi4jax_side(size: int, steps: int) -> Callable[[], Any]:
    """The same algorithm on one rank's block, with mpi4jax: the fields stacked, two sendrecvs a step."""
    import jax
    import jax.numpy as jnp
    import mpi4jax
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size

    def one(state: Fields) -> Fields:
        block = padded_along_y(jnp.stack(state))
        edges = block[..., :2], block[..., -2:]
        from_left = mpi4jax.sendrecv(edges[1], edges[1], source=left, dest=right, comm=comm)
        from_right = mpi4jax.sendrecv(edges[0], edges[0], source=right, dest=left, comm=comm)
        h, u, v = jnp.concatenate([from_left, block, from_right], -1)
        return stepped(state, (h, u, v))

    run = jax.jit(looped(one, steps))
    columns = slice(comm.rank * size, (comm.rank + 1) * size)
    state = [jnp.asarray(field[:, columns]) for field in initial(size, comm.size)]

    def once() -> Any:
        found = run(*state)
        jax.block_until_ready(found)
        return found[0]

    return once


def gloo(size: int, steps: int) -> Callable[[], Any]:
    """The same algorithm in JAX's own shard_map, over the devices of all processes."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    n = jax.device_count()
    mesh = jax.make_mesh((n,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))

    def one(state: Fields) -> Fields:
        block = padded_along_y(jnp.stack(state))
        from_left = lax.ppermute(block[..., -2:], "x", [(i, (i + 1) % n) for i in range(n)])
        from_right = lax.ppermute(block[..., :2], "x", [(i, (i - 1) % n) for i in range(n)])
        h, u, v = jnp.concatenate([from_left, block, from_right], -1)
        return stepped(state, (h, u, v))

    spec = sharding.spec
    run = jax.jit(jax.shard_map(looped(one, steps), mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec,) * 3))
    fields = initial(size, n)
    state = [jax.make_array_from_callback(f.shape, sharding, lambda index, f=f: f[index]) for f in fields]

    def once() -> Any:
        found = run(*state)
        jax.block_until_ready(found)
        return found[0].addressable_shards[0].data

    return once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 512], help="rows and columns of a rank's block")
    parser.add_argument("--repeat", type=int, default=7, help="calls of each side that are counted")
    parser.add_argument("--without", nargs="*", default=[], help="sides to leave out")
    options = parser.parse_args()
    import collectives

    world = collectives.world()
    if world.size < 2:
        raise SystemExit(__doc__)
    import jax
    import numpy as np

    sides: dict[str, Callable[[int, int], Callable[[], Any]]] = {
        "local view": local_view,
        "global view": global_view,
        ALONE: one_block,
    }
    if importlib.util.find_spec("mpi4jax"):
        sides["mpi4jax"] = mpi4jax_side
    elif world.rank == 0:
        print("mpi4jax is not installed: left out")
    if "gloo" not in options.without:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        port = world.broadcast(np.array([os.getpid() % 20_000 + 20_000]), root=0)[0]
        jax.distributed.initialize(f"127.0.0.1:{int(port)}", world.size, world.rank)
        sides["JAX, gloo"] = gloo
    sides = {name: side for name, side in sides.items() if name not in options.without}
    for size in options.sizes:
        steps = max(50, 2_000_000 // size**2)
        once = {name: side(size, steps) for name, side in sides.items()}
        times: dict[str, list[float]] = {name: [] for name in once}
        results: dict[str, Any] = {}
        for number in range(options.repeat + 2):
            for name, call in once.items():
                world.barrier()
                start = time.perf_counter()
                results[name] = call()
                if number > 1:
                    times[name].append((time.perf_counter() - start) / steps * 1e6)
        first = np.asarray(results["local view"])
        for name, result in results.items():
            if not np.isfinite(result).all() or (name != ALONE and not np.allclose(result, first, rtol=1e-4)):
                raise RuntimeError(f"{name} differs by {np.abs(np.asarray(result) - first).max()}")
        if world.rank == 0:
            print(f"{size} x {size} on each of {world.size} ranks, {steps} steps a call")
            base = statistics.median(times["local view"])
            for name, values in times.items():
                spread = f"({min(values):.1f} to {max(values):.1f})"
                ratio = (
                    "" if name == "local view" else f"; local view takes {base / statistics.median(values):.2f} of it"
                )
                print(f"  {name:12} {statistics.median(values):8.1f} us a step {spread}{ratio}")


if __name__ == "__main__":
    main()
