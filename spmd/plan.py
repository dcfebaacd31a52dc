"""`Plan`: a layout for every value of a global jaxpr, a strategy for every equation; no ranks yet.

What the planner makes, and what lowering, printing and counting read. The body of a loop or branch has a plan of its own,
inside the equation's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from collectives.jax_compat import Atom, JaxprEqn, Source
from collectives.simulated import reduction_dtype
from placements import ItemSizes, Layout, Machine, Mesh, Step
from placements.redistribute import step_us
from spmd.factors import Rule
from spmd.rules.named import Call
from spmd.trace import GlobalJaxpr

LOCAL: Final = "in a local function"
"""The reason of what a local function sends."""


@dataclass(frozen=True, slots=True)
class Move:
    """Bring a value from one layout to another, for the equation `by`; for a result, that is the one which made it.

    `joined`: in one message with the move before it, or in one for each step.
    """

    atom: Atom
    source: Layout
    target: Layout
    steps: tuple[Step, ...]
    reason: str
    by: JaxprEqn | None = None
    joined: bool = False

    @property
    def communicates(self) -> bool:
        """Whether any step sends anything."""
        return any(step.communicates for step in self.steps)


@dataclass(frozen=True, slots=True)
class PlannedEqn:
    """An equation with the layouts of its operands and results, and the moves that bring the operands there.

    `rule` is None for a fallback (operands replicated), for loops, branches and local functions, whose `bodies` are planned,
    and for equations that only place a value. `call` is what a collective of a local function sends. `count` says how often
    the bodies run; None: not known.
    """

    eqn: JaxprEqn
    rule: Rule | None
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    moves: tuple[Move, ...]
    is_fallback: bool = False
    bodies: tuple[Plan, ...] = ()
    count: int | None = 1
    call: Call | None = None

    def runs(self, count: int | None) -> int | None:
        """How often its bodies run where it runs `count` times; None: not known."""
        return None if count is None or self.count is None else count * self.count

    def received(self, index: int) -> int:
        """The bytes that the busiest rank receives for an operand of its call: the formulas of `collectives.functions`."""
        call, mesh = self.call, self.operands[index].mesh
        assert call is not None
        n = mesh.group_size(call.axes)
        before, after = (
            local_bytes(atoms[index].aval, layouts[index])
            for atoms, layouts in ((self.eqn.invars, self.operands), (self.eqn.outvars, self.results))
        )
        if call.op is not None:
            before = (
                before // self.eqn.invars[index].aval.dtype.itemsize * item_sizes(self.eqn.invars[index].aval).reduced
            )
        others = any(i != j for i, j in call.each[index].get("pairs", ()))
        table = {
            "all_gather": after - before,
            "all_reduce": 2 * before * (n - 1) // n,
            "all_to_all": before * (n - 1) // n,
            "broadcast": before,
            "permute": before * others,
            "reduce_scatter": before * (n - 1) // n,
        }
        return table[call.name] if n > 1 else 0


@dataclass(frozen=True, slots=True)
class SourcedMove:
    """A move, its source line, and how often it happens in one run; None: a loop of unknown length."""

    move: Move
    source: Source | None
    count: int | None


@dataclass(frozen=True, slots=True)
class SourcedCall:
    """The same of an equation of a local function that sends something."""

    planned: PlannedEqn
    source: Source
    count: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """A layout for every value and a strategy for every equation; no ranks yet.

    `arrivals` are the layouts in which the inputs come, `entry` the moves to what is stated for them, `exits` those that bring
    the outputs to `departures`.
    """

    jaxpr: GlobalJaxpr
    mesh: Mesh
    arrivals: tuple[Layout, ...]
    entry: tuple[Move, ...]
    eqns: tuple[PlannedEqn, ...]
    exits: tuple[Move, ...]
    departures: tuple[Layout, ...]
    machine: Machine

    def moves(self, count: int | None = 1) -> Iterator[SourcedMove]:
        """Every move in the order of execution, those of bodies included. `count` is how often the plan as a whole runs."""
        return (each for each in self.sent(count) if isinstance(each, SourcedMove))

    def sent(self, count: int | None = 1) -> Iterator[SourcedMove | SourcedCall]:
        """Every move, and every call of a local function, in the order of execution."""
        for move in self.entry:
            yield self.sourced(move, count)
        for planned in self.eqns:
            for move in planned.moves:
                yield self.sourced(move, count)
            if planned.call is not None and self.mesh.group_size(planned.call.axes) > 1:
                yield SourcedCall(planned, self.jaxpr.source(planned.eqn), count)
            for body in planned.bodies:
                yield from body.sent(planned.runs(count))
        for move in self.exits:
            yield self.sourced(move, count)

    def axes_used(self) -> dict[str, None]:
        """The mesh axes that it communicates over."""
        found: dict[str, None] = {}
        for each in self.sent():
            if isinstance(each, SourcedCall):
                assert each.planned.call is not None
                found.update(dict.fromkeys(each.planned.call.axes))
            else:
                sent = (step for step in each.move.steps if step.communicates)
                found.update(dict.fromkeys(axis for step in sent for axis in step.axes))
        return found

    def sourced(self, move: Move, count: int | None) -> SourcedMove:
        """A move with its source line."""
        return SourcedMove(move, None if move.by is None else self.jaxpr.source(move.by), count)

    def is_sharded(self) -> bool:
        """Whether anything is sharded or in parts."""
        found = (
            layouts
            for plan in self.flat()
            for layouts in (plan.arrivals, plan.departures, *((*each.operands, *each.results) for each in plan.eqns))
        )
        return any(layout.axes for layouts in found for layout in layouts)

    def flat(self) -> Iterator[Plan]:
        """This plan and those of all bodies in it."""
        yield self
        for planned in self.eqns:
            for body in planned.bodies:
                yield from body.flat()

    def total_us(self) -> float:
        """What one run costs, under the machine model: nothing overlaps."""
        return self.communication_us() + self.compute_us()

    def communication_us(self) -> float:
        """What one run communicates, under the machine model. A loop of unknown length counts once."""
        return sum(times(found.count) * _sent_us(found, self.machine) for found in self.sent())

    def compute_us(self) -> float:
        """What the busiest rank computes and stacks in one run, under the machine model."""
        total = 0.0
        for planned in self.eqns:
            if planned.rule is not None:
                total += self.machine.compute_us(planned.rule.flops / _ranks(planned))
            total += sum(body.compute_us() for body in planned.bodies) * times(planned.count)
            if planned.bodies:  # what a loop stacks is written whole, in parts or in shards
                pairs = zip(planned.eqn.outvars, planned.results, strict=True)
                total += sum(self.machine.memory_us(local_bytes(var.aval, layout)) for var, layout in pairs)
        return total


def shown_times(count: int | None) -> str:
    """How often something runs, for texts; nothing where that is once."""
    return "" if count == 1 else f" x {'?' if count is None else count}"


def times(count: int | None) -> int:
    """How often something runs, for sums: once, where it is not known."""
    return 1 if count is None else count


def _sent_us(found: SourcedMove | SourcedCall, machine: Machine) -> float:
    if isinstance(found, SourcedMove):
        return _move_us(found.move, machine)
    call = found.planned.call
    assert call is not None
    return machine.collective_us(call.axes, sum(map(found.planned.received, range(len(call.each)))))


def _move_us(move: Move, machine: Machine) -> float:
    """The cost of a move. One that joins others' messages pays for its bytes alone, and for packing them."""
    sizes = item_sizes(move.atom.aval)
    total = sum(step_us(step, sizes, machine) for step in move.steps)
    return total - machine.latency_us * sum(step.communicates for step in move.steps) * move.joined


def _ranks(planned: PlannedEqn) -> int:
    """Over how many ranks an equation's computation is divided: those along which an operand or result is sharded."""
    layouts = (*planned.operands, *planned.results)
    axes = dict.fromkeys(axis for layout in layouts for dim in layout.dims for axis in dim)
    return layouts[0].mesh.group_size(tuple(axes)) if axes else 1


def local_bytes(aval: Any, layout: Layout) -> int:
    """The bytes of the largest part that a coordinate holds."""
    return layout.largest_local_size(aval.shape) * int(aval.dtype.itemsize)


def item_sizes(aval: Any) -> ItemSizes:
    """The bytes per element of an aval, as moved and as reduced."""
    return ItemSizes(aval.dtype.itemsize, reduction_dtype(aval.dtype).itemsize)
