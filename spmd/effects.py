"""Callbacks with an effect: they see whole values, and happen once.

`jax.debug.print`, `jax.debug.callback` and `io_callback` happen on the first rank of the mesh, in the order in which that rank
comes to them (`ordered=True`: in the program's). What has to be gathered for them is reported, as for operations without a
rule. What an `io_callback` returns is a sum of parts, of which the others' are nothing: so every rank gets it.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from jax import lax

from collectives import jax_compat
from collectives.jax_compat import JaxprEqn
from collectives.simulated import identity
from placements import Layout
from spmd.factors import Dims, Rule
from spmd.plan import PlannedEqn

if TYPE_CHECKING:
    from spmd.propagate import Planner

CALLBACKS: Final = ("debug_callback", "debug_print", "io_callback")
"""The primitives whose effect is to call Python."""


def plan_callback(planner: Planner, eqn: JaxprEqn) -> PlannedEqn:
    """Whole operands, and results that the first rank has."""
    operands = tuple(Layout.replicated(planner.mesh, np.ndim(atom.aval)) for atom in eqn.invars)
    results = tuple(
        Layout.replicated(planner.mesh, len(var.aval.shape)).with_partial((axis, _op(var)) for axis in planner.axes)
        for var in eqn.outvars
    )
    return planner.finish(eqn, _rule(eqn, planner.axes), operands, results)


def _op(var: Any) -> str:
    return "or" if var.aval.dtype == np.bool_ else "sum"


def _rule(eqn: JaxprEqn, axes: tuple[str, ...]) -> Rule:
    """Everything whole; the first rank calls."""
    count = itertools.count()
    shapes = [atom.aval.shape for atom in (*eqn.invars, *eqn.outvars)]
    dims: list[Dims] = [tuple((next(count),) for _ in shape) for shape in shapes]
    sizes = tuple(itertools.chain(*shapes))

    def happens(*values: Any) -> tuple[Any, ...]:
        return tuple(jax_compat.bind(eqn, list(values), eqn.params))

    def nothing(*values: Any) -> tuple[Any, ...]:
        return tuple(lax.full(var.aval.shape, identity(_op(var), var.aval.dtype)) for var in eqn.outvars)

    def local(call: Any, operands: list[Any]) -> list[Any]:
        if not axes:
            return list(happens(*operands))
        return list(lax.cond(lax.eq(call.place.flat_index(axes), np.int32(0)), happens, nothing, *operands))

    operands = len(eqn.invars)
    replicated = tuple(range(len(sizes)))
    return Rule(tuple(dims[:operands]), tuple(dims[operands:]), sizes, replicated=replicated, local=local)
