"""The conformance suite: each case states a collective's inputs and outputs, member by member.

`cases(size)` yields them for a group of `size`; expected outputs are numpy formulas in rank and size, independent of the
implementation. One suite drives both forms: `check_group` a function on all members' arrays (the simulator),
`check_communicator` a `Communicator`, which every member of a real group calls. Values have mixed signs and vary with
position and rank; sizes do not divide, and some members are empty.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from collectives.calls import chunks
from collectives.communicator import Communicator
from collectives.errors import ConformanceError

Array = np.ndarray[Any, Any]

DTYPES: Final = ("bool", "int8", "uint16", "int32", "float32", "float16", "bfloat16", "complex64")
OPS: Final[dict[str, Callable[[Array, Array], Array]]] = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One collective on one group: the arguments of `Communicator.<name>`, and each member's input and output."""

    name: str
    arguments: dict[str, Any]
    inputs: tuple[Array, ...]
    outputs: tuple[Array | None, ...]
    tolerance: float = 0.0


def values(shape: tuple[int, ...], dtype: str, rank: int) -> Array:
    """Mixed signs, no two neighbours or ranks alike: small integers, exact in every dtype but bool."""
    numbers = (np.arange(np.prod(shape, dtype=int)) * 7 + 5 * rank + 3) % 11 - 5
    if dtype == "bool":
        return (numbers > 0).reshape(shape)
    if dtype == "complex64":
        return (numbers + 1j * ((numbers * 3) % 5 - 2)).astype(dtype).reshape(shape)
    return numbers.astype(np.dtype(dtype) if dtype != "bfloat16" else ml_dtypes.bfloat16).reshape(shape)


def allowed(op: str, dtype: str) -> bool:
    """Whether the reduction `op` exists for a dtype."""
    if dtype == "bool":
        return op not in ("sum", "mean")
    if dtype.startswith(("int", "uint")):
        return op != "mean"
    return op in (("sum", "mean", "prod") if dtype == "complex64" else ("sum", "mean", "prod", "max", "min"))


def reduced(parts: list[Array], op: str) -> Array:
    """The reduction of the parts, in numpy; floats of 16 bits in float32."""
    dtype = parts[0].dtype
    if dtype.itemsize == 2 and dtype.kind not in "iu":
        return reduced([part.astype(np.float32) for part in parts], op).astype(dtype)
    if dtype == np.bool_ and op in ("prod", "max", "min"):
        op = {"prod": "and", "max": "or", "min": "and"}[op]
    total = functools.reduce(OPS[op], parts)
    return (total / len(parts)).astype(dtype) if op == "mean" else total.astype(dtype)


def cases(size: int) -> Iterator[Case]:
    """Every case for a group of `size` members."""
    for dtype in DTYPES:
        yield from _reductions(size, dtype)
        yield from _movements(size, dtype)
    yield from _nan_cases(size)


def _reductions(size: int, dtype: str) -> Iterator[Case]:
    for op in OPS:
        if not allowed(op, dtype):
            continue
        tolerance = 1e-5 * size if op in ("mean", "prod") and dtype not in ("bool", "int8", "uint16", "int32") else 0.0
        for shape in ((), (3,), (2, 5), (0, 4)):
            parts = [values(shape, dtype, rank) for rank in range(size)]
            yield Case("all_reduce", {"op": op}, tuple(parts), (reduced(parts, op),) * size, tolerance)
            for root in {0, size - 1}:
                only = tuple(reduced(parts, op) if rank == root else None for rank in range(size))
                yield Case("reduce", {"op": op, "root": root}, tuple(parts), only, tolerance)
        for length in (5, size - 1, 0):
            sizes = chunks(length, size)
            parts = [values((3, length), dtype, rank) for rank in range(size)]
            outputs = np.split(reduced(parts, op), np.cumsum(sizes)[:-1], axis=1)
            arguments = {"op": op, "dim": 1, "sizes": sizes}
            yield Case("reduce_scatter", arguments, tuple(parts), tuple(outputs), tolerance)


def _movements(size: int, dtype: str) -> Iterator[Case]:
    for length in (7, size, size - 1):
        sizes = chunks(length, size)
        whole = values((2, length), dtype, 1)
        parts = tuple(np.split(whole, np.cumsum(sizes)[:-1], axis=1))
        yield Case("all_gather", {"dim": 1, "sizes": sizes}, parts, (whole,) * size)
        for root in {0, size - 1}:
            arguments = {"dim": 1, "root": root, "sizes": sizes}
            yield Case("gather", arguments, parts, tuple(whole if rank == root else None for rank in range(size)))
            given = tuple(whole if rank == root else np.zeros_like(whole) for rank in range(size))
            yield Case("scatter", arguments, given, parts)
            yield Case("scatter", {"dim": 1, "root": root}, given, parts)
        yield _transpose(size, dtype, length)
        yield from _exchanges(size, whole, sizes)
    yield from _rows(size, dtype)
    parts = tuple(values((2, 3), dtype, rank) for rank in range(size))
    yield Case("all_gather", {"dim": -1}, parts, (np.concatenate(parts, -1),) * size)
    for root in (0, size - 1):
        yield Case("broadcast", {"root": root}, parts, (parts[root],) * size)
    ring = tuple((rank, (rank + 1) % size) for rank in range(size))
    yield Case("permute", {"pairs": ring}, parts, tuple(parts[(rank - 1) % size] for rank in range(size)))
    zeros = np.zeros_like(parts[0])
    yield Case("permute", {"pairs": ring[:-1]}, parts, (zeros, *parts[: size - 1]))


