"""The tables of rules: one module per family, one row per primitive.

`rule_of(eqn)` is the only entry: it finds the row by the equation's primitive and makes the rule for its shapes, dtypes
and parameters. None means that there is no row, or that the row does not cover these parameters: the caller falls back to
replicated operands, which is right for every primitive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from collectives.jax_compat import JaxprEqn, Primitive, primitive
from spmd.factors import Rule
from spmd.rules import contraction, elementwise, indexing, linalg, movement, named, random, reduction, windowed

Maker = Callable[[JaxprEqn], Rule | None]

RULES: Final[dict[Primitive, Maker]] = {
    found: maker
    for table in (
        elementwise.TABLE,
        reduction.TABLE,
        movement.TABLE,
        contraction.TABLE,
        indexing.TABLE,
        linalg.TABLE,
        random.TABLE,
        windowed.TABLE,
    )
    for name, maker in table.items()
    if (found := primitive(name)) is not None
}


REGISTERED: Final[dict[Primitive, Maker]] = {}
"""The rows of users. They come before ours."""


def rule_of(eqn: JaxprEqn) -> Rule | None:
    """The rule of an equation, or None where it must be computed on replicated operands."""
    maker = REGISTERED.get(eqn.primitive) or RULES.get(eqn.primitive) or named.TABLE.get(eqn.primitive.name)
    return None if maker is None else maker(eqn)


_BODIES: Final = "planned with its bodies, or inlined when tracing"
_LOCAL: Final = "in local functions a collective over their axes; elsewhere JAX refuses it when tracing"
_EFFECT: Final = "an effect, or a reference: refused, with the reason"

OTHERWISE: Final[dict[str, str]] = {
    **dict.fromkeys((
        "call", "call_hi_primitive", "closed_call", "cond", "custom_jvp_call", "custom_linear_solve", "custom_vjp_call",
        "eval_jaxpr", "jit", "remat2", "scan", "while",
    ), _BODIES),
    **dict.fromkeys((
        "all_gather", "all_to_all", "axis_index", "pmax", "pmin", "ppermute", "psum",
    ), _LOCAL),
    "ragged_all_to_all": "refused, with the reason: `collectives.ragged_all_to_all` is the one that there is",
    "sharding_constraint": "a constraint, when traced",
    **dict.fromkeys(("after_all", "create_token", "dce_sink", "get", "swap"), _EFFECT),
    "custom_lin": "inside JAX's transformations alone",
    "stage": "inside JAX's transformations alone",
    "device_put": "gone when traced: devices are the process's own",
    "stop_gradient": "gone when traced: differentiation is over",
    "split": "becomes slices when traced",
}  # fmt: skip
"""Primitives that need no rule, and why."""

REPLICATED: Final[dict[str, str]] = {
    "approx_top_k": "its result depends on the platform",
    "cholesky_update": "one matrix",
    "empty2": "uninitialised memory",
    "polynomial": "coefficients and values in one operand",
    "random_seed": "one key",
    "reduce": "a reduction by any function has no parts",
    "reduce_window": "a reduction by any function has no identity",
    "rng_bit_generator": "its state runs through all elements",
    "rng_uniform": "its state runs through all elements",
    "select_and_gather_add": "forward-mode derivative of a maximum over windows",
    "select_and_scatter": "a reduction by any function has no identity",
    "threefry2x32": "bits of keys that were taken apart by hand",
}
"""Primitives that are computed on whole operands on every rank, and why."""
