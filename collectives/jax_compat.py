"""Everything that touches `jax.extend`, `jax.interpreters` or a private name of JAX, in one place.

The other modules import from here, so that a new JAX version is one file's work. Tried with JAX 0.10 and 0.12.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.extend.core
import jax.extend.core.primitives as _extend_primitives
import jax.extend.random
import numpy as np
from jax import lax
from jax._src import array as _array
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src import source_info_util as _source_info
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax import lax as _lax
from jax.interpreters import ad as ad
from jax.interpreters import batching as batching
from jax.interpreters import mlir

Primitive = jax.extend.core.Primitive
Literal = jax.extend.core.Literal
ShapedArray = jax.core.ShapedArray
Tracer = jax.core.Tracer
Atom = Any  # Var | Literal
if TYPE_CHECKING:  # their avals are typed as AbstractValue, which has neither shape nor dtype
    JaxprEqn = Any
    Var = Any
else:
    JaxprEqn = jax.extend.core.JaxprEqn
    Var = jax.extend.core.Var

INLINED: Final = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}
"""Call primitives whose bodies are planned in place: name to the parameter that holds the body."""


def abstract_mesh(axes: Sequence[tuple[str, int]]) -> Any:
    """JAX's mesh of these axes, without devices, for `jax.shard_map`."""
    names, sizes = tuple(name for name, _ in axes), tuple(size for _, size in axes)
    return jax.sharding.AbstractMesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))


def local_axes() -> dict[str, int]:
    """The axes of the local function that is being traced (`jax.shard_map`), with their sizes, in the order of the mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return {name: mesh.shape[name] for name in mesh.axis_names if name in mesh.manual_axes}


def varying_axes(value: Any) -> frozenset[str]:
    """The axes of a local function over which a value, or an aval, may differ from rank to rank."""
    kind = getattr(value if isinstance(value, ShapedArray) else jax.typeof(value), "manual_axis_type", None)
    return frozenset() if kind is None else frozenset(kind.varying)


def _typed_over(aval: Any, axes: frozenset[str]) -> Any:
    """An aval that differs over these axes of a local function."""
    return aval.update(manual_axis_type=aval.manual_axis_type.update(varying=axes))


def plain_equation(eqn: JaxprEqn) -> JaxprEqn:
    """An equation without what JAX notes of the mesh: shardings of its own, and the axes that it names."""
    effects = {effect for effect in eqn.effects if type(effect).__name__ != "NamedAxisEffect"}
    is_noted = eqn.primitive.name != "sharding_constraint"
    params = {
        key: None if is_noted and isinstance(value, jax.sharding.NamedSharding) else value
        for key, value in eqn.params.items()
    }
    return eqn.replace(params=params, effects=effects)


def plain_aval(aval: Any) -> Any:
    """An aval without what JAX notes of the mesh."""
    return ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type) if type(aval) is ShapedArray else aval


def local_primitive(name: str, transpose: Callable[..., list[Any]] | None, varies: bool) -> Primitive:
    """A collective for local functions: of any number of operands as many results, of their shapes.

    Operands vary over the parameter `axes`, results do if `varies`. `transpose(cotangents, **params)` makes it linear; without
    it there is no derivative. Batches pass.
    """
    made = Primitive(name)
    made.multiple_results = True

    def abstract(*avals: Any, axes: tuple[str, ...], **params: Any) -> list[Any]:
        return [_typed_over(a, varying_axes(a) | set(axes) if varies else varying_axes(a) - set(axes)) for a in avals]

    def backward(cotangents: Any, *operands: Any, **params: Any) -> list[Any]:
        assert transpose is not None
        return transpose([ad.instantiate_zeros(each) for each in cotangents], **params)

    def batch(operands: Any, dims: Any, **params: Any) -> Any:
        return made.bind(*operands, **params), dims

    made.def_abstract_eval(abstract)
    batching.primitive_batchers[made] = batch
    if transpose is not None:
        ad.deflinear2(made, backward)
    return made


def as_struct(aval: Any) -> jax.ShapeDtypeStruct:
    """An aval as an argument of `make_jaxpr`, weak type kept."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def calls_python(effects: Any) -> bool:
    """Whether all effects are those of callbacks."""
    known = ("DebugEffect", "OrderedDebugEffect", "IOEffect", "OrderedIOEffect")
    return all(type(effect).__name__ in known for effect in effects)


