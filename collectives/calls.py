"""The calls of a communicator: what fits, sizes that are left out, and calls that are ready to be made again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from collectives.errors import InvalidCollective
from collectives.wire import Arranged
from placements.intervals import piece

SIZES: Final[dict[str, dict[str, tuple[str, bool]]]] = {
    "all_gather": {"sizes": ("dim", False)},
    "all_to_all": {"sizes": ("dim", False), "to_sizes": ("to_dim", True)},
    "all_to_all_rows": {"sends": ("dim", True)},
    "gather": {"sizes": ("dim", False)},
    "reduce_scatter": {"sizes": ("dim", True)},
    "scatter": {"sizes": ("dim", True)},
}
"""By collective and argument: the dim whose sizes it lists, and whether this member has all of it, or its own part."""


def chunks(length: int, n: int) -> tuple[int, ...]:
    """The sizes of balanced chunks.

    >>> chunks(7, 3)
    (3, 2, 2)
    """
    return tuple(high - low for low, high in (piece(length, n, i) for i in range(n)))


def filled(name: str, arguments: dict[str, Any], shape: Sequence[int], rank: int, n: int) -> dict[str, Any]:
    """The arguments of a collective for an array of this shape, on a member of n: dims from the front, sizes filled in.

    Sizes are by default balanced chunks of what this member has all of, else on all members as on this one. Raises
    `InvalidCollective` for what does not fit.
    """
    found = dict(arguments)
    for key in ("dim", "to_dim"):
        if key in found:
            dim = whole_number(name, key, found[key])
            if not -len(shape) <= dim < len(shape):
                hint = "; x[None] has a dim to join along" if not shape else ""
                raise InvalidCollective(f"{name}: {key}={dim} of an array of shape {tuple(shape)}{hint}.")
            found[key] = dim % len(shape)
    if "to_dim" in found and found["to_dim"] == found["dim"]:
        raise InvalidCollective(f"{name}: dim and to_dim are both {found['dim']}.")
    for key, (along, is_whole) in SIZES.get(name, {}).items():
        held = shape[found[along]]
        if found[key] is None:
            found[key] = chunks(held, n) if is_whole else (held,) * n
        sizes = found[key]
        check_sizes(name, key, sizes, n)
        stated = sum(sizes) if is_whole else sizes[rank]
        if held != stated:
            raise InvalidCollective(
                f"{name}: {key}={sizes}: member {rank} has {held} indices, and {stated} are stated."
            )
    if name == "all_to_all_rows":
        check_sizes(name, "receives", found["receives"], n)
        if found["sends"][rank] != found["receives"][rank]:
            own = found["sends"][rank], found["receives"][rank]
            raise InvalidCollective(f"{name}: member {rank} sends {own[0]} indices to itself, and receives {own[1]}.")
    if name == "exchange":
        for key in ("have", "want"):
            if len(found[key]) != n or any(low > high or low < 0 for low, high in found[key]):
                raise InvalidCollective(f"{name}: {key}={found[key]}: bounds for each of {n} members.")
        low, high = found["have"][rank]
        if high - low != shape[found["dim"]]:
            raise InvalidCollective(
                f"{name}: member {rank} has {shape[found['dim']]} indices, and {high - low} are stated."
            )
    if name == "permute":
        pairs = [(whole_number(name, "pairs", i), whole_number(name, "pairs", j)) for i, j in found["pairs"]]
        if any(not (0 <= i < n and 0 <= j < n) for i, j in pairs) or len({j for _, j in pairs}) < len(pairs):
            raise InvalidCollective(
                f"{name}: pairs={pairs} of {n} members: members exist, and destinations are distinct."
            )
    return found


def check_sizes(name: str, key: str, sizes: Sequence[int], n: int) -> None:
    """Raise `InvalidCollective` unless there is one size for each member, none below zero."""
    if len(sizes) != n:
        raise InvalidCollective(f"{name}: {key} lists {len(sizes)} sizes, for {n} members.")
    if min(sizes) < 0:
        raise InvalidCollective(f"{name}: {key}={tuple(sizes)}: no size is below zero.")


def whole_number(name: str, key: str, value: Any) -> int:
    """An argument as an integer; raises `InvalidCollective` where it is none."""
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidCollective(f"{name}: {key}={value!r} is no integer.") from None


def sizes_of(name: str, sizes: Any) -> tuple[int, ...] | None:
    """Sizes as a tuple, None if they are left out."""
    if sizes is None or type(sizes) is tuple:
        return sizes
    try:
        return tuple(whole_number(name, "sizes", size) for size in sizes)
    except TypeError:
        raise InvalidCollective(f"{name}: sizes={sizes!r}; one for each member.") from None


def on_host(name: str, leaf: Any) -> Any:
    """An argument as a numpy array of numbers, in the byte order of this machine; without a copy where that is possible."""
    if isinstance(leaf, np.ma.MaskedArray):
        raise InvalidCollective(f"{name}: a masked array; fill it, or pass data and mask.")
    array = np.asarray(leaf)
    if array.dtype.kind in "biufc" and array.dtype.itemsize <= 16 and array.dtype.char not in "gG":
        return array if array.dtype.isbuiltin == 1 else array.astype(array.dtype.type)
    if array.dtype.isbuiltin == 2 and jnp.issubdtype(array.dtype, jnp.number):  # of ml_dtypes
        return array
    kind = f"an array of {array.dtype}" if isinstance(leaf, np.ndarray) else f"{type(leaf).__name__}"
    raise InvalidCollective(
        f"{name}: {kind}; what travels is numbers and bools. Other objects: {name_of_objects(name)}."
    )


def name_of_objects(name: str) -> str:
    """What takes any object in place of a collective."""
    return f"{name}_object" if name in ("broadcast", "all_gather", "gather", "scatter", "send") else "all_gather_object"


def receives_into(out: Any, shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether an array is numpy's and can be received into, as it lies."""
    return (
        type(out) is np.ndarray
        and out.shape == shape
        and out.dtype == dtype
        and out.flags.c_contiguous
        and out.flags.writeable
    )


class Ready:
    """A collective on numpy arrays of one kind, sent and received as they lie: made once, called again."""

    def __init__(
        self, run: Callable[[Any, Any], None], arranged: Arranged, fail: Callable[[BaseException], None]
    ) -> None:
        self.run, self.fail, self.finish = run, fail, arranged.finish
        self.shape, self.dtype = arranged.plain or (), arranged.transfer.dtype
        self.gives = not arranged.is_elsewhere

    def fits(self, array: Any, out: Any) -> bool:
        """Whether arrays lie as they have to; what else is wrong with them is not found here."""
        if not array.flags.c_contiguous:
            return False
        return out is None or not self.gives or receives_into(out, self.shape, self.dtype)

    def __call__(self, array: Any, out: Any) -> Any:
        """The result, in `out` if there is one. A failure gives the communicator up."""
        if out is None or not self.gives:
            out = np.empty(self.shape, self.dtype)
        try:
            self.run(array, out)
        except BaseException as error:
            self.fail(error)
            raise
        if not self.gives:
            return None
        return out if self.finish is None else self.finish(out)
