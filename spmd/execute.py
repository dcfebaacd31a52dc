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

import functools
import os
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from collectives import ffi, jax_compat, primitives, process
from collectives.jax_compat import Literal
from collectives.watch import check_end
from placements import Mesh
from placements.mesh import group_positions
from spmd.lower import literal_value
from spmd.program import Message, Program

Ranks = tuple[Any, ...]
"""One value on every rank that this process holds: one array per position of the mesh; on a real rank one in all."""

Positions = Sequence[int]
"""The places in the mesh, row-major, of the ranks that are simulated side by side."""

SimulateControl = Callable[[list[Any], list[list[Any]], Positions], list[list[Any]]]
"""A loop or branch on the values of the ranks at some positions: what each rank gets."""

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
    return [tuple(column) for column in zip(*_together(walks, memo, range(mesh.size)), strict=True)]


def _together(walks: list[Walk], memo: Memo, positions: Positions) -> list[list[Any]]:
    """Let the ranks at these positions walk from collective to collective: what each returns."""
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
            return returned
        eqns, operands = [eqn for eqn, _ in arrived], [values for _, values in arrived]
        assert all(eqn.primitive is eqns[0].primitive for eqn in eqns), "the ranks have different collectives"
        name = primitives.BY_PRIMITIVE.get(eqns[0].primitive)
        if name is None:
            results = SIMULATED_CONTROL[eqns[0].primitive.name](eqns, operands, positions)
        else:
            columns = [
                primitives.simulate(name, tuple(jnp.asarray(value) for value in column), params, positions)
                for column, params in zip(zip(*operands, strict=True), primitives.parameters(eqns[0]), strict=True)
            ]
            results = [list(row) for row in zip(*columns, strict=True)]


def _bodies(closed: Sequence[Any], inputs: Sequence[list[Any]], positions: Positions) -> list[list[Any]]:
    """One body on every rank, side by side: what each rank returns."""
    memo: Memo = {}
    walks = [_walk(body, values, memo) for body, values in zip(closed, inputs, strict=True)]
    return _together(walks, memo, positions)


def _deciding(eqns: list[Any], positions: Positions) -> list[list[int]]:
    """The ranks, by index, that decide together on a loop or branch: those that communicate in it. Others may decide otherwise:
    in iterations of their own, or in a local function."""
    found = [each.params for each in collectives_in(eqns[:1])]
    mesh = found[0]["mesh"]
    axes = tuple(axis for axis in mesh.axis_names if any(axis in params["axes"] for params in found))
    index = {position: at for at, position in enumerate(positions)}
    return [[index[position] for position in group] for group in group_positions(mesh, axes) if group[0] in index]


def _chosen(at: Sequence[int], *rows: Sequence[Any]) -> list[list[Any]]:
    """Of every sequence what belongs to some ranks."""
    return [[row[index] for index in at] for row in rows]


def _simulate_scan(eqns: list[Any], operands: list[list[Any]], positions: Positions) -> list[list[Any]]:
    """Ranks of several shape classes may have different numbers of constants and carries: a carry that one of them does not
    change is a constant there."""
    params = eqns[0].params
    counts = [jax_compat.scan_counts(eqn) for eqn in eqns]
    bodies = [eqn.params["jaxpr"] for eqn in eqns]
    constants = [values[:first] for values, (first, _) in zip(operands, counts, strict=True)]

    def step(carries: list[list[Any]], rows: list[list[Any]]) -> tuple[list[list[Any]], list[list[Any]]]:
        made = _bodies(bodies, [[*c, *k, *x] for c, k, x in zip(constants, carries, rows, strict=True)], positions)
        pairs = list(zip(made, counts, strict=True))
        return [values[:carried] for values, (_, carried) in pairs], [
            values[carried:] for values, (_, carried) in pairs
        ]

    init = [values[first : first + carried] for values, (first, carried) in zip(operands, counts, strict=True)]
    xs = [values[sum(count) :] for values, count in zip(operands, counts, strict=True)]
    carries, stacked = lax.scan(step, init, xs, length=params["length"], reverse=params["reverse"])
    return [[*carry, *ys] for carry, ys in zip(carries, stacked, strict=True)]


