"""Library code that users call without knowing what is inside: solvers, scans, integrators, minimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import sample
from jax import lax
from jax.experimental.ode import odeint
from jax.scipy.optimize import minimize
from jax.scipy.sparse.linalg import bicgstab, cg, gmres
from oracle import agree, fitting

from placements import Mesh, P, Shard

X = np.sin(np.arange(21).reshape(7, 3) * 1.7).astype(np.float32)
W = (np.cos(np.arange(49).reshape(7, 7) * 1.3) * 0.3 + 3 * np.eye(7)).astype(np.float32)


def root(x: Any) -> Any:
    """The root of y^3 + y = x of every element, by Newton's method."""
    return lax.custom_root(
        lambda y: y**3 + y - x,
        jnp.zeros_like(x),
        lambda f, y: lax.fori_loop(0, 20, lambda i, y: y - f(y) / (3 * y * y + 1), y),
        lambda g, y: y / g(jnp.ones_like(y)),
    )


LIBRARY: dict[str, Callable[..., Any]] = {
    "associative_scan": lambda x: lax.associative_scan(jnp.add, x, axis=0),
    "associative_scan, backward": lambda x: lax.associative_scan(lambda a, b: a * b, x + 2, reverse=True),
    "bicgstab": lambda x: bicgstab(lambda v: W @ v + x @ (x.T @ v), x[:, 0])[0],
    "cg": lambda x: cg(lambda v: 2 * v + x @ (x.T @ v), x[:, 1])[0],
    "custom_root": root,
    "gmres": lambda x: gmres(lambda v: W @ v, x[:, 2])[0],
    "inv": lambda x: jnp.linalg.inv(x.T @ x + 3 * jnp.eye(3)),
    "lstsq": lambda x: jnp.linalg.lstsq(x, x[:, 0] ** 2)[0],
    "odeint": lambda x: odeint(lambda y, t: -y * x.sum(1) * 0.1, x[:, 0], jnp.linspace(0.0, 1.0, 4)),
    "solve": lambda x: jnp.linalg.solve(W, x),
}


@pytest.mark.parametrize("name", sample(LIBRARY, 3))
def test_library_code(name: str) -> None:
    """Values and gradients, of rows and of columns that are sharded unevenly."""
    for placement in (P(a=Shard(0)), P(a=Shard(1))):
        agree(LIBRARY[name], [X], [placement], fitting(Mesh(a=3)), compiled=True)


def test_a_minimizer() -> None:
    def nearest(x: Any) -> Any:
        return minimize(lambda p: ((p - x[:, 0]) ** 2).sum(), jnp.zeros(7), method="BFGS").x

    agree(nearest, [X], [P(a=Shard(0))], fitting(Mesh(a=3)), gradient=False, compiled=True)


def test_solvers_send_what_their_products_and_norms_need() -> None:
    """Conjugate gradients on a sharded operator: reductions in the loop, and no gather."""
    import spmd

    def solved(a: Any, b: Any) -> Any:
        return cg(lambda v: a.T @ (a @ v) + v, b, maxiter=20)[0]

    args = jax.ShapeDtypeStruct((64, 8), np.float32), jax.ShapeDtypeStruct((8,), np.float32)
    program = spmd.jit(solved, mesh=Mesh(a=4), in_placements=(P(a=Shard(0)), P()), fallback="error").lower(*args)
    assert {collective.name for collective in program.collectives} <= {"all_reduce", "broadcast"}
