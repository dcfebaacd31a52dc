"""The text of a Program: one line for each argument, step and equation, with local types and placements.

Invariants: every operand was defined on an earlier line; a value that moved and the original have names of their own; no path,
no address and no hash-dependent order occurs, so the text is the same on every rank and in every process. Source lines are
given as function and offset: the text stays when a function moves.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np

from collectives.jax_compat import Literal
from placements import Layout
from placements.redistribute import step_bytes
from spmd.effects import CALLBACKS
from spmd.plan import LOCAL, Move, Plan, PlannedEqn, SourcedMove, item_sizes, shown_times


class Naming:
    """Names for values: those of the inputs, then a, b, ..., z, aa, ab, ... in the order in which they are asked for.

    Names of arguments and axes, and keywords, are left out. In a text, a value that moved has a name for each layout.
    """

    def __init__(self, program: Any) -> None:
        pairs = zip(program.plan.jaxpr.inputs, program.names, strict=False)
        self.names: dict[Any, str] = {id(var): name for var, name in pairs}
        roots = (re.match(r"\w*", name) for name in program.names)
        self.taken = {*(root.group() for root in roots if root), *program.mesh.axis_names, *keyword.kwlist}
        self.count = self.local = 0  # names given; local functions around

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
        return f"{'+' * move.joined}{self(move.atom)}:{move.source}:{steps}"

    def fresh(self) -> str:
        """A name that nothing has yet."""
        while True:
            number, word = self.count, ""
            self.count += 1
            while number >= 0:
                number, digit = number // 26 - 1, number % 26
                word = chr(ord("a") + digit) + word
            if word not in self.taken:
                return word


SHOWN: Final = (
    "axes", "axis", "axis_name", "dimension", "dimensions", "permutation", "new_dtype", "y",
    "start_indices", "limit_indices", "strides", "padding_config", "reverse", "bounds",
)  # fmt: skip
"""The parameters that the text shows; the others follow from the shapes."""

Row = tuple[str, str, str]
"""One line of the text: what is computed, its local type and placements, a note."""


def program_lines(program: Any) -> Iterator[str]:
    """The text: arguments, equations with the moves before them, results, and the sum."""
    plan, naming = program.plan, Naming(program)
    rows = [*_input_rows(program, naming), *_plan_rows(program, naming, plan, "", 1)]
    width = min(max((len(left) for left, _, _ in rows), default=0), 60)
    results = [naming.placed(a, layout) for a, layout in zip(plan.jaxpr.outputs, plan.departures, strict=True)]
    yield f"{program.name} on {plan.mesh!r}, shapes at {program.at}{_class_note(program)}"
    yield from (f"  {left:<{width}}  {types}{note}".rstrip() for left, types, note in rows)
    yield f"  return {', '.join(results)}"
    yield _sum(program)


def _plan_rows(program: Any, naming: Naming, plan: Plan, indent: str, count: int | None) -> Iterator[Row]:
    """The lines of a plan's moves and equations, which run `count` times; those of a body are indented."""

    def moves(items: Iterable[Move]) -> Iterator[Row]:
        for move in items:
            for left, types, note in _move_rows(program, naming, plan.sourced(move, count)):
                yield indent + left, types, note

    yield from moves(plan.entry)
    for planned in plan.eqns:
        yield from moves(planned.moves)
        if planned.bodies:
            yield from _body_rows(program, naming, planned, indent, count)
        elif planned.call is not None:
            left, types, note = _call_row(program, naming, plan, planned, count)
            yield indent + left, types, note
        elif planned.rule is None and not planned.is_fallback:
            naming.same(planned.eqn.outvars[0], planned.eqn.invars[0], planned.operands[0])
        else:
            left, types, note = _equation_row(program, naming, planned)
            yield indent + left, types, note
    yield from moves(plan.exits)


def _body_rows(program: Any, naming: Naming, planned: PlannedEqn, indent: str, count: int | None) -> Iterator[Row]:
    """A loop, branch or local function: its own line, then each body: what its inputs are, its lines, what it returns."""
    left, types, note = _equation_row(program, naming, planned)
    name, params = planned.eqn.primitive.name, planned.eqn.params
    times = f", {'?' if planned.count is None else planned.count} times" if name in ("scan", "while") else ""
    for number, body in enumerate(planned.bodies):
        inputs = " ".join(naming(var) for var in body.jaxpr.inputs)
        kind = "condition" if name == "while" and number == 0 else "body"
        kind = f"branch {number}" if name == "cond" else kind
        kind = f"local over {', '.join(params['local'])}:" if name == "shard_map" else kind
        yield f"{indent}{kind} {inputs}{times}", "", ""
        depth = naming.local
        naming.local += name == "shard_map"
        yield from _plan_rows(program, naming, body, indent + "  ", planned.runs(count))
        naming.local = depth
        results = [naming.placed(a, layout) for a, layout in zip(body.jaxpr.outputs, body.departures, strict=True)]
        yield f"{indent}  yield {', '.join(results)}", "", ""
    yield indent + left, types, note


def _input_rows(program: Any, naming: Naming) -> Iterator[Row]:
    inputs, hidden = program.plan.jaxpr.inputs, len(program.plan.jaxpr.hidden)
    for index, (var, layout) in enumerate(zip(inputs, program.plan.arrivals, strict=True)):
        kind = "closed over" if index >= len(inputs) - hidden else "argument"
        yield f"{kind} {naming(var)}", _typed(program, var.aval, layout), ""
    for var, _ in program.plan.jaxpr.constants:
        layout = Layout.replicated(program.mesh, len(var.aval.shape))
        yield f"constant {naming(var)}", _typed(program, var.aval, layout), ""


