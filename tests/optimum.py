"""The cheapest plan there is, by an integer program: what the planner's plans are measured against.

The costs are the planner's own, and so is its precedence: where some strategies of an equation keep a sharded operand where it
is and move no other, one of these is taken. Everything else is free: every strategy that a rule admits, parts wherever an
equation is linear, every value moved once to each layout, from where it was made or from one that it was moved to.

    python tests/optimum.py            # solve all programs (minutes), and write tests/optima.json

Variables: one for each strategy of each equation (0 or 1), one for each move of a value between two layouts. A move starts from
the layout in which a value is made, or from one that a first move gave.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import coo_matrix

from collectives.jax_compat import Literal
from placements import Layout, Mesh, P, Shard
from placements.cost import DEFAULT
from placements.redistribute import is_free, path_us
from spmd.factors import Assignment, layouts
from spmd.plan import Plan, item_sizes
from spmd.propagate import plan
from spmd.rules import rule_of
from spmd.trace import trace

OPTIMA = Path(__file__).parent / "optima.json"
S = Shard


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One way to compute an equation: layouts, and microseconds."""

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    compute_us: float
    grows: bool


def strategies(eqn: Any, mesh: Mesh) -> list[Strategy]:
    """Every assignment that the equation's rule admits."""
    rule = rule_of(eqn)
    assert rule is not None, f"no rule for {eqn.primitive}"
    found: dict[tuple[Any, Any], Strategy] = {}
    for assignment in _assignments(rule, [axis for axis, size in mesh.axes if size > 1], mesh):
        made = layouts(rule, assignment, mesh)
        if made is not None and made not in found:
            axes = dict.fromkeys(axis for layout in (*made[0], *made[1]) for dim in layout.dims for axis in dim)
            cost = DEFAULT.compute_us(rule.flops / (mesh.group_size(tuple(axes)) if axes else 1))
            grows = any(r.partial for r in made[1]) and _nbytes(eqn.outvars) > _nbytes(eqn.invars)
            found[made] = Strategy(*made, cost, grows)
    return list(found.values())


def _assignments(rule: Any, axes: list[str], mesh: Mesh) -> Iterator[Assignment]:
    if not axes:
        yield Assignment()
        return
    *rest, axis = axes
    for assignment in _assignments(rule, rest, mesh):
        yield assignment
        for factor in rule.shardable():
            held = assignment.axes_of(factor)
            if rule.divides(factor, mesh.group_size((*held, axis))):
                for at in range(len(held) + 1):
                    yield assignment.shard(factor, (*held[:at], axis, *held[at:]))
        for passes in rule.passes:
            yield from (assignment.let_pass(axis, op, passes) for op in passes.ops if op == "sum")


def _nbytes(atoms: Any) -> int:
    return sum(int(np.prod(atom.aval.shape)) * atom.aval.dtype.itemsize for atom in atoms)


def _restricted(strategy: Strategy, axes: list[str]) -> tuple[Layout, ...]:
    return tuple(layout.restrict(axes) for layout in (*strategy.operands, *strategy.results))


