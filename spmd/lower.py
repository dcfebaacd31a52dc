"""From a Plan and a coordinate to the local jaxpr of a shape class, with explicit collective primitives.

Shapes are static; everything else that depends on the rank comes from the coordinate, which is an argument of the local
jaxpr (one int32 per mesh axis, first). Coordinates whose local shapes agree for every value share one jaxpr: a shape class.
Lowering is evaluation of the plan under JAX's own tracer: all classes have the same collectives, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from collectives import jax_compat, primitives
from collectives.jax_compat import Literal, ShapedArray
from collectives.simulated import GROUP, identity, reduction_dtype
from placements import Layout, Mesh, Split, Step
from placements.intervals import Window, length
from placements.layout import Shape
from placements.mesh import Coordinate
from spmd.errors import ArgumentError
from spmd.plan import Move, Plan, PlannedEqn
from spmd.rules.named import Call


@dataclass(frozen=True, slots=True)
class Place:
    """Where a local program runs: a coordinate of its shape class, for shapes, and the traced one, for everything else."""

    mesh: Mesh
    coordinate: Coordinate
    index: tuple[Any, ...]

    def flat_index(self, axes: Sequence[str]) -> Any:
        """The traced index among the pieces over `axes`, the first major; 0 for no axes."""
        flat: Any = None
        for axis in axes:
            at = self.mesh.axis_index(axis)
            index = self.index[at]
            flat = index if flat is None else lax.add(lax.mul(flat, np.int32(self.mesh.axes[at][1])), index)
        return np.int32(0) if flat is None else flat

    def start(self, size: int, axes: Sequence[str]) -> Any:
        """Where this rank's piece of a dim begins, traced: ceil(i*size/n) without overflow."""
        if axes and size > np.iinfo(np.int32).max:
            raise ArgumentError(
                f"a dim of {size} over {', '.join(axes)}: offsets are int32, so sharded dims end at 2**31 - 1."
            )
        n = self.mesh.group_size(axes)
        quotient, rest = divmod(size, n)
        i = self.flat_index(axes)
        start = lax.mul(i, np.int32(quotient)) if axes else i
        if not rest:
            return start
        return lax.add(start, lax.div(lax.add(lax.mul(i, np.int32(rest)), np.int32(n - 1)), np.int32(n)))

    def reached(self, window: Window) -> tuple[Any, Any]:
        """Where this rank's window of a dim would begin if the dim had no ends, and where it does, traced."""
        reach, axes = window.reach, window.axes
        low = self.start(reach.of, axes)
        if reach.flipped:
            count = length(Split(reach.of, axes).bounds(self.mesh, self.coordinate))
            low = lax.sub(np.int32(reach.of - count), low)
        first = jnp.floor_divide(low * np.int32(reach.step) + np.int32(reach.first), np.int32(reach.per))
        return first, jnp.clip(first, *reach.limits(window.size))

    def begin(self, layout: Layout, dim: int, size: int) -> Any:
        """Where this rank's part of a dim begins, traced."""
        held = layout.intervals(dim, size)
        return self.reached(held)[1] if isinstance(held, Window) else self.start(size, held.axes)


@dataclass(frozen=True, slots=True)
class LocalCall:
    """What a rule's own local computation may know: its place, and the layouts and local shapes around it."""

    place: Place
    operand_layouts: tuple[Layout, ...]
    result_layouts: tuple[Layout, ...]
    result_shapes: list[Shape]

    def window(self, index: int, shape: Shape, dim: int) -> Window | None:
        """The window that this rank has of a dim of an operand of global `shape`; None if it has a piece, or all."""
        held = self.operand_layouts[index].intervals(dim, shape[dim])
        return held if isinstance(held, Window) else None

    def offset(self, layout: Layout, shape: Shape, dim: int) -> Any | None:
        """Where along `dim` this rank's part of an array of global `shape` begins, traced; None if it holds all."""
        return self.place.start(shape[dim], layout.dims[dim]) if layout.dims[dim] else None


def local_jaxpr(plan: Plan, coordinate: Coordinate) -> Any:
    """The local jaxpr of the class of `coordinate`: inputs are its int32 indices, then the shards of the plan's inputs."""
    mesh = plan.mesh
    index = [ShapedArray((), np.dtype(np.int32))] * len(mesh.axes)
    shards = [
        ShapedArray(layout.local_shape(var.aval.shape, coordinate), var.aval.dtype, weak_type=var.aval.weak_type)
        for var, layout in zip(plan.jaxpr.inputs, plan.arrivals, strict=True)
    ]

    def run(*values: Any) -> list[Any]:
        place = Place(mesh, coordinate, values[: len(index)])
        return evaluate(plan, place, values[len(index) :])

    return jax.make_jaxpr(run)(*map(jax_compat.as_struct, (*index, *shards)))


