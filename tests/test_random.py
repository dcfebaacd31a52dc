"""`jax.random` in a decorated function: the numbers of one machine, for every placement, mesh and number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import sample
from jax import random

import spmd
from placements import Mesh, P, Shard

N = (7, 5)
DRAWS: dict[str, Callable[[Any], Any]] = {
    "ball": lambda k: random.ball(k, 5, 2.0, (7,)),
    "bernoulli": lambda k: random.bernoulli(k, 0.3, N),
    "beta": lambda k: random.beta(k, 2.0, 3.0, N),
    "binomial": lambda k: random.binomial(k, 10, 0.3, N),
    "bits": lambda k: random.bits(k, N),
    "categorical": lambda k: random.categorical(k, jnp.arange(35.0).reshape(7, 5)),
    "cauchy": lambda k: random.cauchy(k, N),
    "chisquare": lambda k: random.chisquare(k, 3.0, shape=N),
    "choice": lambda k: random.choice(k, 20, N),
    "choice by weight": lambda k: random.choice(k, 4, N, p=jnp.array([0.1, 0.2, 0.3, 0.4])),
    "choice of others": lambda k: random.choice(k, 40, (7,), replace=False),
    "dirichlet": lambda k: random.dirichlet(k, jnp.ones(5), (7,)),
    "double_sided_maxwell": lambda k: random.double_sided_maxwell(k, 0.0, 1.0, N),
    "exponential": lambda k: random.exponential(k, N),
    "f": lambda k: random.f(k, 3.0, 4.0, N),
    "folded": lambda k: random.normal(random.fold_in(random.split(k, 3)[1], 5), N),
    "gamma": lambda k: random.gamma(k, 2.0, N),
    "generalized_normal": lambda k: random.generalized_normal(k, 1.5, N),
    "geometric": lambda k: random.geometric(k, 0.3, N),
    "gumbel": lambda k: random.gumbel(k, N),
    "laplace": lambda k: random.laplace(k, N),
    "loggamma": lambda k: random.loggamma(k, 2.0, N),
    "logistic": lambda k: random.logistic(k, N),
    "lognormal": lambda k: random.lognormal(k, 1.0, N),
    "maxwell": lambda k: random.maxwell(k, N),
    "multinomial": lambda k: random.multinomial(k, 10, jnp.ones(5) / 5, shape=N),
    "multivariate_normal": lambda k: random.multivariate_normal(k, jnp.zeros(5), jnp.eye(5), (7,)),
    "normal": lambda k: random.normal(k, N),
    "normal of 16 bits": lambda k: random.normal(k, N, jnp.bfloat16),
    "orthogonal": lambda k: random.orthogonal(k, 5, (7,)),
    "pareto": lambda k: random.pareto(k, 2.0, N),
    "permutation": lambda k: random.permutation(k, jnp.arange(35).reshape(7, 5)),
    "permutation of each": lambda k: random.permutation(k, jnp.arange(35).reshape(7, 5), independent=True),
    "poisson": lambda k: random.poisson(k, 3.0, N),
    "rademacher": lambda k: random.rademacher(k, N),
    "randint": lambda k: random.randint(k, N, -3, 9),
    "rayleigh": lambda k: random.rayleigh(k, 1.0, N),
    "t": lambda k: random.t(k, 3.0, N),
    "triangular": lambda k: random.triangular(k, 0.0, 0.5, 1.0, N),
    "truncated_normal": lambda k: random.truncated_normal(k, -1.0, 1.0, N),
    "uniform": lambda k: random.uniform(k, N),
    "wald": lambda k: random.wald(k, 1.0, N),
    "weibull_min": lambda k: random.weibull_min(k, 1.0, 2.0, N),
}
"""Every distribution of `jax.random`."""

FIRST = P(a=Shard(0))


def close(found: Any, expected: Any) -> None:
    """Integers and flags are equal; floats but for the rounding of the last functions."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if expected.dtype.kind in "biu":
        np.testing.assert_array_equal(found, expected)
    else:
        np.testing.assert_allclose(found.astype(np.float64), expected.astype(np.float64), rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("name", sample(DRAWS, 4))
def test_numbers_are_those_of_one_machine(name: str) -> None:
    """Typed and raw keys, results sharded in several ways, and a key for each row, sharded like the rows."""
    draw = DRAWS[name]
    for key in (random.key(3), random.PRNGKey(3)):
        expected = draw(key)
        placements = [FIRST] if expected.ndim == 1 else [FIRST, P(b=Shard(1), a=Shard(0))]
        for placement in placements:
            mesh = Mesh(a=3) if placement == FIRST else Mesh(b=2, a=2)
            drawn = spmd.jit(draw, mesh=mesh, out_placements=placement, fallback="allow")
            close(drawn(key).full(), expected)
    keys = random.split(random.key(4), 5)
    rows = spmd.jit(jax.vmap(draw), mesh=Mesh(a=3), in_placements=FIRST, fallback="error")
    close(rows(keys).full(), jax.vmap(draw)(keys))
    for collective in rows.lower(keys).collectives:
        assert collective.shape == (), f"{collective}: an array is sent, where each rank has keys of its own"


def test_every_distribution_is_tried() -> None:
    others = {"clone", "fold_in", "key", "key_data", "key_dtype", "key_impl", "PRNGKey", "split", "wrap_key_data"}
    public = {name for name in dir(random) if not name.startswith("_") and callable(getattr(random, name))}
    tried = {name.split()[0] for name in DRAWS} | others | {"gamma", "bits", "fold_in"}
    assert {name for name in public - tried if name.islower() or name == "PRNGKey"} == set()
