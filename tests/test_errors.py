"""The table of bad calls: each names argument path, shape, placement, mesh and remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import jax
import numpy as np
import pytest

import spmd
from placements import Mesh, P, Partial, Shard

MESH = Mesh(dp=2, tp=2)
X = np.ones((5, 4), np.float32)
OTHER = Mesh(dp=4)


def f(params: Any, x: Any) -> Any:
    return x


def jit(**options: Any) -> Any:
    return spmd.jit(f, mesh=MESH, **options)


def stated(placements: P) -> Any:
    return jit(in_placements={"params": {"w": placements}})


PARAMS = {"w": X}

BAD_CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown axis": (
        lambda: stated(P(pp=Shard(0)))(PARAMS, X),
        "f: params['w'] of shape (5, 4), stated as P(pp=S(0)): axis 'pp' is not on Mesh(dp=2, tp=2); its axes are dp, tp.",
    ),
    "dim out of range": (
        lambda: stated(P(dp=Shard(2)))(PARAMS, X),
        "f: params['w'] of shape (5, 4), stated as P(dp=S(2)): dim 2 is out of range for an array with 2 dims (-2 to 1).",
    ),
    "axis twice": (
        lambda: stated(P(Shard(0), Shard(1), Shard(0)))(PARAMS, X),
        "f: params['w'] of shape (5, 4), stated as P(S(0), S(1), S(0)): P(S(0), S(1), S(0)) has 3 placements, but the mesh has 2 axes: dp, tp. "
        "Give at most one placement for each axis.",
    ),
    "0-d leaf": (
        lambda: stated(P(dp=Shard(0)))({"w": 1.0}, X),
        "f: params['w'] of shape (), stated as P(dp=S(0)): a 0-d array has no dim to shard. Use Replicate().",
    ),
    "prefix that does not fit": (
        lambda: jit(in_placements=({"w": P(), "b": P()}, P()))(PARAMS, X),
        "f: the placements of argument 'params' do not fit: a placement for ['b'], but the keys are 'w'.",
    ),
    "a leaf that is no placement": (
        lambda: jit(in_placements=({"w": "dp"}, P()))(PARAMS, X),
        "f: the placements of argument 'params': 'dp' is no placement; a leaf is a P, None, or a function (path, aval) -> P.",
    ),
    "a key without a placement": (
        lambda: jit(in_placements={"params": {"w": P()}})({**PARAMS, "b": X}, X),
        "f: the placements of argument 'params' do not fit: no placement for ['b'].",
    ),
    "two placements for one result": (
        lambda: jit(out_placements=(P(), P()))(PARAMS, X),
        "f: the placements of the result do not fit: a tuple of placements for the whole, which is one array.",
    ),
    "two placements for three entries": (
        lambda: jit(in_placements=([P(), P()], P()))([X, X, X], X),
        "f: the placements of argument 'params' do not fit: 2 placements for the 3 entries of the whole.",
    ),
    "a list of numbers": (
        lambda: jit(in_placements=(P(), P(dp=Shard(0))))(PARAMS, [1.0, 2.0]),
        "f: x[0] of shape (), stated as P(dp=S(0)): a 0-d array has no dim to shard. Use Replicate(). "
        "A list is a pytree of numbers; for an array pass np.asarray of it.",
    ),
    "too many entries": (
        lambda: jit(in_placements=(P(), P(), P())),
        "f: in_placements has 3 entries, but the positional arguments that are not static are 2: params, x.",
    ),
    "an unknown parameter": (
        lambda: jit(in_placements={"y": P()}),
        "f: in_placements names ['y']; the parameters that are not static are params, x.",
    ),
    "placements of a dict, without the tuple": (
        lambda: spmd.jit(lambda params: params, mesh=MESH, in_placements={"w": P()}),
        "<lambda>: in_placements names ['w']; the parameters that are not static are params. Placements for one argument that is a dict "
        "go into a tuple: ({...},).",
    ),
    "a PartitionSpec": (
        lambda: jit(in_placements=jax.sharding.PartitionSpec("dp")),
        f"f: in_placements is a P for all arguments, a tuple with one entry per argument, or a dict by name; {jax.sharding.PartitionSpec('dp')!r} "
        "is a JAX PartitionSpec, here P(dp=S(0)) (P.from_spec translates; S(d) is Shard(d)).",
    ),
    "another mesh": (
        lambda: jit()(PARAMS, spmd.distribute(X, P(), OTHER)),
        "f: argument x, DArray(float32[5,4] P() on Mesh(dp=4)), is on another mesh than the function's, Mesh(dp=2, tp=2). "
        "All DArrays are on the function's mesh: distribute the whole array on it.",
    ),
    "stated twice": (
        lambda: spmd.jit(annotated, in_placements=(P(),)),
        "annotated: the placement of parameter 'x' is stated twice, as P(dp=S(0)) in its annotation and as P() in in_placements. Keep one.",
    ),
    "result stated twice": (
        lambda: spmd.jit(annotated_result, out_placements=P()),
        "annotated_result: the placement of the result is stated twice, as P(dp=S(0)) in the return annotation and as P() in "
        "out_placements. Keep one.",
    ),
    "an annotation that cannot be evaluated": (
        lambda: spmd.jit(unknown_annotation),
        "unknown_annotation: the annotation of parameter 'x', 'Nonsense', cannot be evaluated: NameError: name 'Nonsense' is not defined. "
        "Define the names before the function, or state the placement in in_placements.",
    ),
    "a DArray that would move": (
        lambda: jit(in_placements=(None, P(tp=Shard(0))))(PARAMS, spmd.distribute(X, P(dp=Shard(0)), MESH)),
        "f: argument x is DArray(float32[5,4] P(dp=S(0)) on Mesh(dp=2, tp=2)), stated as P(tp=S(0)): to bring it there takes exchange. "
        'If it is the result of a decorated function, state its out_placements; else move it with x.redistribute(P(tp=S(0))), or decorate with spmd.jit(..., redistribute="allow").',
    ),
    "parts of bool": (
        lambda: jit(in_placements=(None, P(dp=Partial())))(PARAMS, X > 0),
        "f: x of shape (5, 4), stated as P(dp=sum): the sum of bool is not defined. "
        "Use Partial('or') or Partial('and'), or cast to an integer.",
    ),
    "no array": (
        lambda: jit()({"w": "relu"}, X),
        "f: argument params['w'] is a str, which is no array. Pass the arrays of the tree alone, and close over the rest (equinox.partition, flax.nnx.split).",
    ),
    "a result out of range": (
        lambda: jit(out_placements=P(dp=Shard(3)))(PARAMS, X),
        "f: result of shape (5, 4), stated as P(dp=S(3)): dim 3 is out of range for an array with 2 dims (-2 to 1).",
    ),
    "a missing argument": (lambda: jit()(PARAMS), "f: missing a required argument: 'x'"),
    "an unknown option": (
        lambda: jit(fallback="silent"),
        'spmd.jit: fallback is "warn", "error" or "allow", redistribute is "error" or "allow"; got fallback=\'silent\', redistribute=\'error\'.',
    ),
    "static out of range": (lambda: jit(static_argnums=2), "f: static_argnums=2 is out of range; it has 2 parameters."),
    "static by a wrong name": (
        lambda: jit(static_argnames="y"),
        "f: static_argnames='y' is no parameter; they are params, x.",
    ),
    "no mesh": (
        lambda: spmd.jit(f)(PARAMS, X),
        "f: no mesh. State mesh=..., enter `with spmd.use_mesh(mesh):`, or pass a DArray.",
    ),
    "a mesh that is none": (
        lambda: spmd.zeros(3, P(), "dp"),
        "a mesh is a placements.Mesh, as in Mesh(dp=2, tp=2); got a str.",
    ),
    "a spec of JAX's": (
        lambda: jit(in_placements=(P("dp", None), P())),
        "P('dp', None) is a JAX PartitionSpec: it names the axes of each dim. Here each axis names its placement: P(dp=S(0)), with S(d) "
        "for Shard(d). P.from_spec translates.",
    ),
    "an unknown collective": (
        lambda: jit().lower(PARAMS, X).check(allreduce=1),
        "check(allreduce=...): no such collective; they are all_gather, all_reduce, all_to_all, broadcast, exchange, permute, reduce_scatter.",
    ),
    "redistribute out of range": (
        lambda: spmd.distribute(X, P(), MESH).redistribute(P(dp=Shard(5))),
        "redistribute DArray(float32[5,4] P() on Mesh(dp=2, tp=2)): P(dp=S(5)): dim 5 is out of range for an array with 2 dims (-2 to 1).",
    ),
}


def annotated(x: Annotated[jax.Array, P(dp=Shard(0))]) -> Any:
    return x


def annotated_result(x: Any) -> Annotated[jax.Array, P(dp=Shard(0))]:
    return x


def unknown_annotation(x: Nonsense) -> Any:  # type: ignore[name-defined]  # noqa: F821
    return x


@pytest.mark.parametrize("name", sorted(BAD_CALLS))
def test_bad_call(name: str) -> None:
    """The message is word for word what the user needs."""
    call, message = BAD_CALLS[name]
    with pytest.raises((spmd.SpmdError, ValueError, TypeError)) as caught:
        call()
    assert str(caught.value).startswith(message), str(caught.value)


def test_every_error_is_of_its_package() -> None:
    """One base class per package, and a builtin beside it."""
    import collectives.errors
    import placements.errors
    import spmd.errors

    bases = spmd.SpmdError, placements.errors.PlacementError, collectives.errors.CollectiveError
    for module, base in (
        (spmd.errors, spmd.SpmdError),
        (placements.errors, placements.errors.PlacementError),
        (collectives.errors, collectives.errors.CollectiveError),
    ):
        for value in vars(module).values():
            if (
                isinstance(value, type)
                and issubclass(value, Exception)
                and value not in bases
                and not issubclass(value, Warning)
            ):
                assert issubclass(value, base)
                assert len(value.__mro__) > len(base.__mro__) + 1, f"{value} has no builtin beside {base}"


def test_what_jax_advises_is_put_right() -> None:
    """Code for JAX's named axes: its error, with a note on what to write here."""
    with pytest.raises((NameError, RuntimeError)) as caught:
        spmd.jit(lambda x: jax.lax.psum(x, "dp"), mesh=MESH, in_placements=P(dp=Shard(0)))(X)
    assert any("jnp.sum(x) and jnp.mean(x) are those of all ranks" in note for note in caught.value.__notes__)
