"""`Program`: a lowered function, before it is executed. What it communicates, as data and as text.

A program is a plan seen from the outside: every collective with its bytes, source line and reason; the local jaxpr of
each shape class; a digest that is equal on all ranks that may run it together. Nothing here runs anything.

Invariants: `collectives`, `bytes` and `digest` follow from the plan alone, so they are the same on every rank and in every
process; the text holds no path, no address and no hash-dependent order.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import EllipsisType, FunctionType
from typing import Any, Final

import jax

from collectives.jax_compat import UNKNOWN, Literal, Source, bodies_of, raw_bytes
from collectives.primitives import TABLE
from collectives.simulated import reduction_dtype
from placements import Mesh, Split
from placements.intervals import Window
from placements.mesh import Coordinate
from placements.redistribute import step_bytes
from spmd.effects import CALLBACKS
from spmd.errors import ArgumentError, CommunicationMismatch
from spmd.lower import local_jaxpr, shape_key, uneven_splits
from spmd.plan import LOCAL, Plan, SourcedCall, item_sizes, shown_times, times
from spmd.text import Naming, program_lines
from spmd.trace import nbytes

BODIES: Final = frozenset({"bodies", "jaxpr", "branches", "cond_jaxpr", "body_jaxpr", "ft_in", "ft_out"})
"""Parameters of equations with planned bodies that are digested by their plans."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One logical collective: one step of one value.

    `shape` is the global shape of the value, `dtype` what travels (numbers of 16 bits or fewer are reduced in 32),
    `bytes` what the busiest coordinate receives, `count` how often it runs (None: a loop of unknown length), `message`
    the index in `Program.messages` of what carries it.
    """

    name: str
    axes: tuple[str, ...]
    op: str | None
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    source: Source
    reason: str
    count: int | None
    message: int

    def __str__(self) -> str:
        detail = ", ".join((*self.axes, *((self.op,) if self.op else ())))
        where = f"; {self.source}" if self.source.function else ""
        shape = ",".join(map(str, self.shape))
        return f"{self.name}[{detail}] {self.dtype}[{shape}]  {self.bytes} bytes{shown_times(self.count)}: {self.reason}{where}"


@dataclass(frozen=True, slots=True)
class Message:
    """What is sent in one call: the logical collectives that it carries."""

    collectives: tuple[Collective, ...]

    @property
    def bytes(self) -> int:
        """What a coordinate receives at most."""
        return sum(collective.bytes for collective in self.collectives)

    def __str__(self) -> str:
        more = len(self.collectives) - 1
        return f"{self.collectives[0]}" + (f" and {more} more in one message" if more else "")


@dataclass(frozen=True, slots=True)
class Fallback:
    """An equation without a rule, or a callback: its operands are replicated.

    `bytes` is what that moves, `count` how often (None: a loop of unknown length).
    """

    primitive: str
    source: Source
    bytes: int
    count: int | None = 1

    def __str__(self) -> str:
        return f"{self.primitive} ({self.source}, {self.bytes} bytes{shown_times(self.count)} moved)"


@dataclass(frozen=True, slots=True)
class MemoryAnalysis:
    """Bytes that the busiest coordinate holds, before XLA fuses anything: arguments, results, and the peak of live values."""

    argument_bytes: int
    output_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds under the machine model: the collectives, and the local computation of one rank."""

    communication_us: float
    compute_us: float

    @property
    def total_us(self) -> float:
        """Their sum: nothing overlaps in the model."""
        return self.communication_us + self.compute_us


