"""What later uses would like: read backward from a finished plan, to plan again with.

For each value that is made in parts: the layout that is cheapest over all its uses together, to reduce them to. For one that
every rank computes whole: the shards that its uses take of it, if that makes none of them dearer. A use that computes on
whole operands, and need not, counts as what it would cost on shards, a few equations ahead; so the gradient that feeds both a
norm and a sharded optimizer state is scattered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from collectives.jax_compat import Literal, Var
from placements import Layout
from placements.layout import merge
from placements.redistribute import is_free, path_us
from spmd.plan import Plan, PlannedEqn, item_sizes
from spmd.trace import constrain_p, is_widening

if TYPE_CHECKING:
    from spmd.propagate import Problem

Wishes = dict[Var, Layout]
"""Per value the layout that its later uses would like best, without parts."""

AHEAD: Final = 6
"""How many equations ahead a use on shards is followed."""


def wishes_of(plan: Plan, problem: Problem) -> Wishes:
    """The wishes that a plan gives rise to."""
    return _Backward(plan, problem).run()


class _Backward:
    """One backward sweep: the uses of every value, and what they want."""

    def __init__(self, plan: Plan, problem: Problem) -> None:
        self.plan, self.problem, self.machine = plan, problem, plan.machine
        self.bandwidth_alone = dataclasses.replace(plan.machine, latency_us=0.0)  # small reductions share a message
        self.uses: dict[Var, list[tuple[PlannedEqn, int]]] = {}
        self.results: dict[Var, list[Layout]] = {}
        self.demands: dict[Var, list[Layout]] = {}
        self.wishes: Wishes = {}
        self.costs: dict[tuple[Var, Layout, int], float] = {}
        self.best: dict[Var, float] = {}

    def run(self) -> Wishes:
        for atom, target, layout in zip(
            self.plan.jaxpr.outputs, self.problem.outputs, self.plan.departures, strict=True
        ):
            if target is not None and not isinstance(atom, Literal):
                self.results.setdefault(atom, []).append(layout)
                self.demand(atom, layout)
        for planned in reversed(self.plan.eqns):
            for var, layout in zip(planned.eqn.outvars, planned.results, strict=True):
                self.wish(var, layout, planned)
            for index, atom in enumerate(planned.eqn.invars):
                if not isinstance(atom, Literal):
                    self.uses.setdefault(atom, []).append((planned, index))
                    self.demand(atom, self.wanted(planned, index))
        inputs = zip(self.plan.jaxpr.inputs, self.plan.arrivals, strict=True)
        for var, layout in inputs:
            self.wish(var, layout)
        return self.wishes

    def demand(self, var: Var, layout: Layout) -> None:
        """One use would like a value so. Parts are nobody's wish."""
        demands = self.demands.setdefault(var, [])
        whole = layout.with_partial(()).plain
        if whole not in demands:
            demands.append(whole)

    def wish(self, var: Var, made: Layout, maker: PlannedEqn | None = None) -> None:
        """Decide what is best for a value that is made so, by an equation or as an input."""
        demands = self.demands.get(var, [])
        if not demands:
            return
        shape, sizes = var.aval.shape, item_sizes(var.aval)
        if made.partial:
            options = list(dict.fromkeys((made.with_partial(()), *demands)))
            if len(options) > 1:
                costs = [
                    round(path_us(made, option, shape, sizes, self.machine) + self.use_us(var, option, AHEAD), 6)
                    for option in options
                ]
                self.wishes[var] = options[costs.index(min(costs))]
            return
        fallbacks = any(use.is_fallback for use, _ in self.uses.get(var, []))  # they say themselves what they gather
        cast = maker is not None and is_widening(maker.eqn) and not fallbacks
        if cast and len(demands) == 1 and set(demands[0].axes) < set(made.axes):
            self.wishes[var] = demands[0]  # gathered before the cast, that is half as much
            return
        options = [made, *(each for each in demands if is_free(made, each, shape, sizes, self.machine))]
        costs = [round(self.use_us(var, option, AHEAD)) for option in options]
        best = min(range(len(options)), key=lambda at: (costs[at], -len(options[at].axes), at))  # of equals most shards
        if options[best] != made:
            self.wishes[var], self.best[var] = options[best], costs[best]

    def wanted(self, planned: PlannedEqn, index: int) -> Layout:
        """The layout in which an equation would like an operand: as planned, and sharded where its results would be."""
        layout, rule = planned.operands[index], planned.rule
        if planned.eqn.primitive is constrain_p and not planned.eqn.params["pinned"]:
            return merge(planned.eqn.params["placements"], layout, planned.eqn.params["free_dims"])
        if rule is None:
            return layout
        taken = _sharding_axes(planned)
        for var, dims in zip(planned.eqn.outvars, rule.results, strict=True):
            wish = self.wishes.get(var)
            if wish is not None:
                for dim, axes in enumerate(wish.dims):
                    new = tuple(axis for axis in axes if axis not in taken)
                    if new and dims[dim] and not any(axis in names for names in layout.dims for axis in new):
                        layout = _sharded(planned, layout, rule.operands[index], dims[dim][0], new)
        return layout

    def use_us(self, var: Var, layout: Layout, ahead: int) -> float:
        """What all uses of a value cost, from a layout of it: what they move, and what follows."""
        if var in self.best and self.wishes[var] == layout:
            return self.best[var]
        key = var, layout, ahead
        if key not in self.costs:
            self.costs[key] = self._use_us(*key)
        return self.costs[key]

    def _use_us(self, var: Var, layout: Layout, ahead: int) -> float:
        shape, sizes = var.aval.shape, item_sizes(var.aval)

        def move_us(target: Layout) -> float:
            return 0.0 if target == layout else path_us(layout, target, shape, sizes, self.machine)

        total = sum(move_us(target) for target in self.results.get(var, []))
        seen: set[Layout] = set()
        for planned, index in self.uses.get(var, []):
            required = planned.operands[index].with_partial(())
            direct = 0.0 if required in seen else move_us(required)
            if ahead and direct and not is_free(layout, required, shape, sizes, self.machine):
                direct = min([direct, *self.on_shards_us(planned, index, layout, ahead - 1)])
            if direct and direct == move_us(required):
                seen.add(required)
            total += direct
        return total

    def on_shards_us(self, planned: PlannedEqn, index: int, layout: Layout, ahead: int) -> Iterator[float]:
        """What it costs to let an equation that computes on whole operands compute on the shards of `layout`."""
        rule, required = planned.rule, planned.operands[index]
        if rule is None:
            return
        taken = _sharding_axes(planned)
        results = list(planned.results)
        for dim, axes in enumerate(layout.dims):
            new = axes[len(required.dims[dim]) :]
            if axes[: len(required.dims[dim])] != required.dims[dim] or any(axis in taken for axis in new):
                return
            if not new:
                continue
            factors = rule.operands[index][dim]
            if not factors or not _can_shard(planned, factors[0], (*required.dims[dim], *new)):
                return
            op = dict(rule.reductions).get(factors[0])
            if op is not None:
                if any(parts and parts.partial[0][1] != op for parts in results if parts.partial):
                    return
                results = [r.with_partial((*r.partial, *((axis, op) for axis in new))) for r in results]
            results = [
                _sharded(planned, result, dims, factors[0], new)
                for result, dims in zip(results, rule.results, strict=True)
            ]
        total = 0.0
        for var, result in zip(planned.eqn.outvars, results, strict=True):
            whole = result.with_partial(())
            if result.partial:
                total += path_us(result, whole, var.aval.shape, item_sizes(var.aval), self.bandwidth_alone)
            total += self.use_us(var, whole, ahead)
        yield total


def _sharding_axes(planned: PlannedEqn) -> set[str]:
    """The axes that shard something of an equation."""
    return {axis for layout in (*planned.operands, *planned.results) for axes in layout.dims for axis in axes}


def _can_shard(planned: PlannedEqn, factor: int, axes: tuple[str, ...]) -> bool:
    rule, mesh = planned.rule, planned.operands[0].mesh
    return rule is not None and factor in rule.shardable() and rule.divides(factor, mesh.group_size(axes))


def _sharded(
    planned: PlannedEqn, layout: Layout, dims: tuple[tuple[int, ...], ...], factor: int, axes: tuple[str, ...]
) -> Layout:
    """A layout with the dim that `factor` is major in sharded over further axes, if it may be."""
    for dim, factors in enumerate(dims):
        if factors and factors[0] == factor and _can_shard(planned, factor, (*layout.dims[dim], *axes)):
            without = layout.with_partial(pair for pair in layout.partial if pair[0] not in axes)
            return without.with_dim(dim, (*layout.dims[dim], *axes))
    return layout
