"""Lookups whose indices count along a dim, as lookups batched over it.

In `logits[jnp.arange(n), labels]` row i of the result needs row i of the table and no other; to JAX, and to a rule, both are
indices that might be anything. Where an index is seen to count, the dim that it looks up and the one that it counts along
become one: shards of both then stay where they are, in the scatter of the gradient too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from collectives.jax_compat import Atom, JaxprEqn, Literal, Var, known_primitive, shaped_like
from spmd.rules.movement import factorize
from spmd.trace import GlobalJaxpr, drop_dead

LOOKUPS: Final = frozenset(
    {"gather", "scatter", "scatter-add", "scatter-mul", "scatter-max", "scatter-min", "scatter-sub"}
)

CONCATENATE: Final = known_primitive("concatenate")
SLICE: Final = known_primitive("slice")


def with_aligned_lookups(jaxpr: GlobalJaxpr) -> GlobalJaxpr:
    """The same computation with lookups batched where indices count along a dim; in bodies too."""
    return _batched(jaxpr, _Known(jaxpr.constants))


def _batched(jaxpr: GlobalJaxpr, known: _Known) -> GlobalJaxpr:
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if "bodies" in eqn.params:
            bodies = []
            for body, entering in zip(eqn.params["bodies"], _entering(eqn), strict=True):
                inside = _Known(body.constants)
                for atom, var, shift in entering:
                    known.tell(atom, inside, var, shift)
                bodies.append(_batched(body, inside))
                if eqn.primitive.name == "scan":
                    carries = eqn.params["counts"][1]
                    for atom, var in zip(body.outputs[carries:], eqn.outvars[carries:], strict=True):
                        inside.tell(atom, known, var, 1)
            eqn = eqn.replace(params={**eqn.params, "bodies": tuple(bodies)})
        known.learn(eqn)
        eqns += known.batched(eqn) if eqn.primitive.name in LOOKUPS else [eqn]
    return dataclasses.replace(jaxpr, eqns=tuple(drop_dead(eqns, list(jaxpr.outputs))))


def _entering(eqn: JaxprEqn) -> Iterator[list[tuple[Atom, Var, int]]]:
    """For every body of a loop or branch what it gets that is the same in every iteration: the operand, the body's input, and
    by how much dims shift: a row of what is scanned has one less."""
    params, operands, bodies = eqn.params, eqn.invars, eqn.params["bodies"]
    if eqn.primitive.name == "scan":
        consts, carries = params["counts"]
        triples = zip(operands, bodies[0].inputs, [0] * (consts + carries) + [-1] * len(operands), strict=False)
        yield [triple for at, triple in enumerate(triples) if not consts <= at < consts + carries]
    elif eqn.primitive.name == "while":
        first, second = params["cond_nconsts"], params["body_nconsts"]
        for body, given in zip(bodies, (operands[:first], operands[first : first + second]), strict=True):
            yield [(atom, var, 0) for atom, var in zip(given, body.inputs, strict=False)]
    else:
        for body in bodies:
            yield [(atom, var, 0) for atom, var in zip(operands[1:], body.inputs, strict=True)]


def _counted(array: np.ndarray[Any, Any]) -> int | None:
    """The dim that an array counts along from 0, if it does."""
    for dim, size in enumerate(array.shape):
        counting = np.arange(size).reshape(-1, *(1,) * (array.ndim - dim - 1))
        if array.size and np.array_equal(array, np.broadcast_to(counting, array.shape)):
            return dim
    return None


class _Known:
    """What is known of the values of a jaxpr: the dim that one counts along from 0, which are false everywhere, and of arrays
    of indices the dim that each column counts along, or None."""

    def __init__(self, constants: Sequence[tuple[Var, Any]]) -> None:
        self.counts: dict[Var, int] = {}
        self.false: set[Var] = set()
        self.columns: dict[Var, list[int | None]] = {}
        for var, value in constants:
            kind = getattr(value, "dtype", None)
            if kind == np.bool_ and not np.any(value):
                self.false.add(var)
            if isinstance(kind, np.dtype) and kind.kind in "iu" and (dim := _counted(np.asarray(value))) is not None:
                self.counts[var] = dim

    def tell(self, atom: Atom, other: _Known, var: Var, shift: int) -> None:
        """Let what is known of a value be known of another elsewhere, whose dims are shifted."""
        if isinstance(atom, Literal):
            return
        dim = self.counts.get(atom)
        if dim is not None and dim + shift >= 0:
            other.counts[var] = dim + shift
        if atom in self.columns:
            dims = (None if dim is None or dim + shift < 0 else dim + shift for dim in self.columns[atom])
            other.columns[var] = list(dims)
        if atom in self.false:
            other.false.add(var)

    def along(self, atom: Atom) -> int | None:
        """The dim that a value counts along."""
        return None if isinstance(atom, Literal) else self.counts.get(atom)

    def learn(self, eqn: JaxprEqn) -> None:
        """What an equation says of its result."""
        name, params = eqn.primitive.name, eqn.params
        if len(eqn.outvars) != 1:
            return
        (result,) = eqn.outvars
        dim: int | None = None
        if name == "iota" and np.dtype(params["dtype"]).kind in "iu":
            dim = params["dimension"]
        elif name == "lt" and self.along(eqn.invars[0]) is not None and _is_zero(eqn.invars[1]):
            self.false.add(result)
        elif name == "select_n" and eqn.invars[0] in self.false:
            dim = self.along(eqn.invars[1])
        elif name == "concatenate" and params["dimension"] == len(result.aval.shape) - 1:
            if all(atom.aval.shape[-1] == 1 for atom in eqn.invars):
                self.columns[result] = list(map(self.along, eqn.invars))
        elif name in ("broadcast_in_dim", "convert_element_type", "reshape") and len(eqn.invars) == 1:
            before = self.along(eqn.invars[0])
            dim = None if before is None else _moved(eqn, before)
        if dim is not None:
            self.counts[result] = dim

    def batched(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """A lookup, batched over the dims that indices count along as far as these go. One index is left at least."""
        table, indices = eqn.invars[:2]
        columns = [] if isinstance(indices, Literal) else self.columns.get(indices, [])
        names = GATHER if eqn.primitive.name == "gather" else SCATTER
        numbers = eqn.params["dimension_numbers"]
        looked_up, single, outer, inner = (tuple(getattr(numbers, name)) for name in names)
        pairs = dict(zip(outer, inner, strict=True))
        kept: list[int] = []
        for at, (dim, along) in enumerate(zip(looked_up, columns, strict=False)):
            whole = along is not None and table.aval.shape[dim] == indices.aval.shape[along]
            free = along not in (*pairs.values(), len(indices.aval.shape) - 1)
            if along is not None and whole and free and dim in single:
                pairs[dim] = along
            else:
                kept.append(at)
        if len(kept) in (0, len(columns)):
            return [eqn]
        taken, left = _columns(eqn, indices, kept)
        new = (
            tuple(looked_up[at] for at in kept),
            tuple(dim for dim in single if dim not in pairs),
            *zip(*sorted(pairs.items()), strict=True),
        )
        numbers = numbers._replace(**dict(zip(names, new, strict=True)))
        params = {**eqn.params, "dimension_numbers": numbers, "indices_are_sorted": False}
        return [*taken, eqn.replace(invars=[table, left, *eqn.invars[2:]], params=params)]


def _columns(eqn: JaxprEqn, indices: Atom, kept: Sequence[int]) -> tuple[list[JaxprEqn], Var]:
    """The equations that take some columns of the indices of a lookup, and what they make."""
    shape = indices.aval.shape
    start, found, eqns = (0,) * (len(shape) - 1), [], []
    for at in kept:
        found.append(Var(shaped_like(indices.aval, (*shape[:-1], 1))))
        bounds = {"start_indices": (*start, at), "limit_indices": (*shape[:-1], at + 1), "strides": None}
        eqns.append(eqn.replace(primitive=SLICE, invars=[indices], outvars=found[-1:], params=bounds))
    if len(kept) > 1:
        joined = Var(shaped_like(indices.aval, (*shape[:-1], len(kept))))
        along = {"dimension": len(shape) - 1}
        eqns.append(eqn.replace(primitive=CONCATENATE, invars=list(found), outvars=[joined], params=along))
        found.append(joined)
    return eqns, found[-1]


GATHER: Final = "start_index_map", "collapsed_slice_dims", "operand_batching_dims", "start_indices_batching_dims"
SCATTER: Final = (
    "scatter_dims_to_operand_dims",
    "inserted_window_dims",
    "operand_batching_dims",
    "scatter_indices_batching_dims",
)
"""Of the dimension numbers of lookups: the dims that indices look up, those of one element, and the pairs of batched dims."""


def _is_zero(atom: Atom) -> bool:
    return isinstance(atom, Literal) and not np.any(np.asarray(atom.val))


def _moved(eqn: JaxprEqn, dim: int) -> int | None:
    """Where a dim of the operand is in the result of an equation that moves data, if it is there as it was."""
    (operand,), (result,) = eqn.invars, eqn.outvars
    before, after = operand.aval.shape, result.aval.shape
    if eqn.primitive.name == "convert_element_type":
        kind = np.dtype(result.aval.dtype)
        return dim if kind.kind in "iu" and before[dim] - 1 <= np.iinfo(kind).max else None
    if eqn.primitive.name == "broadcast_in_dim":
        to = int(eqn.params["broadcast_dimensions"][dim])
        return to if before[dim] == after[to] else None
    sources, targets, _, _ = factorize(before, after)
    return next((at for at, factors in enumerate(targets) if factors and factors == sources[dim]), None)