class Model:
    """The integer program of one jaxpr."""

    def __init__(self, planned: Plan) -> None:
        self.jaxpr, self.mesh = planned.jaxpr, planned.mesh
        self.costs: list[float] = []
        self.rows: list[tuple[dict[int, float], float, float]] = []
        self.made: dict[int, dict[Layout, dict[int, float]]] = {}  # value, layout: what makes it, and a constant at -1
        self.needs: dict[int, list[tuple[Layout, dict[int, float]]]] = {}
        self.avals: dict[int, Any] = {}
        for var, layout in zip(self.jaxpr.inputs, planned.arrivals, strict=True):
            self.define(var, {layout: {-1: 1.0}})
        for var, _ in self.jaxpr.constants:
            self.define(var, {Layout.replicated(self.mesh, len(var.aval.shape)): {-1: 1.0}})
        self.binaries = 0
        for eqn in self.jaxpr.eqns:
            self.equation(eqn)
        self.binaries = len(self.costs)
        for atom, layout in zip(self.jaxpr.outputs, planned.departures, strict=True):
            self.need(atom, layout, {-1: 1.0})
        for value in self.made:
            self.moves(value)

    def variable(self, cost: float) -> int:
        self.costs.append(cost)
        return len(self.costs) - 1

    def define(self, var: Any, made: dict[Layout, dict[int, float]]) -> None:
        self.made[id(var)] = made
        self.avals[id(var)] = var.aval

    def need(self, atom: Any, layout: Layout, when: dict[int, float]) -> None:
        if not isinstance(atom, Literal):
            self.needs.setdefault(id(atom), []).append((layout, when))

    def us(self, value: int, source: Layout, target: Layout) -> float:
        aval = self.avals[value]
        return path_us(source, target, aval.shape, item_sizes(aval), DEFAULT)

    def is_free(self, value: int, source: Layout, target: Layout) -> bool:
        aval = self.avals[value]
        return source == target or is_free(source, target, aval.shape, item_sizes(aval), DEFAULT)

    def equation(self, eqn: Any) -> None:
        found = strategies(eqn, self.mesh)
        names = [self.variable(strategy.compute_us) for strategy in found]
        self.rows.append((dict.fromkeys(names, 1.0), 1.0, 1.0))
        for index, atom in enumerate(eqn.invars):
            for layout in dict.fromkeys(strategy.operands[index] for strategy in found):
                when = {n: 1.0 for n, each in zip(names, found, strict=True) if each.operands[index] == layout}
                self.need(atom, layout, when)
        self.precedence(eqn, found, names)
        for index, var in enumerate(eqn.outvars):
            made: dict[Layout, dict[int, float]] = {}
            for name, strategy in zip(names, found, strict=True):
                made.setdefault(strategy.results[index], {})[name] = 1.0
            self.define(var, made)

    def precedence(self, eqn: Any, found: list[Strategy], names: list[int]) -> None:
        """Axis by axis, outermost first, whatever the layouts in which the operands are made: if on the axes so far some
        strategies move nothing and leave an operand sharded over the last, one of these is taken."""
        places = [(i, id(atom)) for i, atom in enumerate(eqn.invars) if not isinstance(atom, Literal)]
        axes = [axis for axis, size in self.mesh.axes if size > 1]
        for level in range(1, len(axes) + 1):
            before: dict[Any, list[tuple[int, Strategy]]] = {}
            for name, strategy in zip(names, found, strict=True):
                before.setdefault(_restricted(strategy, axes[: level - 1]), []).append((name, strategy))
            for combination in itertools.product(*(self.made[value].items() for _, value in places)):
                made = [
                    (i, value, layout.restrict(axes[:level]))
                    for (i, value), (layout, _) in zip(places, combination, strict=True)
                ]
                for group in before.values():
                    still = {
                        _restricted(strategy, axes[:level])
                        for _, strategy in group
                        if self.is_still(strategy, made, axes[:level])
                    }
                    if still:
                        taken = [name for name, each in group if _restricted(each, axes[:level]) in still]
                        self.require_one(taken, [name for name, _ in group], [each for _, each in combination])

    def is_still(self, strategy: Strategy, made: list[tuple[int, int, Layout]], axes: list[str]) -> bool:
        """Whether on these axes a strategy moves no operand, and leaves one sharded over the last of them."""
        wanted = [strategy.operands[i].restrict(axes) for i, _, _ in made]
        settled = any(
            layout == want and layout.dim_of(axes[-1]) is not None
            for want, (_, _, layout) in zip(wanted, made, strict=True)
        )
        return (
            settled
            and not strategy.grows
            and all(self.is_free(value, layout, want) for want, (_, value, layout) in zip(wanted, made, strict=True))
        )

    def require_one(self, taken: list[int], group: list[int], made: list[dict[int, float]]) -> None:
        """One of `taken` is chosen if one of `group` is, and all of `made` are so."""
        row, bound = dict.fromkeys(taken, 1.0), -float(len(made))
        for name in group:
            row[name] = row.get(name, 0.0) - 1.0
        for each in made:
            for name, weight in each.items():
                if name < 0:
                    bound += weight
                else:
                    row[name] = row.get(name, 0.0) - weight
        self.rows.append((row, bound, np.inf))

    def moves(self, value: int) -> None:
        """A value is where it was made, where a first move brings it, or where a second one does."""
        wanted = dict.fromkeys(layout for layout, _ in self.needs.get(value, []))
        first: dict[Layout, list[int]] = {}
        second: dict[Layout, list[int]] = {}
        for source, target in itertools.product(self.made[value], wanted):
            if source != target:
                name = self.variable(self.us(value, source, target))
                first.setdefault(target, []).append(name)
                self.bound(name, self.made[value][source])
        for source, target in itertools.product(wanted, wanted):
            if source != target and source in first:
                name = self.variable(self.us(value, source, target))
                second.setdefault(target, []).append(name)
                self.bound(name, dict.fromkeys(first[source], 1.0))
        for layout, when in self.needs.get(value, []):
            have = dict(self.made[value].get(layout, {}))
            have |= dict.fromkeys((*first.get(layout, []), *second.get(layout, [])), 1.0)
            row, bound = {name: weight for name, weight in have.items() if name >= 0}, -have.get(-1, 0.0)
            for name, weight in when.items():
                if name < 0:
                    bound += weight
                else:
                    row[name] = row.get(name, 0.0) - weight
            self.rows.append((row, bound, np.inf))

    def bound(self, name: int, by: dict[int, float]) -> None:
        row = {name: -1.0, **{other: weight for other, weight in by.items() if other >= 0}}
        self.rows.append((row, -by.get(-1, 0.0), np.inf))

    def solve(self, seconds: float) -> tuple[float, float]:
        """The optimum in microseconds, and a lower bound of it where the time was short."""
        count = len(self.costs)
        entries = [(i, name, weight) for i, (row, _, _) in enumerate(self.rows) for name, weight in row.items()]
        at, names, weights = zip(*entries, strict=True)
        matrix = coo_matrix((weights, (at, names)), (len(self.rows), count)).tocsr()
        constraint = LinearConstraint(matrix, [low for _, low, _ in self.rows], [high for _, _, high in self.rows])
        found = milp(
            np.array(self.costs), constraints=constraint, bounds=(0, 1), options={"time_limit": seconds, "mip_rel_gap": 1e-4},
            integrality=np.r_[np.ones(self.binaries), np.zeros(count - self.binaries)],
        )  # fmt: skip
        assert found.x is not None, found.message
        return float(found.fun), float(found.mip_dual_bound)


