"""Collectives of local functions: over the axes that stay global they act on every element by itself.

Those over the local axes are what such an equation is for: `call_of` says which collective it is. Dims that it gathers or
scatters must be whole; sums and movement let parts along the other axes pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from collectives.functions import broadcast_p, permute_p, reduce_p
from collectives.jax_compat import JaxprEqn
from collectives.primitives import Arguments
from placements import Split
from spmd.factors import Passes, Rule
from spmd.rules.elementwise import linear_ops


@dataclass(frozen=True, slots=True)
class Call:
    """What an equation of a local function sends, in one message: a row of `collectives.primitives.TABLE`, over `axes`.

    `each` has the parameters of every operand.
    """

    name: str
    axes: tuple[str, ...]
    each: tuple[Arguments, ...]

    @property
    def op(self) -> str | None:
        """The reduction, if it is one."""
        return self.each[0].get("op")


def names_of(eqn: JaxprEqn) -> tuple[str, ...]:
    """The axes that a collective of a local function names."""
    found = eqn.params.get("axes", eqn.params.get("axis_name"))
    return (found,) if isinstance(found, str) else tuple(found)


def _rule(eqn: JaxprEqn) -> Rule:
    """Every dim by itself, those whole that a collective changes."""
    sizes: list[int] = []
    replicated: list[int] = []

    def factor(size: int, whole: bool) -> int:
        index = len(sizes)
        sizes.append(size)
        replicated.extend([index] * whole)
        return index

    operands, results = [], []
    changed = CHANGED.get(eqn.primitive.name, ())
    for atom, var in zip(eqn.invars, eqn.outvars, strict=True):
        whole = {eqn.params[name] for name in changed}
        before = [factor(size, dim in whole) for dim, size in enumerate(atom.aval.shape)]
        after = [factor(size, True) if dim in whole else before[dim] for dim, size in enumerate(var.aval.shape)]
        operands.append(tuple((each,) for each in before))
        results.append(tuple((each,) for each in after))
    alone = len(eqn.invars) == 1 and eqn.primitive.name not in ("pmax", "pmin", reduce_p.name)
    passes = (Passes(linear_ops(eqn.outvars[0].aval.dtype), (0,), movement=True),) if alone else ()
    return Rule(tuple(operands), tuple(results), tuple(sizes), replicated=tuple(replicated), passes=passes)


def _axis_index(eqn: JaxprEqn) -> Rule:
    axes = names_of(eqn)
    return Rule((), ((),), (), local=lambda call, operands: [call.place.flat_index(axes)])


CHANGED: Final[Mapping[str, tuple[str, ...]]] = {
    "all_gather": ("all_gather_dimension",),
    "all_gather_invariant": ("all_gather_dimension",),
    "all_to_all": ("split_axis", "concat_axis"),
    "reduce_scatter": ("scatter_dimension",),
}
"""The parameters that name dims which a collective changes."""


def _reduce(eqn: JaxprEqn) -> list[Arguments]:
    op = {"pmax": "max", "pmin": "min"}.get(eqn.primitive.name, eqn.params.get("op", "sum"))
    return [{"op": op}] * len(eqn.invars)


def _gather(eqn: JaxprEqn) -> list[Arguments]:
    dim, (var,) = eqn.params["all_gather_dimension"], eqn.outvars
    size = var.aval.shape[dim]
    return [{"dim": dim, "split": Split(size, names_of(eqn)), "out_sizes": ((dim, size),)}]


def _reduce_scatter(eqn: JaxprEqn) -> list[Arguments]:
    dim, (atom,), (var,) = eqn.params["scatter_dimension"], eqn.invars, eqn.outvars
    split = Split(atom.aval.shape[dim], names_of(eqn))
    return [{"op": "sum", "dim": dim, "split": split, "out_sizes": ((dim, var.aval.shape[dim]),)}]


def _all_to_all(eqn: JaxprEqn) -> list[Arguments]:
    dim, to_dim = eqn.params["concat_axis"], eqn.params["split_axis"]
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    axes = names_of(eqn)
    splits = {"split": Split(after[dim], axes), "to_split": Split(before[to_dim], axes)}
    return [{"dim": dim, "to_dim": to_dim, **splits, "out_sizes": ((dim, after[dim]), (to_dim, after[to_dim]))}]


def _broadcast(eqn: JaxprEqn) -> list[Arguments]:
    return [{"root": eqn.params["root"]}] * len(eqn.invars)


def _permute(eqn: JaxprEqn) -> list[Arguments]:
    pairs = eqn.params["pairs"] if eqn.primitive is permute_p else [eqn.params["perm"]]
    return [{"pairs": tuple((int(i), int(j)) for i, j in each)} for each in pairs]


CALLS: Final[dict[str, tuple[str, Callable[[JaxprEqn], list[Arguments]]]]] = {
    "all_gather": ("all_gather", _gather),
    "all_gather_invariant": ("all_gather", _gather),
    "all_to_all": ("all_to_all", _all_to_all),
    "pmax": ("all_reduce", _reduce),
    "pmin": ("all_reduce", _reduce),
    "ppermute": ("permute", _permute),
    "psum_invariant": ("all_reduce", _reduce),
    "reduce_scatter": ("reduce_scatter", _reduce_scatter),
    broadcast_p.name: ("broadcast", _broadcast),
    permute_p.name: ("permute", _permute),
    reduce_p.name: ("all_reduce", _reduce),
}
"""Per primitive of local functions the collective that it is, and its parameters per operand."""


def call_of(eqn: JaxprEqn) -> Call | None:
    """What an equation of a local function sends; None if it is no collective."""
    found = CALLS.get(eqn.primitive.name)
    if found is None:
        return None
    name, arguments = found
    return Call(name, names_of(eqn), tuple(arguments(eqn)))


TABLE: Final[dict[str, Callable[[JaxprEqn], Rule | None]]] = {**dict.fromkeys(CALLS, _rule), "axis_index": _axis_index}
