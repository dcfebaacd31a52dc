"""From a function on whole arrays to one flat global jaxpr.

JAX traces; then every call whose body is planned in place (jit, custom_jvp, custom_vjp, remat, ...) is inlined, equal
equations are merged, and what no result needs is dropped. Invariants of a `GlobalJaxpr`: each variable is bound once, by an
input, a constant or an equation; no equation is one of `INLINED`; every equation is needed, or has an effect. Closed-over
DArrays and large constants have become hidden inputs, after those of the arguments.

The bodies of loops and branches become global jaxprs of their own, under the parameter `bodies`; what they close over
becomes operands. Three primitives exist for tracing alone: `lift` turns a closed-over DArray into a tracer and vanishes
here, `constrain` and `place_like` carry placements to the planner.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import jax
import numpy as np
from jax import lax

from collectives.jax_compat import (
    INLINED,
    UNKNOWN,
    Atom,
    JaxprEqn,
    Literal,
    Source,
    Tracer,
    Var,
    abstract_mesh,
    ad,
    as_closed,
    batching,
    calls_python,
    hi_body,
    identity_primitive,
    inline_function,
    known_primitive,
    local_axes,
    new_equation,
    plain_aval,
    plain_equation,
    raw_bytes,
    scan_counts,
    shaped_like,
    solver_body,
    source_of,
    without_dead_code,
)
from placements import Mesh, P, PlacementError, Shard
from placements.layout import resolve
from spmd import local_view
from spmd.current import use_mesh
from spmd.errors import TransformationError
from spmd.validate import valid_layout

LARGE_CONSTANT: Final = 1_000_000
"""Closed-over constants above so many bytes become hidden inputs: else they would sit in every executable and digest."""

_MESH: Final = jax.make_user_context(None)
"""The mesh of the trace under way. Part of the keys of JAX's own caches: a function under `jax.jit` that was traced for one
mesh, or outside, is traced anew for another."""


def tracing_mesh() -> Mesh | None:
    """The mesh of the trace that is under way in this thread, or None outside one."""
    return _MESH.value


def tracing(mesh: Mesh) -> contextlib.AbstractContextManager[None]:
    """Mark that what is traced inside is traced for `mesh`."""
    return _MESH(mesh)


lift_p = identity_primitive("lift")
"""A closed-over DArray, as a tracer."""

constrain_p = identity_primitive("constrain")
"""Its result is placed as `placements` says. `pinned=False` marks a preference; `free_dims` are batch dims."""

place_like_p = identity_primitive("place_like")
"""Its first operand, placed as the second is."""


def _constrain_transpose(cotangent: Any, operand: Any, **params: Any) -> list[Any]:
    return [constrain_p.bind(ad.instantiate_zeros(cotangent), **{**params, "pinned": False})]


def _constrain_batch(operands: Sequence[Any], dims: Sequence[int], **params: Any) -> tuple[Any, int]:
    at = dims[0]
    named = {
        axis: Shard(placement.dim + (placement.dim >= at)) if isinstance(placement, Shard) else placement
        for axis, placement in params["placements"].named
    }
    free = (at, *(dim + (dim >= at) for dim in params["free_dims"]))
    return constrain_p.bind(operands[0], **{**params, "placements": P(**named), "free_dims": free}), at


def _place_like_batch(operands: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, Any]:
    """A batched value cannot be placed like one of another rank: the placement is left to propagation."""
    if dims[0] == dims[1]:
        return place_like_p.bind(*operands), dims[0]
    return operands[0], dims[0]


def _place_like_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return place_like_p.bind(*primals), tangents[0]


ad.deflinear2(constrain_p, _constrain_transpose)
ad.primitive_jvps[place_like_p] = _place_like_jvp
batching.primitive_batchers[constrain_p] = _constrain_batch
batching.primitive_batchers[place_like_p] = _place_like_batch


@dataclass(frozen=True, slots=True)
class GlobalJaxpr:
    """A flat jaxpr over whole arrays; see the module for its invariants.

    `hidden` are the values of the last inputs. `callers` are the calls, innermost first, that an equation was inlined from,
    by its first result: where an equation itself knows no line of the user's, they do.
    """

    inputs: tuple[Var, ...]
    eqns: tuple[JaxprEqn, ...]
    outputs: tuple[Atom, ...]
    constants: tuple[tuple[Var, Any], ...] = ()
    hidden: tuple[Any, ...] = ()
    callers: Mapping[Var, tuple[JaxprEqn, ...]] = field(default_factory=dict)

    def with_equations(self, eqns: Sequence[JaxprEqn], **changes: Any) -> GlobalJaxpr:
        """The same with other equations, and other changes: the equations and constants that an output needs."""
        changed = dataclasses.replace(self, eqns=tuple(eqns), **changes)
        kept = drop_dead(changed.eqns, changed.outputs)
        used = {id(atom) for eqn in kept for atom in eqn.invars} | {id(atom) for atom in changed.outputs}
        constants = tuple((var, value) for var, value in self.constants if id(var) in used)
        return dataclasses.replace(changed, eqns=kept, constants=constants)

    def source(self, eqn: JaxprEqn) -> Source:
        """Where in the user's code an equation comes from."""
        chain = (eqn, *(self.callers.get(eqn.outvars[0], ()) if eqn.outvars else ()))
        return next((source for source in map(source_of, chain) if source.function), UNKNOWN)


