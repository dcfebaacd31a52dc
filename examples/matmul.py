"""All placement pairs of a matrix product, each with its plan.

`a` is [7, 5] and `b` is [5, 6]; along the one axis of the mesh each is replicated, sharded by rows, sharded by columns, or
held as parts of a sum. Every pair gives the plain product on every rank; what differs is what is sent.

    python examples/matmul.py            # three ranks, simulated in this process
    python examples/matmul.py --ranks 4 --plans
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

import collectives
import spmd
from placements import Mesh, P, Partial, Replicate, Shard

PLACEMENTS = (Replicate(), Shard(0), Shard(1), Partial())


def operands() -> tuple[np.ndarray, np.ndarray]:
    """Integers of both signs, so that every order of summation gives the same product."""
    a = (np.arange(35, dtype=np.float32) * 7 % 11 - 5).reshape(7, 5)
    b = (np.arange(30, dtype=np.float32) * 5 % 13 - 6).reshape(5, 6)
    return a, b


def product(mesh: Mesh, left: P, right: P) -> tuple[spmd.DArray, spmd.Program]:
    """`a @ b` with the operands placed as stated, and its Program."""
    a, b = operands()
    matmul = spmd.jit(jnp.matmul, mesh=mesh, in_placements=(left, right))
    return matmul(a, b), matmul.lower(a, b)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return how many pairs were checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=3, help="ranks to simulate in a lone process (default: 3)")
    parser.add_argument("--plans", action="store_true", help="print every Program whole")
    options = parser.parse_args(arguments)
    world = collectives.world()
    mesh = Mesh(tp=world.size if world.size > 1 else options.ranks)
    a, b = operands()
    pairs = [(P(tp=left), P(tp=right)) for left in PLACEMENTS for right in PLACEMENTS]
    for left, right in pairs:
        result, program = product(mesh, left, right)
        np.testing.assert_array_equal(result.full(), a @ b)
        for coordinate, shard in result.shards.items():
            np.testing.assert_array_equal(shard, (a @ b)[result.layout.index(result.shape, coordinate)])
        if world.rank == 0:
            sent = ", ".join(f"{c.name} {c.bytes} B" for c in program.collectives) or "nothing"
            print(f"{left!s:13} @ {right!s:13} -> {result.placements!s:10}  sends {sent}")
            if options.plans:
                print(program, end="\n\n")
    return len(pairs)


if __name__ == "__main__":
    main()
