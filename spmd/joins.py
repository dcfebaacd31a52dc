"""Reshapes that join dims, put off to where the joined dim itself is needed.

`x.reshape(-1, d) @ w` computes on rows that are pairs of a batch and a position. A shard of positions is no chunk of such rows;
of the array as it was it is a chunk of a dim. So a value that a reshape joined is kept as it was, and what layers do to it is
done to that (`spmd/views.py` says how), in scans too, whose bodies get and give it as it was. The reshape comes back where
something else asks for the joined dim, and vanishes where another takes it apart again. The same numbers in the same order;
nothing is moved for the reshape itself, whatever the sizes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from collectives.jax_compat import Atom, JaxprEqn, Literal, Var, draws_by_index, known_primitive, shaped_like
from spmd.rules import elementwise
from spmd.rules.movement import factorize
from spmd.rules.random import LARGEST
from spmd.trace import GlobalJaxpr
from spmd.views import EXPAND, Pattern, View, fitting, groups_of, joined

RESHAPE: Final = known_primitive("reshape")

DEPTH: Final = 32
"""How many equations a value is followed back that is to be joined like another."""


def without_joins(jaxpr: GlobalJaxpr) -> GlobalJaxpr:
    """The same computation with reshapes that join dims put off; in bodies too."""
    found = _Pass(jaxpr, {})
    return found.finish([found.whole(atom) for atom in jaxpr.outputs])


class _Pass:
    """One pass over the equations of a jaxpr, of whose inputs some are given as what is behind them.

    `views` are the joined values, with the values behind, and `same` the other values that became others; `joins` are the
    equations that put a join off, `made` the joined values that were needed after all. `makers` made the values that stayed,
    and `anew` are those that were made once more, apart. Of a body `around` is the pass over what is around it, `constants`
    the values there that it gets as they are, and `added` those that it gets besides.
    """

    def __init__(
        self,
        jaxpr: GlobalJaxpr,
        given: Mapping[Var, tuple[View, JaxprEqn]],
        around: _Pass | None = None,
        constants: Mapping[Var, Atom] = MappingProxyType({}),
    ) -> None:
        self.jaxpr = jaxpr
        self.given = given
        self.views: dict[Var, View] = {var: view for var, (view, _) in given.items()}
        self.same: dict[Var, Atom] = {}
        self.eqns: list[JaxprEqn] = []
        self.callers = dict(jaxpr.callers)
        self.made: dict[Var, Var] = {}
        self.anew: dict[Any, Var] = {}
        self.joins: dict[Var, JaxprEqn] = {var: join for var, (_, join) in given.items()}
        self.around, self.constants = around, constants
        self.added: dict[Var, Atom] = {}
        self.makers: dict[Var, JaxprEqn] = {}
        for eqn in jaxpr.eqns:
            self.visit(eqn)

    def finish(self, outputs: Sequence[Atom]) -> GlobalJaxpr:
        """The new jaxpr, with these outputs."""
        inputs = tuple(self.views[var].of if var in self.given else var for var in self.jaxpr.inputs)
        callers = MappingProxyType(self.callers)
        return self.jaxpr.with_equations(self.eqns, inputs=inputs, outputs=tuple(outputs), callers=callers)

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
        if expand is not None and any(views) and not eqn.effects and self.expanded(eqn, views):
            return
        several = [view is not None and sum(len(group) > 1 for group in view.groups) > 1 for view in views]
        if expand is not None and any(several) and not eqn.effects:  # of several joins the first may do
            fewer = [self.fewer(atom) if many else atom for atom, many in zip(operands, several, strict=True)]
            if self.expanded(eqn.replace(invars=fewer), [self.view(atom) for atom in fewer]):
                return
        whole = eqn.replace(invars=list(map(self.whole, operands)))
        self.makers.update(dict.fromkeys(eqn.outvars, whole))
        self.eqns.append(whole)

    def expanded(self, eqn: JaxprEqn, views: Sequence[View | None]) -> bool:
        """Emit an equation on the values behind the joined ones, if that is possible."""
        found = EXPAND[eqn.primitive](eqn, views)
        if found is None:
            return False
        wanted: Sequence[Pattern | None] = found.operands or [None if view is None else view.pattern for view in views]
        inner = [self.fit(atom, each, eqn) for atom, each in zip(eqn.invars, wanted, strict=True)]
        results = [joined(result, found.pattern) for result in eqn.outvars]
        operands = [atom for atom in inner if atom is not None]
        if len(operands) < len(inner):
            return False
        for result, view in zip(eqn.outvars, results, strict=True):
            if all(len(sizes) == 1 for sizes in found.pattern):
                self.same[result] = view.of
            else:
                self.views[result], self.joins[result] = view, eqn
        outvars = [view.of for view in results]
        self.eqns.append(eqn.replace(invars=operands, outvars=outvars, params=found.params))
        if eqn.outvars[0] in self.callers:
            self.callers.update(dict.fromkeys(outvars, self.callers[eqn.outvars[0]]))
        return True

    def fewer(self, atom: Atom) -> Atom:
        """A value of several joins with all but the first joined."""
        view = self.views[self.alias(atom)]
        first = next(dim for dim, group in enumerate(view.groups) if len(group) > 1)
        pattern = [sizes if dim == first else (math.prod(sizes),) for dim, sizes in enumerate(view.pattern)]
        result = Var(atom.aval)
        self.views[result], self.joins[result] = joined(result, pattern), self.joins[self.alias(atom)]
        inner = self.views[result].of
        self.emit(self.joins[result].replace(primitive=RESHAPE), [view.of], inner, _to(inner), self.alias(atom))
        return result

    def fit(self, atom: Atom, pattern: Pattern | None, asking: JaxprEqn, depth: int = DEPTH) -> Atom | None:
        """A value with the dims of a pattern, for an equation; None where it cannot be had. One that is not joined is made
        anew, where it is of size 1 along the dims, or was broadcast, counted, drawn, or computed from such elementwise."""
        view = self.view(atom)
        if pattern is None or not pattern:
            return atom
        now = [(size,) for size in atom.aval.shape] if view is None else view.pattern
        source = atom if view is None else view.of
        if now == pattern:
            return source
        if all(a == b or math.prod(a) == math.prod(b) == 1 for a, b in zip(now, pattern, strict=True)):
            made = joined(Var(atom.aval), pattern).of
            self.eqns.append(asking.replace(primitive=RESHAPE, invars=[source], outvars=[made], params=_to(made)))
            return made
        if view is not None or isinstance(atom, Literal):
            return None
        key = atom, tuple(pattern)
        if key not in self.anew and depth:
            found = (
                self.outside(atom, pattern, asking, depth)
                if atom in self.constants
                else self.again(atom, pattern, depth)
            )
            if found is not None:
                self.anew[key] = found
        return self.anew.get(key)

    def outside(self, var: Var, pattern: Pattern, asking: JaxprEqn, depth: int) -> Var | None:
        """A constant of a body, made anew outside of it: a new constant."""
        if self.around is None:
            return None
        made = self.around.fit(self.constants[var], pattern, asking, depth - 1)
        if made is None:
            return None
        inner = Var(made.aval)
        self.added[inner] = made
        return inner

    def again(self, atom: Var, pattern: Pattern, depth: int) -> Var | None:
        """A value that was broadcast, counted, drawn, or computed from such elementwise, with the dims of a pattern."""
        maker = self.makers.get(atom)
        if maker is None or maker.effects or len(maker.outvars) > 1:
            return None
        name, params = maker.primitive.name, maker.params
        view = joined(atom, pattern)
        apart = {dim for dim, sizes in enumerate(pattern) if len(sizes) > 1}
        operands: list[Atom] = list(maker.invars)
        shape = {"shape": view.of.aval.shape}
        if name == "broadcast_in_dim" and len(operands) == 1 and not apart & set(params["broadcast_dimensions"]):
            dims = tuple(view.groups[dim][0] for dim in params["broadcast_dimensions"])
            params = {**params, **shape, "broadcast_dimensions": dims}
        elif name == "iota" and not operands and params["dimension"] not in apart:
            params = {**params, **shape, "dimension": view.groups[params["dimension"]][0]}
        elif name == "random_bits" and not operands[0].aval.shape and math.prod(atom.aval.shape) < LARGEST:
            if not draws_by_index(operands[0].aval):
                return None
            params = {**params, **shape}
        elif name in (*elementwise.TABLE, "bitcast_convert_type"):
            if any(operand.aval.shape and len(operand.aval.shape) != len(pattern) for operand in operands):
                return None
            each = [(operand, fitting(pattern, operand)) for operand in operands]
            fitted = [self.fit(operand, to, maker, depth - 1) for operand, to in each]
            operands = [operand for operand in fitted if operand is not None]
            if len(operands) < len(fitted):
                return None
        else:
            return None
        self.emit(maker, operands, view.of, params, atom)
        return view.of

    def scan(self, eqn: JaxprEqn) -> None:
        """A scan whose body gets joined values as what is behind them, and gives them so. A carry is that if the body makes it
        joined as it got it; rows are, and what is stacked, along any dims but the scanned one."""
        (body,), (consts, carries) = eqn.params["bodies"], eqn.params["counts"]
        given: dict[Var, tuple[View, JaxprEqn]] = {}
        constants = dict(zip(body.inputs[:consts], eqn.invars, strict=False))
        for at, (var, atom) in enumerate(zip(body.inputs, map(self.alias, eqn.invars), strict=True)):
            view = self.view(atom)
            if (
                view is not None
                and not isinstance(atom, Literal)
                and (at < consts + carries or len(view.groups[0]) == 1)
            ):
                pattern = view.pattern if at < consts + carries else view.pattern[1:]
                given[var] = joined(var, pattern), self.joins[atom]
        carried = list(zip(body.inputs[consts : consts + carries], body.outputs, strict=False))
        while True:
            inside = _Pass(body, given, self, constants)
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
                self.views[result], self.joins[result] = joined(result, pattern), eqn
                outputs.append(view.of)
                results.append(self.views[result].of)
        operands = [
            self.views[self.alias(atom)].of if var in given else self.whole(atom)
            for var, atom in zip(body.inputs, eqn.invars, strict=True)
        ]
        made = inside.finish(outputs)
        used = {id(atom) for each in made.eqns for atom in each.invars} | set(map(id, outputs))
        pairs = [*inside.added.items(), *zip(made.inputs[:consts], operands, strict=False)]
        kept = [(var, atom) for var, atom in pairs if id(var) in used]
        made = dataclasses.replace(made, inputs=(*(var for var, _ in kept), *made.inputs[consts:]))
        params = {**eqn.params, "bodies": (made,), "counts": (len(kept), carries)}
        operands = [*(atom for _, atom in kept), *operands[consts:]]
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
        if shape != before:  # a dim is taken apart, or dims of size 1 come or go
            var = Var(shaped_like(result.aval, shape))
            self.emit(eqn, [source], var, {**eqn.params, "new_sizes": shape}, result)
            source = var
        self.views[result] = View(source, groups_of(apart))
        self.joins[result] = eqn

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


def _to(var: Var) -> dict[str, Any]:
    """The parameters of a reshape to the shape of a variable."""
    return {"new_sizes": var.aval.shape, "dimensions": None, "sharding": None}


def _apart(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[int, ...]] | None:
    """Per dim of `after` the sizes of the factors of dims that it joins, where a reshape joins at least two."""
    _, outer, sizes, replicated = factorize(before, after)
    if replicated or 0 in before:
        return None
    if all(len(factors) < 2 for factors in outer):
        return None
    return [tuple(sizes[factor] for factor in factors) or (1,) for factors in outer]
