"""Nonlinear shallow water on a ring in both directions: a local function, one halo exchange a step, in one compiled loop.

Two vortices on a rotating plane turn around one another. Every rank has a block of the grid; `changes` gets it with two rows
and columns of its neighbours around it, which is all that a rank ever learns of the others. The scheme is Sadourny's on
Arakawa's C grid (height in the middle of a cell, velocities on its east and north faces), forward-backward in time with
Adams-Bashforth for the velocities, and in flux form: mass is conserved to rounding.

    mpiexec -n 4 python examples/shallow_water.py             # Mesh(y=2, x=2), on four processes
    python examples/shallow_water.py --ranks 6 --size 48      # Mesh(y=2, x=3), simulated in this process
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from grid import BLOCKS, grid_of_ranks
from jax import lax
from tqdm import tqdm

import collectives
import spmd
from placements import Mesh, P

GRAVITY, CORIOLIS, DEPTH = 9.81, 1e-4, 100.0
"""m/s², 1/s, m."""
LENGTH = 5e5
"""Of the square, in m."""
DAMPING = 0.1
"""What Adams-Bashforth takes more of the present than it should: then fast waves decay, slowly."""

Block = tuple[jax.Array, jax.Array, jax.Array]
"""Height (m), velocity to the east and to the north (m/s), all of one shape."""

State = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]
"""A block without anything around it, and its accelerations (m/s²) of the step before."""


def initial_state(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two vortices of equal sign, their velocities in balance with the slope of the water."""
    y, x = np.meshgrid(*[(np.arange(size) + 0.5) / size * LENGTH] * 2, indexing="ij")
    height = np.full((size, size), DEPTH)
    for sign in (-1, 1):
        away = (x - LENGTH * (0.5 + 0.11 * sign)) ** 2 + (y - LENGTH * (0.5 + 0.03 * sign)) ** 2
        height -= 3.0 * np.exp(-away / (2 * (LENGTH / 16) ** 2))
    spacing = LENGTH / size
    east = -GRAVITY / CORIOLIS * (np.roll(height, -1, 0) - np.roll(height, 1, 0)) / (2 * spacing)
    north = GRAVITY / CORIOLIS * (np.roll(height, -1, 1) - np.roll(height, 1, 1)) / (2 * spacing)
    return height, east, north


def changes(padded: Block, spacing: float, dt: float) -> Block:
    """The height after dt (s), and the accelerations, from blocks with two rows and columns around them."""
    h, u, v = padded

    def at(field: jax.Array, down: int = 0, right: int = 0) -> jax.Array:
        """A field on the block and one cell around it, so many cells further on."""
        rows, columns = field.shape[0] - 2, field.shape[1] - 2
        return field[1 + down : 1 + down + rows, 1 + right : 1 + right + columns]

    def wide(field: jax.Array) -> jax.Array:
        """A field of the block and one cell around it, in the shape of a padded one; the outermost cells are not read."""
        return jnp.pad(field, 1)

    flux_east, flux_north = wide((at(h) + at(h, 0, 1)) / 2 * at(u)), wide((at(h) + at(h, 1)) / 2 * at(v))
    spin = (at(v, 0, 1) - at(v) - at(u, 1) + at(u)) / spacing
    potential = wide((CORIOLIS + spin) / ((at(h) + at(h, 0, 1) + at(h, 1) + at(h, 1, 1)) / 4))
    kinetic = (at(u) ** 2 + at(u, 0, -1) ** 2 + at(v) ** 2 + at(v, -1) ** 2) / 4
    outflow = at(flux_east) - at(flux_east, 0, -1) + at(flux_north) - at(flux_north, -1)
    height = at(h) - dt / spacing * outflow
    energy = wide(kinetic + GRAVITY * height)

    def block(field: jax.Array, down: int = 0, right: int = 0) -> jax.Array:
        """A field on the block alone."""
        rows, columns = field.shape[0] - 4, field.shape[1] - 4
        return field[2 + down : 2 + down + rows, 2 + right : 2 + right + columns]

    def carried(flux: jax.Array, down: int, right: int) -> jax.Array:
        """Potential vorticity times the flux across it, on both sides of a face."""
        across = [
            block(potential, -i * right, -i * down)
            * (block(flux, -i * right, -i * down) + block(flux, down - i * right, right - i * down))
            for i in (0, 1)
        ]
        return (across[0] + across[1]) / 4

    east = carried(flux_north, 0, 1) - (block(energy, 0, 1) - block(energy)) / spacing
    north = -carried(flux_east, 1, 0) - (block(energy, 1) - block(energy)) / spacing
    return height[1:-1, 1:-1], east, north


