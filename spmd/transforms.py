"""JAX's transformations for DArrays: `grad`, `value_and_grad`, `vjp`, `jvp`, `vmap`.

Inside a decorated function they are JAX's, and cotangents are placed like their primals. Outside one they do the same under
an `spmd.jit` of their own, whose mesh is that of the function, else the current one, else that of the arguments. As
differentiation happens on whole arrays before anything is partitioned, there is no factor of the number of ranks to get
wrong.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from placements import Mesh
from spmd.api import SpmdFunction, jit
from spmd.program import Program
from spmd.trace import place_like_p, tracing_mesh


def place_like(cotangents: Any, primals: Any) -> Any:
    """Cotangents placed as their primals are."""

    def place(cotangent: Any, primal: Any) -> Any:
        if getattr(cotangent, "dtype", None) == jax.dtypes.float0:
            return cotangent
        return place_like_p.bind(cotangent, primal)

    return jax.tree.map(place, cotangents, primals)


class Transformed:
    """A transformed function: itself inside a decorated function, outside one a program of its own."""

    def __init__(self, what: str, function: Callable[..., Any], inside: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.inside = inside
        # What is decorated shows the signature of what is transformed, so that messages name its parameters; the placements
        # stated there become constraints when it is inlined.
        shown = functools.wraps(function)(lambda *args, **kwargs: inside(*args, **kwargs))
        shown.__name__ = f"{what}({getattr(function, '__name__', 'function')})"
        shown.__signature__ = _unannotated(function)  # type: ignore[attr-defined]
        statics = tuple(function.signature.statics) if isinstance(function, SpmdFunction) else ()
        self.decorated = jit(shown, mesh=_mesh_of(function), static_argnames=statics)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply it to arrays or DArrays."""
        return (self.inside if tracing_mesh() is not None else self.decorated)(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Program:
        """The Program of a call from outside. See `SpmdFunction.lower`."""
        return self.decorated.lower(*args, **kwargs)


def _mesh_of(function: Callable[..., Any]) -> Mesh | None:
    return function.mesh if isinstance(function, SpmdFunction) else None


def _unannotated(function: Callable[..., Any]) -> inspect.Signature:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return inspect.signature(lambda *args, **kwargs: None)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)


def grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, allow_int: bool = False
) -> Transformed:
    """`jax.grad` for DArrays: the gradient of a scalar function, placed like the arguments. See `jax.grad`.

    >>> import jax.numpy as jnp
    >>> from placements import Mesh, P, Shard
    >>> import spmd
    >>> x = spmd.arange(4.0, placements=P(dp=Shard(0)), mesh=Mesh(dp=2))
    >>> grad(lambda x: jnp.sum(x**2))(x).placements
    P(dp=S(0))
    """
    inside = _value_and_grad(fun, argnums, has_aux, allow_int)

    def gradient_alone(*args: Any, **kwargs: Any) -> Any:
        value, gradient = inside(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return Transformed("grad", fun, gradient_alone)


def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, allow_int: bool = False
) -> Transformed:
    """`jax.value_and_grad` for DArrays: the value, and the gradient placed like the arguments. See `jax.value_and_grad`."""
    return Transformed("value_and_grad", fun, _value_and_grad(fun, argnums, has_aux, allow_int))


def _value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int], has_aux: bool, allow_int: bool
) -> Callable[..., Any]:
    def inside(*args: Any, **kwargs: Any) -> Any:
        value, gradient = jax.value_and_grad(fun, argnums, has_aux, allow_int=allow_int)(*args, **kwargs)
        primals = args[argnums] if isinstance(argnums, int) else tuple(args[number] for number in argnums)
        return value, place_like(gradient, primals)

    return inside


def jvp(fun: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """`jax.jvp` for DArrays: the value and the directional derivative. See `jax.jvp`."""

    def inside(primals: Any, tangents: Any) -> Any:
        return jax.jvp(fun, primals, tangents)

    return _once(fun, inside)(tuple(primals), tuple(tangents))


def vjp(fun: Callable[..., Any], *primals: Any) -> tuple[Any, Callable[[Any], Any]]:
    """`jax.vjp` for DArrays: the value, and the function from a cotangent of it to those of the primals, placed like them.

    Outside a decorated function the second recomputes the value: nothing is kept between two programs.
    """
    if tracing_mesh() is not None:
        value, pull = jax.vjp(fun, *primals)
        return value, lambda cotangent: place_like(pull(cotangent), primals)

    def back(cotangent: Any, *primals: Any) -> Any:
        return place_like(jax.vjp(fun, *primals)[1](cotangent), primals)

    pull_back = _once(fun, back)
    return _once(fun, lambda *primals: fun(*primals))(*primals), lambda cotangent: pull_back(cotangent, *primals)


def vmap(fun: Callable[..., Any], in_axes: Any = 0, out_axes: Any = 0, axis_size: int | None = None) -> Transformed:
    """`jax.vmap` for DArrays. Placements that `fun` states shift past the batch dim, which is left free. See `jax.vmap`."""
    return Transformed("vmap", fun, jax.vmap(fun, in_axes, out_axes, axis_size=axis_size))


def _once(function: Callable[..., Any], inside: Callable[..., Any]) -> Callable[..., Any]:
    """`inside` as it is within a trace, under an `spmd.jit` of its own outside one."""
    return inside if tracing_mesh() is not None else jit(inside, mesh=_mesh_of(function))
