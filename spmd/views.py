"""Reshapes that join dims, put off to where the joined dim itself is needed.

`x.reshape(-1, d) @ w` computes on rows that are pairs of a batch and a position. A shard of positions is no chunk of such rows;
of the array as it was it is a chunk of a dim. So a value that a reshape joined is kept as it was, and what layers do to it is
done to that: elementwise functions, products, reductions, transpositions. The reshape comes back where something else asks
for the joined dim, and vanishes where another takes it apart again. The same numbers in the same order; nothing is moved for
the reshape itself, whatever the sizes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Final

from collectives.jax_compat import Atom, JaxprEqn, Literal, Primitive, Var, primitive, shaped_like
from spmd.rules import elementwise
from spmd.rules.movement import factorize
from spmd.trace import GlobalJaxpr, drop_dead

Groups = tuple[tuple[int, ...], ...]
"""Per dim of a joined value the dims of the one that it was made of, in order: all of them, each once."""


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """A value as a reshape that joins dims of another."""

    of: Atom
    groups: Groups

    def dims(self, dims: Sequence[int]) -> tuple[int, ...]:
        """The dims behind some dims."""
        return tuple(inner for dim in dims for inner in self.groups[dim])

    def sizes(self, dim: int) -> tuple[int, ...]:
        """The sizes behind a dim."""
        return tuple(self.of.aval.shape[inner] for inner in self.groups[dim])


def without_joins(jaxpr: GlobalJaxpr) -> GlobalJaxpr:
    """The same computation with reshapes that join dims put off; in bodies too."""
    return _Pass(jaxpr).run()


class _Pass:
    """One pass over the equations of a jaxpr."""

    def __init__(self, jaxpr: GlobalJaxpr) -> None:
        self.jaxpr = jaxpr
        self.views: dict[Var, View] = {}
        self.same: dict[Var, Atom] = {}
        self.eqns: list[JaxprEqn] = []
        self.callers = dict(jaxpr.callers)
        self.made: dict[Var, Var] = {}
        self.joins: dict[Var, JaxprEqn] = {}
        self.makers: dict[Var, JaxprEqn] = {}

    def run(self) -> GlobalJaxpr:
        """The new jaxpr."""
        for eqn in self.jaxpr.eqns:
            self.visit(eqn)
        outputs = tuple(map(self.whole, self.jaxpr.outputs))
        eqns, callers = tuple(drop_dead(self.eqns, list(outputs))), MappingProxyType(self.callers)
        return dataclasses.replace(self.jaxpr, eqns=eqns, outputs=outputs, callers=callers)

    def visit(self, eqn: JaxprEqn) -> None:
        """Emit one equation, on the values behind the joined ones where that is possible."""
        if "bodies" in eqn.params:
            bodies = tuple(map(without_joins, eqn.params["bodies"]))
            eqn = eqn.replace(params={**eqn.params, "bodies": bodies})
        operands = [self.same.get(atom, atom) if not isinstance(atom, Literal) else atom for atom in eqn.invars]
        eqn = eqn.replace(invars=operands)
        plain = eqn.primitive.name == "reshape" and len(operands) == 1 and eqn.params.get("dimensions") is None
        if plain and not isinstance(operands[0], Literal):
            self.reshape(eqn, operands[0])
            return
        views = [self.views.get(atom) if not isinstance(atom, Literal) else None for atom in operands]
        expand = EXPAND.get(eqn.primitive)
        usable = expand is not None and any(views) and not eqn.effects
        inner: list[Atom] | None = [
            atom if view is None else view.of for atom, view in zip(operands, views, strict=True)
        ]
        if usable and expand is _elementwise:
            inner = self.stretched(eqn, views)
        found = expand(eqn, views) if usable and expand is not None and inner is not None else None
        if found is None or inner is None:
            whole = eqn.replace(invars=list(map(self.whole, operands)))
            self.makers.update(dict.fromkeys(eqn.outvars, whole))
            self.eqns.append(whole)
            return
        params, shape, groups = found
        (result,) = eqn.outvars
        var = Var(shaped_like(result.aval, shape))
        self.emit(eqn, inner, var, params, result)
        if all(len(group) == 1 for group in groups):
            self.same[result] = var
        else:
            self.views[result] = View(var, groups)
            self.joins[result] = eqn

    def reshape(self, eqn: JaxprEqn, operand: Var) -> None:
        """A reshape of a joined value is one of what is behind it; one that joins whole dims is put off."""
        view, (result,) = self.views.get(operand), eqn.outvars
        source = operand if view is None else view.of
        before, after = source.aval.shape, result.aval.shape
        if before == after:
            self.same[result] = source
            return
        apart = _apart(before, after)
        if apart is None:
            self.eqns.append(eqn.replace(invars=[source]))
            return
        shape = tuple(itertools.chain(*apart))
        if shape != before:  # dims of size 1 come or go
            var = Var(shaped_like(result.aval, shape))
            self.emit(eqn, [source], var, {**eqn.params, "new_sizes": shape}, result)
            source = var
        self.views[result] = View(source, _groups(apart))
        self.joins[result] = eqn

    def stretched(self, eqn: JaxprEqn, views: Sequence[View | None]) -> list[Atom] | None:
        """The operands of an elementwise equation, for the values behind: those that are not joined become so, where they are
        scalars, of size 1 along the joined dims, or were broadcast along them. None where one is neither."""
        pattern = _pattern(eqn, views)
        if pattern is None:
            return None
        found: list[Atom] = []
        for atom, view in zip(eqn.invars, views, strict=True):
            if view is not None and all(len(a) == len(b) for a, b in zip(view.groups, pattern.groups, strict=True)):
                found.append(view.of)
            elif atom.aval.shape == () or view is not None:
                found.append(atom)  # a view of another kind: `_elementwise` refuses it
            elif (made := self.stretch(atom, pattern, eqn)) is not None:
                found.append(made)
            else:
                return None
        return found

    def stretch(self, atom: Atom, pattern: View, asking: JaxprEqn) -> Atom | None:
        """A value that is the same along the joined dims, with these apart, for an equation."""
        joined = {dim for dim, group in enumerate(pattern.groups) if len(group) > 1}
        shape = atom.aval.shape
        if all(shape[dim] == 1 for dim in joined):
            sizes = [(1,) * len(pattern.groups[dim]) if dim in joined else (size,) for dim, size in enumerate(shape)]
            var = Var(shaped_like(atom.aval, tuple(itertools.chain(*sizes))))
            self.eqns.append(asking.replace(primitive=RESHAPE, invars=[atom], outvars=[var], params=_to(var)))
            return var
        maker = None if isinstance(atom, Literal) else self.makers.get(atom)
        if maker is None or maker.primitive.name != "broadcast_in_dim" or len(maker.invars) != 1:
            return None
        to = maker.params["broadcast_dimensions"]
        if joined & set(to):
            return None
        sizes = [pattern.sizes(dim) if dim in joined else (size,) for dim, size in enumerate(shape)]
        groups = _groups(sizes)
        var = Var(shaped_like(atom.aval, tuple(itertools.chain(*sizes))))
        dims = tuple(groups[dim][0] for dim in to)
        self.emit(
            maker, list(maker.invars), var, {**maker.params, "shape": var.aval.shape, "broadcast_dimensions": dims}, var
        )
        return var

    def whole(self, atom: Atom) -> Atom:
        """A value as itself: a joined one by the reshape that was put off."""
        if isinstance(atom, Literal):
            return atom
        atom = self.same.get(atom, atom)
        view = self.views.get(atom) if not isinstance(atom, Literal) else None
        if view is None or isinstance(atom, Literal):
            return atom
        if atom not in self.made:
            var = self.made[atom] = Var(atom.aval)
            self.emit(self.joins[atom].replace(primitive=RESHAPE), [view.of], var, _to(var), atom)
        return self.made[atom]

    def emit(self, eqn: JaxprEqn, operands: list[Atom], var: Var, params: dict[str, Any], result: Var) -> None:
        """Append an equation with another result, which has the callers of the old one."""
        self.eqns.append(eqn.replace(invars=operands, outvars=[var], params=params))
        if result in self.callers:
            self.callers[var] = self.callers[result]


def _to(var: Var) -> dict[str, Any]:
    """The parameters of a reshape to the shape of a variable."""
    return {"new_sizes": var.aval.shape, "dimensions": None, "sharding": None}


def _apart(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[int, ...]] | None:
    """Per dim of `after` the sizes of the dims that it joins, where a reshape joins at least two and takes none apart."""
    inner, outer, sizes, replicated = factorize(before, after)
    if replicated or 0 in before or any(len(factors) > 1 for factors in inner):
        return None
    if all(len(factors) < 2 for factors in outer):
        return None
    return [tuple(sizes[factor] for factor in factors) or (1,) for factors in outer]


Expanded = tuple[dict[str, Any], tuple[int, ...], Groups]
"""The parameters, the shape of the result, and its groups, on the values behind the joined ones."""


def _pattern(eqn: JaxprEqn, views: Sequence[View | None]) -> View | None:
    """The view of an operand that has the shape of the result, if there is one."""
    (result,) = eqn.outvars
    pairs = zip(eqn.invars, views, strict=True)
    return next((view for atom, view in pairs if view is not None and atom.aval.shape == result.aval.shape), None)


def _elementwise(eqn: JaxprEqn, views: Sequence[View | None]) -> Expanded | None:
    """All joined operands are joined alike; along a joined dim they are whole, or all of size 1."""
    pattern = _pattern(eqn, views)
    if pattern is None:
        return None
    sizes = [pattern.sizes(dim) for dim in range(len(pattern.groups))]
    for view in views:
        for dim, wanted in enumerate(sizes if view is not None else ()):
            assert view is not None
            if view.sizes(dim) not in (wanted, (1,) * len(wanted)):
                return None
    return dict(eqn.params), tuple(itertools.chain(*sizes)), _groups(sizes)


def _as_view(atom: Atom, view: View | None) -> View:
    """A value that is not joined, as a view of itself."""
    return view or View(atom, tuple((dim,) for dim in range(len(atom.aval.shape))))


def _dot_general(eqn: JaxprEqn, views: Sequence[View | None]) -> Expanded | None:
    """Dims that are contracted or batched are joined alike on both sides; the others as they like."""
    contract, batch = eqn.params["dimension_numbers"]
    both = left, right = [_as_view(atom, view) for atom, view in zip(eqn.invars, views, strict=True)]
    for ours, theirs in ((contract[0], contract[1]), (batch[0], batch[1])):
        if any(left.sizes(a) != right.sizes(b) for a, b in zip(ours, theirs, strict=True)):
            return None
    numbers = tuple(tuple(view.dims(dims) for view, dims in zip(both, pair, strict=True)) for pair in (contract, batch))
    kept = [left.sizes(dim) for dim in batch[0]]
    for view, used in ((left, (*contract[0], *batch[0])), (right, (*contract[1], *batch[1]))):
        kept += [view.sizes(dim) for dim in range(len(view.groups)) if dim not in used]
    return {**eqn.params, "dimension_numbers": numbers}, tuple(itertools.chain(*kept)), _groups(kept)


def _groups(kept: Sequence[Sequence[int]]) -> Groups:
    """Groups of consecutive dims, of these lengths."""
    counter = itertools.count()
    return tuple(tuple(next(counter) for _ in sizes) for sizes in kept)


def _reduce(eqn: JaxprEqn, views: Sequence[View | None]) -> Expanded | None:
    (view,) = views
    assert view is not None
    axes = eqn.params["axes"]
    kept = [view.sizes(dim) for dim in range(len(view.groups)) if dim not in axes]
    return {**eqn.params, "axes": view.dims(axes)}, tuple(itertools.chain(*kept)), _groups(kept)


def _transpose(eqn: JaxprEqn, views: Sequence[View | None]) -> Expanded | None:
    (view,) = views
    assert view is not None
    permutation = eqn.params["permutation"]
    kept = [view.sizes(dim) for dim in permutation]
    return {**eqn.params, "permutation": view.dims(permutation)}, tuple(itertools.chain(*kept)), _groups(kept)


def _broadcast_in_dim(eqn: JaxprEqn, views: Sequence[View | None]) -> Expanded | None:
    """Where no joined dim is stretched."""
    (view, *rest), (atom, *_) = views, eqn.invars
    if rest or view is None:
        return None
    shape, to = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    at = {dim: index for index, dim in enumerate(to)}
    if any(len(view.groups[i]) > 1 and atom.aval.shape[i] != shape[dim] for dim, i in at.items()):
        return None
    kept = [
        view.sizes(at[dim]) if dim in at and len(view.groups[at[dim]]) > 1 else (size,)
        for dim, size in enumerate(shape)
    ]
    groups, sizes = _groups(kept), tuple(itertools.chain(*kept))
    dims = tuple(inner for dim in to for inner in groups[dim])
    return {**eqn.params, "shape": sizes, "broadcast_dimensions": dims}, sizes, groups


_reshape = primitive("reshape")
assert _reshape is not None
RESHAPE: Final[Primitive] = _reshape

EXPAND: Final[dict[Primitive, Callable[[JaxprEqn, Sequence[View | None]], Expanded | None]]] = {
    found: maker
    for name, maker in {
        **dict.fromkeys(elementwise.TABLE, _elementwise),
        "optimization_barrier": _elementwise,
        "broadcast_in_dim": _broadcast_in_dim,
        "dot_general": _dot_general,
        **{f"reduce_{op}": _reduce for op in ("and", "max", "min", "or", "prod", "sum", "xor")},
        "transpose": _transpose,
    }.items()
    if (found := primitive(name)) is not None
}
"""How an equation is done to the values behind joined ones. Others get the joined value."""