def evaluate(plan: Plan, place: Place, shards: Sequence[Any]) -> list[Any]:
    """Run a plan on local values, at one place."""
    values: dict[tuple[int, Layout], Any] = {}
    for var, layout, shard in zip(plan.jaxpr.inputs, plan.arrivals, shards, strict=True):
        values[id(var), layout] = shard
    for var, constant in plan.jaxpr.constants:
        values[id(var), Layout.replicated(plan.mesh, len(var.aval.shape))] = constant

    def read(atom: Any, layout: Layout) -> Any:
        if isinstance(atom, Literal) and layout.is_replicated:
            return literal_value(atom)
        return values[id(atom), layout]

    def make(moves: Sequence[Move]) -> None:
        for message in messages_of(moves):
            found = send(message, [read(move.atom, move.source) for move in message], place)
            values.update({(id(move.atom), move.target): value for move, value in zip(message, found, strict=True)})

    make(plan.entry)
    for planned in plan.eqns:
        make(planned.moves)
        operands = [read(atom, layout) for atom, layout in zip(planned.eqn.invars, planned.operands, strict=True)]
        for var, layout, value in zip(
            planned.eqn.outvars, planned.results, compute(planned, operands, place), strict=True
        ):
            values[id(var), layout] = value
    make(plan.exits)
    return [read(atom, layout) for atom, layout in zip(plan.jaxpr.outputs, plan.departures, strict=True)]


def literal_value(atom: Any) -> Any:
    """A literal's value with its own dtype (a Python scalar would be weakly typed)."""
    return np.asarray(atom.val, atom.aval.dtype) if not atom.aval.weak_type else atom.val


def compute(planned: PlannedEqn, operands: list[Any], place: Place) -> list[Any]:
    """One equation's local computation."""
    eqn, rule = planned.eqn, planned.rule
    if planned.call is not None:
        return _call(planned.call, operands, place)
    if planned.is_fallback:
        return jax_compat.bind(eqn, operands, eqn.params)
    if planned.bodies:
        return CONTROL[eqn.primitive.name](planned, operands, place)
    if rule is None:
        return operands[:1]
    shapes = [
        layout.local_shape(var.aval.shape, place.coordinate)
        for var, layout in zip(eqn.outvars, planned.results, strict=True)
    ]
    if rule.local is not None:
        return rule.local(LocalCall(place, planned.operands, planned.results, shapes), operands)
    params = eqn.params if rule.resize is None else rule.resize(eqn.params, [np.shape(x) for x in operands], shapes)
    return jax_compat.bind(eqn, operands, params)


def _call(call: Call, operands: list[Any], place: Place) -> list[Any]:
    """What a local function sends; nothing where its group is this rank."""
    values = [jnp.asarray(value) for value in operands]
    if place.mesh.group_size(call.axes) > 1:
        return primitives.bind(call.name, values, mesh=place.mesh, axes=call.axes, each=call.each)
    members = [place.coordinate]
    each = [primitives.group_arguments(call.name, members, {"mesh": place.mesh, **params}) for params in call.each]
    return [GROUP[call.name]([x], **arguments)[0] for x, arguments in zip(values, each, strict=True)]


def _local(planned: PlannedEqn, operands: list[Any], place: Place) -> list[Any]:
    (body,) = planned.bodies
    return evaluate(body, place, operands)


