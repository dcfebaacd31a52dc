"""Rules of users: for a primitive of their own, or for a Python function that is one step to the planner.

A rule is a promise, so one that is written as `rule("b s d, d f -> b s f")` is tried when it is made: every strategy that it
admits, on simulated ranks, against the function on whole arrays.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax import lax

from collectives.jax_compat import JaxprEqn, Primitive, function_primitive
from collectives.simulated import identity
from placements.placement import REDUCTIONS
from spmd.effects import CALLBACKS
from spmd.errors import RuleError
from spmd.factors import LINEAR, Passes, Rule, check_shape
from spmd.rules import OTHERWISE, REGISTERED, RULES, Maker
from spmd.testing import check_rule

SIZES: Final = (5, 3, 4, 7, 2, 6)
"""Sizes of the factors of examples, by turns: some divide, some do not."""


def register_rule(primitive: Primitive, maker: Maker, *, replace: bool = False) -> None:
    """Let `maker(eqn)` say how equations of a primitive are sharded: a `spmd.factors.Rule`, or None for replicated operands.

    `eqn` is JAX's equation, with whole shapes. Programs that are lowered from now on use it; `spmd.testing.check_rule` tries
    it. With `replace` it may take the place of another. Raises `RuleError` for what is no primitive, needs no rule, or has one.

    >>> from jax.extend.core import Primitive
    >>> from spmd.rules.elementwise import elementwise
    >>> register_rule(Primitive("soften"), elementwise)
    """
    if not isinstance(primitive, Primitive) or not callable(maker):
        raise RuleError(
            f"register_rule takes a jax.extend.core.Primitive and a function of an equation; got {primitive!r}, {maker!r}."
        )
    if primitive.name in OTHERWISE:
        raise RuleError(f"register_rule: {primitive.name} takes no rule: {OTHERWISE[primitive.name]}.")
    if primitive.name in CALLBACKS:
        raise RuleError(f"register_rule: {primitive.name} takes no rule: its effect happens once, with whole values.")
    if (primitive in RULES or primitive in REGISTERED) and not replace:
        raise RuleError(f"register_rule: {primitive.name} has a rule; replace=True takes its place.")
    REGISTERED[primitive] = _checked(maker)


def _checked(maker: Maker) -> Maker:
    """A maker whose rules fit the equations, or are a `RuleError`."""

    def checked(eqn: JaxprEqn) -> Rule | None:
        found = maker(eqn)
        if found is None:
            return None
        if not isinstance(found, Rule):
            raise RuleError(f"{eqn.primitive}: its rule is a spmd.factors.Rule, or None; the maker returned {found!r}.")
        try:
            check_shape(found, eqn)
        except (TypeError, IndexError) as error:
            raise RuleError(
                f"{eqn.primitive}: {found!r}: a rule has, for every operand and every result, a tuple of its dims, and for "
                f"each dim a tuple of factors, which are indices into `sizes`: {type(error).__name__}: {error}."
            ) from error
        return found

    return checked


def rule(
    spec: str,
    *,
    reduce: str = "sum",
    replicated: str | Sequence[str] = (),
    linear: int | Sequence[int] = (),
    example: Sequence[Any] | None = None,
    tolerance: float = 2e-5,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function of arrays one step of a Program, sharded as `spec` says: `"b s d, d f -> b s f"`.

    It takes the operands that `spec` lists, in order or by name, and nothing else: bind other values by `functools.partial`.

    A name is a factor, one for each dim; `()` is a 0-d array. A factor of operands and results may be sharded, and the
    function is then called with shards; one that is in no result is reduced by `reduce` over what it is sharded over; those of
    `replicated` are whole. In each of the operands `linear` parts may pass. The function is differentiated and batched as the
    operations in it are.

    It is tried at once, on arrays `example` or on small ones of float32. Raises `RuleError` where the promise does not hold,
    and at a call where sizes do not agree. Communication: none of its own.

    >>> import jax.numpy as jnp
    >>> @rule("b d, d f -> b f")
    ... def project(x, w):
    ...     return jnp.tanh(x[:, :, None] * w).sum(1)
    >>> project(jnp.ones((2, 3)), jnp.ones((3, 1))).shape
    (2, 1)
    """
    if not isinstance(spec, str):
        raise RuleError(f'rule takes what is sharded, as in @spmd.rule("b s d, d f -> b s f"); got {spec!r}.')
    operands, results = _parsed(spec)
    replicated = replicated.split() if isinstance(replicated, str) else replicated
    linear = (linear,) if isinstance(linear, int) else linear
    names = list(dict.fromkeys(itertools.chain(*operands, *results)))
    if reduce not in REDUCTIONS:
        raise RuleError(f"rule({spec!r}): reduce is one of {', '.join(REDUCTIONS)}; got {reduce!r}.")
    if unknown := [name for name in replicated if name not in names]:
        raise RuleError(
            f"rule({spec!r}): {', '.join(unknown)} of `replicated` is no factor; they are {', '.join(names)}."
        )
    if any(not 0 <= index < len(operands) for index in linear):
        raise RuleError(f"rule({spec!r}): `linear` names operands 0 to {len(operands) - 1}; got {tuple(linear)}.")
    produced, given = set(itertools.chain(*results)), set(itertools.chain(*operands))
    whole = {*replicated, *(produced - given)}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        name = getattr(function, "__name__", getattr(getattr(function, "func", None), "__name__", "function"))
        primitive = function_primitive(name, function)

        def maker(eqn: JaxprEqn) -> Rule:
            atoms = [*eqn.invars, *eqn.outvars]
            sizes = _sizes(f"{name}: rule({spec!r})", (*operands, *results), atoms, len(operands))

            def local(call: Any, values: list[Any]) -> list[Any]:
                shapes = [*(np.shape(value) for value in values), *call.result_shapes]
                if any(0 in shape for shape in shapes) and 0 not in sizes.values():
                    pairs = zip(call.result_shapes, eqn.outvars, strict=True)
                    return [lax.full(shape, identity(reduce, var.aval.dtype)) for shape, var in pairs]
                return list(primitive.bind(*values))

            return Rule(
                tuple(tuple((names.index(factor),) for factor in dims) for dims in operands),
                tuple(tuple((names.index(factor),) for factor in dims) for dims in results),
                tuple(sizes[factor] for factor in names),
                tuple((names.index(factor), reduce) for factor in names if factor not in produced | whole),
                tuple(names.index(factor) for factor in names if factor in whole),
                tuple(Passes(LINEAR, (index,)) for index in linear),
                local=local,
                flops=float(math.prod(sizes.values())),
            )

        @functools.wraps(function)
        def call(*arrays: Any, **named: Any) -> Any:
            if named:
                arrays = _in_order(f"{name}: rule({spec!r})", function, arrays, named)
            if len(arrays) != len(operands):
                raise RuleError(
                    f"{name}: rule({spec!r}) has {len(operands)} operands; got {len(arrays)}. Give other values before the "
                    f"rule is made: spmd.rule({spec!r})(functools.partial({name}, ...))."
                )
            arrays = tuple(value if hasattr(value, "shape") else jnp.asarray(value) for value in arrays)
            _sizes(f"{name}: rule({spec!r})", (*operands, *results), arrays, len(operands))
            found = primitive.bind(*arrays)
            return found[0] if len(results) == 1 else tuple(found)

        REGISTERED[primitive] = maker
        arrays = _example(operands, names) if example is None else [example] if hasattr(example, "shape") else example
        try:
            if not sum(check_rule(call, *arrays, tolerance=tolerance).values()):
                raise RuleError(f"{name}: rule({spec!r}): nothing may be sharded, and no parts pass.")
        except RuleError:
            del REGISTERED[primitive]
            raise
        except Exception as error:
            del REGISTERED[primitive]
            pairs = zip(operands, arrays, strict=False)
            shapes = ", ".join(f"{' '.join(factors) or '()'} of shape {np.shape(array)}" for factors, array in pairs)
            created = sorted((produced - given) - set(replicated))
            only = f" In results alone: {', '.join(created)}." if created else ""
            raise RuleError(
                f"{name}: rule({spec!r}): on {shapes}: {type(error).__name__}: {str(error).rstrip('.')}. The rule is tried "
                f"when it is made; give arrays that the function takes as `example`.{only}"
            ) from error
        return call

    return decorate


