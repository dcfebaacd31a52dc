"""Rules of users: for a primitive of their own, and for a Python function as one step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from oracle import agree, fitting

import spmd
from collectives.jax_compat import function_primitive, primitive
from placements import Mesh, P, Shard
from spmd.factors import Rule
from spmd.rules import REGISTERED
from spmd.rules.elementwise import elementwise
from spmd.testing import check_rule

S = Shard
SOME = fitting(Mesh(a=2), Mesh(a=3), Mesh(a=7))


def signed(*shape: int) -> Any:
    return (np.sin(np.arange(np.prod(shape)) * 1.7) * 1.3).astype(np.float32).reshape(shape)


@spmd.rule("b s d, d f -> b s f")
def mixed(x: Any, w: Any) -> Any:
    """Nothing that a table knows as one step."""
    return (jnp.tanh(x[..., None] * w) * jnp.cos(w)).sum(-2)


@spmd.rule("r c -> r, r c", replicated=("c",))
def normalised(x: Any) -> Any:
    scale = jnp.abs(x).max(-1)
    return scale, x / scale[:, None]


@spmd.rule("r c -> c", reduce="max", linear=())
def highest(x: Any) -> Any:
    return x.max(0, initial=-jnp.inf)


def test_a_function_is_one_step() -> None:
    """Sharded on any factor, a sum over one that is in no result; values and gradients; under vmap, in a loop."""
    args = [signed(5, 3, 4), signed(4, 6)]
    for placements in ((P(a=S(0)), P()), (P(a=S(1)), P()), (P(a=S(2)), P(a=S(0))), (P(), P(a=S(1)))):
        agree(mixed, args, placements, SOME[1:2], fallback="error")
    agree(normalised, [signed(5, 4)], [P(a=S(0))], SOME[1:2], fallback="error", compiled=True)
    agree(highest, [signed(5, 4)], [P(a=S(0))], SOME[2:], fallback="error", gradient=False)
    agree(
        lambda x, w: lax.fori_loop(0, 2, lambda i, y: mixed(y, w), x),
        [args[0], signed(4, 4)],
        [P(a=S(0)), P()],
        SOME[:1],
    )
    agree(lambda x, w: jax.vmap(lambda y: mixed(y, w))(x), [signed(2, 5, 3, 4), args[1]], [P(a=S(1)), P()], SOME[:1])


def test_its_program() -> None:
    lowered = spmd.jit(mixed, mesh=Mesh(a=4), in_placements=(P(a=S(2)), P(a=S(0)))).lower(signed(5, 3, 4), signed(4, 6))
    lowered.check(all_reduce=1)
    assert "= mixed x w" in str(lowered)
    spmd.jit(normalised, mesh=Mesh(a=4), in_placements=P(a=S(1))).lower(signed(5, 4)).check(all_to_all=1)


FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "a sum that is none": (lambda: spmd.rule("r c -> c")(lambda x: x.max(0)), "another value than the whole"),
    "a shard that is not independent": (lambda: spmd.rule("r c -> r c")(lambda x: jnp.cumsum(x, 1)), "another value"),
    "parts that do not pass": (lambda: spmd.rule("r c -> r c", linear=(0,))(lambda x: x * x), "another value"),
    "a fixed size": (lambda: spmd.rule("r c -> r c")(lambda x: x.reshape(2, 2)), "give arrays that the function takes"),
    "no arrow": (lambda: spmd.rule("r c"), "an arrow and results"),
    "a factor twice": (lambda: spmd.rule("r r -> r"), "names a factor twice"),
    "no name": (lambda: spmd.rule("r *, c -> r"), "names of factors"),
    "an unknown op": (lambda: spmd.rule("r c -> c", reduce="average"), "reduce is one of sum, mean"),
    "an unknown factor": (lambda: spmd.rule("r c -> c", replicated=("d",)), "d of `replicated` is no factor"),
    "an unknown operand": (lambda: spmd.rule("r c -> c", linear=(1,)), "`linear` names operands 0 to 0"),
    "nothing to shard": (lambda: spmd.rule("r -> r", replicated=("r",))(lambda x: x * 2), "nothing may be sharded"),
    "too few operands": (lambda: mixed(signed(5, 3, 4)), r"has 2 operands; got 1"),
    "sizes that differ": (lambda: mixed(signed(5, 3, 4), signed(5, 6)), r"d is 4 and, in operand 1, 5"),
    "other dims": (lambda: mixed(signed(3, 4), signed(4, 6)), r"operand 0 has shape \(3, 4\), not the dims b s d"),
    "no primitive": (lambda: spmd.register_rule("add", elementwise), "takes a jax.extend.core.Primitive"),
    "ours": (lambda: spmd.register_rule(primitive("add"), elementwise), "add has a rule; replace=True"),
    "a loop": (lambda: spmd.register_rule(primitive("scan"), elementwise), "scan takes no rule"),
}


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_faults(name: str) -> None:
    make, message = FAULTS[name]
    before = dict(REGISTERED)
    with pytest.raises(spmd.RuleError, match=message):
        make()
    assert before == REGISTERED


def test_a_primitive_of_ones_own() -> None:
    """Without a row it replicates, with a warning; with one it stays sharded, and `check_rule` tries it."""
    soften: Primitive = function_primitive("soften", lambda x: jnp.log1p(jnp.exp(x)))

    def function(x: Any) -> Any:
        return soften.bind(x)[0] * 2

    with pytest.warns(spmd.PlacementWarning, match="soften"):
        spmd.jit(function, mesh=Mesh(a=2), in_placements=P(a=S(0)))(signed(5, 3))
    spmd.register_rule(soften, elementwise)
    try:
        agree(function, [signed(5, 3)], [P(a=S(0))], SOME, fallback="error")
        assert check_rule(function, signed(5, 3))["soften"] > 0
        spmd.register_rule(
            soften, lambda eqn: Rule((((0,), (1,)),), (((0,), (1,)),), (5, 3), replicated=(1,)), replace=True
        )
        spmd.jit(function, mesh=Mesh(a=2), in_placements=P(a=S(1))).lower(signed(5, 3)).check(all_to_all=1)
    finally:
        del REGISTERED[soften]


def test_operands_are_found_by_the_names_that_a_function_has() -> None:
    """Not by those of a function that it wraps; scalars are arrays too."""

    def plain(x: Any, w: Any) -> Any:
        return x - w

    @functools.wraps(plain)
    def turned(w: Any, x: Any) -> Any:
        return plain(x, w)

    a, b = signed(5, 3), signed(5, 3)[::-1].copy()
    np.testing.assert_array_equal(spmd.rule("r c, r c -> r c")(turned)(x=a, w=b), a - b)
    np.testing.assert_array_equal(spmd.rule("(), r c -> r c")(lambda s, x: s * x)(s=2.0, x=a), 2 * a)


def test_rules_that_do_not_fit_say_so() -> None:
    def softened(x: Any) -> Any:
        return jnp.tanh(x)

    def kernel(x: Any, y: Any) -> Any:
        return jnp.exp(-((x[:, :, None] - y[:, None]) ** 2).sum(-1))

    @spmd.rule("a b -> a b")
    def scaled(x: Any, k: float = 2.0) -> Any:
        return x * k

    for arguments, message in (
        ((softened,), "rule takes what is sharded"),
        (("a b -> a b", softened, {"replicated": "col"}), "col of `replicated` is no factor"),
        (("a b -> c", lambda x: x.sum(0) + x.sum(1)), "In results alone: c"),
        (("a b -> b a", softened), "b is 3 and, in result 0, 5"),
        (
            ("b n d, b m d -> b n m", kernel),
            r"expected .*, in float32",
        ),
    ):
        spec, *rest = arguments
        options = rest.pop() if rest and isinstance(rest[-1], dict) else {}
        with pytest.raises(spmd.RuleError, match=message) as caught:
            spmd.rule(spec, **options)(*rest)
        assert len(str(caught.value)) < 600
    spmd.rule("a b -> a b", linear=0)(lambda x: 2 * x)
    spmd.rule("a -> a", example=np.arange(5.0))(softened)
    with pytest.raises(spmd.RuleError, match=r"has 1 operands; got 2.*functools.partial\(scaled"):
        scaled(signed(5, 3), k=3.0)
    own = Primitive("own")
    own.def_impl(lambda x: x)
    own.def_abstract_eval(lambda x: x)
    for made in (
        "a b -> a b",
        Rule((((0,), (1,)),), ((0, 1),), (5, 3)),
        Rule((((0,), (7,)),), (((0,), (1,)),), (5, 3)),
    ):
        spmd.register_rule(own, lambda eqn: made, replace=True)  # noqa: B023
        with pytest.raises(spmd.RuleError, match=r"own"):
            spmd.jit(own.bind, mesh=Mesh(a=2), in_placements=P(a=S(0))).lower(signed(5, 3))
    del REGISTERED[own]
