"""From a global jaxpr and placements to a Plan: a layout for every value, a strategy for every equation.

One forward pass. Each equation gets its assignment axis by axis, outermost first, each axis seeing those before. For one
axis the candidates are: compute on every rank; shard a factor that some operand is sharded on; let parts pass. **A candidate
under which some operand is sharded and none moves comes before any other**, unless it yields parts larger than its
operands together. Among the rest cost decides: what the operands must move, the reduction of parts in the result, and the
computation. Parts pass through data movement and widening casts and are reduced at their first other use.

Invariants: a plan depends on its arguments alone, never on a set's order or a measurement, so every rank plans the same. A
value moves once: what a move yields stays available to later equations. Layouts obtained without communication do not
count as sharded: a replicated weight that was sliced for one use is not sharded for the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from collectives.jax_compat import Atom, JaxprEqn, Literal, Primitive, Source, Var
from collectives.simulated import reduction_dtype
from placements import ItemSizes, Layout, Machine, Mesh, P, Step, plan_steps
from placements.cost import DEFAULT
from placements.layout import merge
from placements.redistribute import is_free, path_us
from spmd.errors import FallbackError
from spmd.factors import Assignment, Passes, Rule, layouts
from spmd.rules import rule_of
from spmd.trace import GlobalJaxpr, constrain_p, place_like_p


@dataclass(frozen=True, slots=True)
class Move:
    """Bring a value from one layout to another, just before the equation that asks for it."""

    atom: Atom
    source: Layout
    target: Layout
    steps: tuple[Step, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class PlannedEqn:
    """An equation with the layouts of its operands and results, and the moves that bring the operands there.

    `rule` is None for a fallback (operands replicated) and for equations that only place a value.
    """

    eqn: JaxprEqn
    rule: Rule | None
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    moves: tuple[Move, ...]
    is_fallback: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """A layout for every value and a strategy for every equation; no ranks yet.

    `arrivals` are the layouts in which the inputs come, `entry` the moves to what is stated for them, `exits` those of the
    outputs to `departures`.
    """

    jaxpr: GlobalJaxpr
    mesh: Mesh
    arrivals: tuple[Layout, ...]
    entry: tuple[Move, ...]
    eqns: tuple[PlannedEqn, ...]
    exits: tuple[Move | None, ...]
    departures: tuple[Layout, ...]
    machine: Machine

    def moves(self) -> Iterator[tuple[Move, Source | None]]:
        """Every move in order, with its source line: that of the equation that asks, for a result of the one that made it."""
        yield from ((move, None) for move in self.entry)
        for planned in self.eqns:
            if planned.moves:
                source = self.jaxpr.source(planned.eqn)
                yield from ((move, source) for move in planned.moves)
        makers = {id(var): planned.eqn for planned in self.eqns for var in planned.eqn.outvars}
        for move in self.exits:
            if move is not None:
                maker = makers.get(id(move.atom))
                yield move, None if maker is None else self.jaxpr.source(maker)


def item_sizes(aval: Any) -> ItemSizes:
    """The bytes per element of an aval, as moved and as reduced."""
    return ItemSizes(aval.dtype.itemsize, reduction_dtype(aval.dtype).itemsize)


@dataclass(slots=True)
class Versions:
    """The layouts in which a value is available: that of its producer first, then those that moves yielded."""

    aval: Any
    made: list[Layout]
    free: list[Layout] = field(default_factory=list)

    @property
    def primary(self) -> Layout:
        """The layout of the producer."""
        return self.made[0]

    def __iter__(self) -> Iterator[Layout]:
        yield from self.made
        yield from self.free


def plan(
    jaxpr: GlobalJaxpr,
    mesh: Mesh,
    arrivals: Sequence[Layout],
    stated: Sequence[Layout | None],
    outputs: Sequence[P | None],
    machine: Machine = DEFAULT,
    names: Sequence[str] = (),
) -> Plan:
    """Plan a jaxpr whose inputs arrive as `arrivals`, are brought to `stated`, and whose results leave as `outputs` say.

    `names` are those of the inputs, for reasons. Raises `FallbackError` for an effect, `PlacementError` where an output's
    placement does not fit.
    """
    return _Planner(jaxpr, mesh, machine).run(arrivals, stated, outputs, names)


class _Planner:
    """The state of one forward pass: the versions of every value."""

    def __init__(self, jaxpr: GlobalJaxpr, mesh: Mesh, machine: Machine) -> None:
        self.jaxpr, self.mesh, self.machine = jaxpr, mesh, machine
        self.axes = tuple(axis for axis, size in mesh.axes if size > 1)
        self.values: dict[Var, Versions] = {}
        self.moves: list[Move] = []

    def run(
        self,
        arrivals: Sequence[Layout],
        stated: Sequence[Layout | None],
        outputs: Sequence[P | None],
        names: Sequence[str],
    ) -> Plan:
        for index, (var, layout, wanted) in enumerate(zip(self.jaxpr.inputs, arrivals, stated, strict=True)):
            self.define(var, layout)
            if wanted is not None and wanted != layout:
                name = names[index] if index < len(names) else f"input {index}"
                self.require(var, wanted, f"argument {name} is stated as {wanted}")
                self.define(var, wanted)
        entry, self.moves = tuple(self.moves), []
        for var, value in self.jaxpr.constants:
            self.define(var, Layout.replicated(self.mesh, np.ndim(value)))
        eqns = tuple(self.plan_eqn(eqn) for eqn in self.jaxpr.eqns)
        self.moves = []
        exits, departures = [], []
        for index, (atom, placements) in enumerate(zip(self.jaxpr.outputs, outputs, strict=True)):
            target = self.departure(atom, placements)
            self.require(atom, target, f"result {index} is stated as {target}" if placements else f"result {index}")
            exits.append(self.moves.pop() if self.moves else None)
            departures.append(target)
        return Plan(self.jaxpr, self.mesh, tuple(arrivals), entry, eqns, tuple(exits), tuple(departures), self.machine)

    def define(self, var: Var, layout: Layout) -> None:
        """A value is produced in a layout."""
        self.values[var] = Versions(var.aval, [layout])

    def versions(self, atom: Atom) -> Versions:
        """The layouts in which an operand is available. A literal is replicated."""
        if isinstance(atom, Literal):
            return Versions(atom.aval, [Layout.replicated(self.mesh, np.ndim(atom.val))])
        return self.values[atom]

    def require(self, atom: Atom, target: Layout, reason: str) -> None:
        """Make a value available in a layout, by the cheapest move from any version."""
        versions = self.versions(atom)
        if target in versions:
            return
        shape, sizes = versions.aval.shape, item_sizes(versions.aval)
        source = min(versions, key=lambda layout: path_us(layout, target, shape, sizes, self.machine))
        steps = plan_steps(source, target, shape, sizes, self.machine)
        self.moves.append(Move(atom, source, target, steps, reason))
        (versions.made if any(step.communicates for step in steps) else versions.free).append(target)

    def departure(self, atom: Atom, placements: P | None) -> Layout:
        """The layout in which a result leaves: as stated, else as it is, with parts reduced."""
        versions = self.versions(atom)
        whole = next((layout for layout in versions.made if not layout.partial), None)
        if placements is None:
            return whole or versions.primary.with_partial(())
        target = merge(placements, versions.primary)
        kept = {axis for axis, placement in placements.items(self.mesh.axis_names) if placement is None}
        return target.with_partial(pair for pair in target.partial if pair[0] not in kept)

    def plan_eqn(self, eqn: JaxprEqn) -> PlannedEqn:
        """Decide one equation, and record the moves of its operands."""
        self.moves = []
        special = PLACING.get(eqn.primitive)
        if special is not None:
            return special(self, eqn)
        rule = None if eqn.effects else rule_of(eqn)
        if rule is None:
            return self.fallback(eqn)
        versions = [self.versions(atom) for atom in eqn.invars]
        found = layouts(rule, self.assign(rule, versions, eqn), self.mesh)
        assert found is not None, "an assignment that mixes parts was chosen"
        return self.finish(eqn, rule, *found)

    def finish(
        self, eqn: JaxprEqn, rule: Rule | None, operands: tuple[Layout, ...], results: tuple[Layout, ...]
    ) -> PlannedEqn:
        for index, (atom, layout) in enumerate(zip(eqn.invars, operands, strict=True)):
            self.require(atom, layout, f"operand {index} of {eqn.primitive} as {layout}")
        for var, layout in zip(eqn.outvars, results, strict=True):
            self.define(var, layout)
        return PlannedEqn(eqn, rule, operands, results, tuple(self.moves), rule is None)

    def fallback(self, eqn: JaxprEqn) -> PlannedEqn:
        """Replicate the operands: right for every primitive without an effect."""
        if eqn.effects:
            raise FallbackError(
                f"{eqn.primitive} ({self.jaxpr.source(eqn)}) has an effect, {', '.join(map(str, eqn.effects))}: run on every "
                "rank it would happen once per rank. Callbacks and effects inside spmd.jit are not supported yet; "
                "return the value and act on it outside."
            )
        operands = tuple(Layout.replicated(self.mesh, np.ndim(atom.aval)) for atom in eqn.invars)
        results = tuple(Layout.replicated(self.mesh, len(var.aval.shape)) for var in eqn.outvars)
        return self.finish(eqn, None, operands, results)

    def assign(self, rule: Rule, versions: list[Versions], eqn: JaxprEqn) -> Assignment:
        """Choose what each mesh axis does to an equation, outermost axis first."""
        assignment, decided = Assignment(), []
        for axis in self.axes:
            decided.append(axis)
            if any(axis in layout.axes for value in versions for layout in value):
                candidates = list(self.candidates(rule, versions, axis, assignment))
                keys = [self.rate(rule, candidate, versions, axis, tuple(decided), eqn) for candidate in candidates]
                assignment = candidates[min(range(len(keys)), key=keys.__getitem__)]
        return assignment

    def candidates(
        self, rule: Rule, versions: list[Versions], axis: str, assignment: Assignment
    ) -> Iterator[Assignment]:
        """What `axis` may do: nothing, shard a factor that an operand is sharded on, let parts pass."""
        yield assignment
        factors = {
            dims[dim][0]
            for dims, value in zip(rule.operands, versions, strict=True)
            for layout in value.made
            if (dim := layout.dim_of(axis)) is not None and dims[dim]
        }
        for factor in rule.shardable():
            axes = assignment.axes_of(factor)
            if factor in factors and rule.divides(factor, self.mesh.group_size((*axes, axis))):
                for at in range(len(axes) + 1):
                    yield assignment.shard(factor, (*axes[:at], axis, *axes[at:]))
        for passes in rule.passes:
            op = self.passing(passes, versions, axis)
            if op is not None:
                yield assignment.let_pass(axis, op, passes)

    def passing(self, passes: Passes, versions: list[Versions], axis: str) -> str | None:
        """The op of the parts along `axis` that may pass, or None.

        It is data movement, and all the operands named are parts that no other use has reduced already.
        """
        if not passes.movement:
            return None
        ops = {layout.op_of(axis) for index in passes.operands for layout in versions[index].made}
        return ops.pop() if len(ops) == 1 and ops <= set(passes.ops) else None

    def rate(
        self,
        rule: Rule,
        candidate: Assignment,
        versions: list[Versions],
        axis: str,
        decided: tuple[str, ...],
        eqn: JaxprEqn,
    ) -> tuple[int, float]:
        """Smaller is better: the class of the precedence rule, then microseconds."""
        found = layouts(rule, candidate, self.mesh)
        if found is None:
            return 2, math.inf
        operands, results = found
        communication, settled = 0.0, False
        for value, required in zip(versions, operands, strict=True):
            communication += min(self.move_us(value.aval, layout.restrict(decided), required) for layout in value)
            settled |= axis in required.axes and any(layout.restrict(decided) == required for layout in value.made)
        avals = [var.aval for var in eqn.outvars]
        reduction = sum(self.reduction_us(aval, layout, axis) for aval, layout in zip(avals, results, strict=True)) * (
            not any(parts[0] == axis for parts in candidate.parts)
        )
        ranks = math.prod(self.mesh.group_size(axes) for _, axes in candidate.factors)
        cost = communication + reduction + self.machine.compute_us(rule.flops / ranks)
        if settled and communication == 0 and not (reduction and _outgrows(avals, versions)):
            return 0, cost
        return 1, cost

    def move_us(self, aval: Any, source: Layout, target: Layout) -> float:
        """What a move communicates, in microseconds; 0 where it is free."""
        if source == target or is_free(source, target, aval.shape, sizes := item_sizes(aval), self.machine):
            return 0.0
        return path_us(source, target, aval.shape, sizes, self.machine)

    def reduction_us(self, aval: Any, layout: Layout, axis: str) -> float:
        """What it costs to reduce the parts of a result along `axis`; 0 where there are none."""
        if layout.op_of(axis) is None:
            return 0.0
        whole = layout.with_partial(pair for pair in layout.partial if pair[0] != axis)
        return path_us(layout, whole, aval.shape, item_sizes(aval), self.machine)


def _outgrows(results: list[Any], operands: list[Versions]) -> bool:
    """Whether the results are larger than all operands together, in bytes of the whole arrays."""
    produced = sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in results)
    return produced > sum(math.prod(value.aval.shape) * value.aval.dtype.itemsize for value in operands)


def _plan_constrain(planner: _Planner, eqn: JaxprEqn) -> PlannedEqn:
    """A pinned constraint brings the value to its placement; a preference leaves it where it is."""
    current = planner.versions(eqn.invars[0]).primary
    target = merge(eqn.params["placements"], current, eqn.params["free_dims"]) if eqn.params["pinned"] else current
    return _place(planner, eqn, target)


def _plan_place_like(planner: _Planner, eqn: JaxprEqn) -> PlannedEqn:
    """The cotangent of a value held in parts is the same for every part: replicated where the value is partial."""
    return _place(planner, eqn, planner.versions(eqn.invars[1]).primary.with_partial(()))


def _place(planner: _Planner, eqn: JaxprEqn, target: Layout) -> PlannedEqn:
    planner.require(eqn.invars[0], target, f"constrained to {target}")
    planner.define(eqn.outvars[0], target)
    others = tuple(planner.versions(atom).primary for atom in eqn.invars[1:])
    return PlannedEqn(eqn, None, (target, *others), (target,), tuple(planner.moves))


PLACING: Final[dict[Primitive, Callable[[_Planner, JaxprEqn], PlannedEqn]]] = {
    constrain_p: _plan_constrain,
    place_like_p: _plan_place_like,
}
"""Equations that place a value and compute nothing."""
