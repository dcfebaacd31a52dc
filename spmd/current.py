"""The current mesh: what functions and factories use where none is stated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from placements import Mesh
from spmd.errors import ArgumentError

_CURRENT: ContextVar[Mesh | None] = ContextVar("spmd_current_mesh", default=None)


def current_mesh() -> Mesh | None:
    """The mesh of the innermost `use_mesh`, else that of `set_mesh`, else None. In a decorated function the mesh that it is
    traced for: shapes may depend on it."""
    return _CURRENT.get()


def set_mesh(mesh: Mesh | None) -> None:
    """Make `mesh` the current one from here on; None: no mesh."""
    _CURRENT.set(_checked(mesh))


@contextlib.contextmanager
def use_mesh(mesh: Mesh) -> Iterator[Mesh]:
    """Make `mesh` the current one inside a `with` block."""
    token = _CURRENT.set(_checked(mesh))
    try:
        yield mesh
    finally:
        _CURRENT.reset(token)


def mesh_or_current(mesh: Mesh | None, what: str) -> Mesh:
    """`mesh`, or the current one. Raises `ArgumentError` where there is none."""
    found = mesh if mesh is not None else current_mesh()
    if found is None:
        raise ArgumentError(f"{what}: no mesh. Pass mesh=Mesh(dp=2), or enter `with spmd.use_mesh(mesh):`.")
    checked = _checked(found)
    assert checked is not None
    return checked


def kind_name(value: object) -> str:
    """The full name of a value's type: `jax.sharding` has a Mesh of its own."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _checked(mesh: Mesh | None) -> Mesh | None:
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ArgumentError(f"a mesh is a placements.Mesh, as in Mesh(dp=2, tp=2); got a {kind_name(mesh)}.")
    return mesh
