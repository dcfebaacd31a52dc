"""`DArray`: a distributed array, whole by its shape, in parts by its shards.

Invariants: immutable; a pytree leaf; its shards are what its layout says, on every position that this process holds (all of
them in the simulator); `repr` and every attribute but `full` and `redistribute` are free of communication. It is no
`jax.Array`: outside a decorated function JAX refuses it, with a message of ours; inside one it is closed over like any
array.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from collectives.jax_compat import ShapedArray, Tracer, Var, as_weak, register_array_type
from collectives.process import held_coordinates
from collectives.simulated import identity
from placements import InvalidPlacement, Layout, Mesh, P, PartialTypeError, Replicate
from placements.layout import Shape, resolve
from placements.mesh import Coordinate
from spmd.errors import ArgumentError, DeletedError, EagerError, NotReplicatedError, TransformationError
from spmd.execute import Executable, Ranks
from spmd.program import Program
from spmd.propagate import plan
from spmd.trace import GlobalJaxpr, lift_p, tracing_mesh
from spmd.validate import valid_merge


class DArray:
    """A distributed array: `shape` and `dtype` of the whole, `placements` on a `mesh`, the `shards` that are here.

    Made by decorated functions, `spmd.distribute`, `spmd.from_callback`, `spmd.from_local` and the factories.
    """

    __slots__ = ("__weakref__", "_aval", "_gone", "_shards", "layout", "placements")
    __hash__ = None  # type: ignore[assignment]

    layout: Layout
    """The layout: mesh and placements in canonical form."""
    placements: P
    """What each mesh axis does to the array; axes of size 1 included."""

    def __init__(self, aval: Any, layout: Layout, shards: Ranks, stated: P | None = None) -> None:
        if any(isinstance(shard, Tracer) for shard in shards):
            raise TransformationError(
                "a DArray cannot be made inside jax.jit, a lax loop or another JAX transformation from outside: put the "
                "loop or the transformation inside the decorated function."
            )
        self._aval = aval
        self._shards: Ranks | None = shards
        self._gone = ""
        self.layout = layout
        self.placements = with_unit_axes(layout, stated)

    @property
    def mesh(self) -> Mesh:
        """The mesh that it lies on."""
        return self.layout.mesh

    @property
    def shape(self) -> Shape:
        """The shape of the whole array."""
        return tuple(self._aval.shape)

    @property
    def dtype(self) -> Any:
        """The dtype."""
        return self._aval.dtype

    @property
    def weak_type(self) -> bool:
        """Whether the dtype yields to others in promotion, as in JAX."""
        return bool(self._aval.weak_type)

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self._aval.shape)

    @property
    def size(self) -> int:
        """The number of elements of the whole array."""
        return math.prod(self._aval.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole array."""
        return self.size * int(self.dtype.itemsize)

    @property
    def shards(self) -> Mapping[Coordinate, jax.Array]:
        """The shards that this process holds, by coordinate (in mesh order): all in the simulator, one on a real rank."""
        return MappingProxyType(_Shards(zip(held_coordinates(self.mesh), self._ranks(), strict=True)))

    @property
    def local(self) -> jax.Array:
        """This process's shard. Raises `NotReplicatedError` where it holds several, as in the simulator."""
        ranks = self._ranks()
        if len(ranks) == 1:
            return ranks[0]
        raise NotReplicatedError(
            f"{self!r}: this process simulates {len(ranks)} ranks and holds a shard of each; read x.shards[coordinate]."
        )

    def _ranks(self) -> Ranks:
        if self._shards is None:
            raise DeletedError(f"DArray {self._kind()}: it was {self._gone}. Keep the result that took its place.")
        return self._shards

    def redistribute(self, placements: P) -> DArray:
        """The same array in other placements; `None` leaves an axis as it is.

        Communication: the cheapest steps of `placements.plan_steps`. Collective. Raises `InvalidPlacement` where the
        placements do not fit, `TransformationError` inside a decorated function (use `spmd.constrain`).
        """
        refuse_in_trace(f"redistribute or full of {self!r}")
        try:
            target = valid_merge(placements, self.layout, self.dtype)
        except (InvalidPlacement, PartialTypeError) as error:
            raise type(error)(f"redistribute {self!r}: {error}") from error
        stated = _with_kept(placements, self.placements, self.layout)
        if target == self.layout:
            return DArray(self._aval, target, self._ranks(), stated)
        (shards,) = _redistribution(self.layout, target, self.shape, self.dtype)([self._ranks()])
        return DArray(self._aval, target, shards, stated)

    def full(self) -> jax.Array:
        """The whole array, on every rank. Communication: a gather or reduction of what is not replicated. Collective."""
        return self.redistribute(P()).whole("full")

    def whole(self, what: str) -> jax.Array:
        """The whole array if every rank holds it; else raises `NotReplicatedError` with the remedy."""
        if self.layout.is_replicated:
            value = self._ranks()[0]
            return as_weak(value) if self.weak_type else value
        raise NotReplicatedError(
            f"{what} of {self!r}: this process holds a part of it. x.full() gathers it (every rank must call it); "
            "x.shards are the parts."
        )

    def block_until_ready(self) -> DArray:
        """Wait until the shards are computed, and return the array."""
        jax.block_until_ready(self._ranks())
        return self

    def is_ready(self) -> bool:
        """Whether the shards are computed."""
        return all(shard.is_ready() for shard in self._ranks())

    def delete(self) -> None:
        """Let go of the shards; reading the array afterwards raises `DeletedError`."""
        self.retire("deleted")

    def retire(self, how: str) -> None:
        """Let go of the shards; `how` is the reason given to who reads it later."""
        self._shards, self._gone = None, how

    def is_deleted(self) -> bool:
        """Whether it was deleted or donated."""
        return self._shards is None

    def _kind(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}] {self.placements} on {self.mesh!r}"

    def __repr__(self) -> str:
        if self._shards is None:
            return f"DArray({self._kind()}, {self._gone})"
        if self.layout.is_replicated and self.size <= 4 and isinstance(self.dtype, np.dtype):
            return f"DArray({self._kind()}, {np.asarray(self._shards[0]).tolist()})"
        return f"DArray({self._kind()})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.whole("np.asarray"), dtype, copy=copy)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """What numpy calls for `np.sin(x)`, `np.sum(x)` and `array * x`: inside a decorated function that of `jax.numpy`."""
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        inside = getattr(jnp, name, None)
        if tracing_mesh() is None or inside is None or options:
            raise EagerError(_eager(f"numpy's {name}", self))
        return inside(*(each.__jax_array__() if isinstance(each, DArray) else each for each in inputs))

    def __float__(self) -> float:
        return float(self.whole("float"))

    def __int__(self) -> int:
        return int(self.whole("int"))

    def __complex__(self) -> complex:
        return complex(self.whole("complex"))

    def __bool__(self) -> bool:
        return bool(self.whole("bool"))

    def __index__(self) -> int:
        return self.whole("index").__index__()

    def __format__(self, spec: str) -> str:
        return format(self.whole("format"), spec) if spec else repr(self)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d DArray")
        return self.shape[0]

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.__jax_array__() if tracing_mesh() is not None else self.whole("iteration"))

    def item(self) -> Any:
        """The only element of a replicated array of one element."""
        return self.whole("item").item()

    def tolist(self) -> Any:
        """A replicated array as nested lists."""
        return self.whole("tolist").tolist()

    @property
    def aval(self) -> Any:
        """The aval, inside a trace. JAX asks for it; outside a trace it raises `TransformationError`."""
        return aval_in_trace(self)

    @property
    def sharding(self) -> Any:
        """None of JAX's: raises, so that `jnp.zeros_like` and its kin cannot build a full-size array in silence."""
        aval_in_trace(self)
        raise AttributeError("a DArray has placements, and no jax sharding")

    def __jax_array__(self) -> Any:
        """A tracer, inside a decorated function; outside one raises `TransformationError`."""
        aval_in_trace(self)
        return lift_p.bind(self)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(jax.Array, name):
            if tracing_mesh() is not None:
                return getattr(self.__jax_array__(), name)
            raise AttributeError(_eager(f"x.{name}", self))
        raise AttributeError(f"'DArray' object has no attribute {name!r}")


