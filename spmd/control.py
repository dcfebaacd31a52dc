"""Planning loops and branches: their bodies are planned like any jaxpr, and carries by fixed point.

A carry has one layout, in which it enters and leaves the body. Candidates are those of the initial values, what the body makes
of these, and so on until it is stable; and parts where the body only adds parts to a carry: then one reduction follows the
loop in place of one in every iteration. The cheapest candidate wins: what it costs to enter, every iteration, and to reduce
what is left in parts.

Iterations that need nothing of one another, but for sums, are apart: along a sharded scanned dim each rank has those of its
own rows, and a sum over all of them is in parts afterwards. Otherwise a scanned dim is whole on every rank: what shards it goes
to the next dim, or is gathered. What a body would gather of a value that does not change is gathered once, before. A predicate
that decides on collectives is made common: ranks that decided otherwise would wait for one another.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import jax.numpy as jnp

from collectives.jax_compat import Atom, JaxprEqn, Literal
from placements import Layout, Step
from spmd.plan import Move, Plan, PlannedEqn
from spmd.trace import GlobalJaxpr, nbytes

if TYPE_CHECKING:
    from spmd.propagate import Planner

Layouts = tuple[Layout, ...]

UNKNOWN_COUNT: Final = 10
"""The iterations that a loop of unknown length is taken to have."""
STEPS: Final = 4
"""How often the fixed point is approached."""


ACCUMULATES: Final = {"add": "sum", "add_any": "sum", "add_jaxvals": "sum", "sub": "sum", "max": "max", "min": "min"}
"""The op of the parts that a primitive accumulates."""


class _Loop:
    """A loop under planning: `plan(carry, results)` plans its body; other results than carries may follow.

    Over the axes `apart` every rank has iterations of its own, `count` at most.
    """

    def __init__(
        self,
        planner: Planner,
        eqn: JaxprEqn,
        init: Sequence[Atom],
        count: int,
        body: GlobalJaxpr,
        first: int,
        apart: tuple[str, ...] = (),
    ) -> None:
        self.planner, self.eqn, self.init, self.count = planner, eqn, init, count
        self.apart, self.sums = apart, [_sum_of(body, first + index, index) for index in range(len(init))]

    def choose(self, plan: Callable[..., Plan]) -> Layouts:
        """The layouts of the carries in the body."""
        found = dict.fromkeys(self.candidates(plan))
        return min(found, key=lambda carry: round(self.cost_us(carry, plan(carry, carry)), 6))

    def candidates(self, plan: Callable[..., Plan]) -> Iterator[Layouts]:
        """What the carries might be, the initial values first."""
        carry = tuple(_without(self.planner.settled(atom), self.apart) for atom in self.init)
        for _ in range(STEPS):
            yield carry
            body = plan(carry, None)
            made = body.departures[: len(carry)]
            whole = tuple(layout.with_partial(()) for layout in made)
            parts = tuple(self.accumulated(body, index) or layout for index, layout in enumerate(whole))
            if parts != whole:
                yield parts
            if whole == carry:
                return
            carry = whole

    def accumulated(self, body: Plan, index: int) -> Layout | None:
        """The layout in parts of what the body adds to a carry and does nothing else with, if that is so."""
        found = self.sums[index]
        if found is None or not found.added:
            return None
        made = {
            id(var): layout for each in body.eqns for var, layout in zip(each.eqn.outvars, each.results, strict=True)
        }
        layouts = {made.get(id(atom)) for atom in found.added}
        layout = layouts.pop()
        if layouts or layout is None or {"sum" if op == "mean" else op for _, op in layout.partial} != {found.op}:
            return None
        return layout

    def around(self, carry: Layouts) -> Layouts:
        """The layouts of the carries around the loop: sums of iterations that are apart are in parts."""
        if not self.apart:
            return carry
        found = []
        for layout, each in zip(carry, self.sums, strict=True):
            assert each is not None
            parts = [(axis, each.op) for axis in self.apart] if each.added else []
            found.append(layout.with_partial((*layout.partial, *parts)))
        return tuple(found)

    def can_be_apart(self) -> bool:
        """Whether iterations need nothing of one another but sums, which only leave the loop."""
        return all(found is not None and found.is_alone for found in self.sums)

    def cost_us(self, carry: Layouts, body: Plan) -> float:
        """Entering, iterating, and reducing what is left in parts."""
        planner = self.planner
        total = self.count * body.total_us()
        for atom, var, layout in zip(self.init, self.eqn.outvars, self.around(carry), strict=False):
            total += planner.cheapest_us(atom, layout)
            total += planner.reduction_us(var, layout, planner.axes)
        return total


@dataclass(frozen=True, slots=True)
class _Sum:
    """What a body does to a carry if it does nothing else with it: it accumulates `added` by `op`, or nothing. `is_alone`: the
    values on the way are used nowhere else."""

    op: str
    added: tuple[Atom, ...]
    is_alone: bool


def _sum_of(body: GlobalJaxpr, input_index: int, output_index: int) -> _Sum | None:
    """The sum that a carry is, by what leads from the output back to the input; None if anything else happens to it."""
    carry, atom = body.inputs[input_index], body.outputs[output_index]
    counts = collections.Counter(id(atom) for eqn in body.eqns for atom in eqn.invars)
    counts.update(id(atom) for atom in body.outputs)
    if atom is carry:
        return _Sum("", (), True)
    if sum(each is carry for eqn in body.eqns for each in eqn.invars) != 1:
        return None
    makers = {id(var): eqn for eqn in body.eqns for var in eqn.outvars}
    led = _led_from(carry, body.eqns)
    added: list[Atom] = []
    ops: set[str] = set()
    casts: list[Any] = []
    is_alone = counts[id(carry)] == 1
    while atom is not carry:
        is_alone = is_alone and counts[id(atom)] == 1
        maker = makers.get(id(atom))
        if maker is None:
            return None
        if maker.primitive.name == "convert_element_type":
            casts += [maker.invars[0].aval.dtype, maker.outvars[0].aval.dtype]
            atom = maker.invars[0]
            continue
        name = maker.primitive.name
        if name not in ACCUMULATES:
            return None
        left, right = maker.invars
        other, atom = (right, left) if id(left) in led else (left, right)
        if isinstance(other, Literal) or id(other) in led or (name == "sub" and other is left):
            return None
        added.append(other)
        ops.add(ACCUMULATES[name])
    if len(ops) != 1 or not _are_sums_of_casts(casts, carry.aval.dtype, *ops):
        return None
    return _Sum(ops.pop(), tuple(added), is_alone)


def _are_sums_of_casts(dtypes: Sequence[Any], dtype: Any, op: str) -> bool:
    """Whether accumulating in other dtypes on the way, at least as wide, is still accumulating: of floats but for rounding, of
    integers where sums wrap alike. A cast that truncates or saturates in every iteration is not."""
    if any(found.itemsize < dtype.itemsize for found in dtypes):
        return False
    if all(jnp.issubdtype(found, jnp.floating) for found in (*dtypes, dtype)):
        return True
    return not dtypes or (op == "sum" and all(jnp.issubdtype(found, jnp.integer) for found in dtypes))


def _led_from(carry: Atom, eqns: Sequence[JaxprEqn]) -> set[int]:
    """The values, by identity, to which sums lead from `carry`."""
    led = {id(carry)}
    for eqn in eqns:
        if eqn.primitive.name in (*ACCUMULATES, "convert_element_type") and any(id(atom) in led for atom in eqn.invars):
            led.update(map(id, eqn.outvars))
    return led


def _common(planner: Planner, atom: Atom, bodies: Sequence[Plan]) -> tuple[Move, ...]:
    """What makes a predicate the same on all ranks, bit for bit, where it decides on collectives: a broadcast over the axes
    that the bodies communicate over. Nothing where it follows from integers, or where they do not communicate."""
    used = {axis for body in bodies for axis in body.axes_used()}
    axes = tuple(axis for axis, size in planner.mesh.axes if size > 1 and axis in used)
    if not axes or atom in planner.problem.exact:
        return ()
    layout = Layout.replicated(planner.mesh, 0)
    step = Step("broadcast", axes, layout, layout, 1)
    return (Move(atom, layout, layout, (step,), "the predicate is made common", planner.asking),)


def _split(arrived: Layouts, constants: Layouts) -> tuple[Layout | None, ...]:
    """What constants that were gathered before the loop count as sharded by."""
    return tuple(a if a != b else None for a, b in zip(arrived, constants, strict=True))


def _hoisted(body: Plan, constants: Layouts) -> Layouts:
    """The layouts of a body's constants, with what it gathers of them in every iteration gathered before."""
    found = list(constants)
    for index, (var, layout) in enumerate(zip(body.jaxpr.inputs, constants, strict=False)):
        moves = [move for planned in body.eqns for move in planned.moves if move.atom is var and move.communicates]
        if len(moves) == 1 and moves[0].source == layout and not moves[0].target.windows:
            found[index] = moves[0].target
    return tuple(found)