@dataclass(frozen=True, eq=False)
class Program:
    """A lowered function: `print(program)`, `program.collectives`, `program.check(all_reduce=1)`. Made by `f.lower(...)`.

    `at` is the coordinate whose local shapes the text shows.
    """

    name: str
    plan: Plan
    names: tuple[str, ...]
    at: Coordinate

    @property
    def mesh(self) -> Mesh:
        """The mesh that it is lowered for."""
        return self.plan.mesh

    @functools.cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Every logical collective, in the order of execution."""
        found: list[Collective] = []
        first = following = 0  # the message of the first step, and the next one that is free
        for each in self.plan.sent():
            if isinstance(each, SourcedCall):
                first, following = following, following + 1
                found += _called(each, first)
                continue
            move, aval = each.move, each.move.atom.aval
            sent = [step for step in move.steps if step.communicates]
            if not move.joined:
                first, following = following, following + len(sent)
            for message, step in enumerate(sent, first):
                dtype = str(reduction_dtype(aval.dtype) if step.op else aval.dtype)
                found.append(
                    Collective(
                        step.name, step.axes, step.op, aval.shape, dtype, int(step_bytes(step, item_sizes(aval))),
                        each.source or UNKNOWN, move.reason, each.count, message,
                    )
                )  # fmt: skip
        return tuple(found)

    @property
    def messages(self) -> tuple[Message, ...]:
        """What is sent, in order. Independent collectives of one kind that are ready together share a message."""
        in_order = sorted(self.collectives, key=lambda collective: collective.message)
        groups = itertools.groupby(in_order, lambda collective: collective.message)
        return tuple(Message(tuple(group)) for _, group in groups)

    @property
    def bytes(self) -> int:
        """What a coordinate receives in one run at most: the sum of what the busiest of each collective receives.

        They need not be the same: the parts of a roll have each a busiest of their own. Loops of unknown length count as one
        iteration.
        """
        return sum(collective.bytes * times(collective.count) for collective in self.collectives)

    @functools.cached_property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """The equations without a rule, and the callbacks, whose operands had to be replicated, in order."""
        return tuple(_fallbacks(self.plan, 1))

    @property
    def cost(self) -> Cost:
        """What one run costs under the plan's machine model."""
        return Cost(self.plan.communication_us(), self.plan.compute_us())

    @functools.cached_property
    def _splits(self) -> tuple[Split | Window, ...]:
        return uneven_splits(self.plan)

    @functools.cached_property
    def _jaxprs(self) -> dict[tuple[int, ...], Any]:
        return {}

    def shape_class(self, coordinate: Coordinate) -> tuple[int, ...]:
        """What the local shapes at `coordinate` depend on; coordinates with equal classes share a local jaxpr."""
        return shape_key(self.mesh, self._splits, coordinate)

    @functools.cached_property
    def classes(self) -> dict[tuple[int, ...], Coordinate]:
        """Every shape class, with its first coordinate."""
        if not self._splits:
            return {(): self.mesh.coordinate_at(0)}
        found: dict[tuple[int, ...], Coordinate] = {}
        for coordinate in self.mesh.coordinates():
            found.setdefault(self.shape_class(coordinate), coordinate)
        return found

    def jaxpr(self, coordinate: Coordinate | None = None) -> Any:
        """The local jaxpr at a coordinate: inputs are its indices (int32, one per axis), then its shards."""
        at = self.at if coordinate is None else coordinate
        key = self.shape_class(at)
        if key not in self._jaxprs:
            self._jaxprs[key] = local_jaxpr(self.plan, at)
        return self._jaxprs[key]

    def compile(self) -> Any:
        """The compiled program: a function of the shards of every input. See `execute.Executable`."""
        from spmd.execute import Executable

        return Executable(self, compiled=True)

    def memory_analysis(self) -> MemoryAnalysis:
        """What the coordinate `at` holds at once, by liveness over its local jaxpr."""
        jaxpr = self.jaxpr().jaxpr
        arguments, results = (sum(map(nbytes, atoms)) for atoms in (jaxpr.invars, jaxpr.outvars))
        return MemoryAnalysis(arguments, results, _peak(jaxpr))

    @functools.cached_property
    def digest(self) -> str:
        """A SHA-256 of all that decides what is computed and communicated: equal on ranks that may run it together."""
        sha = hashlib.sha256("\n".join(self._digested()).encode())
        for var, value in self.plan.jaxpr.constants:
            sha.update(f"{var.aval}".encode())
            sha.update(raw_bytes(value))
        return sha.hexdigest()

    def _digested(self) -> list[str]:
        """All that is digested but for the values of constants."""
        plan = self.plan
        words = [self.name, repr(plan.mesh), repr(plan.machine), f"JAX {jax.__version__}"]
        words += [f"{var.aval} {layout}" for var, layout in zip(plan.jaxpr.inputs, plan.arrivals, strict=True)]
        return words + _words(plan, Naming(self))

    def comparable(self) -> str:
        """The text, and all else that the digest is made of: what ranks compare when their digests differ."""
        whole = [
            f"argument {name}: {var.aval.str_short()} as a whole (a rank's own piece goes to spmd.from_local)"
            for name, var in zip(self.names, self.plan.jaxpr.inputs, strict=False)
        ]
        first, *text = program_lines(self)
        lines = [first, *whole, *text, *self._digested()]
        for var, value in self.plan.jaxpr.constants:
            uses = [eqn for eqn in self.plan.jaxpr.eqns if var in eqn.invars]
            where = f", used at {self.plan.jaxpr.source(uses[0])}" if uses else ""
            checksum = hashlib.sha256(raw_bytes(value)).hexdigest()[:8]
            lines.append(f"closed-over array {var.aval.str_short()}{where}: values of checksum {checksum}")
        return "\n".join(lines)

    def check(
        self,
        *,
        axis: str | None = None,
        max_bytes: int | None = None,
        max_messages: int | None = None,
        **counts: int | EllipsisType,
    ) -> None:
        """Raise `CommunicationMismatch`, with the table, unless the program communicates just so.

        `counts` are those of logical collectives by name: `all_reduce=1`. One that is not named must not occur; the
        Ellipsis leaves it free. `axis` looks at the collectives over one mesh axis alone; `max_bytes` bounds what the
        busiest coordinate receives in one run, `max_messages` what is sent.

        Raises `ArgumentError` for a name that is no collective or an axis that the mesh does not have.
        """
        if axis is not None and axis not in self.mesh.axis_names:
            raise ArgumentError(f"check(axis={axis!r}): {self.mesh!r} has no such axis.")
        for name in counts:
            if name not in TABLE:
                raise ArgumentError(f"check({name}=...): no such collective; they are {', '.join(TABLE)}.")
        chosen = [c for c in self.collectives if axis is None or axis in c.axes]
        faults = []
        for name in TABLE:
            found, wanted = sum(c.name == name for c in chosen), counts.get(name, 0)
            if wanted is not ... and found != wanted:
                faults.append(f"{name}: {found}, expected {wanted}")
        received = sum(c.bytes * times(c.count) for c in chosen)
        if max_bytes is not None and received > max_bytes:
            faults.append(f"{received} bytes received, at most {max_bytes} allowed")
        messages = sum(any(c in chosen for c in message.collectives) for message in self.messages)
        if max_messages is not None and messages > max_messages:
            faults.append(f"{messages} messages, at most {max_messages} allowed")
        if faults:
            over = f" over {axis}" if axis is not None else ""
            table = "\n".join(f"  {c}" for c in chosen) or "  no collective"
            raise CommunicationMismatch(f"{self.name}{over}: {'; '.join(faults)}. It communicates:\n{table}")

    def __str__(self) -> str:
        return "\n".join(program_lines(self))