def trace(
    function: Callable[..., Any], avals: Sequence[Any], mesh: Mesh, is_hidden: Callable[[Any], bool]
) -> GlobalJaxpr:
    """Trace `function` of flat arguments for `mesh`. `is_hidden` says which closed-over constants become inputs."""
    with tracing(mesh), use_mesh(mesh), jax.sharding.use_abstract_mesh(abstract_mesh(mesh.axes)):
        try:
            closed = without_dead_code(jax.make_jaxpr(function)(*avals))
        except Exception as error:
            for word, hint in HINTS:
                if word in str(error):
                    error.add_note(f"spmd.jit: {hint}")
            raise
    flat = _Flattening(is_hidden, mesh)
    inputs = [Var(var.aval) for var in closed.jaxpr.invars]
    outputs = flat.inline(closed, list(inputs))
    eqns = drop_dead(flat.eqns, outputs)
    used = {id(atom) for eqn in eqns for atom in eqn.invars} | {id(atom) for atom in outputs}
    constants = tuple((var, value) for var, value in flat.constants if id(var) in used)
    hidden = [(var, value) for var, value in flat.hidden if id(var) in used]
    return GlobalJaxpr(
        (*inputs, *(var for var, _ in hidden)),
        eqns,
        tuple(outputs),
        constants,
        tuple(value for _, value in hidden),
        MappingProxyType(flat.callers),
    )


HINTS: Final = (
    (
        "unbound axis name",
        "a decorated function sees whole arrays, so it needs no named axis: jnp.sum(x) and jnp.mean(x) are those of all ranks.",
    ),
)
"""What JAX says of code for its own meshes is no help here: a word of its message, and what to do."""


def drop_dead(eqns: Sequence[JaxprEqn], outputs: Sequence[Atom]) -> tuple[JaxprEqn, ...]:
    """The equations that an output needs, or that have an effect."""
    needed = {id(atom) for atom in outputs}
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or any(id(var) in needed for var in eqn.outvars):
            kept.append(eqn)
            needed.update(id(atom) for atom in eqn.invars)
    return tuple(kept[::-1])


SAME: Final = ("device_put", "pvary", "reshard", "stop_gradient")
"""What gives its operands: differentiation is over, types of local functions are checked, axes that JAX shards by itself there
are none, and the devices of a lowered program are the process's own."""

SLICE: Final = known_primitive("slice")


def sliced(eqn: JaxprEqn, operand: Atom, result: Var, dim: int, bounds: tuple[int, int]) -> JaxprEqn:
    """The equation, in place of another, that cuts an operand along one dim."""
    shape = operand.aval.shape
    starts, limits = (0,) * len(shape), shape
    params = {
        "start_indices": (*starts[:dim], bounds[0], *starts[dim + 1 :]),
        "limit_indices": (*limits[:dim], bounds[1], *limits[dim + 1 :]),
        "strides": None,
    }
    return eqn.replace(primitive=SLICE, invars=[operand], outvars=[result], params=params)


