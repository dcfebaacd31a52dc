"""`check_rule`: the public validator of rules.

A rule is a promise: computed on shards, or on parts, an equation gives the shards or parts of its result. The validator
tries every strategy that a rule admits, alone and in pairs on a two-axis mesh, on simulated ranks: with uneven and empty
shards, and with parts that are unequal, of mixed signs and, for integers, wrap. What it accepts a planner may use.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from collectives import jax_compat
from collectives.jax_compat import JaxprEqn, Literal, Var
from collectives.simulated import reduce_parts
from placements import Layout, Mesh
from placements.cost import DEFAULT
from placements.mesh import group_positions
from spmd.errors import RuleError
from spmd.execute import Ranks, simulate
from spmd.factors import Assignment, Rule, check_shape, layouts
from spmd.lower import literal_value
from spmd.plan import Plan, PlannedEqn
from spmd.program import Program
from spmd.rules import rule_of
from spmd.trace import GlobalJaxpr, trace

MESHES = (Mesh(a=2), Mesh(a=3), Mesh(a=5), Mesh(a=2, b=2), Mesh(a=2, b=3))


def check_rule(
    function: Callable[..., Any],
    *args: Any,
    meshes: Sequence[Mesh] = MESHES,
    rule: Callable[[JaxprEqn], Rule | None] = rule_of,
    tolerance: float = 2e-5,
) -> dict[str, int]:
    """Check the rules of all equations in `function(*args)`; return how many strategies were tried, by primitive.

    `args` are whole arrays: small ones, whose sizes do not divide. `rule` finds the rule of an equation (default: the
    tables). Integers and data movement must agree exactly, floats within `tolerance`, relative to the largest element.

    Raises `RuleError`, naming primitive, strategy and rank, where a rule does not fit its equation or gives another value.

    >>> check_rule(jnp.tanh, np.array([0.5, -1.0, 2.0], np.float32))
    {'tanh': 7}
    """
    jaxpr = trace(function, [jax.typeof(arg) for arg in args], Mesh(), lambda value: False)
    values: dict[int, Any] = {id(var): jnp.asarray(arg) for var, arg in zip(jaxpr.inputs, args, strict=True)}
    values.update({id(var): constant for var, constant in jaxpr.constants})
    counts: dict[str, int] = {}
    for eqn in jaxpr.eqns:
        operands = [_value(atom, values) for atom in eqn.invars]
        found = rule(eqn)
        if found is not None:
            check_shape(found, eqn)
            tried = sum(_check_mesh(eqn, found, operands, mesh, tolerance) for mesh in meshes)
            counts[eqn.primitive.name] = counts.get(eqn.primitive.name, 0) + tried
        for var, value in zip(eqn.outvars, jax_compat.bind(eqn, operands, eqn.params), strict=True):
            values[id(var)] = value
    return counts


def _value(atom: Any, values: dict[int, Any]) -> Any:
    return jnp.asarray(literal_value(atom)) if isinstance(atom, Literal) else values[id(atom)]


def _check_mesh(eqn: JaxprEqn, rule: Rule, operands: list[Any], mesh: Mesh, tolerance: float) -> int:
    count = 0
    for assignment in strategies(rule, mesh, eqn):
        found = layouts(rule, assignment, mesh)
        if found is not None:
            _check_strategy(eqn, rule, operands, *found, mesh, tolerance)
            count += 1
    return count


def strategies(rule: Rule, mesh: Mesh, eqn: JaxprEqn) -> Iterator[Assignment]:
    """Every assignment that a rule admits in which each axis of the mesh does something."""
    options: list[list[tuple[str, Any, Any]]] = []
    dtype = eqn.outvars[0].aval.dtype
    for axis in mesh.axis_names:
        shards = [(axis, factor, None) for factor in rule.shardable()]
        parts = [(axis, op, passes) for passes in rule.passes for op in passes.ops if _defined(op, dtype)]
        options.append([*shards, *parts])
    for choice in itertools.product(*options):
        for order in itertools.permutations(choice):
            assignment = Assignment()
            for axis, what, passes in order:
                if passes is not None:
                    assignment = assignment.let_pass(axis, what, passes)
                else:
                    assignment = assignment.shard(what, (*assignment.axes_of(what), axis))
            whole = all(rule.divides(factor, mesh.group_size(axes)) for factor, axes in assignment.factors)
            same_factor = len({what for _, what, passes in choice if passes is None}) < len(choice)
            if whole and (order == choice or same_factor):
                yield assignment


def _defined(op: str, dtype: Any) -> bool:
    if dtype == jnp.bool_:
        return op not in ("sum", "mean")
    if jnp.issubdtype(dtype, jnp.integer):
        return op != "mean"
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return op in ("sum", "mean", "prod")
    return jnp.issubdtype(dtype, jnp.floating) and op not in ("and", "or", "xor")


def _check_strategy(
    eqn: JaxprEqn,
    rule: Rule,
    operands: list[Any],
    operand_layouts: tuple[Layout, ...],
    result_layouts: tuple[Layout, ...],
    mesh: Mesh,
    tolerance: float,
) -> None:
    """Compute on shards and on whole arrays, and compare every rank."""
    variables = [Var(atom.aval) for atom in eqn.invars]
    eqn = eqn.replace(invars=list(variables))
    ranks, whole = (
        zip(*map(_spread, operands, operand_layouts, itertools.count()), strict=True) if operands else ((), ())
    )
    jaxpr = GlobalJaxpr(tuple(variables), (eqn,), tuple(eqn.outvars))
    planned = PlannedEqn(eqn, rule, operand_layouts, result_layouts, ())
    plan = Plan(jaxpr, mesh, operand_layouts, (), (planned,), (), result_layouts, DEFAULT)
    what = f"{eqn.primitive} with {', '.join(map(str, operand_layouts))} -> {', '.join(map(str, result_layouts))} on {mesh!r}"
    try:
        results = simulate(Program(eqn.primitive.name, plan, (), mesh.coordinate_at(0)), list(ranks))
    except Exception as error:
        raise RuleError(f"{what}: the local computation fails: {type(error).__name__}: {error}") from error
    expected = jax_compat.bind(eqn, list(whole), eqn.params)
    kinds = [x.dtype for x in (*whole, *expected) if jnp.issubdtype(x.dtype, jnp.inexact)]
    bound = max([tolerance, *(8 * float(jnp.finfo(kind).eps) for kind in kinds)])
    for wanted, shards, layout in zip(expected, results, result_layouts, strict=True):
        _compare(what, wanted, shards, layout, bound)


def _spread(value: Any, layout: Layout, seed: int) -> tuple[Ranks, Any]:
    """An operand on every rank, and as a whole: parts are made first, and the whole is their reduction."""
    mesh, shape = layout.mesh, value.shape
    axes = tuple(axis for axis, _ in layout.partial)
    if axes:
        op = layout.partial[0][1]
        parts = [_part(value, op, seed, i) for i in range(mesh.group_size(axes))]
        held = [parts[mesh.flat_index(at, axes)] for at in mesh.coordinates()]
        value = reduce_parts(parts, op)
    else:
        held = [value] * mesh.size
    return tuple(x[layout.index(shape, at)] for x, at in zip(held, mesh.coordinates(), strict=True)), value


def _part(value: Any, op: str, seed: int, i: int) -> jax.Array:
    """The i-th part: unequal, of mixed signs, and wrapping for integers that are summed or multiplied."""
    rng = np.random.default_rng([seed, i, 7])
    dtype = value.dtype
    if dtype == jnp.bool_:
        return jnp.asarray(rng.integers(0, 2, value.shape).astype(bool))
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        wide = np.uint64 if limits.min == 0 else np.int64
        return jnp.asarray(rng.integers(limits.min, limits.max, value.shape, wide, endpoint=True).astype(dtype))
    numbers = rng.integers(-8, 9, value.shape) / 4 + 0.125
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.asarray((numbers + 1j * rng.integers(-4, 5, value.shape)).astype(dtype))
    return jnp.asarray(numbers).astype(dtype)


def _compare(what: str, wanted: Any, shards: Ranks, layout: Layout, tolerance: float) -> None:
    mesh = layout.mesh
    axes = tuple(axis for axis, _ in layout.partial)
    reduced: dict[int, Any] = {}
    for group in group_positions(mesh, axes):
        total = reduce_parts([shards[p] for p in group], layout.partial[0][1]) if axes else shards[group[0]]
        reduced.update(dict.fromkeys(group, total))
    for position, at in enumerate(mesh.coordinates()):
        found, expected = reduced[position], wanted[layout.index(wanted.shape, at)] if wanted.ndim else wanted
        same = found.shape == expected.shape and found.dtype == expected.dtype
        if not same or not _close(_plain(found), _plain(expected), tolerance):
            raise RuleError(
                f"{what}: coordinate {at} holds another value than the whole computation gives: "
                + (_difference(found, expected) if same else f"{_type(found)}, expected {_type(expected)}.")
            )


def _type(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}"


def _difference(found: Any, expected: Any) -> str:
    """The element that is furthest off."""
    ours, theirs = _plain(found), _plain(expected)
    off = np.nan_to_num(np.abs(ours - theirs), nan=np.inf) if ours.dtype != np.bool_ else ours != theirs
    at = np.unravel_index(int(np.argmax(off)), off.shape)
    place = f" at {[int(index) for index in at]}" if off.ndim else ""
    return f"{ours[at]}{place}, expected {theirs[at]}, in {_type(found)}."


def _plain(value: Any) -> np.ndarray[Any, Any]:
    """The numbers of an array; of typed keys their words."""
    return np.asarray(jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value)


def _close(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], tolerance: float) -> bool:
    if found.dtype.kind in "biu":
        return bool(np.array_equal(found, expected))
    wide = np.complex128 if found.dtype.kind == "c" else np.float64
    a, b = found.astype(wide), expected.astype(wide)
    finite = np.abs(b[np.isfinite(b)])
    scale = float(finite.max()) if finite.size else 0.0
    return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True))
