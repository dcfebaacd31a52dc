"""From a global jaxpr and placements to a Plan: a layout for every value, a strategy for every equation.

A forward pass gives each equation its assignment, axis by axis, outermost first, each axis seeing those before. For one axis
the candidates are: compute on every rank; shard a factor that some operand is sharded on, or that is wished for; let parts
pass. **A candidate under which some operand is sharded and none moves comes before any other**, unless it yields parts
larger than its operands together. Among the rest cost decides: what the operands must move, the reduction of parts in the
result, and the computation. Parts pass with discipline (`Planner.passing`) and are reduced at their first other use, to where
all later uses together would have them.

What later uses would like is read backward from a finished plan (`wishes.py`), and the next round plans with it: so a
gradient is scattered where optimizer states are sharded, and all-reduced where they are not. The cheapest round wins.

Invariants: a plan depends on its arguments alone, never on a set's order or a measurement, so every rank plans the same. A
value moves once: what a move yields stays available to later equations. Layouts obtained without communication do not
count as sharded: a replicated weight that was sliced for one use is not sharded for the next.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from collectives.jax_compat import Atom, JaxprEqn, Literal, Primitive, Var
from placements import Layout, Machine, Mesh, P, plan_steps
from placements.cost import DEFAULT
from placements.layout import merge
from placements.redistribute import is_free, path_us
from spmd.control import CONTROL
from spmd.effects import CALLBACKS, plan_callback
from spmd.errors import FallbackError
from spmd.exact import Exactness
from spmd.factors import Assignment, Passes, Rule, layouts
from spmd.messages import merged
from spmd.phases import PHASES
from spmd.plan import Move, Plan, PlannedEqn, item_sizes
from spmd.rules import rule_of
from spmd.rules.named import call_of
from spmd.trace import GlobalJaxpr, constrain_p, is_widening, nbytes, place_like_p
from spmd.wishes import Wishes, wishes_of

CARRIES_ZERO: Final = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "neg", "reshape", "transpose"})
"""What makes zeros of zeros."""


CUT: Final = ", as it is cut along a sharded dim: give what is cut a dim of its own"
"""What a Program says, beside the reason, of an operand of which a slice moves much."""


@dataclass(slots=True)
class Versions:
    """The layouts in which a value is available: that of its producer first, then those that moves yielded; `windows` for one
    use each.

    `resplit` is what a value that had to be gathered counts as sharded by, though it is yet to be sliced.
    """

    aval: Any
    made: list[Layout]
    free: list[Layout] = field(default_factory=list)
    windows: list[Layout] = field(default_factory=list)
    resplit: Layout | None = None

    @property
    def primary(self) -> Layout:
        """The layout of the producer."""
        return self.made[0]

    @property
    def sharding(self) -> Iterator[Layout]:
        """The layouts that an equation may take its sharding from: not the free ones."""
        if self.resplit is not None:
            yield self.resplit
        yield from self.made

    def __iter__(self) -> Iterator[Layout]:
        yield from self.made
        yield from self.free


Target = P | Layout | None
"""Where a result goes: placements, of which None leaves an axis as it is; a layout; None for wherever it is made."""

AHEAD: Final = 6
"""How many equations a value is followed back that is not planned yet."""

ROUNDS: Final = 3
"""Forward passes: the first without wishes, each later one with those that the plan before gives."""


def plan(
    jaxpr: GlobalJaxpr,
    mesh: Mesh,
    arrivals: Sequence[Layout],
    stated: Sequence[Layout | None],
    outputs: Sequence[P | None],
    machine: Machine = DEFAULT,
    names: Sequence[str] = (),
    results: Sequence[str] = (),
) -> Plan:
    """Plan a jaxpr whose inputs arrive as `arrivals`, are brought to `stated`, and whose results leave as `outputs` say.

    `names` are those of the inputs and `results` those of the results, for reasons. Raises `FallbackError` for an effect,
    `PlacementError` where an output's placement does not fit.
    """
    problem = Problem(
        jaxpr,
        mesh,
        machine,
        Exactness(jaxpr),
        tuple(arrivals),
        tuple(stated),
        tuple(outputs),
        tuple(names),
        tuple(results),
    )
    return cheapest(problem)


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be planned. `keeps_parts`: results without a target may leave in parts, as those of a loop's body do.

    `local` are the axes over which it is a local view: along them a layout says nothing. `split` are the layouts that inputs
    count as sharded by, though they arrive whole: a loop gathered them before it.
    `bodies` are the plans of bodies made so far: one is asked for in every round of everything around it; `instead` the
    equations that stand for one.
    """

    jaxpr: GlobalJaxpr
    mesh: Mesh
    machine: Machine
    exact: Exactness
    arrivals: tuple[Layout, ...]
    stated: tuple[Layout | None, ...]
    outputs: tuple[Target, ...]
    names: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    keeps_parts: bool = False
    local: tuple[str, ...] = ()
    split: tuple[Layout | None, ...] = ()
    bodies: dict[Any, Plan] = field(default_factory=dict, compare=False)
    instead: dict[int, list[JaxprEqn]] = field(default_factory=dict, compare=False)


