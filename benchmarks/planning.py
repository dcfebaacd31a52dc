"""Tracing, planning and lowering of forward and backward of a deep MLP, not scanned; XLA's compilation not included.

    python benchmarks/planning.py            # 50 layers, meshes of 4 and of 4,096 ranks

Prints seconds (median of the repetitions) per stage.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from placements import Mesh, P, Shard

MESHES = (Mesh(dp=4), Mesh(dp=4096), Mesh(dp=2, tp=2), Mesh(dp=64, tp=64))


def loss(params: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
    """The mean square of an MLP's output."""
    for weight, bias in params:
        x = jnp.tanh(x @ weight + bias)
    return jnp.mean(x**2)


def gradient(mesh: Mesh) -> spmd.SpmdFunction:
    """Value and gradient: data-parallel over `dp`; over `tp` every other weight by columns, the others by rows."""

    def place(path: str, aval: Any) -> P:
        layer = int(path.split("[")[1].rstrip("]"))
        if "tp" not in mesh.axis_names:
            return P()
        if aval.ndim == 2:
            return P(tp=Shard(1 - layer % 2))
        return P() if layer % 2 else P(tp=Shard(0))

    return spmd.jit(jax.value_and_grad(loss), mesh=mesh, in_placements=(place, P(dp=Shard(0))))


def measure(mesh: Mesh, layers: int, width: int) -> tuple[dict[str, float], spmd.Program]:
    """Seconds of lowering to a Program, of the local jaxpr, and of the text and digest."""
    struct = jax.ShapeDtypeStruct
    params = [(struct((width, width), np.float32), struct((width,), np.float32))] * layers
    seconds: dict[str, float] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = call()
        seconds[name] = time.perf_counter() - start
        return result

    function = gradient(mesh)
    program = timed("trace and plan", lambda: function.lower(params, struct((8192, width), np.float32)))
    timed("lower", program.jaxpr)
    timed("text", lambda: str(program))
    timed("digest", lambda: program.digest)
    return seconds, program


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=50)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    for mesh in MESHES:
        runs = [measure(mesh, options.layers, options.width) for _ in range(options.repeat)]
        medians = {name: statistics.median(seconds[name] for seconds, _ in runs) for name in runs[0][0]}
        program = runs[0][1]
        words = "  ".join(f"{name} {value:.3f} s" for name, value in medians.items())
        total = medians["trace and plan"] + medians["lower"]
        print(f"{mesh!r:24} {len(program.plan.eqns)} equations, {len(program.collectives)} collectives")
        print(f"    {words}  | trace, plan, lower: {total:.3f} s")


if __name__ == "__main__":
    main()
