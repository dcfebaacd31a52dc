"""What a rule is: an equation summarised by named factors.

As in Shardy, every dim of every operand and result is a product of factors, major first, in the spirit of einsum:
`"m k, k n -> m n"`. A factor is *pass-through*, a *reduction* (absent from the results: sharding it yields parts), or
*replicated* (must not be sharded). `passes` says in which operands the equation is linear. Along a dim with `windows` a shard
of the factor is computed from a window of the operand: from neighbours' elements too, and from no others. An `Assignment`
gives mesh axes to factors and to parts; from it follow the layouts of all operands and results. The planner knows nothing
else of an equation.

Invariants, checked by `check_rule`: one entry per operand, result and dim; the factors of a dim without windows multiply to
its size; a factor with no dim in any operand is created, one with no dim in any result is a reduction or replicated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from collectives.jax_compat import JaxprEqn
from placements import Layout, Mesh
from placements.intervals import Reach
from placements.placement import REDUCTIONS
from spmd.errors import RuleError

Dims = tuple[tuple[int, ...], ...]
"""Per dim its factors, major first. A size-1 dim may have none."""

ANY_OP: Final = REDUCTIONS
LINEAR: Final = ("sum", "mean")


@dataclass(frozen=True, slots=True)
class Passes:
    """If all of `operands`, and no other, are parts of one op of `ops`, so are the results, after a local computation.

    `movement` marks data movement and widening casts: there a planner lets parts pass without looking at what follows.
    """

    ops: tuple[str, ...]
    operands: tuple[int, ...]
    movement: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """How one equation may be sharded. `resize` maps its parameters to local ones; `local` replaces its computation.

    `windows` are triples of an operand, a dim, and how far its only factor reaches. `uneven` are windows of dims whose first
    factor does not divide over the ranks: pieces of the result are then no pieces of the operand, but made of nearly those.

    `resize(params, operand_shapes, result_shapes)` gets local shapes. `local(call, operands)` gets a `lower.LocalCall`.
    `flops` is the work of the whole equation.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: tuple[int, ...]
    reductions: tuple[tuple[int, str], ...] = ()
    replicated: tuple[int, ...] = ()
    passes: tuple[Passes, ...] = ()
    windows: tuple[tuple[int, int, Reach], ...] = ()
    uneven: tuple[tuple[int, int, Reach], ...] = ()
    resize: Callable[[dict[str, Any], list[tuple[int, ...]], list[tuple[int, ...]]], dict[str, Any]] | None = None
    local: Callable[[Any, list[Any]], list[Any]] | None = None
    flops: float = 0.0

    def shardable(self) -> Iterator[int]:
        """The factors that may be sharded: not replicated, and major in every dim that they occur in."""
        minor = {
            factor
            for dims in (*self.operands, *self.results)
            for factors in dims
            for at, factor in enumerate(factors)
            if any(self.sizes[other] != 1 for other in factors[:at])
        }
        return (f for f in range(len(self.sizes)) if f not in self.replicated and f not in minor)

    def divides(self, factor: int, n: int) -> bool:
        """Whether the chunks of `factor` over n ranks are chunks of every dim that it is major in, or windows of them."""
        return self.is_even(factor, n) or any(self.operands[at][dim][0] == factor for at, dim, _ in self.uneven)

    def is_even(self, factor: int, n: int) -> bool:
        """Whether the chunks of `factor` over n ranks are chunks of every dim that it is major in."""
        alone = all(
            math.prod(self.sizes[f] for f in factors) == self.sizes[factor]
            for dims in (*self.operands, *self.results)
            for factors in dims
            if factor in factors
        )
        return alone or self.sizes[factor] % n == 0


@dataclass(frozen=True, slots=True)
class Assignment:
    """What mesh axes do to an equation: per factor the axes that shard it, major first; per axis the parts that pass."""

    factors: tuple[tuple[int, tuple[str, ...]], ...] = ()
    parts: tuple[tuple[str, str, Passes], ...] = ()

    def axes_of(self, factor: int) -> tuple[str, ...]:
        """The axes that shard `factor`."""
        return next((axes for f, axes in self.factors if f == factor), ())

    def shard(self, factor: int, axes: tuple[str, ...]) -> Assignment:
        """The same with `factor` sharded over `axes`."""
        kept = tuple(pair for pair in self.factors if pair[0] != factor)
        return Assignment((*kept, (factor, axes)), self.parts)

    def let_pass(self, axis: str, op: str, passes: Passes) -> Assignment:
        """The same with parts along `axis`."""
        return Assignment(self.factors, (*self.parts, (axis, op, passes)))


