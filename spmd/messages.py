"""Messages: independent moves of one kind that are ready together are sent as one.

A move waits for its value and is waited for by an equation; between the two it may be sent at any point. Here later moves are
brought forward to the first one of their kind: the same collective, op, axes and dtype. Each saves the latency of a message and
costs the packing of its bytes, so large ones stay alone; and what is sent early is kept until it is used, so a message is
bounded by `BUCKET`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Final

import jax

from collectives.jax_compat import Literal
from collectives.simulated import reduction_dtype
from placements import Layout, Machine
from placements.redistribute import step_bytes
from spmd.plan import Move, Plan, item_sizes, local_bytes

BUCKET: Final = 2**20
"""Bytes of one message of several collectives, at most."""

Version = tuple[int, Layout]
"""A value in a layout: the value by identity."""


def merged(plan: Plan) -> Plan:
    """The same plan, with the moves that share a message side by side. Bodies are plans of their own, and left alone."""
    points = [list(plan.entry), *(list(planned.moves) for planned in plan.eqns), list(plan.exits)]
    made = _made(plan, points)
    facts = {id(move): _facts(move, plan.machine) for moves in points for move in moves}
    changed = False
    for at, moves in enumerate(points):
        index = 0
        while index < len(moves):
            found = _joining(moves[index], points, at, index, made, facts)
            for point, move in found:
                points[point].remove(move)
            moves[index + 1 : index + 1] = [dataclasses.replace(move, joined=True) for _, move in found]
            index += 1 + len(found)
            changed |= bool(found)
    if not changed:
        return plan
    entry, *between, exits = map(tuple, points)
    eqns = tuple(
        planned if planned.moves == moves else dataclasses.replace(planned, moves=moves)
        for planned, moves in zip(plan.eqns, between, strict=True)
    )
    return dataclasses.replace(plan, entry=entry, eqns=eqns, exits=exits)


def _made(plan: Plan, points: list[list[Move]]) -> dict[Version, int]:
    """The point at which each version is made: point 0 is the entry, point i + 1 comes before equation i, the last is the exit.

    The inputs are in none of them. What an equation makes exists at the next point.
    """
    made: dict[Version, int] = {}
    for index, planned in enumerate(plan.eqns):
        for var, layout in zip(planned.eqn.outvars, planned.results, strict=True):
            made.setdefault((id(var), layout), index + 1)
    for at, moves in enumerate(points):
        for move in moves:
            made.setdefault((id(move.atom), move.target), at)
    return made


@dataclasses.dataclass(frozen=True, slots=True)
class _Facts:
    """What decides whether a move can share a message; `kind` is None where it cannot."""

    kind: Hashable
    nbytes: int


def _facts(move: Move, machine: Machine) -> _Facts:
    return _Facts(_kind(move) if move.communicates and _is_small(move, machine) else None, _bytes(move))


def _joining(
    leader: Move, points: list[list[Move]], at: int, index: int, made: dict[Version, int], facts: dict[int, _Facts]
) -> list[tuple[int, Move]]:
    """The later moves that can go with `leader`, which is the `index`th at point `at`."""
    kind, room = facts[id(leader)].kind, BUCKET - facts[id(leader)].nbytes
    if kind is None:
        return []
    found: list[tuple[int, Move]] = []
    taken: set[Version] = {_version(leader)}
    for point in range(at, len(points)):
        for move in points[point][index + 1 if point == at else 0 :]:
            if move.joined or facts[id(move)].kind != kind or facts[id(move)].nbytes > room or _version(move) in taken:
                continue
            if isinstance(move.atom, Literal) or made.get((id(move.atom), move.source), -1) < at:
                found.append((point, move))
                taken.add(_version(move))
                room -= facts[id(move)].nbytes
    return found


def _version(move: Move) -> Version:
    return id(move.atom), move.target


def _kind(move: Move) -> Hashable:
    """What moves of one message have in common, or of one message for each step; None for one that sends nothing, or keys."""
    dtype = move.atom.aval.dtype
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return None
    sent = [step for step in move.steps if step.communicates]
    return tuple((step.name, step.axes, step.op, reduction_dtype(dtype) if step.op else dtype) for step in sent) or None


def _bytes(move: Move) -> int:
    return sum(step_bytes(step, item_sizes(move.atom.aval)) for step in move.steps)


def _is_small(move: Move, machine: Machine) -> bool:
    """Whether packing and unpacking costs less than the latency of a message. Of an exchange only what is sent is packed."""
    aval, packed = move.atom.aval, 0
    for step in move.steps:
        if step.name == "exchange":
            packed = max(packed, step_bytes(step, item_sizes(aval)))
        elif step.communicates:
            packed = max(packed, *(local_bytes(aval, layout) for layout in (step.source, step.target)))
    return 2 * machine.memory_us(packed) < machine.latency_us
