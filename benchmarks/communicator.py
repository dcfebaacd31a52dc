"""Every collective of a communicator, 8 B to 64 MB, beside raw mpi4py and, if torch is installed, torch.distributed over gloo.

    mpiexec -bind-to core -n 2 python benchmarks/communicator.py

Sizes are what a rank gives. All write into arrays that exist (`out=`). All in one job, in turn, with a barrier before each
call; the time of a call is that of the slowest rank; medians. The results are compared.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Call = Callable[[], Any]
SIZES = (8, 64, 1024, 8192, 65_536, 1_048_576, 8_388_608, 67_108_864)


def ours(world: Any, x: Any, out: dict[str, Any]) -> dict[str, Call]:
    """By name the calls, into `out`."""
    n = world.size
    after, before = (world.rank + 1) % n, (world.rank - 1) % n
    from collectives import Receive, Send

    return {
        "all_reduce": lambda: world.all_reduce(x, out=out["same"]),
        "reduce": lambda: world.reduce(x, out=out["same"]),
        "broadcast": lambda: world.broadcast(x, out=out["same"]),
        "all_gather": lambda: world.all_gather(x, out=out["all"]),
        "gather": lambda: world.gather(x, out=out["all"]),
        "scatter": lambda: world.scatter(x, out=out["part"]),
        "reduce_scatter": lambda: world.reduce_scatter(x, out=out["part"]),
        "all_to_all": lambda: world.all_to_all_rows(x, receives=(x.size // n,) * n, out=out["same"]),
        "batch": lambda: world.batch([Send(x, after), Receive(before, out=out["same"])]),
    }


def mpi4py_side(comm: Any, x: Any, out: dict[str, Any]) -> dict[str, Call]:
    """The same by mpi4py's blocking calls."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    same, whole, part = out["same"], out["all"], out["part"]
    from mpi4py import MPI

    def broadcast() -> None:
        if comm.rank == 0:
            same[:] = x
        comm.Bcast(same)

    return {
        "all_reduce": lambda: comm.Allreduce(x, same),
        "reduce": lambda: comm.Reduce(x, same if comm.rank == 0 else None),
        "broadcast": broadcast,
        "all_gather": lambda: comm.Allgather(x, whole),
        "gather": lambda: comm.Gather(x, whole if comm.rank == 0 else None),
        "scatter": lambda: comm.Scatter(x if comm.rank == 0 else None, part),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(x, part, MPI.SUM),
        "all_to_all": lambda: comm.Alltoall(x, same),
        "batch": lambda: comm.Sendrecv(x, after, recvbuf=same, source=before),
    }


def gloo_side(x: Any, out: dict[str, Any]) -> dict[str, Call]:
    """The same by torch.distributed over gloo, on the memory of the same arrays."""
    import torch
    import torch.distributed as dist

    rank, n = dist.get_rank(), dist.get_world_size()
    given, same, part = (torch.from_numpy(each) for each in (x, out["same"], out["part"]))
    wholes = list(torch.from_numpy(out["all"]).chunk(n))
    parts = list(given.chunk(n))

    def reduced(call: Callable[[Any], Any]) -> None:
        same.copy_(given)
        call(same)

    def batch() -> None:
        ops = [dist.P2POp(dist.isend, given, (rank + 1) % n), dist.P2POp(dist.irecv, same, (rank - 1) % n)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return {
        "all_reduce": lambda: reduced(dist.all_reduce),
        "reduce": lambda: reduced(lambda t: dist.reduce(t, 0)),
        "broadcast": lambda: reduced(lambda t: dist.broadcast(t, 0)),
        "all_gather": lambda: dist.all_gather(wholes, given),
        "gather": lambda: dist.gather(given, wholes if rank == 0 else None, dst=0),
        "scatter": lambda: dist.scatter(part, parts if rank == 0 else None, src=0),
        "all_to_all": lambda: dist.all_to_all_single(same, given),
        "batch": batch,
    }


def connect_gloo(world: Any) -> bool:
    """Whether torch is there, and its processes are connected."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    port = int(world.broadcast(np.array([os.getpid() % 20_000 + 20_000]))[0])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=world.rank, world_size=world.size)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes that a rank gives")
    parser.add_argument("--only", nargs="*", help="names of collectives")
    parser.add_argument("--without-gloo", action="store_true")
    options = parser.parse_args()
    import collectives

    world = collectives.world("mpi")
    if world.size < 2:
        raise SystemExit(__doc__)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    has_gloo = not options.without_gloo and connect_gloo(world)
    if world.rank == 0:
        print(f"{world.size} ranks; microseconds a call, medians; the ratio and the difference are to mpi4py")
        print(f"{'':15} {'bytes':>10} {'mpi4py':>10} {'ours':>10} {'':>16} {'gloo':>10}")
    for nbytes in options.sizes:
        items = max(nbytes // 4 // world.size, 1) * world.size
        x = (np.arange(items, dtype=np.float32) % 1000) + world.rank
        rooms = [
            {name: np.zeros(count, np.float32) for name, count in lengths.items()}
            for lengths in [{"same": items, "all": items * world.size, "part": items // world.size}] * 3
        ]
        sides = {"mpi4py": mpi4py_side(comm, x, rooms[0]), "ours": ours(world, x, rooms[1])}
        if has_gloo:
            sides["gloo"] = gloo_side(x, rooms[2])
        for name in sides["ours"]:
            if options.only and name not in options.only:
                continue
            for room in rooms:
                for array in room.values():
                    array.fill(0)
            times = measured(comm, {side: calls[name] for side, calls in sides.items() if name in calls}, nbytes)
            for key in rooms[0]:
                if not np.array_equal(rooms[0][key], rooms[1][key]):
                    raise RuntimeError(f"{name} of {nbytes} bytes differs")
            if world.rank == 0:
                raw, own = times["mpi4py"], times["ours"]
                other = f"{times['gloo']:10.1f}" if "gloo" in times else ""
                print(
                    f"{name:15} {nbytes:10} {raw:10.1f} {own:10.1f} {own / raw:6.2f}x {own - raw:+8.1f} {other}",
                    flush=True,
                )


def measured(comm: Any, calls: dict[str, Call], nbytes: int) -> dict[str, float]:
    """Microseconds a call by side: medians over rounds, in each of which every side makes some calls."""
    inner = max(1, min(200, 2_000_000 // (nbytes + 10_000)))
    found: dict[str, list[float]] = {side: [] for side in calls}
    for number in range(14):
        for side, call in calls.items():
            for _ in range(2 if number == 0 else 1):
                call()
            comm.Barrier()
            start = time.perf_counter()
            for _ in range(inner):
                call()
            taken = np.array([(time.perf_counter() - start) / inner * 1e6])
            slowest = np.empty(1)
            comm.Allreduce(taken, slowest, op=_max())
            if number > 1:
                found[side].append(float(slowest[0]))
    return {side: statistics.median(times) for side, times in found.items()}


@functools.cache
def _max() -> Any:
    from mpi4py import MPI

    return MPI.MAX


if __name__ == "__main__":
    main()
