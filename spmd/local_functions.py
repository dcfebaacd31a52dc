"""`spmd.shard_map`: functions that see this rank's shard, and say themselves what to communicate.

JAX's own `shard_map` traces them, over a mesh without devices: its types say which values are the same on all ranks of an
axis, and derivatives, batches, loops and rematerialisation are its own. So all shards of an array have one shape: JAX's arrays
know no others, and a function traced once for each shape could not be differentiated from outside as one. Sizes that do not
divide are an error here, with the remedy; the global view has no such limit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from collectives.jax_compat import abstract_mesh, varying_axes
from placements import Mesh, P, Partial, PlacementError, Shard
from placements.layout import resolve
from spmd.api import Options, SpmdFunction, rebuilt_with, traced_aval
from spmd.errors import ArgumentError
from spmd.prefix import PlacedLeaf, is_leaf, place_leaves
from spmd.signature import Signature, read_signature
from spmd.trace import tracing_mesh


def shard_map(
    function: Callable[..., Any] | None = None,
    /,
    *,
    mesh: Mesh | None = None,
    in_placements: Any = None,
    out_placements: Any = None,
    axes: Sequence[str] | str | None = None,
) -> Any:
    """A function in local view: its arguments are this rank's shards, and it communicates by the functions of `collectives`.

    `in_placements` and `out_placements` are those of `spmd.jit`, and every argument and result has one. `axes` are the local
    axes, all of the mesh by default; along the others the function sees whole arrays, which are partitioned as in the global
    view. Called outside it is a decorated function like those of `spmd.jit`, with `lower`; inside one a part of it.
    `spmd.grad` and its kin, `jax.grad`, `jax.vmap`, loops and `jax.checkpoint` work inside and around it.

    Along a local axis an argument is `Shard(d)`, of a size that divides, or `Replicate()`: the whole, on every rank. A result
    is `Shard(d)`: the shards joined; `Replicate()`: a value that is the same on all ranks (reduced, gathered); or
    `Partial(op)`: what the ranks return is reduced, where it is used. The cotangent of a partial sum is whole on every rank.
    Arguments cannot be Partial: only for a function that is linear in it would that have a meaning.

    Raises `ArgumentError` for a placement that is missing or does not fit, `TransformationError` for a branch that ranks would
    leave differently while others wait. Communication: what the function asks for, and what brings arguments there.

    >>> import jax.numpy as jnp, collectives
    >>> from placements import Mesh, P, Shard
    >>> mesh = Mesh(dp=2)
    >>> def local(x):
    ...     return collectives.all_reduce(x.sum(), "dp")
    >>> total = shard_map(local, mesh=mesh, in_placements=P(dp=Shard(0)), out_placements=P())
    >>> float(total(jnp.arange(6.0)))
    15.0
    """
    frame_locals = dict(sys._getframe(1).f_locals)
    names = (axes,) if isinstance(axes, str) else None if axes is None else tuple(axes)

    def decorate(target: Callable[..., Any]) -> SpmdFunction:
        signature = read_signature(target, in_placements, out_placements, ((), ()), ((), ()), frame_locals)
        local = _LocalFunction(target, signature, names)
        return SpmdFunction(local, signature, Options(mesh, "warn", "error", None))

    return decorate if function is None else decorate(function)


class _LocalFunction:
    """The function on whole arrays that runs a local function on its shards."""

    def __init__(self, function: Callable[..., Any], signature: Signature, axes: tuple[str, ...] | None) -> None:
        self.function, self.signature, self.axes = function, signature, axes
        self.__name__ = signature.name
        if signature.result is None:
            raise ArgumentError(
                f"{self.what}: no out_placements; every result has a placement, P() for one that is whole."
            )
        for leaf in jax.tree.leaves(signature.result, is_leaf=is_leaf):
            _check_result(self.what, leaf)

    @property
    def what(self) -> str:
        """For messages."""
        return f"spmd.shard_map of {self.signature.name}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mesh = tracing_mesh()
        assert mesh is not None, "a local function is traced by spmd.jit"
        axes = mesh.axis_names if self.axes is None else self.axes
        unknown = [axis for axis in axes if axis not in mesh.axis_names]
        if unknown:
            raise ArgumentError(f"{self.what}: axes={axes} names {', '.join(unknown)}, which {mesh!r} does not have.")
        bound = self.signature.bind(args, kwargs)
        values: list[Any] = []
        specs: list[Any] = []
        for name, value in bound.arguments.items():
            what = f"{self.what}: the placements of argument {name!r}"
            prefix = self.signature.prefix(name)
            leaves, _ = place_leaves(prefix, value, name, what, lambda path, leaf: traced_aval(leaf))
            for leaf in leaves:
                values.append(leaf.value)
                specs.append(self.argument_spec(leaf.path, leaf.aval, leaf.stated, mesh, axes))

        def local(*shards: Any) -> Any:
            inside = rebuilt_with(bound, self.signature, shards)
            return self.results(self.function(*inside.args, **inside.kwargs), mesh, axes)

        out_specs = jax.tree.map(lambda leaf: _result_spec(leaf, mesh, axes), self.signature.result, is_leaf=is_leaf)
        mapped = jax.shard_map(
            local, mesh=abstract_mesh(mesh.axes), in_specs=tuple(specs), out_specs=out_specs, axis_names=set(axes)
        )
        return self.reduced(mapped(*values), axes)

    def argument_spec(self, path: str, aval: Any, stated: P | None, mesh: Mesh, axes: Sequence[str]) -> Any:
        """The dims of an argument over the local axes, as JAX wants them. Raises `ArgumentError` where they do not divide."""
        where = f"{self.what}: argument {path} of shape {tuple(aval.shape)}"
        if stated is None:
            raise ArgumentError(
                f"{where} has no placement; every argument has one, P() for one that is whole on every rank."
            )
        try:
            named = resolve(stated, mesh, len(aval.shape)).named
        except PlacementError as error:
            raise type(error)(f"{where}: {error}") from error
        dims: list[tuple[str, ...]] = [()] * len(aval.shape)
        for axis, placement in named:
            if axis not in axes:
                continue
            if placement is None or isinstance(placement, Partial):
                reason = (
                    "is left open"
                    if placement is None
                    else "is Partial: reduce it before, or pass a stack of the parts"
                )
                raise ArgumentError(f"{where}, stated as {stated!r}: {axis} is a local axis, along which it {reason}.")
            if isinstance(placement, Shard):
                dims[placement.dim] += (axis,)
        for dim, names in enumerate(dims):
            n = mesh.group_size(names)
            if aval.shape[dim] % n:
                whole = -(-aval.shape[dim] // n) * n
                raise ArgumentError(
                    f"{where}, stated as {stated!r}: dim {dim} of {aval.shape[dim]} does not divide over {n} ranks "
                    f"({', '.join(names)}), and the shards that a local function sees have one shape. Pad it to {whole} "
                    "(and mask what was added), or keep the axis global: axes=... names the local ones, and in the global view "
                    "any size may be sharded."
                )
        return jax.sharding.PartitionSpec(*(names or None for names in dims))

    def placed(self, tree: Any) -> tuple[list[PlacedLeaf], Any]:
        """The leaves of a result with what is stated for each, and its structure."""
        what = f"{self.what}: the placements of the result"
        return place_leaves(self.signature.result, tree, "result", what, lambda path, leaf: jax.typeof(leaf))

    def results(self, tree: Any, mesh: Mesh, axes: Sequence[str]) -> Any:
        """What a local function returned, checked; parts as the only row of a stack."""
        placed, treedef = self.placed(tree)
        found = []
        for leaf in placed:
            stated = leaf.stated
            assert stated is not None
            varying, shape = varying_axes(leaf.aval), tuple(leaf.aval.shape)
            named = dict(stated.items(mesh.axis_names))
            parts = _parts(stated, mesh, axes)
            for axis in axes:
                placement = named.get(axis)
                where = f"{self.what}: {leaf.path} of local shape {shape}, stated as {stated!r}"
                if isinstance(placement, Shard):
                    if placement.dim >= len(shape):
                        raise ArgumentError(f"{where}: it has no dim {placement.dim}.")
                elif axis in varying and axis not in parts:
                    raise ArgumentError(
                        f"{where}: along {axis} it differs from rank to rank: nothing reduced or gathered it. State "
                        f"{axis}=Shard(d) or {axis}=Partial(), or return collectives.all_reduce(x, {axis!r}) or all_gather."
                    )
                elif axis in parts and axis not in varying:
                    raise ArgumentError(
                        f"{where}: along {axis} it is the same on all ranks already, so as parts it would count "
                        f"{mesh.axis_size(axis)} times. State {axis}=Replicate()."
                    )
            found.append(leaf.value[None] if parts else leaf.value)
        return jax.tree.unflatten(treedef, found)

    def reduced(self, tree: Any, axes: Sequence[str]) -> Any:
        """The results, with stacks of parts reduced."""
        mesh = tracing_mesh()
        assert mesh is not None
        placed, treedef = self.placed(tree)
        found = []
        for leaf in placed:
            parts = _parts(leaf.stated or P(), mesh, axes)
            (op,) = set(parts.values()) or {""}
            found.append(_REDUCE[op](leaf.value) if parts else leaf.value)
        return jax.tree.unflatten(treedef, found)


_REDUCE: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum(0, dtype=x.dtype),
    "prod": lambda x: x.prod(0, dtype=x.dtype),
    "max": lambda x: x.max(0),
    "min": lambda x: x.min(0),
    "and": lambda x: jax.lax.reduce_and(x, (0,)),
    "or": lambda x: jax.lax.reduce_or(x, (0,)),
    "xor": lambda x: jax.lax.reduce_xor(x, (0,)),
}
"""Per op the reduction of a stack of parts."""


def _check_result(what: str, leaf: Any) -> None:
    """Raise for a placement that a result of a local function cannot have, whatever its shape."""
    if not isinstance(leaf, P):
        raise ArgumentError(f"{what}: out_placements has {leaf!r}; every result has a P.")
    placed = [placement for _, placement in leaf.named] if leaf.named else list(leaf.positional)
    if any(isinstance(each, Shard) and each.dim < 0 for each in placed):
        raise ArgumentError(f"{what}: out_placements has {leaf!r}; dims of results count from the front here.")
    ops = {each.op for each in placed if isinstance(each, Partial)}
    if len(ops) > 1:
        raise ArgumentError(f"{what}: out_placements has {leaf!r}; parts have one op.")
    if "mean" in ops:
        raise ArgumentError(f"{what}: out_placements has {leaf!r}; return x / axis_size(axes) as parts of a sum.")


def _parts(stated: P, mesh: Mesh, axes: Sequence[str]) -> dict[str, str]:
    """The local axes along which a result is in parts, with the op."""
    return {
        axis: placement.op
        for axis, placement in stated.items(mesh.axis_names)
        if isinstance(placement, Partial) and axis in axes
    }


def _result_spec(stated: P, mesh: Mesh, axes: Sequence[str]) -> Any:
    """The dims of a result over the local axes, as JAX wants them: of a stack of parts where it is one."""
    parts = tuple(_parts(stated, mesh, axes))
    dims: dict[int, tuple[str, ...]] = {-1: parts}
    for axis, placement in stated.items(mesh.axis_names):
        if isinstance(placement, Shard) and axis in axes:
            dims[placement.dim] = (*dims.get(placement.dim, ()), axis)
    first = -1 if parts else 0
    return jax.sharding.PartitionSpec(*(dims.get(dim, ()) or None for dim in range(first, max(dims) + 1)))