class _Shards(dict[Coordinate, jax.Array]):
    """Shards by coordinate; one that this process does not hold is an error that says which it does."""

    def __missing__(self, coordinate: Any) -> Any:
        held = ", ".join(map(str, self))
        raise KeyError(
            f"{coordinate}: this process holds the shard of {held} (x.local on a real rank); x.full() gathers all"
        )


def _eager(what: str, array: DArray) -> str:
    return (
        f"{what} on {array!r} outside a decorated function: there is no eager arithmetic on a DArray. "
        "Write the expression in a function under spmd.jit, or take the whole array with x.full()."
    )


def _operator(name: str) -> Callable[..., Any]:
    def method(self: DArray, *others: Any) -> Any:
        if tracing_mesh() is None:
            raise EagerError(_eager(name, self))
        lifted = (other.__jax_array__() if isinstance(other, DArray) else other for other in others)
        return getattr(self.__jax_array__(), name)(*lifted)

    method.__name__ = name
    return method


_BINARY = [
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
    "divmod",
]
OPERATORS: Final = (
    *(f"__{side}{name}__" for name in _BINARY for side in ("", "r")),
    *(
        f"__{name}__"
        for name in ["neg", "pos", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge", "getitem", "round"]
    ),
)
for _name in OPERATORS:
    setattr(DArray, _name, _operator(_name))


def aval_in_trace(array: DArray) -> Any:
    """The aval of a DArray that a trace meets. Raises outside a trace of ours, and on another mesh."""
    mesh = tracing_mesh()
    if mesh is None:
        raise TransformationError(
            f"JAX met {array!r} outside a function decorated with spmd.jit. JAX's own functions and transformations do not "
            "take DArrays: decorate the function, use spmd.grad, spmd.value_and_grad, spmd.vjp, spmd.jvp or spmd.vmap, "
            "build arrays with spmd.zeros and its kin, or take the whole array with x.full()."
        )
    if array.mesh != mesh:
        raise ArgumentError(
            f"{array!r} is closed over by a function on {mesh!r}. All DArrays are on the function's mesh."
        )
    return ShapedArray(array.shape, array.dtype, weak_type=array.weak_type)


register_array_type(DArray, aval_in_trace)


def refuse_in_trace(what: str) -> None:
    """Raise `TransformationError` inside a decorated function, where arrays are whole."""
    if tracing_mesh() is not None:
        raise TransformationError(
            f"{what} inside a decorated function: there arrays are whole already. Use jnp.zeros, jnp.asarray and their kin, "
            "and pin a placement with spmd.constrain."
        )


def _with_kept(stated: P, current: P, layout: Layout) -> P:
    """What was stated, with `None` replaced by what the axis does now."""
    now = dict(current.named)
    named = resolve(stated, layout.mesh, layout.ndim).named
    return P(**{axis: now.get(axis, Replicate()) if placement is None else placement for axis, placement in named})


@functools.cache
def with_unit_axes(layout: Layout, stated: P | None) -> P:
    """The placements of a layout, with what was stated for the axes of size 1, which a layout does not keep."""
    named = dict(layout.placements.named)
    if stated is not None:
        for axis, placement in resolve(stated, layout.mesh, layout.ndim).items(layout.mesh.axis_names):
            if layout.mesh.axis_size(axis) == 1 and placement is not None and placement != Replicate():
                named[axis] = placement
    return P(**named)


@functools.lru_cache(maxsize=1024)
def _redistribution(source: Layout, target: Layout, shape: Shape, dtype: Any) -> Executable:
    """The program that brings an array from one layout to another."""
    var = Var(ShapedArray(shape, dtype))
    planned = plan(GlobalJaxpr((var,), (), (var,)), source.mesh, [source], [target], [target.placements])
    return Executable(Program("redistribute", planned, ("x",), source.mesh.coordinate_at(0)))


def shards_of(array: Any, layout: Layout) -> Ranks:
    """The shards of a whole array at every position. Copies: numpy memory that is written later must not be seen."""
    return build_shards(np.shape(array), layout, lambda index: _cut(array, index))


def _cut(array: Any, index: tuple[slice, ...]) -> jax.Array:
    if isinstance(array, jax.Array):
        whole = all(part == slice(0, size) for part, size in zip(index, array.shape, strict=True))
        if whole or jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
            return array if whole else array[index]
    return jnp.array(np.asarray(array)[index], copy=True) if np.ndim(array) else jnp.asarray(array)


def build_shards(shape: Shape, layout: Layout, make: Callable[[tuple[slice, ...]], jax.Array]) -> Ranks:
    """One array per position that this process holds: `make(index)`, once for each distinct part.

    Where a part repeats, the identity takes its place.

    Of a value given as parts of a sum, product or xor coordinate 0 keeps it and the others hold the identity; for the other
    ops all keep it.
    """
    refuse_in_trace("building a DArray")
    made: dict[Any, jax.Array] = {}
    masked: dict[Any, jax.Array] = {}
    ranks = []
    for coordinate in held_coordinates(layout.mesh):
        bounds = layout.bounds(shape, coordinate)
        if bounds not in made:
            made[bounds] = make(tuple(slice(low, high) for low, high in bounds))
        repeats = any(
            op in ("sum", "prod", "xor") and coordinate[layout.mesh.axis_index(axis)] for axis, op in layout.partial
        )
        if repeats and bounds not in masked:
            value = made[bounds]
            masked[bounds] = jnp.full(value.shape, identity(layout.partial[0][1], value.dtype), value.dtype)
        ranks.append(masked[bounds] if repeats else made[bounds])
    return tuple(ranks)