def layouts(rule: Rule, assignment: Assignment, mesh: Mesh) -> tuple[tuple[Layout, ...], tuple[Layout, ...]] | None:
    """The layouts of operands and results under an assignment; None where parts of different ops would mix."""
    windows = rule.windows
    for window in rule.uneven:
        factor = rule.operands[window[0]][window[1]][0]
        axes = assignment.axes_of(factor)
        windows += () if rule.is_even(factor, mesh.group_size(axes)) else (window,)
    operands = tuple(
        _layout(
            dims,
            assignment,
            mesh,
            tuple((axis, op) for axis, op, p in assignment.parts if index in p.operands),
            tuple((dim, reach) for operand, dim, reach in windows if operand == index),
        )
        for index, dims in enumerate(rule.operands)
    )
    parts = tuple((axis, op) for axis, op, _ in assignment.parts)
    parts += tuple((axis, op) for factor, op in rule.reductions for axis in assignment.axes_of(factor))
    if len({op for _, op in parts}) > 1:
        return None
    return operands, tuple(_layout(dims, assignment, mesh, parts) for dims in rule.results)


@functools.cache
def _layout(
    dims: Dims,
    assignment: Assignment,
    mesh: Mesh,
    parts: tuple[tuple[str, str], ...],
    windows: tuple[tuple[int, Reach], ...] = (),
) -> Layout:
    axes = dict(assignment.factors)
    sharded = tuple(tuple(axis for factor in factors for axis in axes.get(factor, ())) for factors in dims)
    return Layout(mesh, sharded, (), tuple(sorted(pair for pair in windows if sharded[pair[0]]))).with_partial(parts)


def check_shape(rule: Rule, eqn: JaxprEqn) -> None:
    """Raise `RuleError` unless the rule has an entry for every operand, result and dim of the equation, of its size."""
    for kind, entries, atoms in (("operand", rule.operands, eqn.invars), ("result", rule.results, eqn.outvars)):
        if len(entries) != len(atoms):
            raise RuleError(f"{eqn.primitive}: the rule names {len(entries)} {kind}s, the equation has {len(atoms)}.")
        for index, (dims, atom) in enumerate(zip(entries, atoms, strict=True)):
            windowed = [dim for operand, dim, _ in rule.windows if kind == "operand" and operand == index]
            _check_dims(rule, f"{eqn.primitive}: {kind} {index}", dims, atom.aval.shape, windowed)
    seen = {factor for dims in rule.operands for factors in dims for factor in factors}
    kept = {factor for dims in rule.results for factors in dims for factor in factors}
    lost = seen - kept - {factor for factor, _ in rule.reductions} - set(rule.replicated)
    if lost:
        raise RuleError(f"{eqn.primitive}: factors {sorted(lost)} are in no result; they are reductions or replicated.")
    for passes in rule.passes:
        if any(not 0 <= index < len(eqn.invars) for index in passes.operands):
            raise RuleError(f"{eqn.primitive}: parts pass in operands {passes.operands}, of {len(eqn.invars)}.")


def _check_dims(rule: Rule, what: str, dims: Dims, shape: tuple[int, ...], windowed: Sequence[int]) -> None:
    if len(dims) != len(shape):
        raise RuleError(f"{what}: the rule names {len(dims)} dims, the shape is {shape}.")
    for dim, (factors, size) in enumerate(zip(dims, shape, strict=True)):
        if dim in windowed:
            if len(factors) != 1:
                raise RuleError(f"{what}: dim {dim} has windows, so one factor, not {len(factors)}.")
        elif factors and math.prod(rule.sizes[factor] for factor in factors) != size:
            sizes = [rule.sizes[factor] for factor in factors]
            raise RuleError(f"{what}: the factors of dim {dim} have sizes {sizes}, the dim has {size}.")
