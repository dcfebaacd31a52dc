"""What the stencils share: blocks of a grid, on a mesh that is nearly a square."""

from __future__ import annotations

import math

from placements import Mesh, P, Shard

BLOCKS = P(y=Shard(0), x=Shard(1))
"""Rows of a grid over y, columns over x."""


def grid_of_ranks(ranks: int) -> Mesh:
    """The mesh that is nearest to a square."""
    rows = max(n for n in range(1, math.isqrt(ranks) + 1) if ranks % n == 0)
    return Mesh(y=rows, x=ranks // rows)
