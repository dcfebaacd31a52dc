"""Elementwise primitives: one factor per dim of the result; operands may be scalars, or have size-1 dims.

Since JAX 0.10 an operand's dim may have size 1 against a larger one; such a dim carries no factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from collectives.jax_compat import JaxprEqn, Literal
from spmd.factors import ANY_OP, LINEAR, Passes, Rule

PassesOf = Callable[[JaxprEqn], tuple[Passes, ...]]


def elementwise(eqn: JaxprEqn, passes: tuple[Passes, ...] = ()) -> Rule:
    """The rule of an equation that computes every element of its results from those at the same index."""
    sizes = eqn.outvars[0].aval.shape
    operands = tuple(
        tuple((dim,) if size == sizes[dim] else () for dim, size in enumerate(atom.aval.shape)) for atom in eqn.invars
    )
    results = (tuple((dim,) for dim in range(len(sizes))),) * len(eqn.outvars)
    return Rule(operands, results, sizes, passes=passes, flops=float(math.prod(sizes)))


def _row(passes: PassesOf | None = None) -> Callable[[JaxprEqn], Rule]:
    return lambda eqn: elementwise(eqn, () if passes is None else passes(eqn))


def _dtype(eqn: JaxprEqn) -> Any:
    return eqn.outvars[0].aval.dtype


def linear_ops(dtype: Any) -> tuple[str, ...]:
    """The ops of parts that linear equations of a dtype admit: sum, and mean for inexact ones; none for bool."""
    if dtype == jnp.bool_:
        return ()
    return LINEAR if jnp.issubdtype(dtype, jnp.inexact) else ("sum",)


def _unary_linear(eqn: JaxprEqn) -> tuple[Passes, ...]:
    return (Passes(linear_ops(_dtype(eqn)), (0,)),)


def _identity(eqn: JaxprEqn) -> tuple[Passes, ...]:
    return (Passes(ANY_OP, (0,), movement=True),)


def _additive(eqn: JaxprEqn) -> tuple[Passes, ...]:
    return (Passes(linear_ops(_dtype(eqn)), (0, 1)),)


def _multilinear(eqn: JaxprEqn) -> tuple[Passes, ...]:
    """By a finite literal, or of integers: by an infinity, parts of both signs would give NaN in place of one."""
    ops, exact = linear_ops(_dtype(eqn)), not jnp.issubdtype(_dtype(eqn), jnp.inexact)
    return tuple(Passes(ops, (at,)) for at in (0, 1) if exact or _is_finite(eqn.invars[1 - at]))


def _is_finite(atom: Any) -> bool:
    return isinstance(atom, Literal) and bool(np.all(np.isfinite(np.asarray(atom.val).tolist())))


def _quotient(eqn: JaxprEqn) -> tuple[Passes, ...]:
    """By a literal: by a value that may be zero, parts of both signs would give NaN in place of an infinity."""
    divisor = eqn.invars[1]
    if not _is_finite(divisor) or not np.all(divisor.val):
        return ()
    return (Passes(LINEAR, (0,)),) if jnp.issubdtype(_dtype(eqn), jnp.inexact) else ()


def _same_op(op: str) -> PassesOf:
    return lambda eqn: (Passes((op,), (0, 1)),)


def widens(source: Any, target: Any) -> bool:
    """Whether every value of an inexact dtype is one of another of its kind."""
    kinds = (jnp.floating, jnp.complexfloating)
    if not any(jnp.issubdtype(source, kind) and jnp.issubdtype(target, kind) for kind in kinds):
        return False
    a, b = jnp.finfo(source), jnp.finfo(target)
    return bool(a.nmant <= b.nmant and a.maxexp <= b.maxexp and a.minexp >= b.minexp)


def _cast(eqn: JaxprEqn) -> tuple[Passes, ...]:
    """From an inexact type to an equal or wider one of its kind; before any other cast parts are reduced."""
    source, target = eqn.invars[0].aval.dtype, _dtype(eqn)
    if source == target:
        return _identity(eqn)
    if widens(source, target):
        return (Passes(("sum", "mean", "prod", "max", "min"), (0,), movement=True),)
    return ()


def _select(eqn: JaxprEqn) -> tuple[Passes, ...]:
    return (Passes(ANY_OP, tuple(range(1, len(eqn.invars))), movement=True),)


NONLINEAR: Final = (
    "abs acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz cos cosh digamma eq eq_to "
    "erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac integer_pow is_finite le le_to lgamma log "
    "log1p log2 logistic lt lt_to mulhi ne nextafter not one_minus_square polygamma population_count pow "
    "reduce_precision regularized_incomplete_beta rem round rsqrt shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sinh sqrt square tan tanh zeta"
)

TABLE: Final[dict[str, Callable[[JaxprEqn], Rule]]] = {
    **{name: _row() for name in NONLINEAR.split()},
    "add": _row(_additive),
    "add_jaxvals": _row(_additive),
    "and": _row(_same_op("and")),
    "complex": _row(_additive),
    "conj": _row(_unary_linear),
    "convert_element_type": _row(_cast),
    "copy": _row(_identity),
    "div": _row(_quotient),
    "imag": _row(_unary_linear),
    "max": _row(_same_op("max")),
    "min": _row(_same_op("min")),
    "mul": _row(_multilinear),
    "name": _row(_identity),
    "neg": _row(_unary_linear),
    "or": _row(_same_op("or")),
    "real": _row(_unary_linear),
    "select_n": _row(_select),
    "sub": _row(_additive),
    "xor": _row(_same_op("xor")),
}