def _by_group(together: SimulateControl) -> SimulateControl:
    """A loop or branch of their own for all ranks that decide together, as the first of them does."""

    def simulate_control(eqns: list[Any], operands: list[list[Any]], positions: Positions) -> list[list[Any]]:
        results: dict[int, list[Any]] = {}
        for group in _deciding(eqns, positions):
            chosen = _chosen(group, eqns, operands, positions)
            results.update(zip(group, together(*chosen), strict=True))
        return [results[at] for at in range(len(eqns))]

    return simulate_control


def _while_together(eqns: list[Any], operands: list[list[Any]], positions: Positions) -> list[list[Any]]:
    firsts = [eqn.params["cond_nconsts"] for eqn in eqns]
    seconds = [first + eqn.params["body_nconsts"] for eqn, first in zip(eqns, firsts, strict=True)]
    conditions, bodies = ([eqn.params[name] for eqn in eqns] for name in ("cond_jaxpr", "body_jaxpr"))

    def proceed(carries: list[list[Any]]) -> Any:
        inputs = [[*values[:at], *carry] for values, at, carry in zip(operands, firsts, carries, strict=True)]
        return _bodies(conditions, inputs, positions)[0][0]

    def step(carries: list[list[Any]]) -> list[list[Any]]:
        rows = zip(operands, firsts, seconds, carries, strict=True)
        inputs = [[*values[first:second], *carry] for values, first, second, carry in rows]
        return _bodies(bodies, inputs, positions)

    return lax.while_loop(proceed, step, [values[at:] for values, at in zip(operands, seconds, strict=True)])


def _cond_together(eqns: list[Any], operands: list[list[Any]], positions: Positions) -> list[list[Any]]:
    def branch(at: int) -> Callable[[list[list[Any]]], list[list[Any]]]:
        return lambda inputs: _bodies([eqn.params["branches"][at] for eqn in eqns], inputs, positions)

    branches = [branch(at) for at in range(len(eqns[0].params["branches"]))]
    return lax.switch(jnp.asarray(operands[0][0], jnp.int32), branches, [values[1:] for values in operands])


SIMULATED_CONTROL: Final[dict[str, SimulateControl]] = {
    "cond": _by_group(_cond_together),
    "scan": _simulate_scan,
    "while": _by_group(_while_together),
}
"""Loops and branches whose bodies communicate: one loop over the values of all ranks."""


def _walk(closed: Any, inputs: list[Any], memo: Memo) -> Walk:
    """Evaluate one rank's jaxpr; yield every collective, loop or branch that communicates with its operands, and receive
    its results."""
    jaxpr, consts = jax_compat.as_closed(closed)
    env = dict(zip((*jaxpr.invars, *jaxpr.constvars), (*inputs, *consts), strict=True))

    def read(atom: Any) -> Any:
        return literal_value(atom) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if communicates(eqn):
            results = yield eqn, operands
        elif eqn.effects:  # on every rank that comes to it
            results = jax_compat.bind(eqn, operands, eqn.params)
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


def communicates(eqn: Any) -> bool:
    """Whether an equation of a local jaxpr is a collective, or has one in its bodies."""
    return any(True for _ in collectives_in([eqn]))


def collectives_in(eqns: Sequence[Any]) -> Iterator[Any]:
    """The collectives among equations and in their bodies, in the order of the program."""
    for eqn in eqns:
        if eqn.primitive in primitives.BY_PRIMITIVE:
            yield eqn
        for body in jax_compat.bodies_of(eqn):
            yield from collectives_in(body.eqns)


def run_alone(here: process.MeshProcess, name: str, array: Any, **arguments: Any) -> Any:
    """One collective over all ranks of a mesh, outside a program. A failure underway poisons the mesh."""
    with here.underway():
        return getattr(here.communicator, name)(array, **arguments)


def run_collective(name: str, buffers: Ranks, params: dict[str, Any]) -> Ranks:
    """One collective primitive on buffers, outside a program: on every rank that this process holds."""
    mesh = params["mesh"]
    if process.is_simulated(mesh):
        return primitives.simulate(name, buffers, params)
    here = process.on_mesh(mesh)
    arguments = primitives.group_arguments(name, here.members(params["axes"]), params)
    with here.underway():
        return (jnp.asarray(getattr(here.group(params["axes"]), name)(buffers[0], **arguments)),)


