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
from spmd.rules import contraction, elementwise, indexing, movement, random, reduction

Maker = Callable[[JaxprEqn], Rule | None]

RULES: Final[dict[Primitive, Maker]] = {
    found: maker
    for table in (
        elementwise.TABLE,
        reduction.TABLE,
        movement.TABLE,
        contraction.TABLE,
        indexing.TABLE,
        random.TABLE,
    )
    for name, maker in table.items()
    if (found := primitive(name)) is not None
}


def rule_of(eqn: JaxprEqn) -> Rule | None:
    """The rule of an equation, or None where it must be computed on replicated operands."""
    maker = RULES.get(eqn.primitive)
    return None if maker is None else maker(eqn)