def hi_body(eqn: JaxprEqn) -> Any:
    """What a `call_hi_primitive` of JAX 0.12 stands for (`jnp.searchsorted` is one), as a jaxpr of its flat operands."""
    prim = eqn.params["_prim"]

    def expand(*flat: Any) -> list[Any]:
        return list(jax.tree.leaves(prim.expand(*jax.tree.unflatten(prim.in_tree, flat))))

    return jax.make_jaxpr(expand)(*(as_struct(atom.aval) for atom in eqn.invars))


def solver_body(eqn: JaxprEqn, operands: Sequence[Any]) -> tuple[Any, list[Any]]:
    """What a `custom_linear_solve` computes once differentiation is over: the jaxpr of the solver, and its operands."""
    counts = eqn.params["const_lengths"]
    before = counts.matvec + counts.vecmat
    every = before + counts.solve + counts.transpose_solve
    return eqn.params["jaxprs"].solve, [*operands[before : before + counts.solve], *operands[every:]]


def primitive(name: str) -> Primitive | None:
    """JAX's own primitive of this name, or None where this version has none."""
    for module in (_extend_primitives, lax, lax.linalg):
        found = getattr(module, f"{name}_p", None)
        if found is not None:
            return found
    return None


def registered_primitives() -> set[str]:
    """The names of all primitives that JAX publishes."""
    modules = (_extend_primitives, lax, lax.linalg)
    found = (getattr(module, name) for module in modules for name in dir(module) if name.endswith("_p"))
    return {each.name for each in found if isinstance(each, Primitive)}


def known_primitive(name: str) -> Primitive:
    """The primitive `name`, which every supported version has."""
    found = primitive(name)
    assert found is not None, name
    return found


def typeof(value: Any) -> Any:
    """The aval of a value, weak type included. Raises `TypeError` for what is no JAX type."""
    return jax.typeof(value)


def threefry(key_high: Any, key_low: Any, high: Any, low: Any) -> tuple[Any, Any]:
    """Threefry-2x32 of counts under a key, both as two words of 32 bits. Source: Salmon et al., SC 2011."""
    words = jax.numpy.broadcast_arrays(key_high, key_low, high, low)
    first, second = jax.extend.random.threefry2x32_p.bind(*words)
    return first, second


def draws_by_index(key: Any) -> bool:
    """Whether the bits drawn from keys of this aval are a hash of key and index alone."""
    return bool(_config.threefry_partitionable.value) and "fry" in str(key.dtype)


def as_closed(jaxpr: Any) -> tuple[Any, list[Any]]:
    """A jaxpr, closed or open, as (jaxpr, consts)."""
    consts = list(getattr(jaxpr, "consts", ()))
    return getattr(jaxpr, "jaxpr", jaxpr), consts


def without_dead_code(closed: Any) -> Any:
    """A closed jaxpr without what no result needs, in loops too; all inputs stay."""
    jaxpr = _partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)[0]
    return jax.extend.core.ClosedJaxpr(jaxpr, closed.consts)


def bodies_of(eqn: JaxprEqn) -> list[Any]:
    """The jaxprs of an equation's bodies: those of a loop, a branch, a call."""
    found = []
    for value in eqn.params.values():
        for each in value if isinstance(value, tuple) else (value,):
            opened = getattr(each, "jaxpr", each)
            if hasattr(opened, "eqns") and hasattr(opened, "invars"):
                found.append(opened)
    return found


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many carries; scanned inputs follow."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    constants, carry, _ = eqn.params["ft_in"].unpack()  # since JAX 0.12
    return len(list(constants)), len(list(carry))


def trace_context() -> Hashable:
    """What, besides the arguments, a trace depends on: the x64 flag, matmul precision, PRNG implementation, ..."""
    return _config.trace_context()