def cost_us(planned: Plan) -> float:
    """The cost of a plan, every collective alone in its message."""
    apart = [dataclasses.replace(each.move, joined=False) for each in planned.moves()]
    steps = sum(
        path_us(move.source, move.target, move.atom.aval.shape, item_sizes(move.atom.aval), DEFAULT) for move in apart
    )
    return steps + planned.compute_us()


# The programs


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function with shapes and placements on a mesh."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    mesh: Mesh
    places: tuple[P, ...]
    out: tuple[P | None, ...] | None = None

    def plan(self) -> Plan:
        """What the planner makes of it."""
        jaxpr = trace(self.function, self.args, self.mesh, lambda value: False)
        arrivals = [Layout.of(p, self.mesh, len(a.shape)) for p, a in zip(self.places, self.args, strict=True)]
        outputs = self.out or (None,) * len(jaxpr.outputs)
        return plan(jaxpr, self.mesh, arrivals, [None] * len(arrivals), outputs)


def _mlp(w1: Any, w2: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ w1) @ w2 - y) ** 2)


def _sgd(w1: Any, w2: Any, x: Any, y: Any) -> Any:
    loss, (g1, g2) = jax.value_and_grad(_mlp, (0, 1))(w1, w2, x, y)
    return w1 - 0.1 * g1, w2 - 0.1 * g2, loss


def _deep(w1: Any, w2: Any, w3: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(jnp.tanh(x @ w1) @ w2) @ w3)


def _residual(w1: Any, w2: Any, x: Any) -> Any:
    h = x + jnp.tanh(x @ w1) @ w2
    return jnp.mean((h + jnp.tanh(h @ w1) @ w2) ** 2)


def _attention(q: Any, k: Any, v: Any, x: Any) -> Any:
    scores = jax.nn.softmax(
        jnp.einsum("bshd,bthd->bhst", (x @ q).reshape(*x.shape[:2], 4, -1), (x @ k).reshape(*x.shape[:2], 4, -1))
    )
    return jnp.einsum("bhst,bthd->bshd", scores, (x @ v).reshape(*x.shape[:2], 4, -1)).reshape(x.shape)  # fmt: skip