def _in_order(
    what: str, function: Callable[..., Any], arrays: Sequence[Any], named: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The operands of a call that names some of them."""
    try:
        bound = inspect.signature(function, follow_wrapped=False).bind(*arrays, **named)
    except TypeError as error:
        raise RuleError(f"{what}: {error}.") from error
    if bound.kwargs:
        raise RuleError(
            f"{what}: {', '.join(bound.kwargs)} is no operand: give values that are no arrays by functools.partial, to a "
            "function that a rule is then made of."
        )
    return bound.args


def _parsed(spec: str) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
    """The factors of every dim of operands and results."""
    sides = spec.split("->")
    if len(sides) != 2:
        raise RuleError(f'rule({spec!r}): write operands, an arrow and results, as in "b s d, d f -> b s f".')
    found = []
    for side in sides:
        dims = [tuple(() if entry.strip() == "()" else entry.split()) for entry in side.split(",")]
        for entry, factors in zip(side.split(","), dims, strict=True):
            if not entry.strip() or any(not re.fullmatch(r"[A-Za-z_]\w*", factor) for factor in factors):
                raise RuleError(
                    f"rule({spec!r}): {entry.strip()!r}: names of factors, apart by spaces, or () for a 0-d array."
                )
            if len(set(factors)) < len(factors):
                raise RuleError(f"rule({spec!r}): {entry.strip()!r} names a factor twice.")
        found.append(tuple(tuple(factors) for factors in dims))
    return found[0], found[1]


def _sizes(what: str, dims: Sequence[Sequence[str]], arrays: Sequence[Any], operands: int) -> dict[str, int]:
    """The size of every factor, from the operands, or from operands and results."""
    sizes: dict[str, int] = {}
    if len(arrays) not in (operands, len(dims)):
        raise RuleError(f"{what}: the function gives {len(arrays) - operands} results, not {len(dims) - operands}.")
    for index, (factors, array) in enumerate(zip(dims, arrays, strict=False)):
        name = f"operand {index}" if index < operands else f"result {index - operands}"
        shape = tuple(np.shape(getattr(array, "aval", array)))
        if len(shape) != len(factors):
            raise RuleError(f"{what}: {name} has shape {shape}, not the dims {' '.join(factors) or '()'}.")
        for factor, size in zip(factors, shape, strict=True):
            if sizes.setdefault(factor, size) != size:
                raise RuleError(f"{what}: {factor} is {sizes[factor]} and, in {name}, {size}.")
    return sizes


def _example(operands: Sequence[Sequence[str]], names: Sequence[str]) -> list[Any]:
    """Small arrays, position-dependent and of both signs."""
    sizes = {name: SIZES[at % len(SIZES)] for at, name in enumerate(names)}
    found = []
    for seed, factors in enumerate(operands):
        shape = tuple(sizes[factor] for factor in factors)
        found.append((np.sin(np.arange(math.prod(shape)) * 1.7 + seed) * 1.3).astype(np.float32).reshape(shape))
    return found