def _move_rows(program: Any, naming: Naming, sourced: SourcedMove) -> Iterator[Row]:
    move, source = sourced.move, sourced.source
    times = shown_times(sourced.count)
    sizes, sent = item_sizes(move.atom.aval), sum(step.communicates for step in move.steps)
    for step in move.steps:
        operand = naming.placed(move.atom, step.source)
        detail = ", ".join((*step.axes, *((step.op,) if step.op else ())))
        name = step.name if step.communicates else f"local_{step.name}"
        where = f"; {source.offset}" if source is not None and source.function else ""
        shared = (
            ", in the message above" if move.joined and sent == 1 else ", in a message above" if move.joined else ""
        )
        note = f"  # {step_bytes(step, sizes)} bytes{times}{shared}: {move.reason}{where}" if step.communicates else ""
        result = naming.moved(move.atom, step.target)
        types = _typed(program, move.atom.aval, step.target, naming.local > 0)
        yield f"{result} = {name}[{detail}] {operand}", types, note


def _call_row(program: Any, naming: Naming, plan: Plan, planned: PlannedEqn, count: int | None) -> Row:
    """What a local function sends: as a collective that a plan inserts is shown."""
    call, source = planned.call, plan.jaxpr.source(planned.eqn)
    assert call is not None
    detail = ", ".join((*call.axes, *((call.op,) if call.op else ()), *_pairs(call)))
    eqn = planned.eqn
    results = _few([naming(var) for var in eqn.outvars])
    operands = _few([naming.placed(a, layout) for a, layout in zip(eqn.invars, planned.operands, strict=True)])
    each = _result_types(program, naming, planned)
    types = _few(each) if len(each) > FEW else ", ".join(each)
    times = shown_times(count)
    received = sum(map(planned.received, range(len(call.each))))
    where = f"; {source.offset}" if source.function else ""
    return f"{results} = {call.name}[{detail}] {operands}", types, f"  # {received} bytes{times}: {LOCAL}{where}"


FEW: Final = 6
"""Values of one equation that are all named."""


def _few(words: list[str]) -> str:
    """Some words, or the first two, how many, and the last."""
    return " ".join(words if len(words) <= FEW else [*words[:2], f"... ({len(words)})", words[-1]])


def _pairs(call: Any) -> Iterator[str]:
    """Who sends to whom, where all operands go the same way and few ranks take part."""
    pairs = {params["pairs"] for params in call.each if "pairs" in params}
    if len(pairs) == 1 and len(found := pairs.pop()) <= FEW:
        yield " ".join(f"{source}>{destination}" for source, destination in found)


def _equation_row(program: Any, naming: Naming, planned: PlannedEqn) -> Row:
    eqn = planned.eqn
    operands = " ".join(naming.placed(a, layout) for a, layout in zip(eqn.invars, planned.operands, strict=True))
    results = " ".join(naming(var) for var in eqn.outvars)
    shown = {key: eqn.params[key] for key in SHOWN if eqn.params.get(key) is not None and eqn.params[key] is not False}
    params = ", ".join(f"{key}={_plain(value)}" for key, value in shown.items())
    types = _result_types(program, naming, planned)
    text = f"{results}{' = ' if results else ''}{eqn.primitive}{f'[{params}]' if params else ''} {operands}".rstrip()
    how = (
        "once, on the first rank"
        if eqn.primitive.name in CALLBACKS
        else "no rule: replicated"
        if planned.is_fallback
        else ""
    )
    note = f"  # {how}; {program.plan.jaxpr.source(eqn).offset}" if how else ""
    return text, ", ".join(types), note


def _result_types(program: Any, naming: Naming, planned: PlannedEqn) -> list[str]:
    pairs = zip(planned.eqn.outvars, planned.results, strict=True)
    return [_typed(program, var.aval, layout, naming.local > 0) for var, layout in pairs]


def _plain(value: Any) -> Any:
    """A parameter with numpy's integers as Python's."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return int(value) if isinstance(value, np.integer) else value


def _typed(program: Any, aval: Any, layout: Layout, is_local: bool = False) -> str:
    shape = ",".join(map(str, layout.local_shape(aval.shape, program.at)))
    return f"{aval.dtype}[{shape}]" + (f" {layout}" if layout.axes or not is_local else "")


def _class_note(program: Any) -> str:
    others = [str(at) for key, at in program.classes.items() if key != program.shape_class(program.at)]
    if not others:
        return ""
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    return f"; other shapes at {', '.join(others[:3])}{more}"


def _sum(program: Any) -> str:
    count = len(program.collectives)
    known = all(collective.count is not None for collective in program.collectives)
    lost = len(program.fallbacks)
    fallbacks = ("" if known else ", loops of unknown length counted once") + (
        f", {lost} fallback{'s' * (lost > 1)}" if lost else ""
    )
    if not count:
        whole = program.mesh.size > 1 and not program.plan.is_sharded()
        return f"no communication{fallbacks}{'; nothing is sharded: every rank computes the whole' if whole else ''}"
    messages = len(program.messages)
    shared = f" in {messages} message{'s' * (messages > 1)}" if messages < count else ""
    return f"{count} collective{'s' * (count > 1)}{shared}, {program.bytes} bytes received by a rank at most{fallbacks}"
