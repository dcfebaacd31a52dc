"""Lookups at places that are known when tracing, as what they are.

`logits[jnp.arange(n), labels]` needs of row i of the table nothing but row i; `u.at[1:-1].set(v)` updates a window, and its
gradient reads one. JAX writes all of them as gathers and scatters, whose indices might be anything. Where an index is seen to
count along a dim, the lookup is batched over it; where all of them are seen to be constant or to count in steps, a gather is a
slice, and a scatter an update of a window or a choice between the elements. So shards stay where they are, and neighbours
exchange what they need.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax import lax

from collectives.jax_compat import (
    Atom,
    JaxprEqn,
    Literal,
    Var,
    as_closed,
    inline_function,
    known_primitive,
    shaped_like,
)
from spmd.rules.movement import factorize
from spmd.trace import GlobalJaxpr, sliced

CONCATENATE: Final = known_primitive("concatenate")


@dataclasses.dataclass(frozen=True, slots=True)
class Affine:
    """Integers that are `start + step * index`, the index along `dim`; constant where that is None."""

    start: int
    step: int = 0
    dim: int | None = None

    def is_within(self, low: int, high: int, shape: Sequence[int]) -> bool:
        """Whether all values are in `[low, high)`, for an array of this shape."""
        last = self.start if self.dim is None else self.start + self.step * max(shape[self.dim] - 1, 0)
        return low <= min(self.start, last) and max(self.start, last) < high


def with_known_indices(jaxpr: GlobalJaxpr) -> GlobalJaxpr:
    """The same computation with lookups at known places as slices, updates of windows and batched lookups; in bodies too."""
    return _rewritten(jaxpr, _Known(jaxpr.constants))


def _rewritten(jaxpr: GlobalJaxpr, known: _Known) -> GlobalJaxpr:
    eqns: list[JaxprEqn] = []
    callers = dict(jaxpr.callers)
    for eqn in jaxpr.eqns:
        if "bodies" in eqn.params:
            bodies = []
            for body, entering in zip(eqn.params["bodies"], _entering(eqn), strict=True):
                inside = _Known(body.constants)
                for atom, var, shift in entering:
                    known.tell(atom, inside, var, shift)
                bodies.append(_rewritten(body, inside))
                if eqn.primitive.name == "scan":
                    carries = eqn.params["counts"][1]
                    for atom, var in zip(body.outputs[carries:], eqn.outvars[carries:], strict=True):
                        inside.tell(atom, known, var, 1)
            eqn = eqn.replace(params={**eqn.params, "bodies": tuple(bodies)})
        known.learn(eqn)
        made = known.rewritten(eqn) if eqn.primitive.name in LOOKUPS and not eqn.effects else [eqn]
        for each in made:
            callers.update(dict.fromkeys(each.outvars, callers.get(eqn.outvars[0], ())) if each is not eqn else {})
        eqns += made
    return jaxpr.with_equations(eqns, callers=callers)


def _entering(eqn: JaxprEqn) -> Iterator[list[tuple[Atom, Var, int]]]:
    """For every body of a loop or branch what it gets that is the same in every iteration: the operand, the body's input, and
    by how much dims shift: a row of what is scanned has one less."""
    params, operands, bodies = eqn.params, eqn.invars, eqn.params["bodies"]
    if eqn.primitive.name == "scan":
        consts, carries = params["counts"]
        triples = zip(operands, bodies[0].inputs, [0] * (consts + carries) + [-1] * len(operands), strict=False)
        yield [triple for at, triple in enumerate(triples) if not consts <= at < consts + carries]
    elif eqn.primitive.name == "while":
        first, second = params["cond_nconsts"], params["body_nconsts"]
        for body, given in zip(bodies, (operands[:first], operands[first : first + second]), strict=True):
            yield [(atom, var, 0) for atom, var in zip(given, body.inputs, strict=False)]
    elif eqn.primitive.name == "shard_map":
        yield []  # a local function sees other values than those around it
    else:
        for body in bodies:
            yield [(atom, var, 0) for atom, var in zip(operands[1:], body.inputs, strict=True)]


def _affine(array: np.ndarray[Any, Any]) -> Affine | None:
    """An array of integers as what it is, if it is constant or counts along one dim."""
    if not array.size:
        return None
    corner = (0,) * array.ndim
    start = int(array[corner])
    for dim, size in enumerate(array.shape):
        step = int(array[(*corner[:dim], 1, *corner[dim + 1 :])]) - start if size > 1 else 0
        counting = start + step * np.arange(size).reshape(-1, *(1,) * (array.ndim - dim - 1))
        if step and np.array_equal(array, np.broadcast_to(counting, array.shape)):
            return Affine(start, step, dim)
    return Affine(start) if np.all(array == start) else None


class _Known:
    """What is known of the values of a jaxpr: which are affine, which are false everywhere, and of arrays of indices what each
    column is, or None."""

    def __init__(self, constants: Sequence[tuple[Var, Any]]) -> None:
        self.affine: dict[Var, Affine] = {}
        self.false: set[Var] = set()
        self.columns: dict[Var, list[Affine | None]] = {}
        self.constants: dict[Var, np.ndarray[Any, Any]] = {}
        for var, value in constants:  # their columns are looked at where a lookup asks
            kind = getattr(value, "dtype", None)
            if kind == np.bool_ and not np.any(value):
                self.false.add(var)
            if isinstance(kind, np.dtype) and kind.kind in "iu":
                array = np.asarray(value)
                if (found := _affine(array)) is not None:
                    self.affine[var] = found
                self.constants[var] = array

    def tell(self, atom: Atom, other: _Known, var: Var, shift: int) -> None:
        """Let what is known of a value be known of another elsewhere, whose dims are shifted."""
        if isinstance(atom, Literal):
            return
        if (value := _shifted(self.affine.get(atom), shift)) is not None:
            other.affine[var] = value
        if atom in self.columns:
            other.columns[var] = [_shifted(value, shift) for value in self.columns[atom]]
        if atom in self.false:
            other.false.add(var)
        if atom in self.constants and not shift:
            other.constants[var] = self.constants[atom]

    def of(self, atom: Atom) -> Affine | None:
        """A value as integers that count, if it is."""
        if not isinstance(atom, Literal):
            return self.affine.get(atom)
        value = np.asarray(atom.val)
        return Affine(int(value)) if value.dtype.kind in "iu" and not value.ndim else None

    def is_false(self, atom: Atom) -> bool:
        """Whether a value is false everywhere, or 0."""
        return not np.any(atom.val) if isinstance(atom, Literal) else atom in self.false

    def learn(self, eqn: JaxprEqn) -> None:
        """What an equation says of its result."""
        if len(eqn.outvars) != 1:
            return
        name, (result,) = eqn.primitive.name, eqn.outvars
        kind, shape = result.aval.dtype, result.aval.shape
        operands = [self.of(atom) for atom in eqn.invars]
        last = name == "concatenate" and eqn.params["dimension"] == len(shape) - 1
        if last and all(atom.aval.shape[-1] == 1 for atom in eqn.invars):
            self.columns[result] = operands
        if name == "lt" and (left := operands[0]) is not None and (right := operands[1]) is not None:
            never = right.dim is None and left.is_within(right.start, 2**63, eqn.invars[0].aval.shape)
            self.false.update([result] if never else [])
        if not isinstance(kind, np.dtype) or kind.kind not in "iu":
            return
        found: Affine | None = None
        if name == "iota":
            found = Affine(0, 1, eqn.params["dimension"])
        elif name == "select_n" and self.is_false(eqn.invars[0]):
            found = operands[1]
        elif name == "rev" and operands[0] is not None:
            found = _reversed(eqn, operands[0])
        elif name in ("convert_element_type", "broadcast_in_dim", "reshape") and len(operands) == 1 and operands[0]:
            found = _moved(eqn, operands[0])
        elif name in ("add", "sub", "mul") and None not in operands:
            found = _arithmetic(name, *operands)  # type: ignore[arg-type]
        limits = np.iinfo(kind)
        if found is not None and found.is_within(limits.min, limits.max + 1, shape):
            self.affine[result] = found

    def rewritten(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """A lookup as equations that say what it is, as far as its indices are known."""
        indices = eqn.invars[1]
        if isinstance(indices, Literal):
            return [eqn]
        if indices.aval.shape[-1] == 1:
            columns = [self.of(indices)]
        elif indices in self.constants:
            array = self.constants[indices]
            columns = [_affine(array[..., at : at + 1]) for at in range(array.shape[-1])]
        else:
            columns = self.columns.get(indices, [None] * indices.aval.shape[-1])
        lookup = _Lookup.of(eqn, columns)
        return lookup.at_known_places() or lookup.batched() or [eqn]


@dataclasses.dataclass(frozen=True, slots=True)
class _Lookup:
    """A gather or scatter, with what is known of the columns of its indices.

    `looked_up` are the dims of the table that the columns look up, `single` those of which a lookup has one index and the
    result (a scatter: the update) no dim, `pairs` the batched dims of table and indices, `windows` the dims of the result that
    are of the table, `sizes` how much of each dim a lookup has.
    """

    eqn: JaxprEqn
    columns: Sequence[Affine | None]
    names: tuple[str, str, str, str]
    looked_up: tuple[int, ...]
    single: tuple[int, ...]
    pairs: dict[int, int]
    windows: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, eqn: JaxprEqn, columns: Sequence[Affine | None]) -> _Lookup:
        """Read an equation."""
        numbers, is_gather = eqn.params["dimension_numbers"], eqn.primitive.name == "gather"
        names = GATHER if is_gather else SCATTER
        looked_up, single, outer, inner = (tuple(map(int, getattr(numbers, name))) for name in names)
        windows = tuple(numbers.offset_dims if is_gather else numbers.update_window_dims)
        if is_gather:
            sizes = tuple(eqn.params["slice_sizes"])
        else:
            left = iter([eqn.invars[2].aval.shape[dim] for dim in windows])
            count = len(eqn.invars[0].aval.shape)
            sizes = tuple(1 if dim in (*single, *outer) else next(left) for dim in range(count))
        return cls(eqn, columns, names, looked_up, single, dict(zip(outer, inner, strict=True)), windows, sizes)

    @property
    def table(self) -> Any:
        """The aval of the table."""
        return self.eqn.invars[0].aval

    @property
    def indices(self) -> Any:
        """The aval of the indices."""
        return self.eqn.invars[1].aval

    def batched(self) -> list[JaxprEqn]:
        """Batched over the dims that indices count along, where table and indices are as long. One index is left at least."""
        pairs, kept = dict(self.pairs), []
        for at, (dim, column) in enumerate(zip(self.looked_up, self.columns, strict=True)):
            along = column.dim if column is not None and (column.start, column.step) == (0, 1) else None
            free = along not in (None, *pairs.values(), len(self.indices.shape) - 1)
            if along is not None and free and dim in self.single and self.table.shape[dim] == self.indices.shape[along]:
                pairs[dim] = along
            else:
                kept.append(at)
        if len(kept) in (0, len(self.columns)):
            return []
        taken, left = self._taken(kept)
        new = (
            tuple(self.looked_up[at] for at in kept),
            tuple(dim for dim in self.single if dim not in pairs),
            *zip(*sorted(pairs.items()), strict=True),
        )
        numbers = self.eqn.params["dimension_numbers"]._replace(**dict(zip(self.names, new, strict=True)))
        params = {**self.eqn.params, "dimension_numbers": numbers, "indices_are_sorted": False}
        return [*taken, self.eqn.replace(invars=[self.eqn.invars[0], left, *self.eqn.invars[2:]], params=params)]

    def _taken(self, kept: Sequence[int]) -> tuple[list[JaxprEqn], Var]:
        """The equations that take some columns of the indices, and what they make."""
        eqn, shape = self.eqn, self.indices.shape
        found, eqns = [], []
        for at in kept:
            found.append(Var(shaped_like(self.indices, (*shape[:-1], 1))))
            eqns.append(sliced(eqn, eqn.invars[1], found[-1], len(shape) - 1, (at, at + 1)))
        if len(kept) > 1:
            joined = Var(shaped_like(self.indices, (*shape[:-1], len(kept))))
            along = {"dimension": len(shape) - 1}
            eqns.append(eqn.replace(primitive=CONCATENATE, invars=list(found), outvars=[joined], params=along))
            found.append(joined)
        return eqns, found[-1]

    def at_known_places(self) -> list[JaxprEqn]:
        """As a slice, or an update of one, where every index is constant or counts along a dim of its own, in bounds."""
        place = None if self.pairs or not _combines(self.eqn) else self.place()
        if place is None:
            return []
        return self._as_slice(place) if self.names is GATHER else self._as_update(place)

    def place(self) -> _Place | None:
        """Where in the table the lookup is, if it is at one place of one shape."""
        starts, strides, counts = [0] * len(self.sizes), [1] * len(self.sizes), list(self.sizes)
        flipped: tuple[int, ...] = ()
        along: dict[int, int] = {}
        for dim, column in zip(self.looked_up, self.columns, strict=True):
            if column is None or (column.dim is not None and (column.step == 0 or dim not in self.single)):
                return None
            starts[dim] = column.start
            if column.dim is not None:
                along[dim], strides[dim], counts[dim] = column.dim, abs(column.step), self.indices.shape[column.dim]
                starts[dim] += min(column.step, 0) * (counts[dim] - 1)
                flipped += (dim,) if column.step < 0 else ()
        if sorted(along.values()) != list(range(len(self.indices.shape) - 1)) or 0 in counts:
            return None  # the same place several times, or none
        ends = [start + (count - 1) * step + 1 for start, count, step in zip(starts, counts, strides, strict=True)]
        if min(starts) < 0 or any(end > size for end, size in zip(ends, self.table.shape, strict=True)):
            return None
        outer = [dim for dim in range(len(self.windows) + len(along)) if dim not in self.windows]
        inner = iter(self.windows)
        kept = [dim for dim in range(len(self.sizes)) if dim in along or dim not in self.single]
        order = tuple(outer[along[dim]] if dim in along else next(inner) for dim in kept)
        return _Place(tuple(starts), tuple(ends), tuple(strides), flipped, tuple(kept), order)

    def _as_slice(self, place: _Place) -> list[JaxprEqn]:
        def gather(table: Any, _: Any) -> Any:
            found = place.turned(place.cut(table))
            found = lax.squeeze(found, [dim for dim in range(table.ndim) if dim not in place.kept])
            return lax.transpose(found, np.argsort(place.order).tolist())

        return inline_function(gather, self.eqn)

    def _as_update(self, place: _Place) -> list[JaxprEqn]:
        combine = UPDATES[self.eqn.primitive.name]
        if self.table.dtype == jnp.bool_ and combine is not None:
            return []

        def scatter(table: Any, _: Any, updates: Any) -> Any:
            update = lax.transpose(updates, place.order)
            update = lax.expand_dims(update, [dim for dim in range(table.ndim) if dim not in place.kept])
            update = place.turned(update)
            if all(step == 1 for step in place.strides):
                new = update if combine is None else combine(place.cut(table), update)
                if new.shape == table.shape:
                    return new
                return lax.dynamic_update_slice(table, new, [np.int32(start) for start in place.starts])
            bounds = zip(place.starts, place.ends, place.strides, table.shape, strict=True)
            config = [(start, size - end, step - 1) for start, end, step, size in bounds]
            spread = lax.pad(update, np.zeros((), update.dtype), config)
            chosen = lax.pad(lax.full(update.shape, True), np.False_, config)
            return lax.select(chosen, spread if combine is None else combine(table, spread), table)

        return inline_function(scatter, self.eqn)


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """A strided slice of a table, from the end to the start along `flipped`. Of its dims `kept` are in the result (a scatter:
    the update), at the places `order`."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    strides: tuple[int, ...]
    flipped: tuple[int, ...]
    kept: tuple[int, ...]
    order: tuple[int, ...]

    def cut(self, table: Any) -> Any:
        """The slice as it lies in the table."""
        is_whole = not any(self.starts) and self.ends == table.shape and set(self.strides) <= {1}
        return table if is_whole else lax.slice(table, self.starts, self.ends, self.strides)

    def turned(self, value: Any) -> Any:
        """An array of the table's dims, with the other end of those that are flipped first."""
        return lax.rev(value, self.flipped) if self.flipped else value


