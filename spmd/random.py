"""Random DArrays: the values of `jax.random`, of which each rank draws its own shard.

`spmd.random.normal(key, shape, placements, mesh)` is `jax.random.normal(key, shape)`, the same for every placement, mesh and
number of ranks. Further arguments of the distribution go by keyword. Every rank passes the same key. Inside a decorated
function `jax.random` itself does as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

import jax

from placements import Mesh, P
from spmd.api import jit
from spmd.array import DArray, refuse_in_trace
from spmd.current import mesh_or_current
from spmd.errors import ArgumentError
from spmd.factories import as_shape

__all__ = [
    "bernoulli",
    "bits",
    "exponential",
    "gumbel",
    "laplace",
    "normal",
    "randint",
    "truncated_normal",
    "uniform",
]


@functools.lru_cache(maxsize=256)
def _decorated(
    name: str, shape: tuple[int, ...], placements: P, mesh: Mesh, options: tuple[tuple[str, Hashable], ...]
) -> Any:
    draw = getattr(jax.random, name)

    def function(key: Any) -> Any:
        return draw(key, shape=shape, **dict(options))

    function.__name__ = f"spmd.random.{name}"
    return jit(function, mesh=mesh, in_placements=P(), out_placements=placements)


def _draws(name: str) -> Callable[..., DArray]:
    """The function for one distribution of `jax.random`."""

    def draw(
        key: Any, shape: Sequence[int] | int = (), placements: P = P(), mesh: Mesh | None = None, **options: Any
    ) -> DArray:
        refuse_in_trace(f"spmd.random.{name}")
        found = mesh_or_current(mesh, f"spmd.random.{name}")
        try:
            decorated = _decorated(name, as_shape(shape), placements, found, tuple(sorted(options.items())))
        except TypeError as error:
            raise ArgumentError(f"spmd.random.{name}: {', '.join(options)} are numbers and dtypes ({error}).") from None
        return decorated(key)

    draw.__name__ = draw.__qualname__ = name
    draw.__doc__ = (
        f"`jax.random.{name}(key, shape=shape, **options)` as a DArray: each rank draws its shard.\n\n"
        "Communication: the agreement of every launch. Raises what `jax.random` raises, and `InvalidPlacement`."
    )
    return draw


bernoulli: Final = _draws("bernoulli")
bits: Final = _draws("bits")
exponential: Final = _draws("exponential")
gumbel: Final = _draws("gumbel")
laplace: Final = _draws("laplace")
normal: Final = _draws("normal")
randint: Final = _draws("randint")
truncated_normal: Final = _draws("truncated_normal")
uniform: Final = _draws("uniform")