def _scan(planned: PlannedEqn, operands: list[Any], place: Place) -> list[Any]:
    params, (body,) = planned.eqn.params, planned.bodies
    n_consts, n_carry = params["counts"]
    constants, init, xs = operands[:n_consts], operands[n_consts : n_consts + n_carry], operands[n_consts + n_carry :]

    def step(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
        made = evaluate(body, place, [*constants, *carry, *rows])
        return _typed(made[:n_carry], planned.eqn.outvars), made[n_carry:]

    length = len(xs[0]) if xs else params["length"]  # the iterations of this rank, where they are apart
    options = {key: params[key] for key in ("reverse", "unroll", "_split_transpose") if key in params}
    carry, stacked = lax.scan(step, _typed(init, planned.eqn.outvars), xs, length=length, **options)
    return [*carry, *stacked]


def _while(planned: PlannedEqn, operands: list[Any], place: Place) -> list[Any]:
    params, (condition, body) = planned.eqn.params, planned.bodies
    n_condition, n_body = params["cond_nconsts"], params["body_nconsts"]
    first, init = n_condition + n_body, operands[n_condition + n_body :]

    return lax.while_loop(
        lambda carry: evaluate(condition, place, [*operands[:n_condition], *carry])[0],
        lambda carry: _typed(evaluate(body, place, [*operands[n_condition:first], *carry]), planned.eqn.outvars),
        _typed(init, planned.eqn.outvars),
    )


def _cond(planned: PlannedEqn, operands: list[Any], place: Place) -> list[Any]:
    index, *rest = operands

    def branch(body: Plan) -> Callable[..., list[Any]]:
        return lambda *values: _typed(evaluate(body, place, values), planned.eqn.outvars)

    branches = [branch(body) for body in planned.bodies]
    if index.dtype == np.bool_:  # branches are in the order of the index: False first
        return lax.cond(index, branches[1], branches[0], *rest)
    return lax.switch(index, branches, *rest)


def _typed(values: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Values in exactly the dtypes, weak types included, that the variables have."""
    return [
        jax_compat.as_weak(jnp.asarray(value))
        if var.aval.weak_type
        else lax.convert_element_type(value, var.aval.dtype)
        for value, var in zip(values, variables, strict=False)
    ]


CONTROL: Final[dict[str, Callable[[PlannedEqn, list[Any], Place], list[Any]]]] = {
    "cond": _cond,
    "scan": _scan,
    "shard_map": _local,
    "while": _while,
}
"""Equations with bodies: JAX's own loops and branches, around bodies evaluated at this place."""


def messages_of(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """Moves in runs that share a message."""
    run: list[Move] = []
    for move in moves:
        if run and not move.joined:
            yield run
            run = []
        run.append(move)
    if run:
        yield run


def send(message: Sequence[Move], values: list[Any], place: Place) -> list[Any]:
    """The moves of one message, on local values: local steps, the collectives as one, and the local steps that follow."""
    values, rest = list(values), [list(move.steps) for move in message]
    while any(rest):
        for index, (move, steps) in enumerate(zip(message, rest, strict=True)):
            while steps and not steps[0].communicates:
                step = steps.pop(0)
                values[index] = LOCAL[step.name](step, values[index], move.atom.aval.shape, place)
        waiting = [index for index, steps in enumerate(rest) if steps]
        if waiting:
            found = _communicate(
                [(rest[index].pop(0), message[index].atom.aval.shape, values[index]) for index in waiting], place
            )
            for index, value in zip(waiting, found, strict=True):
                values[index] = value
    return values


def _communicate(parts: Sequence[tuple[Step, Shape, Any]], place: Place) -> list[Any]:
    """Steps of one kind as one collective. Numbers of 16 bits or fewer are reduced in 32."""
    first = parts[0][0]
    assert all((step.name, step.axes, step.op) == (first.name, first.axes, first.op) for step, _, _ in parts)
    values = [jnp.asarray(value) for _, _, value in parts]
    kinds = [reduction_dtype(value.dtype) if first.op else value.dtype for value in values]
    operands = [
        value if kind == value.dtype else lax.convert_element_type(value, kind)
        for value, kind in zip(values, kinds, strict=True)
    ]
    each = [PARAMS[first.name](step, shape, place) for step, shape, _ in parts]
    found = primitives.bind(first.name, operands, mesh=place.mesh, axes=first.axes, each=each)
    return [
        result if result.dtype == value.dtype else lax.convert_element_type(result, value.dtype)
        for result, value in zip(found, values, strict=True)
    ]


def _sizes(step: Step, shape: Shape, place: Place, *dims: int) -> tuple[tuple[int, int], ...]:
    local = step.target.local_shape(shape, place.coordinate)
    return tuple((dim, local[dim]) for dim in dims)


def _all_reduce(step: Step, shape: Shape, place: Place) -> dict[str, Any]:
    return {"op": step.op}


def _all_gather(step: Step, shape: Shape, place: Place) -> dict[str, Any]:
    dim = step.dim or 0
    split = Split(shape[dim], step.source.dims[dim])
    return {"dim": dim, "split": split, "out_sizes": _sizes(step, shape, place, dim)}


def _broadcast(step: Step, shape: Shape, place: Place) -> dict[str, Any]:
    return {"root": 0}


def _reduce_scatter(step: Step, shape: Shape, place: Place) -> dict[str, Any]:
    dim = step.dim or 0
    split = Split(shape[dim], step.target.dims[dim])
    return {"op": step.op, "dim": dim, "split": split, "out_sizes": _sizes(step, shape, place, dim)}


def _all_to_all(step: Step, shape: Shape, place: Place) -> dict[str, Any]:
    dim, to_dim = step.dim or 0, step.to_dim or 0
    return {
        "dim": dim,
        "to_dim": to_dim,
        "split": Split(shape[dim], step.source.dims[dim]),
        "to_split": Split(shape[to_dim], step.target.dims[to_dim]),
        "out_sizes": _sizes(step, shape, place, dim, to_dim),
    }


def _exchange(step: Step, shape: Shape, place: Place) -> dict[str, Any]:
    dim = step.dim or 0
    have, want = (layout.intervals(dim, shape[dim]) for layout in (step.source, step.target))
    return {"dim": dim, "have": have, "want": want, "out_sizes": _sizes(step, shape, place, dim)}


PARAMS: Final[dict[str, Callable[[Step, Shape, Place], dict[str, Any]]]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "exchange": _exchange,
    "reduce_scatter": _reduce_scatter,
}
"""Per communicating step the parameters of its primitive: those of `placements.redistribute.STEPS`, and the broadcast of a
predicate."""


def _starts(step: Step, shape: Shape, place: Place, inner: Layout, outer: Layout) -> list[Any]:
    """Where the piece of `inner` begins within that of `outer`: it differs along the step's dim alone."""
    dim = step.dim or 0
    start = place.begin(inner, dim, shape[dim])
    if outer.dims[dim]:
        start = lax.sub(start, place.begin(outer, dim, shape[dim]))
    return [start if d == dim else np.int32(0) for d in range(len(shape))]


def _slice(step: Step, value: Any, shape: Shape, place: Place) -> Any:
    starts = _starts(step, shape, place, step.target, step.source)
    return jax_compat.dynamic_slice(value, starts, step.target.local_shape(shape, place.coordinate))


def _mask(step: Step, value: Any, shape: Shape, place: Place) -> Any:
    """Coordinate 0 keeps a value whose repetition would change the reduction; for the other ops all keep it."""
    if step.op not in ("sum", "prod", "xor"):
        return value
    value = jnp.asarray(value)
    first = lax.eq(place.flat_index(step.axes), np.int32(0))
    return lax.select(first, value, lax.full_like(value, identity(step.op, value.dtype)))


def _pad(step: Step, value: Any, shape: Shape, place: Place) -> Any:
    """The op's identity around the piece; for a mean zeros, and the value times the number of ranks."""
    op = step.op or "sum"
    if op == "mean":
        value = lax.mul(value, lax.full_like(value, place.mesh.group_size(step.axes)))
    outer = lax.full(step.target.local_shape(shape, place.coordinate), identity(op, value.dtype))
    return jax_compat.dynamic_update_slice(outer, value, _starts(step, shape, place, step.source, step.target))


LOCAL: Final[dict[str, Callable[[Step, Any, Shape, Place], Any]]] = {"mask": _mask, "pad": _pad, "slice": _slice}
"""Per local step how it acts on a local value."""


def uneven_splits(plan: Plan) -> tuple[Split | Window, ...]:
    """Every splitting of a dim, by a plan, into pieces or windows that may be of several lengths; in a fixed order."""
    found: set[Split | Window] = set()

    def add(shape: Shape, layout: Layout) -> None:
        for dim, (size, axes) in enumerate(zip(shape, layout.dims, strict=True)):
            held = layout.intervals(dim, size)
            if axes and (isinstance(held, Window) or size % plan.mesh.group_size(axes)):
                found.add(held)

    for each in plan.flat():
        for var, layout in zip(each.jaxpr.inputs, each.arrivals, strict=True):
            add(var.aval.shape, layout)
        for planned in each.eqns:
            for var, layout in zip(planned.eqn.outvars, planned.results, strict=True):
                add(var.aval.shape, layout)
    for found_move in plan.moves():
        for step in found_move.move.steps:
            add(found_move.move.atom.aval.shape, step.target)
    return tuple(sorted(found, key=repr))


def shape_key(mesh: Mesh, splits: Sequence[Split | Window], coordinate: Coordinate) -> tuple[int, ...]:
    """What the local shapes at a coordinate depend on: coordinates with equal keys are one shape class."""
    return tuple(length(split.bounds(mesh, coordinate)) for split in splits)