def agree_on(mesh: Mesh, lines: Callable[[], list[str]]) -> None:
    """Return if all ranks of a mesh make the same call outside a program; raises `DivergenceError` on all where not."""
    if not process.is_simulated(mesh):
        text = functools.cache(lambda: "\n".join(lines()))
        here = process.on_mesh(mesh)
        digest = 0 if os.environ.get("SPMD_CHECK") == "off" else zlib.crc32(text().encode())
        here.agree(digest, text)


class Executable:
    """A program ready to run: a function of its inputs on every rank that this process holds."""

    def __init__(self, program: Program, compiled: bool = False) -> None:
        self.program = program
        self.runs_eagerly = not compiled
        self.simulated = jax.jit(lambda inputs: simulate(program, inputs))
        self.local: LocalExecutable | None = None

    def __call__(self, inputs: Sequence[Ranks], hosts: Sequence[tuple[int, Any]] = ()) -> list[Ranks]:
        """The outputs. The simulator's first run is op by op, later ones are compiled (`compiled=True`: all of them).

        `hosts` are the inputs, by number, that are the same on every rank by promise: real ranks compare them at the first,
        second, fourth, eighth ... run.
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
"""Of the arguments that should be the same on every rank, so many bytes are compared."""


def checksums(named: Iterable[tuple[str, Any]]) -> dict[str, int]:
    """Per name the checksum of an array; of all of them `COMPARED_BYTES` are read."""
    found, left = {}, COMPARED_BYTES
    for name, value in named:
        if left == 0:
            break
        data = jax_compat.raw_bytes(value)[:left]
        left -= len(data)
        found[name] = zlib.crc32(data)
    return found


VALUES_NOTE: Final = (
    "note: Read the data on every rank, or use spmd.distribute(x, P(...), mesh, source=0); a rank's own piece goes to "
    "spmd.from_local."
)


class LocalExecutable:
    """A program compiled for this process's coordinate on a mesh of real ranks."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.here = process.on_mesh(program.mesh)
        self.index = tuple(np.int32(i) for i in self.here.coordinate)
        self.digest = int(program.digest[:16], 16)
        self.compiled: Any = None
        self.runs = 0

    def __call__(self, inputs: Sequence[Ranks], hosts: Sequence[tuple[int, Any]]) -> list[Ranks]:
        """Agree, run, and hand on the token. Raises what a handler raised; any exception underway poisons the mesh."""
        here = self.here
        self.runs += 1
        asks = self.compiled is None or self.runs.bit_count() == 1 or os.environ.get("SPMD_CHECK") == "values"
        if here.agree(self.digest, self.program.comparable, asks):
            self.compare(hosts)
        try:
            if self.compiled is None:
                self.compiled = jax.jit(self.threaded())
            if here.token is None:
                here.token = ffi.new_token()
            shards = [ranks[0] for ranks in inputs]
            for shard in shards:  # else XLA would run the program on another thread, and return before it has
                shard.block_until_ready()
            here.token, *results = self.compiled(here.token, *self.index, *shards)
            check_end()
        except BaseException as error:
            cause = ffi.take_failure()
            here.poison = error if cause is None else cause
            if cause is None:
                raise
            raise cause from None
        return [(result,) for result in results]

    def compare(self, hosts: Sequence[tuple[int, Any]]) -> None:
        """Compare checksums of the arguments that every rank should give alike. One all_reduce."""
        found = checksums((self.program.names[at], value) for at, value in hosts)
        total = zlib.crc32(repr(sorted(found.items())).encode())
        pair = np.array([total, -total], np.int64)
        if run_alone(self.here, "all_reduce", pair, op="max").tolist() != pair.tolist():
            lines = [f"  argument {name}: values of checksum {crc:08x}" for name, crc in found.items()]
            self.here.explain(
                "\n".join([self.program.name, *lines, VALUES_NOTE]),
                "pass different values where every rank passes the whole array",
            )

    def threaded(self) -> Callable[..., list[Any]]:
        """The local jaxpr as a function that takes and returns the token."""
        closed = self.program.jaxpr(self.here.coordinate)
        found = list(collectives_in(jax_compat.as_closed(closed)[0].eqns))
        assert len(found) == len(self.program.messages), "the local jaxpr has other messages than the program"
        logical = {id(eqn): each for eqn, each in zip(found, self.program.messages, strict=True)}

        def run(token: Any, *inputs: Any) -> list[Any]:
            return self.thread(closed, token, list(inputs), logical)

        return run

    def thread(self, closed: Any, token: Any, inputs: list[Any], logical: dict[int, Message]) -> list[Any]:
        """Evaluate a jaxpr, handing the token from collective to collective: the token, then the results."""
        walk, results = _walk(closed, inputs, {}), None
        while True:
            try:
                eqn, operands = walk.send(results)
            except StopIteration as stop:
                return [token, *stop.value]
            name = primitives.BY_PRIMITIVE.get(eqn.primitive)
            if name is None:
                token, *results = THREADED_CONTROL[eqn.primitive.name](self, eqn, token, operands, logical)
            else:
                token, results = self.collective(token, name, eqn, operands, logical[id(eqn)])

    def collective(
        self, token: Any, name: str, eqn: Any, operands: list[Any], message: Message
    ) -> tuple[Any, list[Any]]:
        """One message in this process's group."""
        group = self.here.group(eqn.params["axes"])
        members = self.here.members(eqn.params["axes"])
        each = [primitives.group_arguments(name, members, params) for params in primitives.parameters(eqn)]
        what = f"{self.program.name}: {message} (group of world ranks {', '.join(map(str, group.world_ranks))})"

        def prepare(transfer: Any) -> Any:
            return group.prepare(transfer, lambda: what)

        values = list(map(jnp.asarray, operands))
        return ffi.collective(token, values, name, group.rank, group.size, prepare, each, group.reduces)