def bind(eqn: JaxprEqn, operands: list[Any], params: dict[str, Any]) -> list[Any]:
    """Apply an equation's primitive to operands, with other parameters."""
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return list(results) if eqn.primitive.multiple_results else [results]


def dynamic_slice(operand: Any, starts: list[Any], sizes: tuple[int, ...]) -> Any:
    """`lax.dynamic_slice` without the arithmetic that wraps negative starts: ours are in range."""
    return known_primitive("dynamic_slice").bind(operand, *starts, slice_sizes=sizes)


def dynamic_update_slice(operand: Any, update: Any, starts: list[Any]) -> Any:
    """`lax.dynamic_update_slice` without the arithmetic that wraps negative starts: ours are in range."""
    return known_primitive("dynamic_update_slice").bind(operand, update, *starts)


def identity_primitive(name: str) -> Primitive:
    """A primitive that does nothing to its first operand, wherever it is evaluated or compiled."""
    made = Primitive(name)
    made.def_abstract_eval(lambda aval, *others, **params: aval)
    made.def_impl(lambda value, *others, **params: value)
    mlir.register_lowering(made, lambda ctx, value, *others, **params: [value])
    return made


def function_primitive(name: str, function: Callable[..., Any]) -> Primitive:
    """A primitive that calls `function`, of arrays, for one array or a tuple of them; differentiated and batched as it is."""
    made = Primitive(name)
    made.multiple_results = True

    def flat(*values: Any) -> list[Any]:
        return jax.tree.leaves(function(*values))

    def abstract(*avals: Any) -> list[Any]:
        structs = list(map(as_struct, avals))
        return [ShapedArray(each.shape, each.dtype) for each in jax.eval_shape(flat, *structs)]

    def derivative(primals: Any, tangents: Any) -> Any:
        return jax.jvp(flat, tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))

    def over_a_batch(values: Any, dims: Any) -> Any:
        made = jax.vmap(flat, in_axes=tuple(dims))(*values)
        return made, [0] * len(made)

    made.def_abstract_eval(abstract)
    made.def_impl(flat)
    mlir.register_lowering(made, mlir.lower_fun(flat, multiple_results=True))
    ad.primitive_jvps[made] = derivative
    batching.primitive_batchers[made] = over_a_batch
    return made


def is_concrete(value: Any) -> bool:
    """Whether a value is an array of JAX's or numpy's, and no tracer."""
    return type(value) is _array.ArrayImpl or type(value) is np.ndarray


def backend_exists() -> bool:
    """Whether JAX has made a client already."""
    return bool(_xla_bridge.backends_are_initialized())


def register_ffi_lowering(
    made: Primitive, target: str, callbacks: Mapping[str, Any], attributes: Callable[[Any], Any]
) -> None:
    """Lower a primitive to a custom call of an FFI target, whose callback is by platform (cpu, cuda): with a side effect, its
    first operand aliased."""

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        rule = jax.ffi.ffi_lowering(target, has_side_effect=True, operand_output_aliases={0: 0})
        return rule(ctx, *operands, **attributes(params))

    for platform, callback in callbacks.items():
        jax.ffi.register_ffi_target(
            target, jax.ffi.pycapsule(callback), platform={"cuda": "CUDA"}.get(platform, platform)
        )
        mlir.register_lowering(made, lower, platform=platform)


def raw_bytes(value: Any) -> bytes:
    """The memory of an array, for checksums; of a typed key its words."""
    keys = isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
    return np.ascontiguousarray(jax.random.key_data(value) if keys else value).tobytes()


def shaped_like(aval: Any, shape: tuple[int, ...]) -> Any:
    """The aval of the same kind of array with another shape."""
    return aval.update(shape=shape)


def as_weak(value: Any) -> Any:
    """The same array with a weak type."""
    return _lax._convert_element_type(value, value.dtype, weak_type=True)


def new_equation(like: JaxprEqn, primitive: Primitive, invars: list[Atom], outvars: list[Var]) -> JaxprEqn:
    """A parameterless equation at the source position of another."""
    return jax.extend.core.new_jaxpr_eqn(invars, outvars, primitive, {}, set(), like.source_info)