def _fallbacks(plan: Plan, count: int | None) -> Iterator[Fallback]:
    """Those of a plan that runs so often."""
    for planned in plan.eqns:
        name = planned.eqn.primitive.name
        if (planned.is_fallback or name in CALLBACKS) and planned.moves:
            steps = ((move, step) for move in planned.moves for step in move.steps)
            moved = sum(step_bytes(step, item_sizes(move.atom.aval)) for move, step in steps)
            yield Fallback(name, plan.jaxpr.source(planned.eqn), moved, count)
        for body in planned.bodies:
            yield from _fallbacks(body, planned.runs(count))


def _called(sent: SourcedCall, message: int) -> Iterator[Collective]:
    """The logical collectives of an equation of a local function: one for each operand."""
    planned, call = sent.planned, sent.planned.call
    assert call is not None
    for index, atom in enumerate(planned.eqn.invars):
        aval = atom.aval
        dtype = str(reduction_dtype(aval.dtype) if call.op else aval.dtype)
        yield Collective(
            call.name, call.axes, call.op, aval.shape, dtype, planned.received(index),
            sent.source, LOCAL, sent.count, message,
        )  # fmt: skip


def _words(plan: Plan, naming: Naming) -> list[str]:
    """All that a plan computes and communicates, bodies included."""
    words = [naming.move(move) for move in plan.entry]
    for planned in plan.eqns:
        moves = " ".join(map(naming.move, planned.moves))
        operands = " ".join(naming(atom) for atom in planned.eqn.invars)
        own = {key: value for key, value in planned.eqn.params.items() if not planned.bodies or key not in BODIES}
        params = ", ".join(f"{key}={_stable(value)}" for key, value in sorted(own.items()))
        layouts = " ".join(map(str, (*planned.operands, *planned.results)))
        results = " ".join(f"{naming(var)}:{var.aval}" for var in planned.eqn.outvars)
        words.append(f"{moves}; {results} = {planned.eqn.primitive}[{params}] {operands}; {layouts}")
        for body in planned.bodies:
            inputs = " ".join(f"{naming(var)}:{var.aval}" for var in body.jaxpr.inputs)
            words += [f"body of {inputs}", *_words(body, naming), "end"]
    words += [naming.move(move) for move in plan.exits]
    return words + [f"{naming(a)} {layout}" for a, layout in zip(plan.jaxpr.outputs, plan.departures, strict=True)]


def _peak(jaxpr: Any) -> int:
    """The largest sum of live bytes in a jaxpr; that of a body is on top of what lives around it."""
    last = {id(atom): at for at, eqn in enumerate(jaxpr.eqns) for atom in eqn.invars}
    last.update({id(atom): len(jaxpr.eqns) for atom in (*jaxpr.outvars, *jaxpr.invars)})
    live = peak = sum(map(nbytes, jaxpr.invars))
    for at, eqn in enumerate(jaxpr.eqns):
        inner = max((_peak(body) - sum(map(nbytes, body.invars)) for body in bodies_of(eqn)), default=0)
        live += sum(map(nbytes, eqn.outvars))
        peak = max(peak, live + max(inner, 0))
        ended = {
            id(v): v for v in (*eqn.invars, *eqn.outvars) if not isinstance(v, Literal) and last.get(id(v), at) == at
        }
        live -= sum(map(nbytes, ended.values()))
    return peak


def _stable(value: Any) -> str:
    """A parameter as text that is the same in every process: addresses cut out."""
    if isinstance(value, FunctionType):
        code = value.__code__
        return f"{value.__module__}.{value.__qualname__} {code.co_code.hex()} {_stable(code.co_consts)} {code.co_names}"
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
