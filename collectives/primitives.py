"""THE table: per collective its primitive, its abstract evaluation, and what it says about one group.

A collective primitive sits in a rank's local jaxpr. It takes any number of operands, which share one message, and gives as many
results: `mesh` and `axes` say that it acts in the group along `axes`, the first major, and `each` has the parameters of every
operand. These are the same on every rank of a mesh but for `out_sizes`, the local sizes that it produces (static, and equal
within a shape class):

- `op`: a reduction; `root`: a flat index in the group; `pairs`: (source, destination) flat indices;
- `dim`, `to_dim`: array dims; `split`, `to_split`, `have`, `want`: the intervals of a dim as formulas of the coordinate.

`group_arguments` turns them into the arguments of `Communicator`, for one group. The simulator uses it for all groups, a
back end for the one that its process is in. Lowering rules are added by the back ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax

from collectives.jax_compat import Primitive, ShapedArray
from collectives.simulated import GROUP
from placements.intervals import Bounds, Intervals
from placements.mesh import Coordinate, Mesh, group_positions

Arguments = dict[str, Any]
Each = tuple[tuple[tuple[str, Any], ...], ...]
"""Per operand the items of its parameters, in the order of their names."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One row: the primitive, the result's shape from operand and parameters, the arguments within one group."""

    primitive: Primitive
    out_shape: Callable[..., tuple[int, ...]]
    arguments: Callable[[list[Coordinate], Arguments], Arguments]


def _bounds(intervals: Intervals, mesh: Mesh, members: list[Coordinate]) -> tuple[Bounds, ...]:
    return tuple(intervals.bounds(mesh, member) for member in members)


def _lengths(intervals: Intervals, mesh: Mesh, members: list[Coordinate]) -> tuple[int, ...]:
    return tuple(high - low for low, high in _bounds(intervals, mesh, members))


def _same_shape(shape: tuple[int, ...], **_: Any) -> tuple[int, ...]:
    return shape


def _resized(shape: tuple[int, ...], *, out_sizes: tuple[tuple[int, int], ...], **_: Any) -> tuple[int, ...]:
    """The operand's shape with the sizes of some dims replaced: `out_sizes` pairs a dim with its new size."""
    sizes = dict(out_sizes)
    return tuple(sizes.get(dim, size) for dim, size in enumerate(shape))


def _op(members: list[Coordinate], params: Arguments) -> Arguments:
    return {"op": params["op"]}


def _gather(members: list[Coordinate], params: Arguments) -> Arguments:
    return {"dim": params["dim"], "sizes": _lengths(params["split"], params["mesh"], members)}


def _reduce_scatter(members: list[Coordinate], params: Arguments) -> Arguments:
    return {"op": params["op"], **_gather(members, params)}


def _all_to_all(members: list[Coordinate], params: Arguments) -> Arguments:
    to_sizes = _lengths(params["to_split"], params["mesh"], members)
    return {**_gather(members, params), "to_dim": params["to_dim"], "to_sizes": to_sizes}


def _exchange(members: list[Coordinate], params: Arguments) -> Arguments:
    have, want = (_bounds(params[name], params["mesh"], members) for name in ("have", "want"))
    return {"dim": params["dim"], "have": have, "want": want}


def _broadcast(members: list[Coordinate], params: Arguments) -> Arguments:
    return {"root": params["root"]}


def _permute(members: list[Coordinate], params: Arguments) -> Arguments:
    return {"pairs": params["pairs"]}


def _row(name: str, out_shape: Callable[..., tuple[int, ...]], arguments: Callable[..., Arguments]) -> Collective:
    primitive = Primitive(name)
    primitive.multiple_results = True

    def abstract_eval(*operands: Any, mesh: Mesh, axes: tuple[str, ...], each: Each) -> list[Any]:
        pairs = zip(operands, each, strict=True)
        return [ShapedArray(out_shape(operand.shape, **dict(params)), operand.dtype) for operand, params in pairs]

    primitive.def_abstract_eval(abstract_eval)
    return Collective(primitive, out_shape, arguments)


TABLE: Final[dict[str, Collective]] = {
    "all_gather": _row("all_gather", _resized, _gather),
    "all_reduce": _row("all_reduce", _same_shape, _op),
    "all_to_all": _row("all_to_all", _resized, _all_to_all),
    "broadcast": _row("broadcast", _same_shape, _broadcast),
    "exchange": _row("exchange", _resized, _exchange),
    "permute": _row("permute", _same_shape, _permute),
    "reduce_scatter": _row("reduce_scatter", _resized, _reduce_scatter),
}
"""Name to row; the names are those of the methods of `Communicator` and of `simulated.GROUP`."""

BY_PRIMITIVE: Final[dict[Primitive, str]] = {row.primitive: name for name, row in TABLE.items()}


def bind(
    name: str, operands: Sequence[Any], *, mesh: Mesh, axes: tuple[str, ...], each: Sequence[Arguments]
) -> list[Any]:
    """Put the collective `name` on `operands`, in one message, into the jaxpr that is being traced."""
    items = tuple(tuple(sorted(params.items())) for params in each)
    return list(TABLE[name].primitive.bind(*operands, mesh=mesh, axes=axes, each=items))


def parameters(eqn: Any) -> list[Arguments]:
    """The parameters of every operand of a collective's equation, mesh and axes among them."""
    shared = {"mesh": eqn.params["mesh"], "axes": eqn.params["axes"]}
    return [{**shared, **dict(items)} for items in eqn.params["each"]]


def group_arguments(name: str, members: list[Coordinate], params: Arguments) -> Arguments:
    """The arguments of `Communicator.<name>` for the group with these coordinates, in group order."""
    return TABLE[name].arguments(members, params)


def simulate(
    name: str, buffers: tuple[jax.Array, ...], params: Arguments, positions: Sequence[int] | None = None
) -> tuple[jax.Array, ...]:
    """The result at every position of the mesh, from the buffers at every position in row-major order.

    `positions`: those of the buffers, if they are not all; groups are among them whole. `out_sizes` is ignored: the group's own
    sizes decide.
    """
    mesh: Mesh = params["mesh"]
    index = {position: at for at, position in enumerate(range(mesh.size) if positions is None else positions)}
    out: list[Any] = [None] * len(buffers)
    for group in group_positions(mesh, params["axes"]):
        if group[0] not in index:
            continue
        members = [mesh.coordinate_at(position) for position in group]
        values = [buffers[index[position]] for position in group]
        results = GROUP[name](values, **group_arguments(name, members, params))
        for position, result in zip(group, results, strict=True):
            out[index[position]] = result
    return tuple(out)
