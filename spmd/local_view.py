"""Local functions in a global jaxpr: `shard_map` equations, and the collectives in their bodies.

A body sees this rank's shard along the axes that are local, and whole arrays along the others, over which it is planned like
any jaxpr. JAX has traced, typed and differentiated it; here its equations get the form that the planner knows: dims are
tiled, independent reductions share a message, and a branch or loop that ranks would leave differently, while others wait for
them in a collective, is refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from collectives.functions import broadcast_p, reduce_p
from collectives.jax_compat import JaxprEqn, Literal, Var, known_primitive, new_equation, shaped_like, source_of
from placements import Mesh, P, Shard
from spmd.errors import TransformationError
from spmd.rules.named import CALLS, names_of

if TYPE_CHECKING:
    from spmd.trace import GlobalJaxpr

Dims = tuple[tuple[str, ...], ...]
"""Per dim the local axes that shard it, major first."""
Axes = frozenset[str]
"""The axes over which a value differs from rank to rank."""
NONE: Final[Axes] = frozenset()

SAME_ON_ALL: Final = frozenset({
    "all_gather", "all_gather_invariant", "pmax", "pmin", "psum_invariant", broadcast_p.name, reduce_p.name,
})  # fmt: skip
"""The collectives that give all ranks the same."""

COLLECTIVES: Final = frozenset({
    *CALLS, "axis_index", "pbroadcast", "psum", "ragged_all_to_all", "psend", "precv", "unreduced_psum", "preduced",
})  # fmt: skip
"""The primitives that name axes; those that are no calls are refused."""

SHARED_BYTES: Final = 2**16
"""Reductions up to so many bytes share a message."""


def read(eqn: JaxprEqn, mesh: Mesh) -> tuple[tuple[str, ...], tuple[Dims, ...], tuple[Dims, ...]]:
    """The local axes of a `shard_map`, in the order of the mesh, and the dims of its operands and results.

    Raises `TransformationError` for another mesh, or for a function whose types JAX did not check.
    """
    params = eqn.params
    where = f"shard_map ({source_of(eqn)})"
    axes = {name: params["mesh"].shape[name] for name in params["mesh"].axis_names}
    if axes != dict(mesh.axes):
        raise TransformationError(
            f"{where} is over {axes}, inside a function on {mesh!r}. Leave its mesh out: it is that of the function."
        )
    if not params["check_vma"]:
        raise TransformationError(
            f"{where} has check_vma=False: then nothing says which results are the same on all ranks, and gradients are off by "
            "the number of ranks. Leave it out; a gathered value is typed so by collectives.all_gather(x, axes), or "
            'jax.lax.all_gather(x, axes, to="invarying").'
        )
    local = tuple(name for name in mesh.axis_names if name in params["newly_manual_axes"])
    operands, results = (
        tuple(_dims(spec, len(atom.aval.shape)) for spec, atom in zip(params[name], atoms, strict=True))
        for name, atoms in (("in_specs", eqn.invars), ("out_specs", eqn.outvars))
    )
    return local, operands, results


def _dims(spec: Sequence[Any], ndim: int) -> Dims:
    """A PartitionSpec as axes per dim."""
    found = [(entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else () for entry in spec]
    return (*found, *((),) * (ndim - len(found)))


def constraint(eqn: JaxprEqn, mesh: Mesh, local: Sequence[str]) -> dict[str, Any]:
    """A sharding constraint of JAX's, as a placement that is pinned; dims that it leaves open are free.

    Raises `TransformationError` for one on another mesh, or over a local axis.
    """
    sharding, free = eqn.params["sharding"], eqn.params["unconstrained_dims"]
    where = f"with_sharding_constraint ({source_of(eqn)})"
    spec, axes = getattr(sharding, "spec", None), getattr(getattr(sharding, "mesh", None), "shape", {})
    if spec is None or dict(axes) != dict(mesh.axes):
        raise TransformationError(
            f"{where} is no placement on {mesh!r}. State it by a PartitionSpec of its axes, or by spmd.constrain(x, P(...))."
        )
    dims = [() if dim in free else names for dim, names in enumerate(_dims(spec, len(eqn.invars[0].aval.shape)))]
    named = {axis: Shard(dim) for dim, names in enumerate(dims) for axis in names}
    if set(named) & set(local):
        raise TransformationError(
            f"{where} shards over {', '.join(sorted(set(named) & set(local)))}, a local axis here."
        )
    return {"placements": P(**named), "pinned": True, "free_dims": tuple(sorted(free))}


class Varying:
    """Which values of a local function differ from rank to rank, and over which axes; decisions on collectives that ranks
    would take differently are refused.

    JAX's types say as much, but for what its solvers and other library calls have inside: so they are derived once more.
    """

    def __init__(self, local: Sequence[str]) -> None:
        self.local = frozenset(local)

    def check(self, body: GlobalJaxpr, entering: Sequence[Axes]) -> tuple[GlobalJaxpr, list[Axes]]:
        """A body once it is checked, and over what its results differ, from over what its inputs do.

        Raises `TransformationError` where ranks would decide differently on a collective that they share.
        """
        env: dict[Var, Axes] = dict(zip(body.inputs, entering, strict=True))

        def read(atom: Any) -> Axes:
            return NONE if isinstance(atom, Literal) else env.get(atom, NONE)

        eqns = []
        for eqn in body.eqns:
            made, results = self.equation(eqn, [read(atom) for atom in eqn.invars])
            eqns.append(made)
            env.update(zip(eqn.outvars, results, strict=True))
        return dataclasses.replace(body, eqns=tuple(eqns)), [read(atom) for atom in body.outputs]

    def equation(self, eqn: JaxprEqn, entering: list[Axes]) -> tuple[JaxprEqn, list[Axes]]:
        """One equation once it is checked, and over what its results differ."""
        if "bodies" in eqn.params:
            return getattr(self, f"_{eqn.primitive.name}")(eqn, entering)
        union, name = NONE.union(*entering), eqn.primitive.name
        if name in CALLS or name == "axis_index":
            named = frozenset(names_of(eqn))
            union = union - named if name in SAME_ON_ALL else union | named
        elif eqn.effects:
            union |= self.local  # every rank calls for itself
        return eqn, [union] * len(eqn.outvars)

    def _cond(self, eqn: JaxprEqn, entering: list[Axes]) -> tuple[JaxprEqn, list[Axes]]:
        predicate, *operands = entering
        found = [self.check(body, operands) for body in eqn.params["bodies"]]
        bodies = tuple(body for body, _ in found)
        results = [predicate.union(*each) for each in zip(*(out for _, out in found), strict=True)]
        return self.decided(eqn, predicate, bodies), results

    def _while(self, eqn: JaxprEqn, entering: list[Axes]) -> tuple[JaxprEqn, list[Axes]]:
        (condition, body), first = eqn.params["bodies"], eqn.params["cond_nconsts"]
        second = first + eqn.params["body_nconsts"]
        carry = entering[second:]
        while True:
            outer, (predicate,) = self.check(condition, [*entering[:first], *carry])
            inner, made = self.check(body, [*entering[first:second], *carry])
            after = [predicate.union(*pair) for pair in zip(carry, made, strict=True)]
            if after == carry:
                return self.decided(eqn, predicate, (outer, inner)), carry
            carry = after

    def _scan(self, eqn: JaxprEqn, entering: list[Axes]) -> tuple[JaxprEqn, list[Axes]]:
        (body,), (first, carries) = eqn.params["bodies"], eqn.params["counts"]
        carry = entering[first : first + carries]
        while True:
            inner, made = self.check(body, [*entering[:first], *carry, *entering[first + carries :]])
            after = [before | new for before, new in zip(carry, made, strict=False)]
            if after == carry:
                return eqn.replace(params={**eqn.params, "bodies": (inner,)}), [*carry, *made[carries:]]
            carry = after

    def _shard_map(self, eqn: JaxprEqn, entering: list[Axes]) -> tuple[JaxprEqn, list[Axes]]:
        return check_local(eqn, entering, self.local)

    def decided(self, eqn: JaxprEqn, predicate: Axes, bodies: tuple[GlobalJaxpr, ...]) -> JaxprEqn:
        """A branch or loop with its bodies, if ranks that communicate in it decide alike."""
        calls = (each for body in bodies for each in _calls(body))
        call = next((each for each in calls if predicate.intersection(names_of(each))), None)
        if call is not None:
            over, used = ", ".join(sorted(predicate.intersection(names_of(call)))), ", ".join(names_of(call))
            name = CALLS[call.primitive.name][0]
            raise TransformationError(
                f"{eqn.primitive} ({source_of(eqn)}): its predicate differs between the ranks over {over}, and what it decides "
                f"on, {name} ({source_of(call)}), communicates over {used}: ranks would wait for others that never come. "
                "Reduce the predicate first (all_reduce of its maximum), or communicate before it and select."
            )
        return eqn.replace(params={**eqn.params, "bodies": bodies})


def check_local(eqn: JaxprEqn, entering: Sequence[Axes], around: Iterable[str] = ()) -> tuple[JaxprEqn, list[Axes]]:
    """A local function once it is checked, and over what its results differ around it.

    Raises `TransformationError` for a result that is stated as the same on all ranks, and differs.
    """
    local, (body,) = frozenset(eqn.params["local"]), eqn.params["bodies"]
    inside = [axes.union(*dims) for axes, dims in zip(entering, eqn.params["in_dims"], strict=True)]
    checked, results = Varying((*around, *local)).check(body, inside)
    for index, (axes, dims) in enumerate(zip(results, eqn.params["out_dims"], strict=True)):
        differs = (axes & local).difference(*dims)
        if differs:
            raise TransformationError(
                f"shard_map ({source_of(eqn)}): result {index} is stated as the same on all ranks over "
                f"{', '.join(sorted(differs))}, and differs between them: nothing reduced or gathered it."
            )
    return eqn.replace(params={**eqn.params, "bodies": (checked,)}), [axes - local for axes in results]


def _calls(body: GlobalJaxpr) -> Iterator[JaxprEqn]:
    """The collectives in a body, and in its bodies."""
    for eqn in body.eqns:
        if eqn.primitive.name in CALLS:
            yield eqn
        for inner in eqn.params.get("bodies", ()):
            yield from _calls(inner)


def tiled(eqn: JaxprEqn, mesh: Mesh) -> list[JaxprEqn]:
    """A collective of a local function as one whose results have the dims of its operands, and reshapes around it.

    Raises `TransformationError` for one that has no counterpart here.
    """
    name, params, where = eqn.primitive.name, eqn.params, f"{eqn.primitive} ({source_of(eqn)})"
    if name not in CALLS and name != "axis_index":
        raise TransformationError(f"{where} has no counterpart; spmd's own are in `collectives`.")
    if params.get("axis_index_groups") is not None:
        raise TransformationError(
            f"{where} names groups of ranks by axis_index_groups; give the mesh an axis for them."
        )
    if any(not isinstance(each, str) for each in names_of(eqn)):
        raise TransformationError(f"{where} names {names_of(eqn)}, which are no mesh axes.")
    if name == "all_to_all" and params["tiled"] and params["split_axis"] == params["concat_axis"]:
        return _within_one_dim(eqn, mesh)
    if params.get("tiled", True):
        return [eqn]
    if name == "all_to_all":
        return _stacked_all_to_all(eqn)
    if name == "reduce_scatter":
        dim = params["scatter_dimension"]
        (result,) = eqn.outvars
        made = _like(result, (*result.aval.shape[:dim], 1, *result.aval.shape[dim:]))
        inner = eqn.replace(outvars=[made], params={**params, "tiled": True})
        return [inner, _reshape(eqn, made, result)]
    (operand,), dim = eqn.invars, params["all_gather_dimension"]
    given = _like(operand, (*operand.aval.shape[:dim], 1, *operand.aval.shape[dim:]))
    return [_reshape(eqn, operand, given), eqn.replace(invars=[given], params={**params, "tiled": True})]


def _within_one_dim(eqn: JaxprEqn, mesh: Mesh) -> list[JaxprEqn]:
    """Pieces of a dim to all ranks, joined along the same dim: by a dim for the ranks before it."""
    (operand,), (result,), dim = eqn.invars, eqn.outvars, eqn.params["split_axis"]
    shape, n = operand.aval.shape, mesh.group_size(names_of(eqn))
    before, rest = shape[:dim], (shape[dim] // n, *shape[dim + 1 :])
    given, made = _like(operand, (*before, n, 1, *rest)), _like(operand, (*before, 1, n, *rest))
    params = {**eqn.params, "split_axis": dim, "concat_axis": dim + 1}
    inner = eqn.replace(invars=[given], outvars=[made], params=params)
    return [_reshape(eqn, operand, given), inner, _reshape(eqn, made, result)]


def _stacked_all_to_all(eqn: JaxprEqn) -> list[JaxprEqn]:
    """One index of a dim to each rank, what they sent stacked along a new one: the dim is whole, then one; the new, one, then
    whole."""
    (operand,), (result,) = eqn.invars, eqn.outvars
    split, stack = eqn.params["split_axis"], eqn.params["concat_axis"]
    at, new = (split, stack + 1) if split <= stack else (split + 1, stack)
    shape = operand.aval.shape
    given = _like(operand, (*shape[:new], 1, *shape[new:]))
    swapped = [1 if dim == at else shape[split] if dim == new else size for dim, size in enumerate(given.aval.shape)]
    made = _like(operand, tuple(swapped))
    params = {**eqn.params, "split_axis": at, "concat_axis": new, "tiled": True}
    inner = eqn.replace(invars=[given], outvars=[made], params=params)
    return [_reshape(eqn, operand, given), inner, _reshape(eqn, made, result)]


def _like(atom: Any, shape: tuple[int, ...]) -> Any:
    return Var(shaped_like(atom.aval, shape))


def _reshape(eqn: JaxprEqn, operand: Any, result: Any) -> JaxprEqn:
    params = {"new_sizes": result.aval.shape, "dimensions": None, "sharding": None}
    return new_equation(eqn, known_primitive("reshape"), [operand], [result]).replace(params=params)


def with_messages_shared(eqns: Sequence[JaxprEqn]) -> tuple[JaxprEqn, ...]:
    """The same equations, with independent small reductions of one kind as one equation, at the place of the first."""
    out: list[JaxprEqn] = []
    made: dict[int, int] = {}  # per value the place of the equation that makes it
    last: dict[Any, int] = {}
    for eqn in eqns:
        place = len(out)
        key = _kind(eqn)
        first = None if key is None else last.get(key)
        if first is not None and all(made.get(id(atom), -1) < first for atom in eqn.invars):
            both = out[first]
            joined = both.replace(invars=[*both.invars, *eqn.invars], outvars=[*both.outvars, *eqn.outvars])
            if _nbytes(joined) <= SHARED_BYTES:
                out[first], place = joined, first
        if place == len(out):
            out.append(eqn)
            if key is not None:
                last[key] = place
        made.update({id(var): place for var in eqn.outvars})
    return tuple(out)


def _kind(eqn: JaxprEqn) -> Any:
    """What reductions that can share a message have in common; None for anything else."""
    if CALLS.get(eqn.primitive.name, ("",))[0] != "all_reduce":
        return None
    return eqn.primitive, names_of(eqn), eqn.params.get("op"), eqn.invars[0].aval.dtype


def _nbytes(eqn: JaxprEqn) -> int:
    return sum(math.prod(atom.aval.shape) * int(atom.aval.dtype.itemsize) for atom in eqn.invars)