def _finish(
    planner: Planner, eqn: JaxprEqn, operands: Layouts, results: Layouts, bodies: Sequence[Plan], count: int | None
) -> PlannedEqn:
    """Bring the operands there, and define the results."""
    for index, (atom, layout) in enumerate(zip(eqn.invars, operands, strict=True)):
        planner.require(atom, layout, f"operand {index} of {eqn.primitive} as {layout}")
    for var, layout in zip(eqn.outvars, results, strict=True):
        planner.define(var, layout)
    return PlannedEqn(eqn, None, operands, results, tuple(planner.moves), False, tuple(bodies), count)


def _plan_scan(planner: Planner, eqn: JaxprEqn) -> PlannedEqn:
    (body,) = eqn.params["bodies"]
    (n_consts, n_carry), length = eqn.params["counts"], eqn.params["length"]
    of_body = tuple(map(planner.settled, eqn.invars[:n_consts]))
    init = eqn.invars[n_consts : n_consts + n_carry]
    arrived = tuple(map(planner.settled, eqn.invars[n_consts + n_carry :]))
    wishes = [planner.wishes.get(var) for var in eqn.outvars[n_carry:]]

    @functools.cache
    def plan(xs: Layouts, constants: Layouts, carry: Layouts, targets: Layouts | None) -> Plan:
        rows = [Layout(planner.mesh, layout.dims[1:]) for layout in xs]
        made = [*(targets or (None,) * n_carry), *(None for _ in wishes)]
        inputs, split = [*constants, *carry, *rows], () if _apart(xs) else _split(of_body, constants)
        found = planner.body(body, inputs, made, split)
        departures = zip(found.departures[n_carry:], body.outputs[n_carry:], wishes, strict=True)
        scattered = [_scattered(planner, layout, atom, wish) for layout, atom, wish in departures]
        if any(scattered):
            found = planner.body(body, inputs, [*made[:n_carry], *scattered], split)
        return found

    @functools.cache
    def looped(apart: tuple[str, ...]) -> _Loop:
        return _Loop(planner, eqn, init, -(-length // planner.mesh.group_size(apart)), body, n_consts, apart)

    options: list[tuple[float, int, Layouts, Layouts, Layouts]] = []
    scanned = [tuple(map(_unscanned, arrived)), tuple(layout.with_dim(0, ()) for layout in arrived)]
    if looped(()).can_be_apart() and not eqn.effects:
        shards = dict.fromkeys(layout.dims[0] for layout in (*arrived, *filter(None, wishes)) if layout.dims[0])
        scanned += [tuple(_without(layout, axes).with_dim(0, axes) for layout in arrived) for axes in shards]
    for xs in dict.fromkeys(scanned):
        apart = _apart(xs)
        loop, constants = looped(apart), tuple(_without(layout, apart) for layout in of_body)
        carry = loop.choose(functools.partial(plan, xs, constants))
        found = plan(xs, constants, carry, carry)
        if _can_run_apart(found, apart, length):
            moved = sum(
                map(planner.cheapest_us, (*eqn.invars[:n_consts], *eqn.invars[n_consts + n_carry :]), (*constants, *xs))
            )
            options.append((round(moved + loop.cost_us(carry, found), 6), len(options), xs, constants, carry))
    _, _, xs, constants, carry = min(options)
    constants = _hoisted(plan(xs, constants, carry, carry), constants)
    chosen, loop = plan(xs, constants, carry, carry), looped(_apart(xs))
    stacked = tuple(
        Layout(planner.mesh, (loop.apart, *layout.dims)).with_partial(layout.partial)
        for layout in chosen.departures[n_carry:]
    )
    around = loop.around(carry)
    return _finish(planner, eqn, (*constants, *around, *xs), (*around, *stacked), [chosen], loop.count)


def _apart(xs: Layouts) -> tuple[str, ...]:
    """The axes that shard the scanned dim."""
    return xs[0].dims[0] if xs else ()


def _without(layout: Layout, axes: Sequence[str]) -> Layout:
    """A layout replicated over `axes`."""
    return layout.restrict(axis for axis in layout.mesh.axis_names if axis not in axes) if axes else layout


def _can_run_apart(body: Plan, axes: tuple[str, ...], length: int) -> bool:
    """Whether ranks along `axes` may run iterations of their own: a body neither depends on where a rank is along them nor
    communicates over them, and over others only if all ranks have as many iterations."""
    if not axes:
        return True
    moves = [each.move for each in body.moves()]
    layouts = (layout for plan in body.flat() for each in plan.eqns for layout in (*each.operands, *each.results))
    used = {axis for layout in (*layouts, *(move.target for move in moves)) for axis in layout.axes}
    used.update(axis for move in moves for step in move.steps for axis in step.axes)
    used.update(axis for plan in body.flat() for each in plan.eqns for axis in each.eqn.params.get("local", ()))
    used.update(body.axes_used())
    is_even = length % body.mesh.group_size(axes) == 0
    return used.isdisjoint(axes) and (is_even or not body.axes_used())


def _scattered(planner: Planner, layout: Layout, atom: Atom, wish: Layout | None) -> Layout | None:
    """Where every iteration is to reduce a result to, if its stack is wished for in shards: the stacked parts of all would be
    whole on every rank. None where writing them costs less than a message in every iteration: then one follows the loop."""
    if wish is None or not layout.partial or not any(wish.dims[1:]):
        return None
    large = planner.machine.memory_us(nbytes(atom)) > planner.machine.latency_us
    return Layout(planner.mesh, wish.dims[1:]) if large else None


def _unscanned(layout: Layout) -> Layout:
    """The scanned dim whole: the axes that shard it go to the next dim."""
    axes, whole = layout.dims[0], layout.with_dim(0, ())
    return whole.with_dim(1, (*layout.dims[1], *axes)) if axes and layout.ndim > 1 else whole


def _plan_while(planner: Planner, eqn: JaxprEqn) -> PlannedEqn:
    condition, body = eqn.params["bodies"]
    n_condition, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    arrived = tuple(map(planner.settled, eqn.invars[: n_condition + n_body]))
    of_condition, of_body = arrived[:n_condition], arrived[n_condition:]
    init = eqn.invars[n_condition + n_body :]

    @functools.cache
    def plan(constants: Layouts, carry: Layouts, targets: Layouts | None) -> Plan:
        return planner.body(body, [*constants, *carry], targets or [None] * len(carry), _split(of_body, constants))

    loop = _Loop(planner, eqn, init, UNKNOWN_COUNT, body, n_body)
    carry = loop.choose(functools.partial(plan, of_body))
    carry = tuple(layout.with_partial(()) for layout in carry) if _reads_parts(condition, n_condition, carry) else carry
    whole = [Layout.replicated(planner.mesh, 0)]
    constants = _hoisted(plan(of_body, carry, carry), of_body)
    chosen = plan(constants, carry, carry)
    read = _hoisted(planner.body(condition, [*of_condition, *carry], whole), of_condition)
    predicate = planner.body(condition, [*read, *carry], whole, _split(of_condition, read))
    (decides,) = condition.outputs
    common = _common(planner, decides, [predicate, chosen])
    predicate = dataclasses.replace(predicate, exits=(*predicate.exits, *common))
    return _finish(planner, eqn, (*read, *constants, *carry), carry, [predicate, chosen], None)


def _reads_parts(condition: Any, first: int, carry: Layouts) -> bool:
    """Whether a condition uses a carry that is in parts."""
    read = {id(atom) for eqn in condition.eqns for atom in eqn.invars}
    return any(layout.partial and id(var) in read for var, layout in zip(condition.inputs[first:], carry, strict=True))


def _plan_cond(planner: Planner, eqn: JaxprEqn) -> PlannedEqn:
    bodies = eqn.params["bodies"]
    operands = tuple(map(planner.settled, eqn.invars[1:]))

    @functools.cache
    def plan(results: Layouts | None) -> tuple[Plan, ...]:
        return tuple(planner.body(body, operands, results or [None] * len(eqn.outvars)) for body in bodies)

    options = dict.fromkeys(tuple(r.with_partial(()) for r in found.departures) for found in plan(None))
    options[tuple(Layout.replicated(planner.mesh, len(var.aval.shape)) for var in eqn.outvars)] = None
    results = min(options, key=lambda option: round(sum(each.total_us() for each in plan(option)), 6))
    index = Layout.replicated(planner.mesh, 0)
    planned = _finish(planner, eqn, (index, *operands), results, plan(results), 1)
    common = _common(planner, eqn.invars[0], planned.bodies)
    return dataclasses.replace(planned, moves=(*planned.moves, *common))


def _plan_local(planner: Planner, eqn: JaxprEqn) -> PlannedEqn:
    """A local function: operands and results are sharded as stated over the local axes, and as they are over the others, which
    come after: along them its body is planned like any."""
    (body,), local = eqn.params["bodies"], eqn.params["local"]
    inside = [_without(planner.settled(atom), local) for atom in eqn.invars]
    operands = tuple(map(_outside, eqn.params["in_dims"], inside))
    found = planner.body(body, inside, [None] * len(eqn.outvars), local=local)
    results = tuple(map(_outside, eqn.params["out_dims"], found.departures))
    return _finish(planner, eqn, operands, results, [found], 1)


def _outside(local: tuple[tuple[str, ...], ...], layout: Layout) -> Layout:
    """The layout around a local function: its axes are major in every dim."""
    sizes = layout.mesh.shape
    dims = tuple(
        (*(axis for axis in own if sizes[axis] > 1), *axes) for own, axes in zip(local, layout.dims, strict=True)
    )
    return Layout(layout.mesh, dims).with_partial(layout.partial)


CONTROL: Final[dict[str, Callable[[Planner, JaxprEqn], PlannedEqn]]] = {
    "cond": _plan_cond,
    "scan": _plan_scan,
    "shard_map": _plan_local,
    "while": _plan_while,
}
"""Equations with bodies, by the name of their primitive."""
