"""Running a Program: here the simulator, all ranks of a mesh side by side in one process.

A value is a tuple with one array per position of the mesh. Each rank's local jaxpr is walked up to its next collective; when
all have come there, the collective is plain array code over the tuple, and the walks go on. Ranks whose operands are the
same arrays share one result. A program's first run is op by op, the second compiles it. Deterministic, free of deadlock, on
any platform.

Invariant: the local jaxprs of all shape classes have the same collectives in the same order. (Not the same equations: JAX
drops some that do nothing for a shape.)
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from collectives import jax_compat, primitives
from collectives.jax_compat import Literal
from spmd.lower import literal_value
from spmd.program import Program

Ranks = tuple[Any, ...]
"""One value on every rank: one array per position of the mesh."""

Memo = dict[tuple[int, ...], tuple[list[Any], list[Any]]]
"""Equation and operands, by identity, to results; the operands are kept, so that an identity stays theirs."""

Walk = Generator[tuple[Any, Any], Any, list[Any]]


def simulate(program: Program, inputs: Sequence[Ranks]) -> list[Ranks]:
    """The outputs of a program on every rank, from its inputs on every rank. Works eagerly and under `jax.jit`."""
    mesh = program.mesh
    numbers = [np.int32(i) for i in range(max((size for _, size in mesh.axes), default=0))]
    memo: Memo = {}
    walks = []
    for position, coordinate in enumerate(mesh.coordinates()):
        values = [*(numbers[i] for i in coordinate), *(value[position] for value in inputs)]
        walks.append(_walk(program.jaxpr(coordinate), values, memo))
    return _together(walks, memo)


def _together(walks: list[Walk], memo: Memo) -> list[Ranks]:
    """Let all ranks walk from collective to collective."""
    results: Sequence[Any] = [None] * len(walks)
    while True:
        memo.clear()
        arrived, returned = [], []
        for walk, result in zip(walks, results, strict=True):
            try:
                arrived.append(walk.send(result))
            except StopIteration as stop:
                returned.append(stop.value)
        if returned:
            assert not arrived, "the ranks have different numbers of collectives"
            return [tuple(column) for column in zip(*returned, strict=True)]
        eqn = arrived[0][0]
        assert all(other.primitive is eqn.primitive for other, _ in arrived), "the ranks have different collectives"
        name = primitives.BY_PRIMITIVE[eqn.primitive]
        results = primitives.simulate(name, tuple(jnp.asarray(operand) for _, operand in arrived), eqn.params)


def _walk(closed: Any, inputs: list[Any], memo: Memo) -> Walk:
    """Evaluate one rank's jaxpr; yield every collective with its operand, and receive its result."""
    jaxpr, consts = jax_compat.as_closed(closed)
    env = dict(zip((*jaxpr.invars, *jaxpr.constvars), (*inputs, *consts), strict=True))

    def read(atom: Any) -> Any:
        return literal_value(atom) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if eqn.primitive in primitives.BY_PRIMITIVE:
            results = [(yield eqn, operands[0])]
        else:
            key = (
                id(eqn),
                *(0 if isinstance(a, Literal) else id(v) for a, v in zip(eqn.invars, operands, strict=True)),
            )
            if key not in memo:
                memo[key] = jax_compat.bind(eqn, operands, eqn.params), operands
            results = memo[key][0]
        env.update(zip(eqn.outvars, results, strict=True))
    return [jnp.asarray(read(atom)) for atom in jaxpr.outvars]


class Executable:
    """A program ready to run on the simulator: a function of its inputs on every rank.

    The first run is op by op, later ones are compiled; with `compiled=True` the first one too.
    """

    def __init__(self, program: Program, compiled: bool = False) -> None:
        self.program = program
        self.runs_eagerly = not compiled
        self.compiled = jax.jit(lambda inputs: simulate(program, inputs))

    def __call__(self, inputs: Sequence[Ranks]) -> list[Ranks]:
        """The outputs on every rank."""
        if self.runs_eagerly:
            self.runs_eagerly = False
            return simulate(self.program, inputs)
        return self.compiled(list(inputs))
