"""Running a Program: on real ranks as one XLA executable with explicit calls, or on the simulator.

On a real rank the local jaxpr of this process's coordinate is compiled whole; each collective is a custom call that a token
keeps in order, across launches too. Every launch begins with an agreement of all ranks of the mesh; an exception after that
poisons the mesh on this rank.

In the simulator all ranks of a mesh run side by side. A value is a tuple with one array per position of the mesh. Each rank's
local jaxpr is walked up to its next collective; when all have come there, the collective is plain array code over the tuple,
and the walks go on. Ranks whose operands are the same arrays share one result. A program's first run is op by op, the second
compiles it. Deterministic, free of deadlock, on any platform.

Invariant: the local jaxprs of all shape classes have the same collectives in the same order. (Not the same equations: JAX
drops some that do nothing for a shape.)
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from collectives import ffi, jax_compat, primitives, process
from collectives.errors import DivergenceError
from collectives.jax_compat import Literal
from spmd.lower import literal_value
from spmd.program import Collective, Program

Ranks = tuple[Any, ...]
"""One value on every rank that this process holds: one array per position of the mesh; on a real rank one in all."""

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


def run_alone(here: process.MeshProcess, name: str, array: Any, **arguments: Any) -> Any:
    """One collective over all ranks of a mesh, outside a program. A failure underway poisons the mesh."""
    try:
        return getattr(here.communicator, name)(array, **arguments)
    except BaseException as error:
        here.poison = error
        raise


def run_collective(name: str, buffers: Ranks, params: dict[str, Any]) -> Ranks:
    """One collective primitive on buffers, outside a program: on every rank that this process holds."""
    mesh = params["mesh"]
    if process.is_simulated(mesh):
        return primitives.simulate(name, buffers, params)
    here = process.on_mesh(mesh)
    arguments = primitives.group_arguments(name, here.members(params["axes"]), params)
    return (jnp.asarray(getattr(here.group(params["axes"]), name)(buffers[0], **arguments)),)


class Executable:
    """A program ready to run: a function of its inputs on every rank that this process holds."""

    def __init__(self, program: Program, compiled: bool = False) -> None:
        self.program = program
        self.runs_eagerly = not compiled
        self.simulated = jax.jit(lambda inputs: simulate(program, inputs))
        self.local: LocalExecutable | None = None

    def __call__(self, inputs: Sequence[Ranks], hosts: Sequence[Any] = ()) -> list[Ranks]:
        """The outputs. The simulator's first run is op by op, later ones are compiled (`compiled=True`: all of them).

        `hosts` are the arguments that are the same on every rank by promise: on real ranks the first run compares them.
        """
        if not process.is_simulated(self.program.mesh):
            if self.local is None:
                self.local = LocalExecutable(self.program)
            return self.local(inputs, hosts)
        if self.runs_eagerly:
            self.runs_eagerly = False
            return simulate(self.program, inputs)
        return self.simulated(list(inputs))


COMPARED_BYTES: Final = 16_000_000
"""Of the arguments that should be the same on every rank, so many bytes are compared at a program's first run."""


class LocalExecutable:
    """A program compiled for this process's coordinate on a mesh of real ranks."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.here = process.on_mesh(program.mesh)
        self.index = tuple(np.int32(i) for i in self.here.coordinate)
        self.digest = int(program.digest[:16], 16)
        self.compiled: Any = None

    def __call__(self, inputs: Sequence[Ranks], hosts: Sequence[Any]) -> list[Ranks]:
        """Agree, run, and hand on the token. Raises what a handler raised; any exception underway poisons the mesh."""
        here = self.here
        here.agree(self.digest, lambda: str(self.program))
        if self.compiled is None or os.environ.get("SPMD_CHECK") == "values":
            self.compare(hosts)
        try:
            if self.compiled is None:
                self.compiled = jax.jit(self.threaded())
            if here.token is None:
                here.token = ffi.new_token()
            here.token, *results = self.compiled(here.token, *self.index, *(ranks[0] for ranks in inputs))
        except BaseException as error:
            cause = ffi.take_failure()
            here.poison = error if cause is None else cause
            if cause is None:
                raise
            raise cause from None
        return [(result,) for result in results]

    def compare(self, hosts: Sequence[Any]) -> None:
        """Compare checksums of the arguments that every rank should give alike. One all_reduce."""
        checksum, size = 0, 0
        for value in (*hosts, *(constant for _, constant in self.program.plan.jaxpr.constants)):
            data = jax_compat.raw_bytes(value)
            size += len(data)
            if size <= COMPARED_BYTES:
                checksum = zlib.crc32(data, checksum)
        pair = np.array([checksum, -checksum], np.int64)
        if run_alone(self.here, "all_reduce", pair, op="max").tolist() != pair.tolist():
            raise DivergenceError(
                f"{self.program.name}: the ranks of {self.program.mesh!r} passed different values where every rank passes "
                "the whole array. Read the data on every rank, or use spmd.distribute(x, P(...), mesh, source=0), "
                "spmd.from_callback or spmd.from_local."
            )

    def threaded(self) -> Callable[..., list[Any]]:
        """The local jaxpr as a function that takes and returns the token."""
        closed = self.program.jaxpr(self.here.coordinate)

        def run(token: Any, *inputs: Any) -> list[Any]:
            walk, result = _walk(closed, list(inputs), {}), None
            for logical in (*self.program.collectives, None):
                try:
                    eqn, operand = walk.send(result)
                except StopIteration as stop:
                    return [token, *stop.value]
                assert logical is not None, "the local jaxpr has more collectives than the program"
                name = primitives.BY_PRIMITIVE[eqn.primitive]
                token, result = self.collective(token, jnp.asarray(operand), name, eqn.params, logical)
            raise AssertionError("unreachable: the walk ends with its last collective")

        return run

    def collective(self, token: Any, value: Any, name: str, params: Any, logical: Collective) -> tuple[Any, Any]:
        """One collective in this process's group."""
        axes = params["axes"]
        group = self.here.group(axes)
        arguments = primitives.group_arguments(name, self.here.members(axes), params)
        what = f"{self.program.name}: {logical} (group of world ranks {', '.join(map(str, group.world_ranks))})"

        def prepare(transfer: Any) -> Any:
            return group.prepare(transfer, lambda: what)

        return ffi.collective(token, value, name, group.rank, group.size, prepare, **arguments)
