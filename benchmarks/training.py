"""One training step of an MLP 784-2048-2048-10, batch 256: ours over MPI, and the same in other libraries.

    mpiexec -bind-to core -n 2 python benchmarks/training.py              # beside JAX over gloo, and mpi4jax if installed
    mpiexec -bind-to core -n 2 python benchmarks/training.py --kind fsdp
    torchrun --nproc-per-node 2 benchmarks/training.py --torch            # DDP; with --kind fsdp FSDP2

All sides of one job run in turn, with a barrier before each step; medians in milliseconds, and the largest relative difference
of the losses. torch has a launcher of its own, so its time is compared between jobs.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

LAYERS = (784, 2048, 2048, 10)
BATCH = 256
RATE = 0.01


def initial() -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray, np.ndarray]:
    """Parameters and one batch, the same on every rank."""
    rng = np.random.default_rng(0)
    params = [
        (rng.normal(size=(m, n)).astype(np.float32) * np.float32(np.sqrt(2 / m)), np.zeros(n, np.float32))
        for m, n in itertools.pairwise(LAYERS)
    ]
    x, y = (rng.normal(size=(BATCH, n)).astype(np.float32) for n in (LAYERS[0], 10))
    return params, x, y


def loss(params: Any, x: Any, y: Any) -> Any:
    """Mean squared error of a ReLU network."""
    import jax
    import jax.numpy as jnp

    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = params[-1]
    return jnp.mean((x @ w + b - y) ** 2)


def step(params: Any, x: Any, y: Any) -> Any:
    """One step of gradient descent."""
    import jax

    value, gradient = jax.value_and_grad(loss)(params, x, y)
    return jax.tree.map(lambda p, g: p - RATE * g, params, gradient), value


def ours(kind: str) -> Callable[[], float]:
    """A step of ours, with its own state."""
    import jax

    import collectives
    import spmd
    from placements import Mesh, P, Shard

    world = collectives.world()
    mesh, rows = Mesh(dp=world.size), P(dp=Shard(0))
    places = P() if kind == "dp" else rows
    run = spmd.jit(step, mesh=mesh, in_placements=(places, rows, rows), out_placements=(places, P()), donate_argnums=0)
    params, x, y = initial()
    state = {"params": spmd.distribute(params, places, mesh)}
    x, y = spmd.distribute(x, rows, mesh), spmd.distribute(y, rows, mesh)

    def once() -> float:
        state["params"], value = run(state["params"], x, y)
        jax.block_until_ready([leaf.local for leaf in jax.tree.leaves(state["params"])])
        return float(value)

    return once


def gloo(kind: str) -> Callable[[], float]:
    """The same step in JAX over gloo: arrays sharded over the devices of all processes, with the same placements."""
    import jax

    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("dp",), axis_types=auto)
    spec = jax.sharding.PartitionSpec
    whole, rows = (jax.sharding.NamedSharding(mesh, s) for s in (spec(), spec("dp")))
    places = whole if kind == "dp" else rows

    def place(x: np.ndarray, sharding: Any) -> Any:
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    params, x, y = initial()
    state = {"params": jax.tree.map(lambda leaf: place(leaf, places), params)}
    x, y = place(x, rows), place(y, rows)
    run = jax.jit(step, in_shardings=(places, rows, rows), out_shardings=(places, whole), donate_argnums=0)

    def once() -> float:
        state["params"], value = run(state["params"], x, y)
        jax.block_until_ready(state["params"])
        return float(value)

    return once


def by_hand() -> Callable[[], float]:
    """The data-parallel step written for one rank with mpi4jax: gradients are averaged leaf by leaf."""
    import jax
    import mpi4jax
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()

    def local(params: Any, x: Any, y: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, x, y)
        mean = lambda leaf: mpi4jax.allreduce(leaf, op=MPI.SUM, comm=comm) / comm.size  # noqa: E731
        return jax.tree.map(lambda p, g: p - RATE * mean(g), params, gradient), mean(value)

    run = jax.jit(local, donate_argnums=0)
    params, x, y = initial()
    rows = slice(comm.rank * BATCH // comm.size, (comm.rank + 1) * BATCH // comm.size)
    state = {"params": jax.tree.map(jax.numpy.asarray, params)}
    x, y = jax.numpy.asarray(x[rows]), jax.numpy.asarray(y[rows])

    def once() -> float:
        state["params"], value = run(state["params"], x, y)
        jax.block_until_ready(state["params"])
        return float(value)

    return once


def torch_step(kind: str) -> Callable[[], float]:
    """The same step in torch over gloo: DDP, or FSDP2 over the layers."""
    import torch
    import torch.distributed as dist

    params, x, y = initial()
    model = torch.nn.Sequential()
    for index, (w, b) in enumerate(params):
        layer = torch.nn.Linear(*w.shape)
        layer.weight.data, layer.bias.data = torch.tensor(w.T.copy()), torch.tensor(b)
        model.append(layer)
        if index < len(params) - 1:
            model.append(torch.nn.ReLU())
    if kind == "dp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    local_x, local_y = torch.tensor(x[rows]), torch.tensor(y[rows])

    def once() -> float:
        value = ((model(local_x) - local_y) ** 2).mean()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = value.detach().clone()
        dist.all_reduce(total)
        return float(total) / size

    return once


def measure(sides: dict[str, Callable[[], float]], barrier: Callable[[], Any], repeat: int) -> tuple[Any, Any]:
    """Milliseconds and losses of every side, in turn, after two rounds that are not counted."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(repeat + 2):
        for name, once in sides.items():
            barrier()
            start = time.perf_counter()
            losses[name].append(once())
            if number > 1:
                times[name].append((time.perf_counter() - start) * 1e3)
    return times, losses


