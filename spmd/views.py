"""Reshapes that join dims, put off to where the joined dim itself is needed.

`x.reshape(-1, d) @ w` computes on rows that are pairs of a batch and a position. A shard of positions is no chunk of such rows;
of the array as it was it is a chunk of a dim. So a value that a reshape joined is kept as it was, and what layers do to it is
done to that: elementwise functions, products, reductions, transpositions, and scans, whose bodies get and give it as it was.
The reshape comes back where something else asks for the joined dim, and vanishes where another takes it apart again. The same
numbers in the same order; nothing is moved for the reshape itself, whatever the sizes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Final

from collectives.jax_compat import Atom, JaxprEqn, Literal, Primitive, Var, known_primitive, primitive, shaped_like
from spmd.rules import elementwise
from spmd.rules.movement import factorize
from spmd.trace import GlobalJaxpr, drop_dead

Groups = tuple[tuple[int, ...], ...]
"""Per dim of a joined value the dims of the one that it was made of, in order: all of them, each once."""


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """A value as a reshape that joins dims of another."""

    of: Var
    groups: Groups

    def dims(self, dims: Sequence[int]) -> tuple[int, ...]:
        """The dims behind some dims."""
        return tuple(inner for dim in dims for inner in self.groups[dim])

    def sizes(self, dim: int) -> tuple[int, ...]:
        """The sizes behind a dim."""
        return tuple(self.of.aval.shape[inner] for inner in self.groups[dim])

    @property
    def pattern(self) -> list[tuple[int, ...]]:
        """The sizes behind every dim."""
        return [self.sizes(dim) for dim in range(len(self.groups))]


def without_joins(jaxpr: GlobalJaxpr) -> GlobalJaxpr:
    """The same computation with reshapes that join dims put off; in bodies too."""
    found = _Pass(jaxpr, {}, {})
    return found.finish([found.whole(atom) for atom in jaxpr.outputs])


class _Pass:
    """One pass over the equations of a jaxpr, of whose inputs some are given as what is behind them.

    `views` are the joined values, with the values behind, and `same` the other values that became others; `joins` are the
    equations that put a join off, `made` the joined values that were needed after all. `makers` made the values that stayed;
    of inputs, those that were made of literals.
    """

    def __init__(
        self, jaxpr: GlobalJaxpr, given: dict[Var, tuple[View, JaxprEqn]], makers: dict[Var, JaxprEqn]
    ) -> None:
        self.jaxpr = jaxpr
        self.given = given
        self.views: dict[Var, View] = {var: view for var, (view, _) in given.items()}
        self.same: dict[Var, Atom] = {}
        self.eqns: list[JaxprEqn] = []
        self.callers = dict(jaxpr.callers)
        self.made: dict[Var, Var] = {}
        self.joins: dict[Var, JaxprEqn] = {var: join for var, (_, join) in given.items()}
        self.makers = dict(makers)
        for eqn in jaxpr.eqns:
            self.visit(eqn)

    def finish(self, outputs: Sequence[Atom]) -> GlobalJaxpr:
        """The new jaxpr, with these outputs."""
        inputs = tuple(self.views[var].of if var in self.given else var for var in self.jaxpr.inputs)
        eqns, callers = tuple(drop_dead(self.eqns, list(outputs))), MappingProxyType(self.callers)
        return dataclasses.replace(self.jaxpr, inputs=inputs, eqns=eqns, outputs=tuple(outputs), callers=callers)

    def visit(self, eqn: JaxprEqn) -> None:
        """Emit one equation, on the values behind the joined ones where that is possible."""
        if eqn.primitive.name == "scan" and "bodies" in eqn.params and not eqn.effects:
            self.scan(eqn)
            return
        if "bodies" in eqn.params:
            bodies = tuple(map(without_joins, eqn.params["bodies"]))
            eqn = eqn.replace(params={**eqn.params, "bodies": bodies})
        operands = [self.alias(atom) for atom in eqn.invars]
        eqn = eqn.replace(invars=operands)
        plain = eqn.primitive.name == "reshape" and len(operands) == 1 and eqn.params.get("dimensions") is None
        if plain and not isinstance(operands[0], Literal):
            self.reshape(eqn, operands[0])
            return
        views = [self.view(atom) for atom in operands]
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

    def scan(self, eqn: JaxprEqn) -> None:
        """A scan whose body gets joined values as what is behind them, and gives them so. A carry is that if the body makes it
        joined as it got it; rows are, and what is stacked, along any dims but the scanned one."""
        (body,), (consts, carries) = eqn.params["bodies"], eqn.params["counts"]
        given: dict[Var, tuple[View, JaxprEqn]] = {}
        makers: dict[Var, JaxprEqn] = {}
        for at, (var, atom) in enumerate(zip(body.inputs, map(self.alias, eqn.invars), strict=True)):
            view = self.view(atom)
            if (
                view is not None
                and not isinstance(atom, Literal)
                and (at < consts + carries or len(view.groups[0]) == 1)
            ):
                pattern = view.pattern if at < consts + carries else view.pattern[1:]
                given[var] = _joined(var, pattern), self.joins[atom]
            maker = None if isinstance(atom, Literal) or at >= consts else self.makers.get(atom)
            if maker is not None and all(isinstance(each, Literal) for each in maker.invars):
                makers[var] = maker
        carried = list(zip(body.inputs[consts : consts + carries], body.outputs, strict=False))
        while True:
            inside = _Pass(body, given, makers)
            changed = [
                var
                for var, made in carried
                if var in given and ((view := inside.view(made)) is None or view.pattern != given[var][0].pattern)
            ]
            if not changed:
                break
            given = {var: pair for var, pair in given.items() if var not in changed}
        outputs: list[Atom] = []
        results: list[Var] = []
        for at, (made, result) in enumerate(zip(body.outputs, eqn.outvars, strict=True)):
            view = inside.view(made)
            if view is None or (at < carries and carried[at][0] not in given):
                outputs.append(inside.whole(made))
                results.append(result)
            else:
                pattern = view.pattern if at < carries else [result.aval.shape[:1], *view.pattern]
                self.views[result], self.joins[result] = _joined(result, pattern), eqn
                outputs.append(view.of)
                results.append(self.views[result].of)
        operands = [
            self.views[self.alias(atom)].of if var in given else self.whole(atom)
            for var, atom in zip(body.inputs, eqn.invars, strict=True)
        ]
        params = {**eqn.params, "bodies": (inside.finish(outputs),)}
        self.eqns.append(eqn.replace(invars=operands, outvars=results, params=params))
        if eqn.outvars and eqn.outvars[0] in self.callers:
            self.callers[results[0]] = self.callers[eqn.outvars[0]]

    def alias(self, atom: Atom) -> Atom:
        """A value, or the one that it became."""
        return atom if isinstance(atom, Literal) else self.same.get(atom, atom)

    def view(self, atom: Atom) -> View | None:
        """How a value is joined, if it is."""
        atom = self.alias(atom)
        return None if isinstance(atom, Literal) else self.views.get(atom)

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
        atom = self.alias(atom)
        view = self.view(atom)
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


def _joined(var: Var, pattern: Sequence[tuple[int, ...]]) -> View:
    """A variable as a join of a new one, whose dims have the sizes of a pattern."""
    return View(Var(shaped_like(var.aval, tuple(itertools.chain(*pattern)))), _groups(pattern))


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


RESHAPE: Final = known_primitive("reshape")

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