GATHER: Final = "start_index_map", "collapsed_slice_dims", "operand_batching_dims", "start_indices_batching_dims"
SCATTER: Final = (
    "scatter_dims_to_operand_dims",
    "inserted_window_dims",
    "operand_batching_dims",
    "scatter_indices_batching_dims",
)
"""Of the dimension numbers of lookups: the dims that indices look up, those of one element, and the pairs of batched dims."""

UPDATES: Final[dict[str, Any]] = {
    "scatter": None,
    "scatter-add": lax.add,
    "scatter-max": lax.max,
    "scatter-min": lax.min,
    "scatter-mul": lax.mul,
    "scatter-sub": lax.sub,
}
"""What a scatter does with an element and its update; None: it takes the update."""

LOOKUPS: Final = frozenset({"gather", *UPDATES})


def _combines(eqn: JaxprEqn) -> bool:
    """Whether a lookup does with element and update what its name says: `x.at[i].apply(f)` is a scatter too, of nothing."""
    body = eqn.params.get("update_jaxpr")
    if eqn.primitive.name != "scatter" or body is None:
        return True
    opened, _ = as_closed(body)
    return not opened.eqns and opened.outvars[0] is opened.invars[1]


def _shifted(value: Affine | None, shift: int) -> Affine | None:
    if value is None or value.dim is None:
        return value
    return dataclasses.replace(value, dim=value.dim + shift) if value.dim + shift >= 0 else None