def step(number: int | jax.Array, state: State, padded: Block, spacing: float, dt: float) -> State:
    """One step of dt (s). The first of a loop knows no accelerations before it."""
    _, u, v, east_before, north_before = state
    height, east, north = changes(padded, spacing, dt)
    more = jnp.where(number == 0, 0.0, 0.5 + DAMPING)
    return (
        height,
        u + dt * (east + more * (east - east_before)),
        v + dt * (north + more * (north - north_before)),
        east,
        north,
    )


def simulation(mesh: Mesh, spacing: float, dt: float, steps: int) -> spmd.SpmdFunction:
    """`steps` steps as one local function: state to state, and the mass (m³) at the end."""

    def advance(h: jax.Array, u: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        def one(number: int, state: State) -> State:
            padded = collectives.halo_exchange(state[:3], {"y": 0, "x": 1}, width=2)
            return step(number, state, padded, spacing, dt)

        state = lax.fori_loop(0, steps, one, (h, u, v, jnp.zeros_like(u), jnp.zeros_like(v)))
        return *state[:3], collectives.all_reduce(state[0].sum() * spacing**2, ("y", "x"))

    return spmd.shard_map(advance, mesh=mesh, in_placements=BLOCKS, out_placements=(BLOCKS, BLOCKS, BLOCKS, P()))


def picture(height: np.ndarray, east: np.ndarray, north: np.ndarray, path: Path) -> None:
    """Depth and vorticity, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    spacing = LENGTH / len(height)
    spin = (np.roll(north, -1, 1) - north - np.roll(east, -1, 0) + east) / spacing
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    for axis, field, title in zip(axes, (height, spin / CORIOLIS), ("height (m)", "vorticity / f"), strict=True):
        extent = (0, LENGTH / 1e3, 0, LENGTH / 1e3)
        figure.colorbar(axis.imshow(field, origin="lower", extent=extent), ax=axis)
        axis.set(title=title, xlabel="km")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def run(mesh: Mesh, size: int, steps: int, calls: int, quiet: bool = False) -> tuple[list[spmd.DArray], list[float]]:
    """The final height and velocities, and the mass before and after every call."""
    if size % mesh.shape["y"] or size % mesh.shape["x"]:
        raise ValueError(
            f"a grid of {size} x {size} does not divide over {mesh!r}: blocks of a local function are equal."
        )
    spacing = LENGTH / size
    dt = 0.4 * spacing / math.sqrt(2 * GRAVITY * DEPTH)
    advance = simulation(mesh, spacing, dt, steps)
    state: list[spmd.DArray] = [spmd.distribute(field, BLOCKS, mesh) for field in initial_state(size)]
    mass = [float(np.sum(initial_state(size)[0]) * spacing**2)]
    for _ in tqdm(range(calls), unit=f"x{steps} steps", disable=quiet or collectives.world().rank != 0):
        *state, total = advance(*state)
        mass.append(float(total))
    return state, mass


def main(arguments: Sequence[str] | None = None) -> float:
    """Run, save the picture, and return the relative change of the mass."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1, help="ranks to simulate in a lone process (default: 1)")
    parser.add_argument("--size", type=int, default=96, help="cells along each side (default: 96)")
    parser.add_argument("--steps", type=int, default=2000, help="steps in one compiled loop (default: 2000)")
    parser.add_argument("--calls", type=int, default=4, help="calls of that loop (default: 4)")
    parser.add_argument("--output", type=Path, default=Path("shallow_water.png"), help="the picture to save")
    parser.add_argument("--program", action="store_true", help="print the Program and stop")
    options = parser.parse_args(arguments)
    world = collectives.world()
    mesh = grid_of_ranks(world.size if world.size > 1 else options.ranks)
    with jax.enable_x64(True):
        if options.program:
            field = jax.ShapeDtypeStruct((options.size, options.size), np.float64)
            spacing = LENGTH / options.size
            program = simulation(mesh, spacing, 0.4 * spacing / math.sqrt(2 * GRAVITY * DEPTH), options.steps)
            print(program.lower(field, field, field), end="\n" if world.rank == 0 else "")
            return 0.0
        state, mass = run(mesh, options.size, options.steps, options.calls)
        fields = [np.asarray(field.full()) for field in state]
    change = max(abs(each / mass[0] - 1) for each in mass)
    if world.rank == 0:
        picture(*fields, options.output)
        print(
            f"mass {mass[-1]:.9e} m³, changed by {change:.1e}; deepest {fields[0].min():.3f} m; saved {options.output}"
        )
    if not np.isfinite(fields[0]).all():
        raise RuntimeError("the water is not finite any more: the time step is too long")
    if change > 1e-12:
        raise RuntimeError(f"mass changed by {change:.1e}: more than rounding")
    return change


if __name__ == "__main__":
    main()