class _Flattening:
    """Inlines calls: collects equations over fresh variables, constants and hidden inputs (one per closed-over object)."""

    def __init__(
        self, is_hidden: Callable[[Any], bool], mesh: Mesh, is_body: bool = False, local: tuple[str, ...] = ()
    ) -> None:
        self.is_hidden, self.mesh, self.is_body, self.local = is_hidden, mesh, is_body, local
        self.eqns: list[JaxprEqn] = []
        self.constants: list[tuple[Var, Any]] = []
        self.hidden: list[tuple[Var, Any]] = []
        self.of_constant: dict[int, tuple[Var, Any]] = {}  # by identity, which is the value's while it is kept
        self.callers: dict[Var, tuple[JaxprEqn, ...]] = {}
        self.seen: dict[Hashable, list[Atom]] = {}

    def inline(self, jaxpr: Any, arguments: list[Atom], callers: tuple[JaxprEqn, ...] = ()) -> list[Atom]:
        """Append the body of a jaxpr, and return its outputs."""
        opened, consts = as_closed(jaxpr)
        env: dict[Var, Atom] = dict(zip(opened.invars, arguments, strict=True))
        for var, value in zip(opened.constvars, consts, strict=True):
            env[var] = self.constant(value, var.aval)

        def read(atom: Atom) -> Atom:
            return atom if isinstance(atom, Literal) else env[atom]

        for found in opened.eqns:
            eqn = plain_equation(found)
            operands = [read(atom) for atom in eqn.invars]
            if eqn.primitive is lift_p or eqn.primitive.name in SAME:
                results: list[Atom] = operands
            elif eqn.primitive.name in INLINED and INLINED[eqn.primitive.name] in eqn.params:
                body = eqn.params[INLINED[eqn.primitive.name]]
                results = self.inline(body, self.guard(eqn, operands), (eqn, *callers))
            elif eqn.primitive.name == "call_hi_primitive":
                results = self.inline(hi_body(eqn), operands, (eqn, *callers))
            elif eqn.primitive.name == "custom_linear_solve":
                results = self.inline(*solver_body(eqn, operands), (eqn, *callers))
            elif eqn.primitive.name in NESTED and calls_python(eqn.effects):
                results = [Var(plain_aval(var.aval)) for var in eqn.outvars]
                self.eqns.append(NESTED[eqn.primitive.name](self, eqn, operands).replace(outvars=results))
                self.callers.update(dict.fromkeys(results, callers) if callers else {})
            else:
                key = self.key(eqn, operands)
                known = None if key is None else self.seen.get(key)
                results = [Var(plain_aval(var.aval)) for var in eqn.outvars] if known is None else known
                if known is None:
                    self.emit(eqn, operands, results)
                    self.callers.update(dict.fromkeys(results, callers) if callers else {})
                if key is not None:
                    self.seen[key] = results
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in opened.outvars]

    def emit(self, eqn: JaxprEqn, operands: list[Atom], results: list[Atom]) -> None:
        """Append one equation; a barrier of several values becomes one barrier each, a split slices."""
        if eqn.primitive.name in local_view.COLLECTIVES:
            self.eqns += local_view.tiled(eqn.replace(invars=operands, outvars=results), self.mesh)
        elif eqn.primitive.name == "sharding_constraint":
            constrained = eqn.replace(primitive=constrain_p, params=local_view.constraint(eqn, self.mesh, self.local))
            self.eqns.append(constrained.replace(invars=operands, outvars=results))
        elif eqn.primitive.name == "optimization_barrier":
            for operand, result in zip(operands, results, strict=True):
                self.eqns.append(new_equation(eqn, eqn.primitive, [operand], [result]))
        elif eqn.primitive.name == "split":
            start = 0
            for result, size in zip(results, eqn.params["sizes"], strict=True):
                self.eqns.append(sliced(eqn, operands[0], result, eqn.params["axis"], (start, start + size)))
                start += size
        else:
            self.eqns.append(eqn.replace(invars=operands, outvars=results))

    def key(self, eqn: JaxprEqn, operands: list[Atom]) -> Hashable:
        """What equal equations have in common; None where an equation stays by itself.

        JAX leaves equal equations to XLA, which merges computations but would not merge their collectives.
        """
        if eqn.effects or eqn.primitive.name == "optimization_barrier" or not eqn.outvars:
            return None
        atoms = tuple((str(a.aval), raw_bytes(a.val)) if isinstance(a, Literal) else id(a) for a in operands)
        key = (eqn.primitive, atoms, tuple(eqn.params.items()), str([var.aval for var in eqn.outvars]))
        try:
            hash(key)
        except TypeError:  # a parameter that is not hashable
            return None
        return key

    def guard(self, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom]:
        """The operands of an inlined body. Those of a rematerialised one go behind an optimization barrier, as in JAX's own
        lowering: else the compiler merges the recomputation with the forward pass."""
        if not (eqn.params.get("differentiated") and eqn.params.get("prevent_cse")):
            return operands
        barrier = known_primitive("optimization_barrier")
        guarded: list[Atom] = [atom if isinstance(atom, Literal) else Var(atom.aval) for atom in operands]
        for operand, result in zip(operands, guarded, strict=True):
            if operand is not result:
                self.eqns.append(new_equation(eqn, barrier, [operand], [result]))
        return guarded

    def nested(self, jaxpr: Any, local: tuple[str, ...] = ()) -> tuple[GlobalJaxpr, list[Atom]]:
        """A body as a jaxpr of its own, whose first inputs are what it closes over; and the variables of these here.

        `local` are further axes over which it is a local view.
        """
        inner = _Flattening(self.is_hidden, self.mesh, is_body=True, local=(*self.local, *local))
        inputs = [Var(plain_aval(var.aval)) for var in as_closed(jaxpr)[0].invars]
        outputs = inner.inline(jaxpr, list(inputs))
        captured = [*inner.constants, *inner.hidden]
        eqns = drop_dead(inner.eqns, outputs)
        body = GlobalJaxpr(
            (*(var for var, _ in captured), *inputs),
            local_view.with_messages_shared(eqns) if inner.local else eqns,
            tuple(outputs),
            callers=MappingProxyType(inner.callers),
        )
        return body, [self.constant(value, var.aval) for var, value in captured]

    def constant(self, value: Any, aval: Any) -> Var:
        """The variable of a closed-over constant."""
        if id(value) not in self.of_constant:
            var = Var(aval)
            self.of_constant[id(value)] = var, value
            kept = value if self.is_body else _owned(value)
            (self.hidden if self.is_hidden(value) else self.constants).append((var, kept))
        return self.of_constant[id(value)][0]