def _arithmetic(name: str, left: Affine, right: Affine) -> Affine | None:
    """A sum, difference or product, where one of both is constant."""
    if name == "mul":
        if right.dim is not None:
            left, right = right, left
        if right.dim is not None:
            return None
        return Affine(left.start * right.start, left.step * right.start, left.dim)
    if left.dim is not None and right.dim is not None:
        return None
    sign, dim = (-1 if name == "sub" else 1), right.dim if left.dim is None else left.dim
    return Affine(left.start + sign * right.start, left.step + sign * right.step, dim)


def _reversed(eqn: JaxprEqn, value: Affine) -> Affine:
    """What counts along a dim, after a reversal of some dims."""
    if value.dim is None or value.dim not in eqn.params["dimensions"]:
        return value
    last = eqn.outvars[0].aval.shape[value.dim] - 1
    return Affine(value.start + value.step * last, -value.step, value.dim)


def _moved(eqn: JaxprEqn, value: Affine) -> Affine | None:
    """What counts along a dim, in the result of an equation that moves data, if the dim is there as it was."""
    (operand,), (result,) = eqn.invars, eqn.outvars
    before, after, dim = operand.aval.shape, result.aval.shape, value.dim
    if dim is None or eqn.primitive.name == "convert_element_type":
        return value
    if eqn.primitive.name == "broadcast_in_dim":
        to = int(eqn.params["broadcast_dimensions"][dim])
        return dataclasses.replace(value, dim=to) if before[dim] == after[to] else None
    if eqn.params.get("dimensions") is not None:
        return None
    sources, targets, _, _ = factorize(before, after)
    found = next((at for at, factors in enumerate(targets) if factors and factors == sources[dim]), None)
    return None if found is None else dataclasses.replace(value, dim=found)
