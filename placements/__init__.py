"""Placements of arrays on a named device mesh, and the cheapest way from one to another. Standard library only.

A `Mesh` names axes over ranks; `P` says what each axis does to an array (`Shard`, `Replicate`, `Partial`); a `Layout` is
the two in canonical form; `plan_steps` lists the collectives that lead from one layout to another.
"""

from placements.cost import Machine
from placements.errors import InvalidPlacement, MeshError, PartialTypeError, PlacementError, RedistributionError
from placements.intervals import Pieces, Split
from placements.layout import Layout
from placements.mesh import Mesh
from placements.placement import P, Partial, Placement, Replicate, Shard
from placements.redistribute import ItemSizes, Step, plan_steps

__all__ = [
    "InvalidPlacement",
    "ItemSizes",
    "Layout",
    "Machine",
    "Mesh",
    "MeshError",
    "P",
    "Partial",
    "PartialTypeError",
    "Pieces",
    "Placement",
    "PlacementError",
    "RedistributionError",
    "Replicate",
    "Shard",
    "Split",
    "Step",
    "plan_steps",
]