def inline_function(function: Callable[..., Any], eqn: JaxprEqn) -> list[JaxprEqn]:
    """What `function` does to the operands of an equation, as equations that give its results, at its source position.

    `function` closes over no arrays.
    """
    closed = jax.make_jaxpr(function)(*(as_struct(atom.aval) for atom in eqn.invars))
    assert not closed.consts, closed
    assert not any(each.primitive.name in INLINED for each in closed.jaxpr.eqns), closed
    env: dict[Var, Atom] = dict(zip(closed.jaxpr.invars, eqn.invars, strict=True))
    found = []
    for each in closed.jaxpr.eqns:
        operands = [atom if isinstance(atom, Literal) else env[atom] for atom in each.invars]
        results = [Var(var.aval) for var in each.outvars]
        env.update(zip(each.outvars, results, strict=True))
        found.append(each.replace(invars=operands, outvars=results, source_info=eqn.source_info))
    for atom, var in zip(closed.jaxpr.outvars, eqn.outvars, strict=True):
        source = atom if isinstance(atom, Literal) else env[atom]
        found.append(new_equation(eqn, known_primitive("copy"), [source], [var]))
    return _without_copies(found)


def _without_copies(eqns: list[JaxprEqn]) -> list[JaxprEqn]:
    """Equations without the copies at their end, where these copy what one of the others made, once."""
    made = {var: (at, index) for at, eqn in enumerate(eqns) for index, var in enumerate(eqn.outvars)}
    kept = list(eqns)
    for eqn in reversed(eqns):
        if eqn.primitive.name != "copy":
            break
        (source,), (result,) = eqn.invars, eqn.outvars
        used = sum(atom is source for each in eqns for atom in each.invars)
        if isinstance(source, Literal) or source not in made or used > 1:
            continue
        at, index = made[source]
        outvars = [*kept[at].outvars[:index], result, *kept[at].outvars[index + 1 :]]
        kept[at] = kept[at].replace(outvars=outvars)
        kept.remove(eqn)
    return kept


def register_array_type(cls: type, aval: Callable[[Any], Any]) -> None:
    """Let JAX's tracers take values of `cls` as constants. `aval` may raise: its message is the user's."""

    def canonicalize(value: Any) -> Any:
        aval(value)
        return value

    _core.pytype_aval_mappings[cls] = aval
    _dtypes.canonicalize_value_handlers[cls] = canonicalize


def under_make_jaxpr() -> bool:
    """Whether `jax.make_jaxpr` is on the stack: it traces exactly as `jax.jit` does, so nothing else tells them apart."""
    return any(
        frame.f_code.co_name == "make_jaxpr_f" and "jax" in Path(frame.f_code.co_filename).parts for frame in _frames()
    )


def _frames() -> Iterator[Any]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Source:
    """Where in the user's code an equation comes from: the function, the line, and the function's first line."""

    function: str
    file: str
    line: int
    first_line: int

    def __str__(self) -> str:
        """Function, file and line."""
        return f"{self.function} ({Path(self.file).name}:{self.line})" if self.function else "unknown"

    @property
    def offset(self) -> str:
        """Function and line offset: the same wherever the function stands in its file."""
        return f"{self.function}+{self.line - self.first_line}" if self.function else "unknown"


UNKNOWN: Final = Source("", "", 0, 0)
_OWN = tuple(str(Path(__file__).parents[1] / package) for package in ("placements", "collectives", "spmd"))


def source_of(eqn: JaxprEqn) -> Source:
    """The innermost frame of an equation's trace that is neither JAX's nor ours."""
    traceback = eqn.source_info.traceback
    if traceback is None:
        return UNKNOWN
    codes, lasti = traceback.raw_frames()
    for code, at in zip(codes, lasti, strict=True):
        if _source_info.is_user_filename(code.co_filename) and not code.co_filename.startswith(_OWN):
            frame = _source_info.raw_frame_to_frame(code, at)
            name = code.co_qualname.rpartition("<locals>.")[2]
            return Source(name, code.co_filename, frame.start_line, code.co_firstlineno)
    return UNKNOWN