def cheapest(problem: Problem) -> Plan:
    """The cheapest plan of some rounds, with and without splitting again what had to be gathered, and with and without moving
    shards to another dim where an equation needs one whole; of equals the first."""
    plans: list[Plan] = []
    may_gather = may_turn = True
    for resplits, turns in ((False, False), (False, True), (True, False), (True, True)):
        if (resplits and not may_gather) or (turns and not may_turn):
            continue
        wishes: Wishes = {}
        for _ in range(ROUNDS):
            planner = Planner(problem, wishes, resplits, turns)
            plans.append(planner.run())
            new = wishes_of(plans[-1], problem)
            if new == wishes:
                break
            wishes = new
        if not resplits and not turns:
            may_gather, may_turn = planner.gathers, planner.is_stuck
    return merged(min(plans, key=lambda found: round(found.total_us(), 6)))


class Planner:
    """The state of one forward pass: the versions of every value."""

    def __init__(self, problem: Problem, wishes: Wishes, resplits: bool, turns: bool) -> None:
        self.problem, self.wishes, self.resplits, self.turns = problem, wishes, resplits, turns
        self.gathers = self.is_stuck = False
        self.forced: list[str] = []
        self.jaxpr, self.mesh, self.machine = problem.jaxpr, problem.mesh, problem.machine
        self.axes = tuple(axis for axis, size in self.mesh.axes if size > 1 and axis not in problem.local)
        self.values: dict[Var, Versions] = {}
        self.moves: list[Move] = []
        self.asking: JaxprEqn | None = None
        self.uses: dict[Var, list[JaxprEqn | None]] = {}
        for eqn, atoms in (*((each, each.invars) for each in self.jaxpr.eqns), (None, self.jaxpr.outputs)):
            for atom in atoms:
                if not isinstance(atom, Literal):
                    self.uses.setdefault(atom, []).append(eqn)
        self.makers = {var: eqn for eqn in self.jaxpr.eqns for var in eqn.outvars}
        self.zeros: set[Var] = set()
        for eqn in self.jaxpr.eqns:
            if eqn.primitive.name in CARRIES_ZERO and self.is_zero(eqn.invars[0]):
                self.zeros.update(eqn.outvars)

    def run(self) -> Plan:
        """Plan every equation, once, in order."""
        problem = self.problem
        for index, (var, layout, wanted) in enumerate(
            zip(self.jaxpr.inputs, problem.arrivals, problem.stated, strict=True)
        ):
            self.define(var, layout)
            if index < len(problem.split) and problem.split[index] is not None:
                self.gathers = True
                self.values[var].resplit = problem.split[index] if self.resplits else None
            if wanted is not None and wanted != layout:
                name = _named(problem.names, index, "input")
                self.require(var, wanted, f"argument {name} is stated as {wanted}")
                self.define(var, wanted)
        entry, self.moves = tuple(self.moves), []
        for var, value in self.jaxpr.constants:
            self.define(var, Layout.replicated(self.mesh, np.ndim(value)))
        eqns = tuple(planned for eqn in self.jaxpr.eqns for planned in self.plan_eqn(eqn))
        self.moves, departures = [], []
        for index, (atom, wanted_as) in enumerate(zip(self.jaxpr.outputs, problem.outputs, strict=True)):
            self.asking = None if isinstance(atom, Literal) else self.makers.get(atom)
            target = self.departure(atom, wanted_as)
            stated = "leaves the body" if problem.keeps_parts else "is stated" if wanted_as else "leaves"
            self.require(atom, target, f"{_named(problem.results, index, 'result')} {stated} as {target}")
            departures.append(target)
        exits = tuple(self.moves)
        return Plan(self.jaxpr, self.mesh, problem.arrivals, entry, eqns, exits, tuple(departures), self.machine)

    def define(self, var: Var, layout: Layout) -> None:
        """A value is produced in a layout."""
        self.values[var] = Versions(var.aval, [layout])

    def versions(self, atom: Atom) -> Versions:
        """The layouts in which an operand is available. A literal is replicated."""
        if isinstance(atom, Literal):
            return Versions(atom.aval, [Layout.replicated(self.mesh, np.ndim(atom.val))])
        return self.values[atom]

    def is_zero(self, atom: Atom) -> bool:
        """Whether a value is known to be zero: it is in every placement at once."""
        if isinstance(atom, Literal):
            value = np.asarray(atom.val)
            return value.dtype != np.bool_ and not value.any()
        return atom in self.zeros

    def require(self, atom: Atom, target: Layout, reason: str) -> None:
        """Make a value available in a layout, by the cheapest move from any version.

        A value in parts is first reduced to where all its later uses together would have it.
        """
        versions = self.versions(atom)
        if target in versions or target in versions.windows:
            return
        wish = self.unsettled_wish(atom)
        if wish is not None and wish != target and not target.partial:
            self.move(atom, wish, reason)
        if target not in versions:
            self.move(atom, target, reason)

    def move(self, atom: Atom, target: Layout, reason: str) -> None:
        """Record the cheapest move of a value to a layout, from any version."""
        versions = self.versions(atom)
        shape, sizes = versions.aval.shape, item_sizes(versions.aval)
        source = min(versions, key=lambda layout: path_us(layout, target, shape, sizes, self.machine))
        steps = plan_steps(source, target, shape, sizes, self.machine)
        self.moves.append(Move(atom, source, target, steps, reason, self.asking))
        sent = any(step.communicates for step in steps)
        (versions.windows if target.windows else versions.made if sent else versions.free).append(target)

    def unsettled_wish(self, atom: Atom) -> Layout | None:
        """Where a value that exists in parts alone is to be reduced to, if its later uses have said so."""
        if isinstance(atom, Literal) or not all(layout.partial for layout in self.values[atom].made):
            return None
        return self.wishes.get(atom)

    def settled(self, atom: Atom) -> Layout:
        """A layout without parts in which a value is available, or the one it is to be reduced to."""
        versions = self.versions(atom)
        whole = next((layout for layout in versions.sharding if not layout.partial), None)
        return whole or self.unsettled_wish(atom) or versions.primary.with_partial(())

    def departure(self, atom: Atom, target: Target) -> Layout:
        """The layout in which a result leaves: as stated, else as it is, with parts reduced."""
        if isinstance(target, Layout):
            return target
        versions = self.versions(atom)
        whole = next((layout for layout in versions.made if not layout.partial), None)
        if target is None:
            return whole or (versions.primary if self.problem.keeps_parts else versions.primary.with_partial(()))
        merged = merge(target, versions.primary)
        kept = {axis for axis, placement in target.items(self.mesh.axis_names) if placement is None}
        return merged.with_partial(pair for pair in merged.partial if pair[0] not in kept)

    def body(
        self,
        jaxpr: GlobalJaxpr,
        arrivals: Sequence[Layout],
        outputs: Sequence[Target],
        split: Sequence[Layout | None] = (),
        local: tuple[str, ...] = (),
    ) -> Plan:
        """The plan of a body, whose results may leave in parts. `local` are further axes over which it is a local view."""
        bodies = self.problem.bodies
        key = id(jaxpr), tuple(arrivals), tuple(outputs), tuple(split)
        if key not in bodies:
            bodies[key] = cheapest(
                Problem(
                    jaxpr,
                    self.mesh,
                    self.machine,
                    self.problem.exact,
                    key[1],
                    (None,) * len(arrivals),
                    key[2],
                    keeps_parts=True,
                    local=(*self.problem.local, *local),
                    split=key[3],
                    bodies=bodies,
                )
            )
        return bodies[key]

    def instead(self, eqn: JaxprEqn, make: Callable[[JaxprEqn], list[JaxprEqn]]) -> list[PlannedEqn]:
        """Plan other equations in place of one: the same in every round."""
        made = self.problem.instead.setdefault(id(eqn), [])
        if not made:
            made += make(eqn)
        for each in made:
            self.makers.update(dict.fromkeys(each.outvars, each))
            for atom in each.invars:
                if not isinstance(atom, Literal):
                    self.uses.setdefault(atom, []).append(each)
        return [planned for each in made for planned in self.plan_eqn(each)]

    def plan_eqn(self, eqn: JaxprEqn) -> list[PlannedEqn]:
        """Decide one equation, and record the moves of its operands. It may be planned as several."""
        self.moves, self.asking = [], eqn
        if eqn.primitive.name in PHASES and not eqn.effects:
            found = PHASES[eqn.primitive.name](self, eqn)
            if found is not None:
                return found
        return [self.plan_alone(eqn)]

    def plan_alone(self, eqn: JaxprEqn) -> PlannedEqn:
        """Decide one equation as it is."""
        special = PLACING.get(eqn.primitive) or CONTROL.get(eqn.primitive.name if "bodies" in eqn.params else "")
        if special is not None:
            return special(self, eqn)
        if eqn.primitive.name in CALLBACKS:
            return plan_callback(self, eqn)
        rule = None if eqn.effects else rule_of(eqn)
        if rule is None:
            return self.fallback(eqn)
        versions = [self.versions(atom) for atom in eqn.invars]
        wish, made = self.wishes.get(eqn.outvars[0]), versions[0].primary if versions else None
        if (
            wish is not None
            and made is not None
            and is_widening(eqn)
            and not made.partial
            and set(wish.axes) < set(made.axes)
        ):
            return self.finish(eqn, rule, (wish,), (wish,))  # the uses want it gathered: before the cast it is smaller
        self.forced = []
        found = layouts(rule, self.assign(rule, versions, eqn), self.mesh)
        assert found is not None, "an assignment that mixes parts was chosen"
        planned = self.finish(eqn, rule, *found)
        self.split_again(eqn, planned.results, self.forced)
        return planned

    def finish(
        self, eqn: JaxprEqn, rule: Rule | None, operands: tuple[Layout, ...], results: tuple[Layout, ...]
    ) -> PlannedEqn:
        """Bring the operands to their layouts, and define the results."""
        for index, (atom, layout) in enumerate(zip(eqn.invars, operands, strict=True)):
            hint = CUT * (eqn.primitive.name == "slice" and self.is_cut(eqn, layout))
            self.require(atom, layout, f"operand {index} of {eqn.primitive} as {layout}{hint}")
        for var, layout in zip(eqn.outvars, results, strict=True):
            self.define(var, layout)
        call = call_of(eqn) if self.problem.local else None
        return PlannedEqn(eqn, rule, operands, results, tuple(self.moves), rule is None, call=call)

    def is_cut(self, eqn: JaxprEqn, layout: Layout) -> bool:
        """Whether a slice takes half of a sharded dim or less, and moves half of what it takes or more."""
        (atom,), (result,) = eqn.invars, eqn.outvars
        made = self.versions(atom).primary
        sizes = zip(atom.aval.shape, result.aval.shape, made.dims, strict=True)
        if not any(axes and 2 * after <= before for before, after, axes in sizes):
            return False
        steps = plan_steps(made, layout, atom.aval.shape, item_sizes(atom.aval), self.machine)
        return bool(2 * sum(step.elements for step in steps) >= layout.largest_local_size(atom.aval.shape) > 1)

    def split_again(self, eqn: JaxprEqn, results: Sequence[Layout], axes: Sequence[str]) -> None:
        """Let results count as sharded over `axes`, along which an equation can only be computed whole, if that is tried.

        Otherwise all that follows a reshape whose boundaries do not line up would be computed on every rank.
        """
        for var, layout in zip(eqn.outvars, results, strict=True):
            shape, split = var.aval.shape, layout
            for axis in axes:
                for atom in eqn.invars:
                    own = next(self.versions(atom).sharding).dim_of(axis)
                    dim = own if own is None or atom.aval.shape == shape else _evenest(split, shape, axis)
                    if dim is not None:
                        split = split.with_dim(dim, (*split.dims[dim], axis))
                        break
            if split != layout:
                self.gathers = True
                self.values[var].resplit = split if self.resplits else None

    def fallback(self, eqn: JaxprEqn) -> PlannedEqn:
        """Replicate the operands: right for every primitive without an effect."""
        if eqn.effects:
            raise FallbackError(
                f"{eqn.primitive} ({self.jaxpr.source(eqn)}) has an effect, {', '.join(map(str, eqn.effects))}, of which it is "
                "not known what it means on several ranks; return the value and act on it outside."
            )
        operands = tuple(Layout.replicated(self.mesh, np.ndim(atom.aval)) for atom in eqn.invars)
        results = tuple(Layout.replicated(self.mesh, len(var.aval.shape)) for var in eqn.outvars)
        planned = self.finish(eqn, None, operands, results)
        self.split_again(eqn, results, self.axes)
        return planned

    def assign(self, rule: Rule, versions: list[Versions], eqn: JaxprEqn) -> Assignment:
        """Choose what each mesh axis does to an equation, outermost axis first."""
        assignment, decided = Assignment(), []
        wishes = [self.wishes.get(var) for var in eqn.outvars]
        for axis in self.axes:
            decided.append(axis)
            touched = any(axis in layout.axes for value in versions for layout in (*value, *value.sharding))
            if touched or any(wish is not None and axis in wish.axes for wish in wishes):
                candidates = list(self.candidates(rule, versions, axis, assignment, eqn))
                if len(candidates) == 1:
                    self.forced.append(axis)
                keys = [self.rate(rule, candidate, versions, axis, tuple(decided), eqn) for candidate in candidates]
                assignment = candidates[min(range(len(keys)), key=keys.__getitem__)]
        return assignment

    def candidates(
        self, rule: Rule, versions: list[Versions], axis: str, assignment: Assignment, eqn: JaxprEqn
    ) -> Iterator[Assignment]:
        """What `axis` may do: nothing, shard a factor that an operand is sharded on or that is wished for, let parts pass."""
        yield assignment
        sharded = [
            (dims, layout) for dims, value in zip(rule.operands, versions, strict=True) for layout in value.sharding
        ]
        wished = zip((*rule.operands, *rule.results), (*eqn.invars, *eqn.outvars), strict=True)
        sharded += [
            (dims, wish)
            for at, (dims, atom) in enumerate(wished)
            if (wish := self.unsettled_wish(atom) if at < len(eqn.invars) else self.wishes.get(atom)) is not None
        ]
        factors = {dims[dim][0] for dims, layout in sharded if (dim := layout.dim_of(axis)) is not None and dims[dim]}
        stuck = any(factor in rule.replicated for factor in factors)
        self.is_stuck |= stuck
        if stuck and self.turns:  # along another dim, after an all_to_all
            size = self.mesh.axis_size(axis)
            factors |= {factor for factor in rule.shardable() if rule.sizes[factor] >= size}
        for factor in rule.shardable():
            axes = assignment.axes_of(factor)
            if factor in factors and rule.divides(factor, self.mesh.group_size((*axes, axis))):
                for at in reversed(range(len(axes) + 1)):  # of equals the innermost place
                    yield assignment.shard(factor, (*axes[:at], axis, *axes[at:]))
        for passes in rule.passes:
            op = self.passing(passes, versions, axis, eqn)
            if op is not None:
                yield assignment.let_pass(axis, op, passes)

    def passing(self, passes: Passes, versions: list[Versions], axis: str, eqn: JaxprEqn) -> str | None:
        """The op of the parts along `axis` that may pass, or None.

        All the operands named are parts that no other use has reduced already, or zero; and it is data movement that copies
        nothing, a sum of parts alone, or the only use of a value that shrinks by it, or that then meets other parts in a
        sum. Elsewhere parts would multiply: a backward pass is linear in its cotangents, and would end with one reduction
        for each parameter and use. A small value may pass without shrinking: its reduction shares a message with later
        ones, and a pass over its memory costs less than a message.
        """
        parts = [index for index in passes.operands if not self.is_zero(eqn.invars[index])]
        ops = {layout.op_of(axis) for index in parts for layout in versions[index].made}
        if len(ops) != 1 or not ops <= set(passes.ops):
            return None
        if len(passes.operands) == 1:
            (index,) = passes.operands
            before, after = nbytes(eqn.invars[index]), sum(map(nbytes, eqn.outvars))
            meets = functools.cache(lambda: any(self.meets_parts(var, axis) for var in eqn.outvars))
            if passes.movement:
                return ops.pop() if after <= before or is_widening(eqn) or meets() else None
            if after > before or len(self.uses[eqn.invars[index]]) > 1:
                return None
            small = self.machine.memory_us(after) < self.machine.latency_us
            if after == before and not small and not meets():
                return None
        return ops.pop()

    def meets_parts(self, var: Var, axis: str) -> bool:
        """Whether a value, if it were in parts, would come to a sum with other parts by its only uses."""
        while len(uses := self.uses.get(var, [])) == 1:
            (eqn,) = uses
            if eqn is None:
                return self.problem.keeps_parts
            rule = None if "bodies" in eqn.params or eqn.effects else rule_of(eqn)
            passes = () if rule is None else rule.passes
            index = next(at for at, atom in enumerate(eqn.invars) if atom is var)
            linear = [each for each in passes if index in each.operands]
            others = [eqn.invars[at] for each in linear for at in each.operands if at != index]
            others = [atom for atom in others if not self.is_zero(atom)]
            if not linear or (others and not any(each.movement for each in linear)):
                return any(self.may_be_parts(atom, axis, AHEAD) for atom in others)
            var = eqn.outvars[0]
        return False

    def may_be_parts(self, atom: Atom, axis: str, ahead: int) -> bool:
        """Whether a value is in parts alone, or zero; or may be, as far as it is not planned yet. A carry of a loop may be."""
        if isinstance(atom, Literal) or self.is_zero(atom):
            return self.is_zero(atom)
        if self.problem.keeps_parts and atom in self.jaxpr.inputs:
            return True
        if atom in self.values:
            return all(layout.op_of(axis) is not None for layout in self.values[atom].made)
        eqn = self.makers[atom]
        if not ahead or "bodies" in eqn.params or eqn.effects or (rule := rule_of(eqn)) is None:
            return False
        linear = {index for each in rule.passes for index in each.operands}
        return bool(rule.reductions) or any(self.may_be_parts(eqn.invars[at], axis, ahead - 1) for at in sorted(linear))

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
        for atom, value, required in zip(eqn.invars, versions, operands, strict=True):
            communication += self.bring_us(atom, value, required, decided)
            settled |= axis in required.axes and any(layout.restrict(decided) == required for layout in value.sharding)
        avals = [var.aval for var in eqn.outvars]
        passes = any(parts[0] == axis for parts in candidate.parts)
        reduction = 0.0 if passes else sum(map(self.reduction_us, eqn.outvars, results, [decided] * len(results)))
        ranks = math.prod(self.mesh.group_size(axes) for _, axes in candidate.factors)
        cost = communication + reduction + self.machine.compute_us(rule.flops / ranks)
        if settled and communication == 0 and not (reduction and _outgrows(avals, versions)):
            return 0, cost
        return 1, cost

    def bring_us(self, atom: Atom, value: Versions, required: Layout, decided: tuple[str, ...]) -> float:
        """What it costs to bring an operand, restricted to the axes decided, to a layout."""
        direct = min(self.move_us(value.aval, layout.restrict(decided), required) for layout in value)
        wish = self.unsettled_wish(atom)
        if direct == 0 or wish is None or required.partial:
            return direct
        made, wish = value.primary.restrict(decided), wish.restrict(decided)
        return self.move_us(value.aval, made, wish) + self.move_us(value.aval, wish, required)

    def move_us(self, aval: Any, source: Layout, target: Layout) -> float:
        """What a move communicates, in microseconds; 0 where it is free."""
        if source == target or is_free(source, target, aval.shape, sizes := item_sizes(aval), self.machine):
            return 0.0
        return path_us(source, target, aval.shape, sizes, self.machine)

    def cheapest_us(self, atom: Atom, target: Layout) -> float:
        """What it costs to bring a value to a layout from the version that is nearest; 0 where that is free."""
        versions = self.versions(atom)
        return min(self.move_us(versions.aval, layout, target) for layout in versions)

    def reduction_us(self, var: Var, layout: Layout, decided: tuple[str, ...]) -> float:
        """What it costs to reduce a result's parts to where its later uses would have it; 0 where there are none."""
        if not layout.partial:
            return 0.0
        wish = self.wishes.get(var)
        whole = layout.with_partial(()) if wish is None else wish.restrict(decided)
        return path_us(layout, whole, var.aval.shape, item_sizes(var.aval), self.machine)


