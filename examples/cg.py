"""Conjugate gradients, as they come with JAX, on a sharded operator; and the gradient of what they find.

The operator is -div(k grad u) on a ring of cells in two directions, plus a little of u: slices of whole arrays, that neighbours
exchange. The solver knows nothing of ranks: its dot products become all_reduces. `jax.grad` through the solve gives the
sensitivity to the conductivity k, by one more solve.

    mpiexec -n 4 python examples/cg.py                        # Mesh(y=2, x=2), on four processes
    python examples/cg.py --ranks 6 --program                 # simulated in this process; what is sent
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from grid import BLOCKS, grid_of_ranks
from jax.scipy.sparse.linalg import cg

import collectives
import spmd


def operator(conductivity: jax.Array, u: jax.Array) -> jax.Array:
    """-div(k grad u) + u / 10, symmetric and positive; k (positive) on the faces after each cell is a mean of two."""
    total = u / 10
    for dim in (0, 1):
        face = (conductivity + jnp.roll(conductivity, -1, dim)) / 2
        flux = face * (jnp.roll(u, -1, dim) - u)
        total = total - flux + jnp.roll(flux, 1, dim)
    return total


def solve(conductivity: jax.Array, source: jax.Array) -> jax.Array:
    """u with operator(u) = source."""
    return cg(lambda u: operator(conductivity, u), source, tol=1e-8, maxiter=500)[0]


def misfit(conductivity: jax.Array, source: jax.Array, observed: jax.Array) -> jax.Array:
    """Half the square of the distance between the solution and what was observed."""
    return ((solve(conductivity, source) - observed) ** 2).sum() / 2


def problem(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Conductivity, source and observations, varying with position."""
    y, x = np.meshgrid(np.arange(rows) / rows, np.arange(columns) / columns, indexing="ij")
    conductivity = 1 + 0.5 * np.sin(2 * np.pi * y) * np.cos(4 * np.pi * x)
    source = np.cos(2 * np.pi * (x + 2 * y)) + 0.3 * np.sin(6 * np.pi * x)
    return conductivity, source, 5 * np.cos(2 * np.pi * (x + 2 * y + 0.1))


def main(arguments: Sequence[str] | None = None) -> float:
    """Solve, compare value and gradient with one machine, and return the misfit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=3, help="ranks to simulate in a lone process (default: 3)")
    parser.add_argument("--rows", type=int, default=40, help="cells down (default: 40)")
    parser.add_argument("--columns", type=int, default=30, help="cells across (default: 30)")
    parser.add_argument("--program", action="store_true", help="print the solver's Program and stop")
    options = parser.parse_args(arguments)
    world = collectives.world()
    mesh = grid_of_ranks(world.size if world.size > 1 else options.ranks)
    with jax.enable_x64(True):
        given = problem(options.rows, options.columns)
        solver = spmd.jit(solve, mesh=mesh, in_placements=BLOCKS, out_placements=BLOCKS)
        program = solver.lower(*given[:2])
        program.check(exchange=..., all_reduce=..., broadcast=...)  # raises if anything is gathered
        if options.program:
            if world.rank == 0:
                print(program)
            return 0.0
        if world.rank == 0:
            print("solving, and differentiating the solver ...", flush=True)
        found = solver(*given[:2])
        np.testing.assert_allclose(found.full(), solve(*map(jnp.asarray, given[:2])), rtol=1e-6, atol=1e-6)
        sensitivity = spmd.jit(jax.value_and_grad(misfit), mesh=mesh, in_placements=BLOCKS)
        value, gradient = sensitivity(*given)
        expected = jax.value_and_grad(misfit)(*map(jnp.asarray, given))
        np.testing.assert_allclose(float(value), expected[0], rtol=1e-6)
        np.testing.assert_allclose(gradient.full(), expected[1], rtol=1e-5, atol=1e-5)
        residual = np.abs(operator(jnp.asarray(given[0]), found.full()) - given[1]).max()
    if world.rank == 0:
        print(f"residual {residual:.1e}; misfit {float(value):.6f}, its gradient is placed as {gradient.placements}")
    return float(value)


if __name__ == "__main__":
    main()