def _before_the_loop(flat: _Flattening, body: GlobalJaxpr, constants: list[Atom]) -> tuple[GlobalJaxpr, list[Atom]]:
    """Take out of a body what depends on its constants alone, and is no larger than they; the results are constants too.

    XLA would take the computation out as well, but not what it communicates.
    """
    outside: dict[Var, Atom] = dict(zip(body.inputs, constants, strict=False))
    kept, added = [], []
    for eqn in body.eqns:
        operands = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
        pure = not eqn.effects and "bodies" not in eqn.params and operands
        if not (pure and all(atom in outside for atom in operands)) or _grows(eqn, operands):
            kept.append(eqn)
            continue
        results = [Var(var.aval) for var in eqn.outvars]
        invars = [atom if isinstance(atom, Literal) else outside[atom] for atom in eqn.invars]
        flat.eqns.append(eqn.replace(invars=invars, outvars=results))
        flat.callers[results[0]] = body.callers.get(eqn.outvars[0], ())
        outside.update(zip(eqn.outvars, results, strict=True))
        added += eqn.outvars
    used = {id(atom) for eqn in kept for atom in eqn.invars} | {id(atom) for atom in body.outputs}
    first = len(constants)
    own = [var for var in (*body.inputs[:first], *added) if id(var) in used]
    replaced = dataclasses.replace(body, inputs=(*own, *body.inputs[first:]), eqns=tuple(kept))
    return replaced, [outside[var] for var in own]