def _momentum(w: Any, m: Any, x: Any) -> Any:
    gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    m = 0.9 * m + gradient
    return w - 0.1 * m, m


def _adam(w: Any, mu: Any, nu: Any, x: Any) -> Any:
    g = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    mu, nu = 0.9 * mu + 0.1 * g, 0.99 * nu + 0.01 * g * g
    return w - 0.01 * mu / (jnp.sqrt(nu) + 1e-8), mu, nu


def _clipped(w: Any, m: Any, x: Any) -> Any:
    g = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    g = g * jnp.minimum(1.0, 1.0 / optax.tree.norm(g))
    return w - 0.1 * (m + g), m + g


def _shared(w: Any, x: Any) -> Any:
    return jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) @ w.T))(w)


def _norm(w: Any, g: Any, x: Any) -> Any:
    h = x @ w
    return (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-5) * g


D4, T4 = Mesh(dp=4), Mesh(tp=4)
GRID = Mesh(dp=2, tp=2)
ROWS, COLUMNS, WHOLE = P(dp=S(0)), P(dp=S(1)), P()
W1, W2, BIG, SMALL = struct(256, 1024), struct(1024, 256), struct(4096, 256), struct(64, 256)
TP1, TP2 = P(tp=S(1)), P(tp=S(0))
FT1, FT2 = P(tp=S(1), dp=S(0)), P(tp=S(0), dp=S(1))
SEQ = struct(8, 64, 256)
SQ = struct(256, 256)

