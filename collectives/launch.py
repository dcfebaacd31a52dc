"""What the launcher announced, and what this process does about it before anything computes.

Read from environment variables alone: neither mpi4py is imported nor JAX's client created. If more than one process is
announced, this process's core affinity is narrowed to its share of the node's cores (four unbound ranks on two cores train
3.5 times slower than bound ones; JAX sizes its thread pool when its client is made), and JAX dispatches synchronously (else
a Python main thread delays every collective, and errors surface elsewhere).
"""

from __future__ import annotations

import functools
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import jax

from collectives.jax_compat import backend_exists

SIZES: Final = (
    ("PMI_SIZE", "PMI_RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMIX_SIZE", "PMIX_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("WORLD_SIZE", "RANK"),
)
LOCAL: Final = (
    ("MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_NTASKS_PER_NODE", "SLURM_LOCALID"),
    ("LOCAL_WORLD_SIZE", "LOCAL_RANK"),
)


@dataclass(frozen=True, slots=True)
class Launch:
    """Size and rank in the job, and among the processes of this node, as the launcher's variables say."""

    size: int
    rank: int
    local_size: int
    local_rank: int
    variable: str


def read_launch(environ: Mapping[str, str]) -> Launch | None:
    """What the variables of a launcher say; None for a lone process.

    >>> read_launch({"PMI_SIZE": "4", "PMI_RANK": "1"}).size
    4
    """
    for size_name, rank_name in SIZES:
        size, rank = environ.get(size_name, ""), environ.get(rank_name, "")
        if size.isdigit() and rank.isdigit() and int(size) > 1:
            local_size, local_rank = _local(environ, int(size), int(rank))
            return Launch(int(size), int(rank), local_size, local_rank, size_name)
    return None


def _local(environ: Mapping[str, str], size: int, rank: int) -> tuple[int, int]:
    for size_name, rank_name in LOCAL:
        found, local_rank = environ.get(size_name, ""), environ.get(rank_name, "")
        if found.isdigit() and local_rank.isdigit():
            return int(found), int(local_rank)
    return size, rank


@functools.cache
def launch() -> Launch | None:
    """What was announced to this process, read once."""
    return read_launch(os.environ)


def share(cores: list[int], local_size: int, local_rank: int) -> list[int]:
    """The cores of one of `local_size` processes: disjoint runs where there are enough, else one core in turn.

    >>> share([0, 1, 2, 3], 2, 1), share([0, 1], 4, 3)
    ([2, 3], [1])
    """
    if len(cores) < local_size:
        return [cores[local_rank % len(cores)]]
    return cores[local_rank * len(cores) // local_size : (local_rank + 1) * len(cores) // local_size]


def gpus(environ: Mapping[str, str], devices: Sequence[str]) -> int:
    """How many GPUs this process may use, from its variables and the names in /dev; none where JAX is told to use CPUs.

    >>> gpus({"CUDA_VISIBLE_DEVICES": "2,3"}, []), gpus({}, ["nvidia0", "nvidiactl"])
    (2, 1)
    >>> gpus({"JAX_PLATFORMS": "cpu"}, ["nvidia0"])
    0
    """
    if environ.get("JAX_PLATFORMS", "cuda").split(",")[0] not in ("cuda", "gpu", ""):
        return 0
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return sum(1 for name in devices if re.fullmatch(r"nvidia\d+", name))


@functools.cache
def visible_gpus() -> int:
    """How many GPUs this process may use, without a look at CUDA."""
    return gpus(os.environ, os.listdir("/dev") if os.path.isdir("/dev") else [])


def prepare_process() -> None:
    """Narrow the affinity, make dispatch synchronous and take one GPU, if more than one process is announced."""
    found = launch()
    if found is None:
        return
    if backend_exists():
        warnings.warn(
            "JAX has computed before spmd was imported: the core affinity and synchronous dispatch come too late. "
            "Import spmd (or collectives) before anything that computes.",
            stacklevel=3,
        )
    if visible_gpus() > 1:
        jax.config.update("jax_cuda_visible_devices", str(found.local_rank % visible_gpus()))
    if os.environ.get("SPMD_ASYNC") != "1":
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    if os.environ.get("SPMD_AFFINITY") != "off" and "sched_setaffinity" in dir(os):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) == os.cpu_count():  # else the launcher has bound this process already
            os.sched_setaffinity(0, share(cores, found.local_size, found.local_rank))
