"""Heat on a plate in global view: slices of whole arrays, whose Program exchanges rows with neighbours and nothing else.

The stencil is written as on one machine, and the plate has walls: nothing in `step` knows of ranks, and sizes need not divide.

    mpiexec -n 4 python examples/heat_global.py               # Mesh(y=2, x=2), on four processes
    python examples/heat_global.py --ranks 6 --program        # simulated in this process; what each step sends
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from grid import BLOCKS, grid_of_ranks
from jax import lax
from tqdm import tqdm

import collectives
import spmd

ALPHA = 0.2
"""Diffusivity times dt / dx²: below 1/4, so it is stable."""


def initial_plate(rows: int, columns: int) -> np.ndarray:
    """Two warm spots and a cold one, in kelvin above the walls."""
    y, x = np.meshgrid(np.linspace(0, 1, rows), np.linspace(0, 1, columns), indexing="ij")
    spots = ((0.3, 0.3, 80.0), (0.7, 0.6, 50.0), (0.4, 0.75, -40.0))
    return sum(heat * np.exp(-((y - a) ** 2 + (x - b) ** 2) / 0.01) for a, b, heat in spots).astype(np.float32)


def step(plate: jax.Array) -> jax.Array:
    """One step. The walls stay as they are."""
    inner = plate[1:-1, 1:-1]
    around = plate[:-2, 1:-1] + plate[2:, 1:-1] + plate[1:-1, :-2] + plate[1:-1, 2:]
    return plate.at[1:-1, 1:-1].set(inner + ALPHA * (around - 4 * inner))


def advance(plate: jax.Array, steps: int) -> jax.Array:
    """Many steps, in one loop."""
    return lax.fori_loop(0, steps, lambda _, plate: step(plate), plate)


def main(arguments: Sequence[str] | None = None) -> np.ndarray:
    """Run, compare with one machine, and return the plate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=3, help="ranks to simulate in a lone process (default: 3)")
    parser.add_argument("--rows", type=int, default=101, help="points down the plate (default: 101)")
    parser.add_argument("--columns", type=int, default=67, help="points across (default: 67)")
    parser.add_argument("--steps", type=int, default=1000, help="steps in one compiled loop (default: 1000)")
    parser.add_argument("--calls", type=int, default=4, help="calls of that loop (default: 4)")
    parser.add_argument("--program", action="store_true", help="print the Program and stop")
    options = parser.parse_args(arguments)
    world = collectives.world()
    mesh = grid_of_ranks(world.size if world.size > 1 else options.ranks)
    whole = initial_plate(options.rows, options.columns)
    warm = spmd.jit(advance, mesh=mesh, in_placements=BLOCKS, out_placements=BLOCKS, static_argnames="steps")
    program = warm.lower(whole, options.steps)
    program.check(exchange=...)  # raises if anything but neighbours' rows is sent
    if options.program:
        if world.rank == 0:
            print(program)
        return whole
    plate = spmd.distribute(whole, BLOCKS, mesh)
    for _ in tqdm(range(options.calls), unit=f"x{options.steps} steps", disable=world.rank != 0):
        plate = warm(plate, options.steps)
    found = np.asarray(plate.full())
    expected = np.asarray(jax.jit(advance, static_argnames="steps")(jnp.asarray(whole), options.steps * options.calls))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    if world.rank == 0:
        sent = program.bytes // options.steps
        print(
            f"warmest {found.max():.3f} K, coldest {found.min():.3f} K, as on one machine; {sent} bytes a step at most"
        )
    return found


if __name__ == "__main__":
    main()
