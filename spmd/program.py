"""`Program`: a lowered function, before it is executed. What it communicates, as data and as text.

A program is a plan seen from the outside: every collective with its bytes, source line and reason; the local jaxpr of
each shape class; a digest that is equal on all ranks that may run it together. Nothing here runs anything.

Invariants: `collectives`, `bytes` and `digest` follow from the plan alone, so they are the same on every rank and in every
process; the text holds no path, no address and no hash-dependent order.
"""

from __future__ import annotations

import functools
import hashlib
import keyword
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import EllipsisType, FunctionType
from typing import Any, Final

import jax
import numpy as np

from collectives.jax_compat import UNKNOWN, Literal, Source
from collectives.primitives import TABLE
from collectives.simulated import reduction_dtype
from placements import Layout, Mesh
from placements.mesh import Coordinate
from placements.redistribute import step_bytes, step_us
from spmd.errors import ArgumentError, CommunicationMismatch
from spmd.lower import local_jaxpr, shape_key, uneven_splits
from spmd.propagate import Move, Plan, PlannedEqn, item_sizes


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
        return f"{self.name}[{detail}] {self.dtype}[{shape}]  {self.bytes} bytes: {self.reason}{where}"


@dataclass(frozen=True, slots=True)
class Message:
    """What is sent in one call: the logical collectives that it carries."""

    collectives: tuple[Collective, ...]

    @property
    def bytes(self) -> int:
        """What the busiest coordinate receives."""
        return sum(collective.bytes for collective in self.collectives)