def _transpose(size: int, dtype: str, length: int) -> Case:
    whole = values((length, 4, 2), dtype, 2)
    rows, columns = chunks(length, size), chunks(2, size)
    inputs = tuple(np.split(whole, np.cumsum(rows)[:-1], axis=0))
    outputs = tuple(np.split(whole, np.cumsum(columns)[:-1], axis=2))
    return Case("all_to_all", {"dim": 0, "sizes": rows, "to_dim": 2, "to_sizes": columns}, inputs, outputs)


def _rows(size: int, dtype: str) -> Iterator[Case]:
    """Runs of other lengths from every member to every one, some empty; told, and asked for."""
    table = [[(3 * i + 2 * j) % 4 for j in range(size)] for i in range(size)]
    inputs = tuple(values((sum(row), 2), dtype, rank) for rank, row in enumerate(table))
    pieces = [np.split(array, np.cumsum(row)[:-1]) for array, row in zip(inputs, table, strict=True)]
    outputs = tuple(np.concatenate([pieces[i][j] for i in range(size)]) for j in range(size))
    for told in (True, False):
        by_member = [
            {"sends": row} | ({"receives": [table[i][rank] for i in range(size)]} if told else {})
            for rank, row in enumerate(table)
        ]
        yield Case("all_to_all_rows", {"by_member": by_member}, inputs, outputs)


def _exchanges(size: int, whole: Array, sizes: tuple[int, ...]) -> Iterator[Case]:
    """Chunks to pieces of other lengths, to halos of one, to everything, and reversed."""
    length = whole.shape[1]
    have = _bounds(sizes)
    halo = tuple((max(0, low - 1), min(length, high + 1)) for low, high in have)
    uneven = _bounds((*(min(1, length - i) if i < length else 0 for i in range(size - 1)), max(0, length - size + 1)))
    for want in (halo, uneven, ((0, length),) * size, have[::-1]):
        inputs, outputs = (tuple(whole[:, low:high] for low, high in bounds) for bounds in (have, want))
        yield Case("exchange", {"dim": 1, "have": have, "want": want}, inputs, outputs)


def _nan_cases(size: int) -> Iterator[Case]:
    """max and min carry NaN, whichever member holds it."""
    for holder in range(size):
        parts = [values((3,), "float32", rank) for rank in range(size)]
        parts[holder][1] = np.nan
        for op in ("max", "min"):
            yield Case("all_reduce", {"op": op}, tuple(parts), (reduced(parts, op),) * size)


def _bounds(sizes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return tuple((end - size, end) for end, size in zip(ends, sizes, strict=True))


def check_group(functions: dict[str, Callable[..., list[Any]]], size: int) -> int:
    """Run every case on functions of all members' arrays. Returns the number of cases; raises `ConformanceError`."""
    count = 0
    for case in cases(size):
        if case.name not in functions or (case.name == "all_gather" and "sizes" not in case.arguments):
            continue
        results = functions[case.name]([jnp.asarray(part) for part in case.inputs], **case.arguments)
        for rank, result in enumerate(results):
            compare(case, rank, result)
        count += 1
    return count


def member_cases(communicator: Communicator) -> Iterator[tuple[Case, dict[str, Any], Array]]:
    """Every case with the arguments and the input of this member."""
    size, rank = communicator.size, communicator.rank
    for case in cases(size):
        arguments = dict(case.arguments)
        arguments |= arguments.pop("by_member", [{}] * size)[rank]
        yield case, arguments, case.inputs[rank]


def check_communicator(communicator: Communicator) -> int:
    """Run every case on this member's side of a communicator. Collective. Returns the number; raises `ConformanceError`."""
    count = 0
    for case, arguments, given in member_cases(communicator):
        method = getattr(communicator, case.name)
        for array in (given, jnp.asarray(given)):  # the result is of the kind of the argument
            result = method(array, **arguments)
            compare(case, communicator.rank, result)
            assert result is None or isinstance(result, jnp.ndarray) is isinstance(array, jnp.ndarray)
        count += 1
    return count


def compare(case: Case, rank: int, result: Any) -> None:
    """Raise `ConformanceError` where member `rank` has another result than the case states."""
    expected = case.outputs[rank]
    if expected is None or result is None:
        if result is not expected:
            raise ConformanceError(
                f"{case.name}({case.arguments}) on member {rank}: expected {expected}, found {result}"
            )
        return
    found = np.asarray(result)
    same = found.shape == expected.shape and found.dtype == expected.dtype
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    if not same or not np.allclose(
        found.astype(wide), expected.astype(wide), rtol=case.tolerance, atol=0, equal_nan=True
    ):
        raise ConformanceError(
            f"{case.name}({case.arguments}) on member {rank} of {len(case.inputs)}:\n"
            f"  inputs   {[part.tolist() for part in case.inputs]}\n"
            f"  expected {expected.dtype}{list(expected.shape)} {expected.tolist()}\n"
            f"  found    {found.dtype}{list(found.shape)} {found.tolist()}"
        )