def _grows(eqn: JaxprEqn, operands: Sequence[Atom]) -> bool:
    """Whether the results of an equation are larger than its operands."""
    return sum(map(nbytes, eqn.outvars)) > sum(map(nbytes, {id(atom): atom for atom in operands}.values()))


def is_widening(eqn: JaxprEqn) -> bool:
    """Whether an equation is a cast to more bytes."""
    return eqn.primitive.name == "convert_element_type" and nbytes(eqn.outvars[0]) > nbytes(eqn.invars[0])


def nbytes(atom: Atom) -> int:
    """The bytes of a whole value."""
    return math.prod(atom.aval.shape) * int(atom.aval.dtype.itemsize)


def _scan(flat: _Flattening, eqn: JaxprEqn, operands: list[Atom]) -> JaxprEqn:
    n_consts, n_carry = scan_counts(eqn)
    body, captured = flat.nested(eqn.params["jaxpr"])
    body, constants = _before_the_loop(flat, body, [*captured, *operands[:n_consts]])
    params = {**eqn.params, "counts": (len(constants), n_carry), "bodies": (body,)}
    return eqn.replace(invars=[*constants, *operands[n_consts:]], params=params)


def _while(flat: _Flattening, eqn: JaxprEqn, operands: list[Atom]) -> JaxprEqn:
    n_condition, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    condition, of_condition = flat.nested(eqn.params["cond_jaxpr"])
    body, of_body = flat.nested(eqn.params["body_jaxpr"])
    read, constants = (
        [*of_condition, *operands[:n_condition]],
        [*of_body, *operands[n_condition : n_condition + n_body]],
    )
    if condition.outputs[0].aval.shape:
        again, _ = flat.nested(eqn.params["cond_jaxpr"])
        condition, body = _for_any(eqn, condition), _for_those(eqn, again, body, len(read))
        constants = [*read, *constants]
    condition, read = _before_the_loop(flat, condition, read)
    body, constants = _before_the_loop(flat, body, constants)
    counts = {"cond_nconsts": len(read), "body_nconsts": len(constants)}
    invars = [*read, *constants, *operands[n_condition + n_body :]]
    return eqn.replace(invars=invars, params={**eqn.params, **counts, "bodies": (condition, body)})


def _for_any(eqn: JaxprEqn, condition: GlobalJaxpr) -> GlobalJaxpr:
    """One decision, of a loop that `vmap` gave one for each element of a batch: it runs while any goes on."""
    (each,) = condition.outputs
    decides = Var(shaped_like(each.aval, ()))
    like = new_equation(eqn, known_primitive("copy"), [each], [decides])
    made = inline_function(lambda goes_on: lax.reduce_or(goes_on, tuple(range(goes_on.ndim))), like)
    return dataclasses.replace(condition, eqns=(*condition.eqns, *made), outputs=(decides,))


