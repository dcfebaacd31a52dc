"""Concatenations of slices, as one step: `jnp.roll`, and halos that wrap around.

`jnp.concatenate([x[-1:], x[:-1]])` needs of x one element of the neighbour. As a slice, and then a concatenation of what the
slices made, whose pieces lie elsewhere, each would send it on. So a concatenation takes the slices itself: its `bounds` say
what it takes of each operand.
"""

from __future__ import annotations

from typing import Any

from collectives.jax_compat import Atom, JaxprEqn, Literal
from spmd.trace import GlobalJaxpr


def with_slices_taken(jaxpr: GlobalJaxpr) -> GlobalJaxpr:
    """The same computation, whose concatenations take slices along their dim themselves; in bodies too."""
    slices: dict[Atom, JaxprEqn] = {}
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        if "bodies" in params:
            bodies = tuple(with_slices_taken(body) for body in params["bodies"])
            eqn = eqn.replace(params={**params, "bodies": bodies})
        elif name == "slice" and set(params["strides"] or (1,)) == {1}:
            slices[eqn.outvars[0]] = eqn
        elif name == "concatenate" and "bounds" not in params:
            eqn = _taking(eqn, slices)
        eqns.append(eqn)
    return jaxpr.with_equations(eqns)


def _taking(eqn: JaxprEqn, slices: dict[Atom, JaxprEqn]) -> JaxprEqn:
    """A concatenation with what operands are slices of, along its dim alone, in their place."""
    along = eqn.params["dimension"]
    operands: list[Any] = []
    bounds: list[tuple[int, int]] = []
    for atom in eqn.invars:
        maker = None if isinstance(atom, Literal) else slices.get(atom)
        source, taken = atom, (0, atom.aval.shape[along])
        if maker is not None:
            (before,) = maker.invars
            shape, after = before.aval.shape, atom.aval.shape
            if shape[:along] + shape[along + 1 :] == after[:along] + after[along + 1 :]:
                starts, limits = maker.params["start_indices"], maker.params["limit_indices"]
                source, taken = before, (starts[along], limits[along])
        operands.append(source)
        bounds.append(taken)
    if operands == list(eqn.invars):
        return eqn
    return eqn.replace(invars=operands, params={**eqn.params, "bounds": tuple(bounds)})
