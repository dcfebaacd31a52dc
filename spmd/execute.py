"""Running a Program: here the simulator, all ranks of a mesh side by side in one process.

A value is a tuple with one array per position of the mesh. The local jaxprs of all shape classes have the same equations,
so they are walked together: a collective is plain array code over the tuple, any other equation is applied rank by rank.
Ranks whose operands are the same arrays share one result. A program's first run is op by op, the second compiles it.
Deterministic, free of deadlock, on any platform.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from collectives import jax_compat, primitives
from collectives.jax_compat import Literal
from spmd.lower import literal_value
from spmd.program import Program

Ranks = tuple[Any, ...]
"""One value on every rank: one array per position of the mesh."""


def simulate(program: Program, inputs: Sequence[Ranks]) -> list[Ranks]:
    """The outputs of a program on every rank, from its inputs on every rank. Works eagerly and under `jax.jit`."""
    mesh = program.mesh
    coordinates = list(mesh.coordinates())
    jaxprs = [program.jaxpr(coordinate) for coordinate in coordinates]
    numbers = [np.int32(i) for i in range(max((size for _, size in mesh.axes), default=0))]
    index = [tuple(numbers[at[axis]] for at in coordinates) for axis in range(len(mesh.axes))]
    envs = [_start(closed, [value[p] for value in (*index, *inputs)]) for p, closed in enumerate(jaxprs)]
    for eqns in zip(*(closed.jaxpr.eqns for closed in jaxprs), strict=True):
        operands = [[_read(env, atom) for atom in eqn.invars] for env, eqn in zip(envs, eqns, strict=True)]
        for env, eqn, results in zip(envs, eqns, _apply(eqns, operands), strict=True):
            env.update(zip(eqn.outvars, results, strict=True))
    outputs = [[_read(env, atom) for atom in closed.jaxpr.outvars] for env, closed in zip(envs, jaxprs, strict=True)]
    return [tuple(column) for column in zip(*outputs, strict=True)]


def _start(closed: Any, inputs: list[Any]) -> dict[Any, Any]:
    jaxpr, consts = jax_compat.as_closed(closed)
    return dict(zip((*jaxpr.invars, *jaxpr.constvars), (*inputs, *consts), strict=True))


def _read(env: dict[Any, Any], atom: Any) -> Any:
    return literal_value(atom) if isinstance(atom, Literal) else env[atom]


def _apply(eqns: Sequence[Any], operands: list[list[Any]]) -> list[list[Any]]:
    """One equation on all ranks; `eqns` differ in shapes alone."""
    name = primitives.BY_PRIMITIVE.get(eqns[0].primitive)
    if name is not None:
        buffers = tuple(jax.numpy.asarray(operand[0]) for operand in operands)
        return [[result] for result in primitives.simulate(name, buffers, eqns[0].params)]
    shared: dict[tuple[int, ...], list[Any]] = {}
    out = []
    for eqn, values in zip(eqns, operands, strict=True):
        key = (id(eqn), *(0 if isinstance(atom, Literal) else id(v) for atom, v in zip(eqn.invars, values, strict=True)))
        if key not in shared:
            shared[key] = jax_compat.bind(eqn, values, eqn.params)
        out.append(shared[key])
    return out


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
