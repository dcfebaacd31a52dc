"""SPMD execution of pure `jax.numpy` functions: placements in, explicit collectives out.

from typing import Annotated
import jax, jax.numpy as jnp
import spmd
from placements import Mesh, P, Shard

@spmd.jit(mesh=Mesh(dp=2))
def mean(x: Annotated[jax.Array, P(dp=Shard(0))]):
    return jnp.mean(x)

print(mean.lower(x))    # the Program: every collective, before it runs
float(mean(x))          # run on every rank of the mesh
"""

from spmd import random
from spmd.api import SpmdFunction, jit
from spmd.array import DArray
from spmd.current import current_mesh, set_mesh, use_mesh
from spmd.errors import (
    AnnotationError,
    ArgumentError,
    CommunicationMismatch,
    DeletedError,
    EagerError,
    FallbackError,
    NotReplicatedError,
    PlacementWarning,
    RuleError,
    SpmdError,
    TransformationError,
)
from spmd.extend import register_rule, rule
from spmd.factories import arange, distribute, from_callback, from_local, full, ones, zeros
from spmd.local_functions import shard_map
from spmd.prefix import placements_like
from spmd.program import Program
from spmd.trace import constrain
from spmd.transforms import grad, jvp, value_and_grad, vjp, vmap

__all__ = [
    "AnnotationError",
    "ArgumentError",
    "CommunicationMismatch",
    "DArray",
    "DeletedError",
    "EagerError",
    "FallbackError",
    "NotReplicatedError",
    "PlacementWarning",
    "Program",
    "RuleError",
    "SpmdError",
    "SpmdFunction",
    "TransformationError",
    "arange",
    "constrain",
    "current_mesh",
    "distribute",
    "from_callback",
    "from_local",
    "full",
    "grad",
    "jit",
    "jvp",
    "ones",
    "placements_like",
    "random",
    "register_rule",
    "rule",
    "set_mesh",
    "shard_map",
    "use_mesh",
    "value_and_grad",
    "vjp",
    "vmap",
    "zeros",
]