def _thread_scan(here: LocalExecutable, eqn: Any, token: Any, operands: list[Any], logical: Any) -> list[Any]:
    params = eqn.params
    n_consts, n_carry = jax_compat.scan_counts(eqn)
    constants, init, xs = operands[:n_consts], operands[n_consts : n_consts + n_carry], operands[n_consts + n_carry :]

    def step(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
        made = here.thread(params["jaxpr"], carry[0], [*constants, *carry[1:], *rows], logical)
        return made[: 1 + n_carry], made[1 + n_carry :]

    options = {"length": params["length"], "reverse": params["reverse"], "unroll": params["unroll"]}
    carry, stacked = lax.scan(step, [token, *init], xs, **options)
    return [*carry, *stacked]


def _thread_while(here: LocalExecutable, eqn: Any, token: Any, operands: list[Any], logical: Any) -> list[Any]:
    """The predicate of the next iteration is a carry: its collectives need the token too."""
    params = eqn.params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

    def proceed(token: Any, carry: list[Any]) -> list[Any]:
        return here.thread(params["cond_jaxpr"], token, [*operands[:first], *carry], logical)

    def step(state: tuple[Any, Any, list[Any]]) -> tuple[Any, Any, list[Any]]:
        token, _, carry = state
        token, *carry = here.thread(params["body_jaxpr"], token, [*operands[first:second], *carry], logical)
        return (*proceed(token, carry), carry)

    init = (*proceed(token, operands[second:]), operands[second:])
    token, _, carry = lax.while_loop(lambda state: state[1], step, init)
    return [token, *carry]


def _thread_cond(here: LocalExecutable, eqn: Any, token: Any, operands: list[Any], logical: Any) -> list[Any]:
    def branch(body: Any) -> Callable[..., list[Any]]:
        return lambda token, *values: here.thread(body, token, list(values), logical)

    index = jnp.asarray(operands[0], jnp.int32)
    return lax.switch(index, [branch(body) for body in eqn.params["branches"]], token, *operands[1:])


THREADED_CONTROL: Final[dict[str, Callable[..., list[Any]]]] = {
    "cond": _thread_cond,
    "scan": _thread_scan,
    "while": _thread_while,
}
"""Loops and branches whose bodies communicate: JAX's own, with the token among what they carry."""
