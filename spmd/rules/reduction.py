"""Reductions over dims: a reduced dim is a reduction factor where parts exist, else a replicated one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from collectives.jax_compat import JaxprEqn
from spmd.factors import Passes, Rule
from spmd.rules.elementwise import elementwise, linear_ops


def _reduced_dims(eqn: JaxprEqn) -> tuple[Any, Any]:
    """The factors of operand and result: one per dim of the operand, reduced ones left out of the result."""
    axes, shape = eqn.params["axes"], eqn.invars[0].aval.shape
    dims = tuple((dim,) for dim in range(len(shape)))
    return dims, tuple(factors for dim, factors in enumerate(dims) if dim not in axes)


def _reduce(op: str) -> Callable[[JaxprEqn], Rule]:
    """Reduce over dims: sharding one of them yields parts of the same op; such parts also pass through."""

    def maker(eqn: JaxprEqn) -> Rule:
        shape = eqn.invars[0].aval.shape
        operand, result = _reduced_dims(eqn)
        ops = linear_ops(eqn.outvars[0].aval.dtype) if op == "sum" else (op,)
        reductions = tuple((axis, op) for axis in eqn.params["axes"])
        passes = (Passes(ops, (0,)),)
        return Rule((operand,), (result,), shape, reductions, passes=passes, flops=float(math.prod(shape)))

    return maker


def _whole(eqn: JaxprEqn) -> Rule:
    """Reduce over dims that must not be sharded: argmax, argmin."""
    shape = eqn.invars[0].aval.shape
    operand, result = _reduced_dims(eqn)
    return Rule((operand,), (result,), shape, replicated=tuple(eqn.params["axes"]), flops=float(math.prod(shape)))


def _top_k(eqn: JaxprEqn) -> Rule:
    """The largest of a dim, which must not be sharded."""
    shape, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    axis = eqn.params["axis"]
    dims = tuple((dim,) for dim in range(len(shape)))
    result = (*dims[:axis], (len(shape),), *dims[axis + 1 :])
    sizes = (*shape, after[axis])
    whole = (axis, len(shape))
    return Rule((dims,), (result,) * 2, sizes, replicated=whole, flops=4.0 * math.prod(shape))


def _along(parameter: str, linear: bool = False) -> Callable[[JaxprEqn], Rule]:
    """Scan or sort along one dim, which must not be sharded; the others pass."""

    def maker(eqn: JaxprEqn) -> Rule:
        passes = (Passes(linear_ops(eqn.outvars[0].aval.dtype), (0,)),) if linear else ()
        rule = elementwise(eqn, passes)
        return Rule(
            rule.operands, rule.results, rule.sizes, (), (eqn.params[parameter],), rule.passes, flops=rule.flops
        )

    return maker


TABLE: Final[dict[str, Callable[[JaxprEqn], Rule | None]]] = {
    "argmax": _whole,
    "argmin": _whole,
    "cumlogsumexp": _along("axis"),
    "cummax": _along("axis"),
    "cummin": _along("axis"),
    "cumprod": _along("axis"),
    "cumsum": _along("axis", linear=True),
    "reduce_and": _reduce("and"),
    "reduce_max": _reduce("max"),
    "reduce_min": _reduce("min"),
    "reduce_or": _reduce("or"),
    "reduce_prod": _reduce("prod"),
    "reduce_sum": _reduce("sum"),
    "reduce_xor": _reduce("xor"),
    "sort": _along("dimension"),
    "top_k": _top_k,
}