PROGRAMS: dict[str, Program] = {
    "forward dp": Program(_mlp, (W1, W2, BIG, BIG), D4, (WHOLE, WHOLE, ROWS, ROWS)),
    "forward fsdp": Program(_mlp, (W1, W2, BIG, BIG), D4, (ROWS, ROWS, ROWS, ROWS)),
    "forward tp": Program(_mlp, (W1, W2, BIG, BIG), T4, (TP1, TP2, WHOLE, WHOLE)),
    "step dp": Program(_sgd, (W1, W2, BIG, BIG), D4, (WHOLE, WHOLE, ROWS, ROWS), (WHOLE, WHOLE, WHOLE)),
    "step fsdp": Program(_sgd, (W1, W2, BIG, BIG), D4, (ROWS, ROWS, ROWS, ROWS), (ROWS, ROWS, WHOLE)),
    "step fsdp, small batch": Program(_sgd, (W1, W2, SMALL, SMALL), D4, (ROWS, ROWS, ROWS, ROWS), (ROWS, ROWS, WHOLE)),
    "step dp, small batch": Program(_sgd, (W1, W2, SMALL, SMALL), D4, (WHOLE, WHOLE, ROWS, ROWS), (WHOLE, WHOLE, WHOLE)),
    "step zero1 without state": Program(_sgd, (W1, W2, BIG, BIG), D4, (WHOLE, WHOLE, ROWS, ROWS), (ROWS, ROWS, WHOLE)),
    "step tp": Program(_sgd, (W1, W2, BIG, BIG), T4, (TP1, TP2, WHOLE, WHOLE), (TP1, TP2, WHOLE)),
    "step tp, small batch": Program(_sgd, (W1, W2, SMALL, SMALL), T4, (TP1, TP2, WHOLE, WHOLE), (TP1, TP2, WHOLE)),
    "step columns": Program(_sgd, (W1, W2, BIG, BIG), D4, (COLUMNS, COLUMNS, ROWS, ROWS), (COLUMNS, COLUMNS, WHOLE)),
    "step fsdp over 16": Program(_sgd, (W1, W2, BIG, BIG), Mesh(dp=16), (ROWS, ROWS, ROWS, ROWS), (ROWS, ROWS, WHOLE)),
    "gradient dp, three layers": Program(jax.grad(_deep, (0, 1, 2)), (W1, W2, W1, BIG), D4, (WHOLE, WHOLE, WHOLE, ROWS)),
    "gradient tp, three layers": Program(jax.grad(_deep, (0, 1, 2)), (W1, W2, W1, BIG), T4, (TP1, TP2, TP1, WHOLE)),
    "residual dp": Program(jax.grad(_residual, (0, 1)), (W1, W2, BIG), D4, (WHOLE, WHOLE, ROWS)),
    "residual tp": Program(jax.grad(_residual, (0, 1)), (W1, W2, BIG), T4, (TP1, TP2, WHOLE)),
    "residual fsdp": Program(jax.grad(_residual, (0, 1)), (W1, W2, BIG), D4, (ROWS, ROWS, ROWS), (ROWS, ROWS)),
    "residual sequence tp": Program(
        jax.grad(_residual, (0, 1)), (W1, W2, struct(2, 64, 256)), T4, (TP1, TP2, P(tp=S(1))), (TP1, TP2)
    ),
    "attention over heads": Program(_attention, (SQ, SQ, SQ, SEQ), T4, (TP1, TP1, TP1, WHOLE)),
    "attention over the batch": Program(_attention, (SQ, SQ, SQ, SEQ), D4, (WHOLE, WHOLE, WHOLE, ROWS)),
    "attention over the sequence": Program(_attention, (SQ, SQ, SQ, SEQ), T4, (WHOLE, WHOLE, WHOLE, P(tp=S(1)))),
    "momentum dp": Program(_momentum, (SQ, SQ, BIG), D4, (WHOLE, WHOLE, ROWS), (WHOLE, WHOLE)),
    "momentum zero1": Program(_momentum, (SQ, SQ, BIG), D4, (WHOLE, ROWS, ROWS), (WHOLE, ROWS)),
    "adam zero1": Program(_adam, (SQ, SQ, SQ, BIG), D4, (WHOLE, ROWS, ROWS, ROWS), (WHOLE, ROWS, ROWS)),
    "adam fsdp": Program(_adam, (SQ, SQ, SQ, BIG), D4, (ROWS, ROWS, ROWS, ROWS), (ROWS, ROWS, ROWS)),
    "clipping zero1": Program(_clipped, (SQ, SQ, BIG), D4, (WHOLE, ROWS, ROWS), (WHOLE, ROWS)),
    "shared weight dp": Program(_shared, (SQ, BIG), D4, (WHOLE, ROWS)),
    "shared weight fsdp": Program(_shared, (SQ, BIG), D4, (ROWS, ROWS), (ROWS,)),
    "layer norm over features": Program(_norm, (SQ, struct(256), BIG), T4, (TP1, P(tp=S(0)), WHOLE)),
    "layer norm over rows": Program(_norm, (SQ, struct(256), BIG), D4, (WHOLE, WHOLE, ROWS)),
    "forward dp and tp": Program(_mlp, (W1, W2, BIG, BIG), GRID, (TP1, TP2, ROWS, ROWS)),
    "momentum over nested axes": Program(
        _momentum, (SQ, SQ, BIG), Mesh(a=2, b=2),
        (P(a=S(0), b=S(0)), P(a=S(0), b=S(0)), P(a=S(0), b=S(0))), (P(a=S(0), b=S(0)), P(a=S(0), b=S(0))),
    ),
    "momentum fsdp and tp": Program(_momentum, (SQ, SQ, BIG), GRID, (FT1, FT1, ROWS), (FT1, FT1)),
}  # fmt: skip


def main() -> None:
    """Solve every program, print the ratios, and write the optima."""
    chosen = sys.argv[1:] or list(PROGRAMS)
    optima = json.loads(OPTIMA.read_text()) if OPTIMA.exists() else {}
    for name in chosen:
        planned = PROGRAMS[name].plan()
        start = time.monotonic()
        optimum, bound = Model(planned).solve(60)
        took = time.monotonic() - start
        optima[name] = {"optimum_us": round(optimum, 3), "bound_us": round(bound, 3), "equations": len(planned.eqns)}
        cost = cost_us(planned)
        print(f"{name:32} {len(planned.eqns):3} equations", end="")
        print(f" {cost:10.2f} / {optimum:10.2f} = {cost / optimum:.3f}  {took:.1f} s", flush=True)
        OPTIMA.write_text(json.dumps(optima, indent=1) + "\n")


if __name__ == "__main__":
    main()
