"""What one mesh axis does to one array: `Shard`, `Replicate`, `Partial`; and `P`, the placements by axis.

All four are frozen values and none is a tuple: JAX must see a `P` as a leaf of a pytree. Nothing here knows a mesh
or a shape; `layout.Layout` brings the three together and validates them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Self

from placements.errors import InvalidPlacement

REDUCTIONS: Final = ("sum", "mean", "prod", "max", "min", "and", "or", "xor")


@dataclass(frozen=True, slots=True)
class Shard:
    """The array is split along dim `dim`, one piece for each coordinate of the axis. A negative dim counts from the end.

    Piece i of n of a dim of `size` is `[ceil(i*size/n), ceil((i+1)*size/n))`: any size and any n, empty pieces included.
    """

    dim: int

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "dim", operator.index(self.dim))
        except TypeError:
            raise InvalidPlacement(f"Shard({self.dim!r}): a dim is an integer, as in Shard(0).") from None

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every coordinate of the axis holds the same value."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Partial:
    """The global value is the reduction by `op` of what the coordinates of the axis hold.

    `op` is one of sum, mean, prod, max, min, and, or, xor. Sum of bool, and mean of bool or integers, do not exist.
    """

    op: str = "sum"

    def __post_init__(self) -> None:
        if self.op not in REDUCTIONS:
            raise InvalidPlacement(f"Partial({self.op!r}): an op is one of {', '.join(REDUCTIONS)}.")

    def __str__(self) -> str:
        return self.op


Placement = Shard | Replicate | Partial


class P:
    """The placements of one array, by mesh axis: `P(dp=Shard(0), tp=Replicate())`.

    An axis that is not named is replicated; one given as `None` is left to propagation. Where two axes shard one dim,
    the one written first is major. `P(Shard(0), Replicate())` gives the placements in the order of the mesh's axes;
    the two forms do not mix. Axes whose names are no identifiers are passed as `P(**{"my axis": Shard(0)})`.

    Raises `InvalidPlacement` for anything that is not a placement, with the translation of a JAX `PartitionSpec`.

    >>> P(tp=Shard(0), dp=Shard(0), pp=Partial())
    P(tp=S(0), dp=S(0), pp=sum)
    """

    __slots__ = ("_hash", "named", "positional")
    _hash: int
    named: tuple[tuple[str, Placement | None], ...]
    positional: tuple[Placement | None, ...]

    def __init__(self, /, *positional: Placement | None, **named: Placement | None) -> None:
        if positional and named:
            raise InvalidPlacement(
                "P(...): placements are given in mesh order or by axis name, not both. "
                "Name every axis: P(dp=Shard(0), tp=Replicate())."
            )
        _refuse_partition_spec(positional)
        for value in (*positional, *named.values()):
            _check_placement(value)
        object.__setattr__(self, "named", tuple(named.items()))
        object.__setattr__(self, "positional", positional)
        object.__setattr__(self, "_hash", hash((self.named, self.positional)))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"P is frozen; cannot set {name!r}. Make a new P.")

    __delattr__ = __setattr__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, P):
            return NotImplemented
        return self.named == other.named and self.positional == other.positional

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.positional, self.named)

    def __repr__(self) -> str:
        words = [str(value) for value in self.positional]
        words += [f"{axis}={value}" for axis, value in self.named]
        return f"P({', '.join(words)})"

    def items(self, axis_names: tuple[str, ...]) -> Iterator[tuple[str, Placement | None]]:
        """Yield `(axis, placement)` in written order, on a mesh whose axes are `axis_names`."""
        if len(self.positional) > len(axis_names):
            raise InvalidPlacement(
                f"{self!r} has {len(self.positional)} placements, but the mesh has {len(axis_names)} axes: "
                f"{', '.join(axis_names)}. Give at most one placement for each axis."
            )
        yield from zip(axis_names, self.positional, strict=False)
        yield from self.named

    @classmethod
    def from_spec(cls, spec: Iterable[str | tuple[str, ...] | None]) -> Self:
        """Translate a JAX `PartitionSpec`: entry d names the axes, major first, that shard dim d.

        Raises `InvalidPlacement` where an axis occurs twice.

        >>> P.from_spec((None, ("dp", "tp")))
        P(dp=S(1), tp=S(1))
        """
        named: dict[str, Placement | None] = {}
        for dim, entry in enumerate(getattr(spec, "partitions", spec)):
            for axis in (entry,) if isinstance(entry, str) else (entry or ()):
                if axis in named:
                    raise InvalidPlacement(f"P.from_spec({spec!r}): axis {axis!r} occurs twice.")
                named[axis] = Shard(dim)
        for axis in sorted(getattr(spec, "unreduced", ())):
            named[axis] = Partial()
        return cls(**named)


def _rebuild(positional: tuple[Placement | None, ...], named: tuple[tuple[str, Placement | None], ...]) -> P:
    return P(*positional, **dict(named))


def _refuse_partition_spec(positional: tuple[Any, ...]) -> None:
    """Raise with the translation if the arguments are those of a JAX PartitionSpec, or one itself."""
    spec = positional
    if len(positional) == 1 and isinstance(positional[0], Iterable) and not isinstance(positional[0], (str, tuple)):
        spec = tuple(positional[0])
    elif not any(isinstance(entry, (str, tuple)) for entry in positional):
        return
    if all(entry is None or isinstance(entry, (str, tuple)) for entry in spec):
        raise InvalidPlacement(
            f"P{spec!r} is a JAX PartitionSpec: it names the axes of each dim. "
            f"Here each axis names its placement: {P.from_spec(spec)!r}, with S(d) for Shard(d). P.from_spec translates."
        )


def _check_placement(value: object) -> None:
    if value is None or isinstance(value, (Shard, Replicate, Partial)):
        return
    if isinstance(value, type) and issubclass(value, (Shard, Replicate, Partial)):
        example = "Shard(0)" if value is Shard else f"{value.__name__}()"
        raise InvalidPlacement(f"P(...): {value.__name__} is a class; write {example}.")
    if isinstance(value, int):
        raise InvalidPlacement(f"P(...): {value!r} is no placement; write Shard({value}).")
    raise InvalidPlacement(f"P(...): {value!r} is no placement; one of Shard(dim), Replicate(), Partial(op), None.")
