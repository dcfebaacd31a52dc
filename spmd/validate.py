"""Placements against arrays: the one place that checks a `P` for a mesh, a number of dims and a dtype.

Axes of size 1 are checked like any other: code that is wrong on two ranks is wrong on one.
"""

from __future__ import annotations

from typing import Any

from collectives.simulated import kind_of
from placements import InvalidPlacement, Layout, Mesh, P, Partial, PartialTypeError
from placements.layout import merge, partial_fault, resolve


def valid_layout(placements: P, mesh: Mesh, ndim: int, dtype: Any | None) -> Layout:
    """The layout of an array with `ndim` dims; its parts are defined for `dtype` (None: not known yet).

    Raises `InvalidPlacement` for what is no P or does not fit, `PartialTypeError` for parts that the dtype does not have.
    """
    check_is_p(placements)
    layout = Layout.of(placements, mesh, ndim)
    check_parts(placements, mesh, ndim, dtype)
    return layout


def valid_merge(placements: P, current: Layout, dtype: Any) -> Layout:
    """The layout that `placements` ask of an array placed as `current`; `None` leaves an axis as it is."""
    check_is_p(placements)
    layout = merge(placements, current)
    check_parts(placements, current.mesh, current.ndim, dtype)
    return layout


def check_is_p(placements: Any) -> None:
    """Raise `InvalidPlacement` for anything but a P."""
    if not isinstance(placements, P):
        raise InvalidPlacement(f"{placements!r} is no P; placements are by axis, as in P(dp=Shard(0)).")


def check_parts(placements: P, mesh: Mesh, ndim: int, dtype: Any | None) -> None:
    """Raise `PartialTypeError` where the ops of parts are not defined for a dtype."""
    if dtype is None:
        return
    for _, placement in resolve(placements, mesh, ndim).items(mesh.axis_names):
        if isinstance(placement, Partial) and (fault := partial_fault(placement.op, kind_of(dtype))) is not None:
            raise PartialTypeError(f"{placements!r}: {fault.format(dtype=dtype)}")