def _for_those(eqn: JaxprEqn, condition: GlobalJaxpr, body: GlobalJaxpr, n_read: int) -> GlobalJaxpr:
    """The body of such a loop: elements that do not go on keep their values. Its first inputs are the condition's constants."""
    n_carry = len(condition.inputs) - n_read
    carry = body.inputs[len(body.inputs) - n_carry :]
    ours = dict(zip(condition.inputs[n_read:], carry, strict=True))

    def renamed(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else ours.get(atom, atom)

    eqns = [each.replace(invars=list(map(renamed, each.invars))) for each in condition.eqns]
    eqns += body.eqns
    goes_on, outputs = renamed(condition.outputs[0]), []
    for old, new in zip(carry, body.outputs, strict=True):
        outputs.append(Var(old.aval))
        like = new_equation(eqn, known_primitive("copy"), [goes_on, new, old], [outputs[-1]])
        eqns += inline_function(
            lambda goes, new, old: lax.select(lax.broadcast_in_dim(goes, old.shape, range(goes.ndim)), new, old), like
        )
    inputs = (*condition.inputs[:n_read], *body.inputs)
    callers = MappingProxyType({**condition.callers, **body.callers})
    return dataclasses.replace(body, inputs=inputs, eqns=tuple(eqns), outputs=tuple(outputs), callers=callers)


def _cond(flat: _Flattening, eqn: JaxprEqn, operands: list[Atom]) -> JaxprEqn:
    """All branches take what any of them closes over."""
    found = [flat.nested(branch) for branch in eqn.params["branches"]]
    everything = list(dict.fromkeys(var for _, captured in found for var in captured))
    bodies = []
    for body, captured in found:
        own = dict(zip(captured, body.inputs, strict=False))
        inputs = [own[var] if var in own else Var(var.aval) for var in everything]
        bodies.append(dataclasses.replace(body, inputs=(*inputs, *body.inputs[len(captured) :])))
    return eqn.replace(invars=[operands[0], *everything, *operands[1:]], params={**eqn.params, "bodies": tuple(bodies)})


def _shard_map(flat: _Flattening, eqn: JaxprEqn, operands: list[Atom]) -> JaxprEqn:
    """A local function: its body, and per operand and result the axes that shard each dim."""
    local, in_dims, out_dims = local_view.read(eqn, flat.mesh)
    body, captured = flat.nested(eqn.params["jaxpr"], local)
    whole = [((),) * len(atom.aval.shape) for atom in captured]
    params = {"local": local, "in_dims": (*whole, *in_dims), "out_dims": out_dims, "bodies": (body,)}
    made = eqn.replace(invars=[*captured, *operands], params=params)
    if flat.local:  # inside another, which checks it
        return made
    return local_view.check_local(made, [frozenset()] * len(made.invars))[0]


NESTED: Final[dict[str, Callable[[_Flattening, JaxprEqn, list[Atom]], JaxprEqn]]] = {
    "cond": _cond,
    "scan": _scan,
    "shard_map": _shard_map,
    "while": _while,
}
"""Equations whose bodies are planned: the equation with `bodies`, and with what these close over among its operands."""


def _owned(value: Any) -> Any:
    """A closed-over value that no later write changes: numpy memory is copied. Raises for an outer trace's tracer."""
    if isinstance(value, Tracer):
        raise TransformationError(
            f"a function decorated with spmd.jit closes over {value}, a value of a JAX transformation from outside: it would "
            "run unpartitioned on every rank. Use spmd.grad and its kin, or put the transformation inside the function."
        )
    return np.array(value) if isinstance(value, np.ndarray) else value


def constrain(x: Any, placements: P) -> Any:
    """Pin the placement of a value inside a decorated function. The value is the same.

    `placements` may hold `Partial()`, which is honoured, and `None` for axes left to propagation. The cotangent prefers the
    same placement but is not pinned; under `vmap` the dims shift past the batch dim, which is left free.

    Raises `TransformationError` outside a decorated function, `InvalidPlacement` where the placement does not fit.
    """
    mesh = tracing_mesh()
    if mesh is None:
        raise TransformationError(
            "spmd.constrain: a constraint is part of a function decorated with spmd.jit. "
            "Outside one, move a DArray with x.redistribute(P(...))."
        )
    aval, local = jax.typeof(x), local_axes()
    try:
        valid_layout(placements, mesh, aval.ndim, aval.dtype)
    except PlacementError as error:
        raise type(error)(f"spmd.constrain of an array of shape {aval.shape} on {mesh!r}: {error}") from error
    named = [axis for axis, placement in placements.items(mesh.axis_names) if placement is not None and axis in local]
    if named:
        raise TransformationError(
            f"spmd.constrain to {placements!r} inside a local function: along {', '.join(named)} it sees its own shard, and "
            "moves it by the functions of `collectives`. The axes that are not local can be constrained."
        )
    return constrain_p.bind(x, placements=resolve(placements, mesh, aval.ndim), pinned=True, free_dims=())


def is_large(value: Any) -> bool:
    """Whether a closed-over array is above `LARGE_CONSTANT` bytes."""
    return math.prod(value.shape) * value.dtype.itemsize > LARGE_CONSTANT
