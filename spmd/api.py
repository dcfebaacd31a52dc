"""`spmd.jit`: the decorator, and the function that it makes.

A call binds its arguments, looks up or makes an entry (trace, plan, lower: once per structure, avals, placements, mesh and
trace context), cuts whole arrays into shards and runs the program. Invariants: errors that follow from the arguments are
raised before anything runs, and alike on every rank; nothing moves an argument unless the program lists it.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from collectives.jax_compat import Tracer, as_struct, is_concrete, local_axes, trace_context, under_make_jaxpr
from placements import Layout, Mesh, P, PlacementError, plan_steps
from placements.mesh import Coordinate
from spmd.array import DArray, aval_in_trace, shards_of
from spmd.current import current_mesh, kind_name
from spmd.effects import CALLBACKS
from spmd.errors import ArgumentError, FallbackError, PlacementWarning, TransformationError
from spmd.execute import Executable, Ranks
from spmd.indices import with_known_indices
from spmd.joins import without_joins
from spmd.plan import item_sizes
from spmd.prefix import PlacedLeaf, is_leaf, place_leaves
from spmd.program import Program
from spmd.propagate import plan
from spmd.signature import Signature, read_signature
from spmd.slices import with_slices_taken
from spmd.trace import constrain, is_large, trace, tracing_mesh
from spmd.validate import valid_layout, valid_merge

Fallbacks = Literal["warn", "error", "allow"]
Redistribution = Literal["error", "allow"]


@dataclass(frozen=True, slots=True)
class Options:
    """What the decorator was told, beside placements."""

    mesh: Mesh | None
    fallback: str
    redistribute: str
    check: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Entry:
    """A cache entry: the program, how to run it, and how to put its results together. `donated` are places of leaves."""

    program: Program
    executable: Executable
    avals: tuple[Any, ...]
    stated: tuple[P | None, ...]
    treedef: Any
    donated: tuple[int, ...]


class SpmdFunction:
    """A function under `spmd.jit`: call it with arrays or DArrays, or `lower` it to its Program."""

    def __init__(self, function: Callable[..., Any], signature: Signature, options: Options) -> None:
        functools.update_wrapper(self, function)
        self.function, self.signature, self.options = function, signature, options
        self._entries: dict[Hashable, Entry] = {}
        self._quick: dict[Hashable, Entry] = {}

    def __repr__(self) -> str:
        return f"<spmd.jit of {self.signature.name}>"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundFunction(self, instance)

    @property
    def mesh(self) -> Mesh | None:
        """The mesh stated at decoration, or None."""
        return self.options.mesh

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on every rank. Collective. Results are DArrays."""
        if tracing_mesh() is not None:
            return self._inline(args, kwargs)
        quick = None if kwargs or self.signature.statics else self._quick_key(args)
        if quick is not None and (known := self._quick.get(quick)) is not None:
            return self._run(known, jax.tree.leaves(args))
        bound = self.signature.bind(args, kwargs)
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(dict(bound.arguments))):
            return self._under_transformation(args, kwargs)
        leaves, key, mesh = self._describe(bound)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = self._make(bound, leaves, mesh, None)
        if quick is not None:
            self._quick[quick] = entry
        return self._run(entry, [leaf.value for leaf in leaves])

    def _quick_key(self, args: tuple[Any, ...]) -> Hashable | None:
        """The key of a call whose arguments are arrays by position and nothing else: cheap, and as telling as the full one."""
        values, treedef = jax.tree.flatten(args)
        kinds: list[Hashable] = []
        for value in values:
            if type(value) is DArray:
                aval = value._aval
                kinds += (value.layout, aval.shape, aval.dtype, aval.weak_type)
            elif is_concrete(value):
                kinds += (value.shape, value.dtype, type(value) is not np.ndarray and value.weak_type)
            else:
                return None
        return self.options.mesh or current_mesh(), treedef, tuple(kinds), trace_context()

    def lower(self, *args: Any, **kwargs: Any) -> Program:
        """The Program of a call with these arguments; nothing runs. `jax.ShapeDtypeStruct`s stand for arrays.

        `coordinate=` picks the coordinate whose shapes the text shows. Works for a mesh of any size.
        """
        at: Coordinate | None = None if self.signature.has("coordinate") else kwargs.pop("coordinate", None)
        bound = self.signature.bind(args, kwargs)
        leaves, _, mesh = self._describe(bound)
        if at is not None:
            mesh.position(at)
        return self._make(bound, leaves, mesh, at).program

    def _under_transformation(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if under_make_jaxpr():
            return self.function(*args, **kwargs)
        raise TransformationError(
            f"{self.signature.name}: it is decorated with spmd.jit and was called under a JAX transformation from outside "
            "(jax.jit, jax.grad, jax.vmap, ...): JAX would run it unpartitioned on every rank. Use spmd.grad, "
            "spmd.value_and_grad, spmd.vjp, spmd.jvp or spmd.vmap, or put the transformation inside the decorated function."
        )

    def _leaves(self, bound: inspect.BoundArguments) -> tuple[list[PlacedLeaf], list[tuple[str, Any]]]:
        """The array arguments in order, and the structure of each parameter (type and value where it is static)."""
        leaves: list[PlacedLeaf] = []
        structure: list[tuple[str, Any]] = []
        for name, value in bound.arguments.items():
            if name in self.signature.statics:
                structure.append((name, (type(value), value)))  # 1, 1.0 and True are equal, and other programs
                continue
            what = f"{self.signature.name}: the placements of argument {name!r}"
            found, treedef = place_leaves(self.signature.prefix(name), value, name, what, self._aval)
            structure.append((name, treedef))
            leaves += found
        return leaves, structure

    def _aval(self, path: str, value: Any) -> Any:
        if isinstance(value, DArray):
            return value._aval
        if isinstance(value, jax.ShapeDtypeStruct):
            return jax.core.ShapedArray(value.shape, value.dtype, weak_type=value.weak_type)
        try:
            return jax.typeof(value)
        except TypeError:
            hint = "Name its parameter in static_argnames if the function is to be traced for its value."
            if not path.isidentifier():
                hint = "Pass the arrays of the tree alone, and close over the rest (equinox.partition, flax.nnx.split)."
            raise ArgumentError(
                f"{self.signature.name}: argument {path} is a {_described(value)}, which is no array. {hint}"
            ) from None

    def _describe(self, bound: inspect.BoundArguments) -> tuple[list[PlacedLeaf], Hashable, Mesh]:
        """The array arguments, the cache key and the mesh of a call."""
        leaves, structure = self._leaves(bound)
        mesh = self._mesh(leaves)
        kinds = tuple(
            (
                leaf.aval.shape,
                leaf.aval.dtype,
                leaf.aval.weak_type,
                leaf.stated,
                leaf.value.layout if isinstance(leaf.value, DArray) else None,
            )
            for leaf in leaves
        )
        try:
            key = (mesh, tuple(structure), kinds, trace_context())
            hash(key)
        except TypeError:
            statics = {name: value for name, value in bound.arguments.items() if name in self.signature.statics}
            found = [f"{name}, a {kind_name(value)}" for name, value in statics.items() if not _is_hashable(value)]
            raise ArgumentError(
                f"{self.signature.name}: a static argument is not hashable: {'; '.join(found)}."
            ) from None
        return leaves, key, mesh

    def _mesh(self, leaves: list[PlacedLeaf]) -> Mesh:
        arrays = [leaf for leaf in leaves if isinstance(leaf.value, DArray)]
        mesh = self.options.mesh or current_mesh() or next((leaf.value.mesh for leaf in arrays), None)
        if mesh is None:
            raise ArgumentError(
                f"{self.signature.name}: no mesh. State mesh=..., enter `with spmd.use_mesh(mesh):`, or pass a DArray."
            )
        for leaf in arrays:
            if leaf.value.mesh != mesh:
                raise ArgumentError(
                    f"{self.signature.name}: argument {leaf.path}, {leaf.value!r}, is on another mesh than the function's, "
                    f"{mesh!r}. All DArrays are on the function's mesh: distribute the whole array on it."
                )
        return mesh

    def _place(self, leaf: PlacedLeaf, mesh: Mesh) -> tuple[Layout, Layout]:
        """The layout in which an argument arrives, and the one it is brought to."""
        if not isinstance(leaf.value, DArray):
            ndim, dtype = len(leaf.aval.shape), leaf.aval.dtype
            layout = self._checked(valid_layout, leaf, leaf.stated or P(), mesh, ndim, dtype)
            return layout, layout
        arrival = leaf.value.layout
        wanted = (
            arrival if leaf.stated is None else self._checked(valid_merge, leaf, leaf.stated, arrival, leaf.aval.dtype)
        )
        steps = plan_steps(arrival, wanted, leaf.aval.shape, item_sizes(leaf.aval))
        sent = [step.name for step in steps if step.communicates]
        if sent and self.options.redistribute == "error":
            raise ArgumentError(
                f"{self.signature.name}: argument {leaf.path} is {leaf.value!r}, stated as {wanted}: to bring it there takes "
                f"{', '.join(sent)}. If it is the result of a decorated function, state its out_placements; else move it "
                f'with x.redistribute({leaf.stated!r}), or decorate with spmd.jit(..., redistribute="allow").'
            )
        return arrival, wanted

    def _checked(self, make: Callable[..., Layout], leaf: PlacedLeaf, placements: P, *rest: Any) -> Layout:
        """The layout that `make` gives; errors are raised again with the leaf's path and shape."""
        try:
            return make(placements, *rest)
        except PlacementError as error:
            where = f"{leaf.path} of shape {tuple(leaf.aval.shape)}"
            hint = ""
            if isinstance(leaf.value, (bool, int, float, complex)):
                of_list = " A list is a pytree of numbers; for an array pass np.asarray of it."
                hint = of_list if "[" in leaf.path else " One P counts for all arguments; a tuple has one for each."
            what = str(error).removeprefix(f"{placements!r}: ")
            raise type(error)(f"{self.signature.name}: {where}, stated as {placements!r}: {what}{hint}") from error

    def _make(
        self, bound: inspect.BoundArguments, leaves: list[PlacedLeaf], mesh: Mesh, at: Coordinate | None
    ) -> Entry:
        """Trace, plan and lower."""
        placed = [self._place(leaf, mesh) for leaf in leaves]
        trees: list[Any] = []

        def flat(*values: Any) -> list[Any]:
            rebuilt = rebuilt_with(bound, self.signature, values)
            found, treedef = jax.tree.flatten(self.function(*rebuilt.args, **rebuilt.kwargs))
            trees.append(treedef)
            return found

        if hasattr(self.function, "__code__"):  # JAX's messages then name the user's function and file
            functools.update_wrapper(flat, self.function)

        def is_hidden(value: Any) -> bool:
            return isinstance(value, DArray) or is_large(value)

        traced = trace(flat, [as_struct(leaf.aval) for leaf in leaves], mesh, is_hidden)
        jaxpr = with_slices_taken(without_joins(with_known_indices(traced)))
        treedef = trees[-1]
        skeleton = jax.tree.unflatten(treedef, [atom.aval for atom in jaxpr.outputs])
        stated = self._result_placements(skeleton, mesh)
        hidden = [v.layout if isinstance(v, DArray) else Layout.replicated(mesh, np.ndim(v)) for v in jaxpr.hidden]
        names = [leaf.path for leaf in leaves] + [f"closure{i}" for i in range(len(hidden))]
        planned = plan(
            jaxpr,
            mesh,
            [arrival for arrival, _ in placed] + hidden,
            [wanted for _, wanted in placed] + hidden,
            stated,
            names=names,
            results=[
                f"result{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_flatten_with_path(skeleton)[0]
            ],
        )
        program = Program(self.signature.name, planned, tuple(names), at or mesh.coordinate_at(0))
        self._report(program)
        if self.options.check is not None:
            program.check(**self.options.check)
        avals = tuple(atom.aval for atom in jaxpr.outputs)
        owners = [
            name
            for name, value in bound.arguments.items()
            if name not in self.signature.statics
            for _ in jax.tree.leaves(value)
        ]
        donated = tuple(at for at, name in enumerate(owners) if name in self.signature.donated)
        return Entry(program, Executable(program), avals, tuple(stated), treedef, donated)

    def _result_placements(self, skeleton: Any, mesh: Mesh) -> list[P | None]:
        """The placement stated for every result, validated. `skeleton` is the result with avals for arrays."""
        what = f"{self.signature.name}: the placements of the result"
        placed, _ = place_leaves(self.signature.result, skeleton, "result", what, lambda path, aval: aval)
        for leaf in placed:
            if leaf.stated is not None:
                self._checked(valid_layout, leaf, leaf.stated, mesh, len(leaf.aval.shape), leaf.aval.dtype)
        return [leaf.stated for leaf in placed]

    def _report(self, program: Program) -> None:
        """Say what is right but costs more than it might: fallbacks, large closed-over constants."""
        large = [v for v in program.plan.jaxpr.hidden if not isinstance(v, DArray)]
        if large:
            shapes = ", ".join(f"{v.dtype}{list(np.shape(v))}" for v in large)
            warnings.warn(
                f"{self.signature.name} closes over large arrays ({shapes}); they became replicated hidden arguments. "
                "Pass them as arguments, or close over DArrays.",
                PlacementWarning,
                stacklevel=4,
            )
        if not program.fallbacks or self.options.fallback == "allow":
            return
        listed = "\n".join(f"  {fallback}" for fallback in program.fallbacks)
        names = {fallback.primitive for fallback in program.fallbacks}
        parts = []
        if not names <= set(CALLBACKS):
            parts.append(
                "operations without a rule need whole operands; a rule of your own is spmd.rule or spmd.register_rule"
            )
        if names & set(CALLBACKS):
            parts.append(
                "callbacks see whole values; give them what is small, or whole already: spmd.constrain(x, P())"
            )
        message = (
            f'{self.signature.name}: {"; ".join(parts)}:\n{listed}\nAllow this with spmd.jit(..., fallback="allow").'
        )
        if self.options.fallback == "error":
            raise FallbackError(message)
        warnings.warn(message, PlacementWarning, stacklevel=4)

    def _run(self, entry: Entry, values: list[Any]) -> Any:
        """Cut, run, and wrap the results. Donated DArrays are retired once the program has run."""
        plan = entry.program.plan
        everything = (*values, *plan.jaxpr.hidden)
        inputs = [
            value._ranks() if type(value) is DArray else _input(value, layout, var.aval)
            for value, layout, var in zip(everything, plan.arrivals, plan.jaxpr.inputs, strict=True)
        ]
        results = entry.executable(inputs, [pair for pair in enumerate(everything) if type(pair[1]) is not DArray])
        for at in entry.donated:
            if isinstance(values[at], DArray):
                values[at].retire(f"donated to {self.signature.name}")
        arrays = [
            DArray(aval, layout, shards, stated)
            for aval, layout, shards, stated in zip(entry.avals, plan.departures, results, entry.stated, strict=True)
        ]
        return jax.tree.unflatten(entry.treedef, arrays)

    def _inline(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Inside another trace: call the function, its placements as constraints."""
        mesh = tracing_mesh()
        if self.options.mesh is not None and self.options.mesh != mesh:
            raise ArgumentError(
                f"{self.signature.name} is decorated for {self.options.mesh!r}, and called inside a function on {mesh!r}. "
                "A function and those that it calls are on one mesh."
            )
        bound = self.signature.bind(args, kwargs)
        self._check_view()
        for name, value in bound.arguments.items():
            if name not in self.signature.statics:
                what = f"{self.signature.name}: the placements of argument {name!r}"
                bound.arguments[name] = _constrained(value, self.signature.prefix(name), what, name)
        result = self.function(*bound.args, **bound.kwargs)
        what = f"{self.signature.name}: the placements of the result"
        return _constrained(result, self.signature.result, what, "result")

    def _check_view(self) -> None:
        """Raise where arguments would be placed along an axis of which the caller has a shard already."""
        stated = jax.tree.leaves([*self.signature.stated.values(), self.signature.result], is_leaf=is_leaf)
        axes = {
            axis for leaf in stated if isinstance(leaf, P) for axis, placement in leaf.named if placement is not None
        }
        local = [axis for axis in local_axes() if axis in axes]
        if local:
            over = ", ".join(local)
            raise TransformationError(
                f"{self.signature.name} is decorated for whole arrays along {over}, and called in a local function over "
                f"{over}, whose arguments are shards: call the undecorated function there."
            )


class BoundFunction(functools.partial[Any]):
    """A decorated method of an instance."""

    def lower(self, *args: Any, **kwargs: Any) -> Program:
        """See `SpmdFunction.lower`."""
        return self.func.lower(*self.args, *args, **kwargs)  # type: ignore[attr-defined]


def _constrained(tree: Any, prefix: Any, what: str, name: str) -> Any:
    """A tree with every stated leaf constrained."""
    if prefix is None:
        return tree
    placed, treedef = place_leaves(prefix, tree, name, what, lambda path, leaf: traced_aval(leaf))
    found = []
    for leaf in placed:
        try:
            found.append(leaf.value if leaf.stated is None else constrain(leaf.value, leaf.stated))
        except PlacementError as error:
            raise type(error)(f"{what}: {leaf.path} of shape {leaf.aval.shape}: {error}") from error
    return jax.tree.unflatten(treedef, found)


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _described(value: Any) -> str:
    return f"{type(value).__name__} of dtype {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__


def traced_aval(value: Any) -> Any:
    """The aval of a value inside a trace, DArrays that are closed over among them."""
    return aval_in_trace(value) if isinstance(value, DArray) else jax.typeof(value)


def _input(value: Any, layout: Layout, aval: Any) -> Ranks:
    """The shards of an array argument, or of a hidden one, on every rank."""
    if isinstance(value, jax.ShapeDtypeStruct):
        raise ArgumentError(f"a call takes arrays; {value} stands for one in f.lower(...) alone.")
    return shards_of(value if isinstance(value, jax.Array) else np.asarray(value, aval.dtype), layout)


def rebuilt_with(bound: inspect.BoundArguments, signature: Signature, values: Sequence[Any]) -> inspect.BoundArguments:
    """The bound arguments with every array replaced, in order."""
    at = 0
    rebuilt = inspect.BoundArguments(bound.signature, dict(bound.arguments))
    for name, value in bound.arguments.items():
        if name not in signature.statics:
            leaves, treedef = jax.tree.flatten(value)
            rebuilt.arguments[name] = jax.tree.unflatten(treedef, values[at : at + len(leaves)])
            at += len(leaves)
    return rebuilt


def jit(
    function: Callable[..., Any] | None = None,
    /,
    *,
    mesh: Mesh | None = None,
    in_placements: Any = None,
    out_placements: Any = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    fallback: Fallbacks = "warn",
    redistribute: Redistribution = "error",
    check: Mapping[str, Any] | None = None,
) -> Any:
    """Run a pure `jax.numpy` function over whole arrays on every rank of a mesh.

    Placements are stated by annotations, `x: Annotated[jax.Array, P(dp=Shard(0))]`, or by `in_placements`: a prefix of the
    positional arguments without the static ones, or a dict by parameter name; `None` is not stated, a function
    `(path, aval) -> P` decides leaf by leaf. `out_placements=None` leaves the results where propagation puts them, parts
    reduced. Without a stated placement a DArray keeps its own, and any other array is replicated: the same on every rank.

    The mesh defaults to that of `use_mesh` / `set_mesh`, read at the call, then to that of the arguments. `fallback` says
    what happens to operations without a rule: a `PlacementWarning`, a `FallbackError`, or nothing. A DArray whose placement
    differs from the stated one is an error if moving it would communicate; `redistribute="allow"` lists the move in the
    Program. `check` is passed to `Program.check` at every lowering. Donated DArrays raise when read afterwards.

    Raises `AnnotationError` and `ArgumentError` at decoration, `ArgumentError`, `InvalidPlacement` and `PartialTypeError`
    at the call. Communication: what `f.lower(...)` prints.

    >>> from placements import Mesh, P, Shard
    >>> double = jit(lambda x: 2 * x, mesh=Mesh(dp=2), in_placements=P(dp=Shard(0)))
    >>> double(np.arange(5)).placements
    P(dp=S(0))
    """
    frame_locals = dict(sys._getframe(1).f_locals)
    if fallback not in ("warn", "error", "allow") or redistribute not in ("error", "allow"):
        raise ArgumentError(
            f'spmd.jit: fallback is "warn", "error" or "allow", redistribute is "error" or "allow"; '
            f"got fallback={fallback!r}, redistribute={redistribute!r}."
        )

    if mesh is not None and not isinstance(mesh, Mesh):
        raise ArgumentError(f"spmd.jit: mesh is a placements.Mesh, as in Mesh(dp=2, tp=2); got a {kind_name(mesh)}.")
    if check is not None and not isinstance(check, Mapping):
        raise ArgumentError(f"spmd.jit: check is a dict of the arguments of Program.check, not {check!r}.")
    if function is not None and not callable(function):
        raise ArgumentError(
            f"spmd.jit decorates a function; got {function!r}. Options are keywords: spmd.jit(mesh=mesh)."
        )

    def decorate(target: Callable[..., Any]) -> SpmdFunction:
        statics, donated = (static_argnums, static_argnames), (donate_argnums, donate_argnames)
        signature = read_signature(target, in_placements, out_placements, statics, donated, frame_locals)
        return SpmdFunction(target, signature, Options(mesh, fallback, redistribute, check))

    return decorate if function is None else decorate(function)