def report(times: dict[str, list[float]], losses: dict[str, list[float]]) -> None:
    """Medians, ratios to the first side, differences of losses."""
    first = next(iter(times))
    for name, values in times.items():
        ratio = statistics.median(times[first]) / statistics.median(values)
        apart = np.max(np.abs(np.array(losses[first]) - losses[name]) / np.abs(losses[name]))
        print(f"  {name:16} {statistics.median(values):6.1f} ms ({min(values):.1f} to {max(values):.1f})", end="")
        print("" if name == first else f"; {first} takes {ratio:.2f} of it; losses differ by {apart:.0e}")


def run_torch(kind: str, repeat: int) -> None:
    """Under torchrun."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(os.environ["LOCAL_RANK"])]})
    dist.init_process_group("gloo")
    name = "torch DDP" if kind == "dp" else "torch FSDP2"
    times, losses = measure({name: torch_step(kind)}, dist.barrier, repeat)
    if dist.get_rank() == 0:
        report(times, losses)
        print(f"  losses from {losses[name][0]:.6f} to {losses[name][-1]:.6f}")
    dist.destroy_process_group()


def main() -> None:
    """Print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=("dp", "fsdp"), default="dp")
    parser.add_argument("--torch", action="store_true", help="torch's side, under torchrun")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--port", type=int, default=45000 + os.getppid() % 10000)
    options = parser.parse_args()
    if options.torch:
        run_torch(options.kind, options.repeat)
        return
    import jax

    import collectives

    world: Any = collectives.world()
    port = int(world.broadcast(np.array([options.port]), root=0)[0])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", world.size, world.rank)
    sides = {"spmd over MPI": ours(options.kind), "JAX over gloo": gloo(options.kind)}
    if options.kind == "dp" and importlib.util.find_spec("mpi4jax"):
        sides["mpi4jax by hand"] = by_hand()
    elif options.kind == "dp" and world.rank == 0:
        print("  mpi4jax is not installed")
    times, losses = measure(sides, world.barrier, options.repeat)
    if world.rank == 0:
        report(times, losses)
        print(f"  losses from {losses['spmd over MPI'][0]:.6f} to {losses['spmd over MPI'][-1]:.6f}")


if __name__ == "__main__":
    main()