def _named(names: tuple[str, ...], index: int, kind: str) -> str:
    return names[index] if index < len(names) else f"{kind} {index}"


def _outgrows(results: list[Any], operands: list[Versions]) -> bool:
    """Whether the results are larger than all operands together, in bytes of the whole arrays."""
    produced = sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in results)
    return produced > sum(math.prod(value.aval.shape) * value.aval.dtype.itemsize for value in operands)


def _evenest(layout: Layout, shape: Sequence[int], axis: str) -> int | None:
    """The dim that an axis splits best: the first that it divides, else the largest. None if there is none to split."""
    parts = [layout.mesh.group_size((*axes, axis)) for axes in layout.dims]
    even = (dim for dim, size in enumerate(shape) if size and size % parts[dim] == 0)
    largest = max(range(len(shape)), key=lambda dim: (shape[dim] / parts[dim], -dim), default=None)
    return next(even, largest if largest is not None and shape[largest] > 1 else None)


def _plan_constrain(planner: Planner, eqn: JaxprEqn) -> PlannedEqn:
    """A pinned constraint brings the value to its placement. A preference is a wish, and moves nothing but parts."""
    current = planner.versions(eqn.invars[0]).primary
    if eqn.params["pinned"]:
        return _place(planner, eqn, merge(eqn.params["placements"], current, eqn.params["free_dims"]))
    return _place(planner, eqn, planner.settled(eqn.invars[0]) if planner.unsettled_wish(eqn.invars[0]) else current)


def _plan_place_like(planner: Planner, eqn: JaxprEqn) -> PlannedEqn:
    """The cotangent of a value held in parts is the same for every part: replicated where the value is partial."""
    return _place(planner, eqn, planner.versions(eqn.invars[1]).primary.with_partial(()))


def _place(planner: Planner, eqn: JaxprEqn, target: Layout) -> PlannedEqn:
    planner.require(eqn.invars[0], target, f"constrained to {target}")
    planner.define(eqn.outvars[0], target)
    others = tuple(planner.versions(atom).primary for atom in eqn.invars[1:])
    return PlannedEqn(eqn, None, (target, *others), (target,), tuple(planner.moves))


PLACING: Final[dict[Primitive, Callable[[Planner, JaxprEqn], PlannedEqn]]] = {
    constrain_p: _plan_constrain,
    place_like_p: _plan_place_like,
}
"""Equations that place a value and compute nothing."""