@dataclass(frozen=True, slots=True)
class Fallback:
    """An equation without a rule: its operands are replicated. `bytes` is what that moves."""

    primitive: str
    source: Source
    bytes: int

    def __str__(self) -> str:
        return f"{self.primitive} ({self.source}, {self.bytes} bytes moved)"


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
        for move, source in self.plan.moves():
            aval = move.atom.aval
            sizes = item_sizes(aval)
            for step in move.steps:
                if step.communicates:
                    dtype = str(reduction_dtype(aval.dtype) if step.op else aval.dtype)
                    found.append(
                        Collective(
                            step.name, step.axes, step.op, aval.shape, dtype, step_bytes(step, sizes),
                            source or UNKNOWN, move.reason, 1, len(found),
                        )
                    )  # fmt: skip
        return tuple(found)

    @property
    def messages(self) -> tuple[Message, ...]:
        """What is sent, in order: one message for each collective."""
        return tuple(Message((collective,)) for collective in self.collectives)

    @property
    def bytes(self) -> int:
        """What the busiest coordinate receives in one run, all collectives together."""
        return sum(collective.bytes for collective in self.collectives)

    @functools.cached_property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """The equations without a rule whose operands had to be replicated, in order."""
        found = []
        for planned in self.plan.eqns:
            if planned.is_fallback and planned.moves:
                moved = sum(
                    step_bytes(step, item_sizes(move.atom.aval)) for move in planned.moves for step in move.steps
                )
                found.append(Fallback(planned.eqn.primitive.name, self.plan.jaxpr.source(planned.eqn), moved))
        return tuple(found)

    @property
    def cost(self) -> Cost:
        """What one run costs under the plan's machine model."""
        machine = self.plan.machine
        steps = [(step, item_sizes(move.atom.aval)) for move, _ in self.plan.moves() for step in move.steps]
        flops = 0.0
        for planned in self.plan.eqns:
            if planned.rule is not None:
                whole = math.prod(planned.eqn.outvars[0].aval.shape)
                local = planned.results[0].largest_local_size(planned.eqn.outvars[0].aval.shape)
                flops += planned.rule.flops * (local / whole if whole else 0.0)
        return Cost(sum(step_us(step, sizes, machine) for step, sizes in steps), machine.compute_us(flops))

    @functools.cached_property
    def _splits(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
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
        last = {id(atom): at for at, eqn in enumerate(jaxpr.eqns) for atom in eqn.invars}
        last.update({id(atom): len(jaxpr.eqns) for atom in (*jaxpr.outvars, *jaxpr.invars)})
        live = arguments = sum(map(_nbytes, jaxpr.invars))
        peak = live
        for at, eqn in enumerate(jaxpr.eqns):
            live += sum(map(_nbytes, eqn.outvars))
            peak = max(peak, live)
            ended = {
                id(v): v
                for v in (*eqn.invars, *eqn.outvars)
                if not isinstance(v, Literal) and last.get(id(v), at) == at
            }
            live -= sum(map(_nbytes, ended.values()))
        return MemoryAnalysis(arguments, sum(map(_nbytes, jaxpr.outvars)), peak)

    @functools.cached_property
    def digest(self) -> str:
        """A SHA-256 of all that decides what is computed and communicated: equal on ranks that may run it together."""
        plan = self.plan
        words = [self.name, repr(plan.mesh), repr(plan.machine), jax.__version__]
        words += [f"{var.aval} {layout}" for var, layout in zip(plan.jaxpr.inputs, plan.arrivals, strict=True)]
        naming = _Naming(self)
        words += [naming.move(move) for move in plan.entry]
        for planned in plan.eqns:
            moves = " ".join(map(naming.move, planned.moves))
            operands = " ".join(naming(atom) for atom in planned.eqn.invars)
            params = ", ".join(f"{key}={_stable(value)}" for key, value in sorted(planned.eqn.params.items()))
            layouts = " ".join(map(str, (*planned.operands, *planned.results)))
            results = " ".join(f"{naming(var)}:{var.aval}" for var in planned.eqn.outvars)
            words.append(f"{moves}; {results} = {planned.eqn.primitive}[{params}] {operands}; {layouts}")
        words += [naming.move(move) for move in plan.exits if move is not None]
        words += [f"{naming(atom)} {layout}" for atom, layout in zip(plan.jaxpr.outputs, plan.departures, strict=True)]
        sha = hashlib.sha256("\n".join(words).encode())
        for var, value in plan.jaxpr.constants:
            sha.update(f"{var.aval}".encode())
            sha.update(_raw_bytes(value))
        return sha.hexdigest()

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
        received = sum(c.bytes * (c.count or 1) for c in chosen)
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
        return "\n".join(_lines(self))


def _nbytes(atom: Any) -> int:
    aval = atom.aval
    return math.prod(aval.shape) * aval.dtype.itemsize


def _raw_bytes(value: Any) -> bytes:
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        value = jax.random.key_data(value)
    return np.ascontiguousarray(value).tobytes()


def _stable(value: Any) -> str:
    """A parameter as text that is the same in every process: addresses cut out."""
    if isinstance(value, FunctionType):
        code = value.__code__
        return f"{value.__module__}.{value.__qualname__} {code.co_code.hex()} {_stable(code.co_consts)} {code.co_names}"
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


class _Naming:
    """Names for values: those of the inputs, then a, b, ..., z, aa, ab, ... in the order in which they are asked for.

    Axis names and keywords are left out. In a text, a value that moved has a name for each layout.
    """

    def __init__(self, program: Program) -> None:
        pairs = zip(program.plan.jaxpr.inputs, program.names, strict=False)
        self.names: dict[Any, str] = {id(var): name for var, name in pairs}
        self.taken = {*self.names.values(), *program.mesh.axis_names, *keyword.kwlist}
        self.count = 0

    def __call__(self, atom: Any) -> str:
        if isinstance(atom, Literal):
            return str(np.asarray(atom.val).tolist())
        if id(atom) not in self.names:
            self.names[id(atom)] = self.fresh()
        return self.names[id(atom)]

    def placed(self, atom: Any, layout: Layout) -> str:
        """The name of a value in a layout: that of the move that brought it there, else its own."""
        return self.names.get((id(atom), layout)) or self(atom)

    def moved(self, atom: Any, layout: Layout) -> str:
        """A new name for a value in a layout."""
        self.names[id(atom), layout] = name = self.fresh()
        return name

    def same(self, atom: Any, other: Any, layout: Layout) -> None:
        """Let a value have the name of another."""
        self.names[id(atom)] = self.placed(other, layout)

    def move(self, move: Move) -> str:
        """A move with its steps."""
        steps = " ".join(f"{step.name}{step.axes}>{step.target}" for step in move.steps)
        return f"{self(move.atom)}:{move.source}:{steps}"

    def fresh(self) -> str:
        while True:
            number, word = self.count, ""
            self.count += 1
            while number >= 0:
                number, digit = number // 26 - 1, number % 26
                word = chr(ord("a") + digit) + word
            if word not in self.taken:
                return word


SHOWN: Final = (
    "axes", "axis", "dimension", "dimensions", "permutation", "new_dtype", "y",
    "start_indices", "limit_indices", "strides", "padding_config", "reverse",
)  # fmt: skip
"""The parameters that the text shows; the others follow from the shapes."""

Row = tuple[str, str, str]
"""One line of the text: what is computed, its local type and placements, a note."""


def _lines(program: Program) -> Iterator[str]:
    """The text: arguments, equations with the moves before them, results, and the sum."""
    plan, naming = program.plan, _Naming(program)
    rows = [*_input_rows(program, naming)]
    sources = {id(move): source for move, source in plan.moves()}

    def moves(items: Iterable[Move]) -> Iterator[Row]:
        for move in items:
            yield from _move_rows(program, naming, move, sources[id(move)])

    rows += moves(plan.entry)
    for planned in plan.eqns:
        rows += moves(planned.moves)
        if planned.rule is None and not planned.is_fallback:
            naming.same(planned.eqn.outvars[0], planned.eqn.invars[0], planned.operands[0])
        else:
            rows.append(_equation_row(program, naming, planned))
    rows += moves(move for move in plan.exits if move is not None)
    width = min(max((len(left) for left, _, _ in rows), default=0), 60)
    results = [naming.placed(a, layout) for a, layout in zip(plan.jaxpr.outputs, plan.departures, strict=True)]
    yield f"{program.name} on {plan.mesh!r}, shapes at {program.at}{_class_note(program)}"
    yield from (f"  {left:<{width}}  {types}{note}" for left, types, note in rows)
    yield f"  return {', '.join(results)}"
    yield _sum(program)


def _input_rows(program: Program, naming: _Naming) -> Iterator[Row]:
    inputs, hidden = program.plan.jaxpr.inputs, len(program.plan.jaxpr.hidden)
    for index, (var, layout) in enumerate(zip(inputs, program.plan.arrivals, strict=True)):
        kind = "closed over" if index >= len(inputs) - hidden else "argument"
        yield f"{kind} {naming(var)}", _typed(program, var.aval, layout), ""
    for var, _ in program.plan.jaxpr.constants:
        layout = Layout.replicated(program.mesh, len(var.aval.shape))
        yield f"constant {naming(var)}", _typed(program, var.aval, layout), ""


def _move_rows(program: Program, naming: _Naming, move: Move, source: Source | None) -> Iterator[Row]:
    sizes = item_sizes(move.atom.aval)
    for step in move.steps:
        operand = naming.placed(move.atom, step.source)
        detail = ", ".join((*step.axes, *((step.op,) if step.op else ())))
        name = step.name if step.communicates else f"local_{step.name}"
        where = f"; {source.offset}" if source is not None and source.function else ""
        note = f"  # {step_bytes(step, sizes)} bytes: {move.reason}{where}" if step.communicates else ""
        result = naming.moved(move.atom, step.target)
        yield f"{result} = {name}[{detail}] {operand}", _typed(program, move.atom.aval, step.target), note


def _equation_row(program: Program, naming: _Naming, planned: PlannedEqn) -> Row:
    eqn = planned.eqn
    operands = " ".join(naming.placed(a, layout) for a, layout in zip(eqn.invars, planned.operands, strict=True))
    results = " ".join(naming(var) for var in eqn.outvars)
    shown = {key: eqn.params[key] for key in SHOWN if eqn.params.get(key) is not None and eqn.params[key] is not False}
    params = ", ".join(f"{key}={value}" for key, value in shown.items())
    types = [_typed(program, v.aval, layout) for v, layout in zip(eqn.outvars, planned.results, strict=True)]
    text = f"{results} = {eqn.primitive}{f'[{params}]' if params else ''} {operands}".rstrip()
    note = f"  # no rule: replicated; {program.plan.jaxpr.source(eqn).offset}" if planned.is_fallback else ""
    return text, ", ".join(types), note


def _typed(program: Program, aval: Any, layout: Layout) -> str:
    shape = ",".join(map(str, layout.local_shape(aval.shape, program.at)))
    return f"{aval.dtype}[{shape}] {layout}"


def _class_note(program: Program) -> str:
    others = [str(at) for key, at in program.classes.items() if key != program.shape_class(program.at)]
    if not others:
        return ""
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    return f"; other shapes at {', '.join(others[:3])}{more}"


def _sum(program: Program) -> str:
    count = len(program.collectives)
    fallbacks = f", {len(program.fallbacks)} fallbacks" if program.fallbacks else ""
    if not count:
        return f"no communication{fallbacks}"
    return f"{count} collective{'s' * (count > 1)}, {program.bytes} bytes received by the busiest rank{fallbacks}"
