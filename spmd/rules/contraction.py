"""Contractions: dot_general, with factors for batch, free and contracting dims."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import jax.numpy as jnp

from collectives.jax_compat import JaxprEqn
from spmd.factors import Passes, Rule
from spmd.rules.elementwise import linear_ops


def _dot_general(eqn: JaxprEqn) -> Rule | None:
    (contract_l, contract_r), (batch_l, batch_r) = eqn.params["dimension_numbers"]
    left, right = (atom.aval for atom in eqn.invars)
    if eqn.outvars[0].aval.dtype == jnp.bool_:
        return None
    sizes = list(left.shape)
    dims_l = tuple((dim,) for dim in range(left.ndim))
    shared = dict(zip((*contract_r, *batch_r), (*contract_l, *batch_l), strict=True))
    dims_r = []
    for dim, size in enumerate(right.shape):
        if dim not in shared:
            shared[dim] = len(sizes)
            sizes.append(size)
        dims_r.append((shared[dim],))
    free_l = [dim for dim in range(left.ndim) if dim not in (*contract_l, *batch_l)]
    free_r = [shared[dim] for dim in range(right.ndim) if dim not in (*contract_r, *batch_r)]
    result = tuple((factor,) for factor in (*batch_l, *free_l, *free_r))
    return Rule(
        (dims_l, tuple(dims_r)),
        (result,),
        tuple(sizes),
        reductions=tuple((factor, "sum") for factor in contract_l),
        passes=_passes(eqn, left.dtype, right.dtype),
        flops=2.0 * math.prod(sizes),
    )


def _passes(eqn: JaxprEqn, left: Any, right: Any) -> tuple[Passes, ...]:
    """Multilinear in integers. By a float that may be infinite, parts of both signs would give NaN in place of an infinity."""
    dtype = eqn.outvars[0].aval.dtype
    if not left == right == dtype or jnp.issubdtype(dtype, jnp.inexact):
        return ()
    return tuple(Passes(linear_ops(dtype), (index,)) for index in (0, 1))


TABLE: Final[dict[str, Callable[[JaxprEqn], Rule | None]]] = {"dot_general": _dot_general}
