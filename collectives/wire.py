"""From a collective on an array to one transfer of contiguous memory, and back.

A back end moves and reduces flat buffers; which elements lie where in them is decided here, once for numpy (the methods of a
`Communicator`) and for `jax.numpy` (inside an XLA executable, where the compiler fuses it). `arrange` gives the buffer to
send, the `Transfer`, and the function that makes the result of what was received.

Invariants: buffers are contiguous and of dtypes that numpy knows; sizes are static and in items. Bools travel as uint8,
integers below a byte as bytes; numbers of 16 bits or fewer are reduced in 32 (`simulated.reduction_dtype`). max and min of
floats are those of order-preserving integers, in which NaN is the extreme: so all members get the same bits, and NaN is
carried as in JAX. What a back end cannot reduce is moved, and reduced by the members themselves.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from collectives.simulated import reduction_dtype
from placements.intervals import Bounds, cover

Shape = tuple[int, ...]
Reduces = Callable[[np.dtype[Any], str], bool]
"""Whether a back end reduces items of a dtype with an op: sum, prod, max, min, mean, and, or, xor (these bitwise)."""


def all_but_mean(dtype: np.dtype[Any], op: str) -> bool:
    """What MPI reduces."""
    return op != "mean"


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of items of one member's buffer: the member at the other end, the first item, the number of items."""

    member: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """One operation on flat buffers: its kind, the dtype of the items, how many go in and come out.

    all_reduce and reduce_scatter: `op`, and `counts` per member. all_gather, all_to_all: `sends` and `counts` (received) per
    member; all_to_all: `total` over all members, and `some_empty`, whether any two have nothing for each other: by these all
    choose alike how to send. broadcast: `root`. exchange: pieces sent and received; a piece whose member is oneself is copied.
    """

    kind: str
    dtype: np.dtype[Any]
    items_in: int
    items_out: int
    op: str = ""
    counts: tuple[int, ...] = ()
    sends: tuple[int, ...] = ()
    total: int = 0
    some_empty: bool = False
    root: int = 0
    outgoing: tuple[Piece, ...] = ()
    incoming: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True)
class Arranged:
    """A buffer to send, the transfer, and the result as a function of the buffer received.

    `plain`: the shape of a result that is what was received, where what is sent is the array as it lies; `finish` is then done
    to it in place. `is_elsewhere`: this member gets nothing.
    """

    buffer: Any
    transfer: Transfer
    result: Callable[[Any], Any]
    plain: Shape | None = None
    finish: Callable[[Any], Any] | None = None
    is_elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class Joined:
    """Several arranged collectives of one kind as one: the buffer, the transfer, and every result from what was received."""

    buffer: Any
    transfer: Transfer
    results: Callable[[Any], list[Any]]


def join(parts: Sequence[Arranged]) -> Joined:
    """One transfer for several of one kind, op and dtype. Buffers that are ordered by members are interleaved."""
    first = parts[0].transfer
    if len(parts) == 1:
        return Joined(parts[0].buffer, first, lambda x: [parts[0].result(x)])
    transfers = [part.transfer for part in parts]
    assert len({(t.kind, t.dtype, t.op, t.root) for t in transfers}) == 1, "transfers of several kinds in one message"
    if first.kind == "exchange":
        return _join_exchanges(parts)
    sends = [t.sends if t.sends else t.counts if t.kind == "reduce_scatter" else (t.items_in,) for t in transfers]
    counts = [(t.items_out,) if t.kind == "reduce_scatter" else t.counts or (t.items_out,) for t in transfers]
    transfer = Transfer(
        first.kind,
        first.dtype,
        sum(t.items_in for t in transfers),
        sum(t.items_out for t in transfers),
        op=first.op,
        counts=_sum([t.counts for t in transfers]),
        sends=_sum([t.sends for t in transfers]),
        total=sum(t.total for t in transfers),
        some_empty=any(t.some_empty for t in transfers),
        root=first.root,
    )
    pieces = _by_member([part.buffer for part in parts], sends)
    buffer = xp_of(pieces[0]).concatenate(pieces)

    def results(received: Any) -> list[Any]:
        return [part.result(flat) for part, flat in zip(parts, _apart(received, counts), strict=True)]

    return Joined(buffer, transfer, results)


def _sum(columns: list[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*columns, strict=True)))


def _join_exchanges(parts: Sequence[Arranged]) -> Joined:
    """What goes to one member lies together, so that it is one message; so does what comes from one."""
    outgoing, incoming = (
        sorted(
            ((piece, index) for index, part in enumerate(parts) for piece in getattr(part.transfer, name)),
            key=lambda pair: pair[0].member,
        )
        for name in ("outgoing", "incoming")
    )
    buffers = [parts[index].buffer[piece.start : piece.start + piece.count] for piece, index in outgoing]
    buffer = xp_of(parts[0].buffer).concatenate(buffers) if buffers else parts[0].buffer[:0]
    sent, received = (_runs_of([piece for piece, _ in pairs]) for pairs in (outgoing, incoming))
    items_in, items_out = (sum(piece.count for piece in pieces) for pieces in (sent, received))
    transfer = Transfer("exchange", parts[0].transfer.dtype, items_in, items_out, outgoing=sent, incoming=received)

    def results(flat: Any) -> list[Any]:
        found: list[list[tuple[int, Any]]] = [[] for _ in parts]
        at = 0
        for piece, index in incoming:
            found[index].append((piece.start, flat[at : at + piece.count]))
            at += piece.count
        return [part.result(_in_order(pieces, flat)) for part, pieces in zip(parts, found, strict=True)]

    return Joined(buffer, transfer, results)


def _runs_of(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Pieces laid one after the other, those of one member as one."""
    runs: list[Piece] = []
    at = 0
    for piece in pieces:
        if runs and runs[-1].member == piece.member:
            runs[-1] = Piece(piece.member, runs[-1].start, runs[-1].count + piece.count)
        else:
            runs.append(Piece(piece.member, at, piece.count))
        at += piece.count
    return tuple(runs)


def _in_order(pieces: list[tuple[int, Any]], flat: Any) -> Any:
    """What was received for one part, as it expects it: by where each piece starts."""
    ordered = [piece for _, piece in sorted(pieces, key=lambda pair: pair[0])]
    return ordered[0] if len(ordered) == 1 else xp_of(flat).concatenate(ordered) if ordered else flat[:0]


def _by_member(buffers: list[Any], lengths: list[tuple[int, ...]]) -> list[Any]:
    """The runs of all buffers for the first member, then those for the second, and so on."""
    ends = [np.cumsum(each).tolist() for each in lengths]
    return [
        buffer[end[member] - length[member] : end[member]]
        for member in range(len(lengths[0]))
        for buffer, end, length in zip(buffers, ends, lengths, strict=True)
    ]


def _apart(received: Any, counts: list[tuple[int, ...]]) -> list[Any]:
    """The inverse, for what was received: one buffer each, the runs from all members in order."""
    xp, start = xp_of(received), 0
    runs: list[list[Any]] = [[] for _ in counts]
    for member in range(len(counts[0])):
        for run, count in zip(runs, counts, strict=True):
            run.append(received[start : start + count[member]])
            start += count[member]
    return [run[0] if len(run) == 1 else xp.concatenate(run) for run in runs]


def arrange(name: str, array: Any, rank: int, size: int, reduces: Reduces = all_but_mean, **arguments: Any) -> Arranged:
    """The collective `name` on `array`, for member `rank` of `size`; `arguments` are those of `Communicator.<name>`."""
    more = {"reduces": reduces} if "op" in arguments else {}
    return ARRANGE[name](array, rank, size, **arguments, **more)


def xp_of(array: Any) -> Any:
    """The module of array functions for an array: numpy, jax.numpy, cupy."""
    if isinstance(array, np.ndarray):
        return np
    return jnp if isinstance(array, jax.Array) else sys.modules[type(array).__module__.partition(".")[0]]


def _bits(array: Any, dtype: Any) -> Any:
    return lax.bitcast_convert_type(array, dtype) if isinstance(array, jax.Array) else array.view(dtype)


def _items(array: Any) -> tuple[Any, Callable[[Any], Any]]:
    """An array in a dtype that has whole bytes and that MPI and numpy know, and the way back. For movement alone."""
    dtype = array.dtype
    if dtype == jnp.bool_:
        return array.astype(np.uint8), lambda x: x.astype(dtype)
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        wide = np.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else np.uint8
        return array.astype(wide), lambda x: x.astype(dtype)
    if dtype.isbuiltin != 1:  # bfloat16 and the float8s, which numpy only knows by ml_dtypes: their bits
        return _bits(array, {1: np.uint8, 2: np.uint16}[dtype.itemsize]), lambda x: _bits(x, dtype)
    return array, lambda x: x


FUNCTIONS: Final = {
    "sum": "add", "prod": "multiply", "max": "maximum", "min": "minimum",
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
}  # fmt: skip
"""What reduces two arrays, in numpy and its kin."""
_BOOLEAN: Final = {"prod": "min", "min": "min", "max": "max", "and": "min", "or": "max", "xor": "xor"}
"""Reductions of bools, on zeros and ones."""


def _reducible(array: Any, op: str, size: int, reduces: Reduces) -> tuple[Any, str, Callable[[Any], Any]]:
    """An array and an op that back ends reduce right, and the way back. Complex numbers may become pairs, along a last dim."""
    dtype = array.dtype
    if dtype == jnp.bool_:
        return array.astype(np.uint8), _BOOLEAN[op], lambda x: x.astype(dtype)
    if reduction_dtype(dtype) != dtype:
        wide, wire_op, back = _reducible(array.astype(reduction_dtype(dtype)), op, size, reduces)
        return wide, wire_op, lambda x: back(x).astype(dtype)
    if op in ("max", "min") and jnp.issubdtype(dtype, jnp.floating):
        return _ordered(array, op), op, lambda x: _unordered(x, dtype)
    if op == "mean" and not reduces(dtype, op):
        wide, wire_op, back = _reducible(array, "sum", size, reduces)
        return wide, wire_op, lambda x: (back(x) / size).astype(dtype)
    if op == "sum" and jnp.issubdtype(dtype, jnp.complexfloating) and not reduces(dtype, op):
        pairs = xp_of(array).stack([array.real, array.imag], -1)
        return pairs, op, lambda x: (x[..., 0] + 1j * x[..., 1]).astype(dtype)
    return array, op, lambda x: x


def _reduced(stacked: Any, op: str) -> Any:
    """The reduction over the first dim, in order."""
    return functools.reduce(getattr(xp_of(stacked), FUNCTIONS[op]), list(stacked))


def _ordered(array: Any, op: str) -> Any:
    """Floats as integers of the same order; NaN above all for a max, below all for a min."""
    xp, kind = xp_of(array), {4: np.int32, 8: np.int64}[array.dtype.itemsize]
    limits: Any = np.iinfo(kind)
    bits = _bits(array, kind)
    ordered = xp.where(bits < 0, bits ^ kind(limits.max), bits)
    return xp.where(array != array, kind(limits.max if op == "max" else limits.min), ordered)


def _unordered(ordered: Any, dtype: Any) -> Any:
    kind = ordered.dtype.type
    bits = xp_of(ordered).where(ordered < 0, ordered ^ kind(np.iinfo(kind).max), ordered)
    return _bits(bits, dtype)


def _flat(array: Any) -> Any:
    return xp_of(array).reshape(array, (-1,))


def _all_reduce(array: Any, rank: int, size: int, *, op: str, reduces: Reduces) -> Arranged:
    wide, wire_op, back = _reducible(array, op, size, reduces)
    if not reduces(wide.dtype, wire_op):
        gathered = _all_gather(wide[None], rank, size, dim=0, sizes=(1,) * size)
        return Arranged(gathered.buffer, gathered.transfer, lambda x: back(_reduced(gathered.result(x), wire_op)))
    shape, count = wide.shape, math.prod(wide.shape)
    transfer = Transfer("all_reduce", np.dtype(wide.dtype), count, count, op=wire_op)
    plain, finish = _as_it_lies(shape, wide is array, op, wire_op, size)
    return Arranged(_flat(wide), transfer, lambda x: back(x.reshape(shape)), plain, finish)


def _all_gather(array: Any, rank: int, size: int, *, dim: int, sizes: Sequence[int]) -> Arranged:
    items, back = _items(array)
    moved = xp_of(items).moveaxis(items, dim, 0)
    rest = moved.shape[1:]
    counts = tuple(length * math.prod(rest) for length in sizes)
    transfer = Transfer("all_gather", np.dtype(items.dtype), counts[rank], sum(counts), counts=counts)
    whole = (sum(sizes), *rest)
    plain = whole if items is array and dim == 0 else None
    return Arranged(_flat(moved), transfer, _placed(back, whole, dim), plain)


def _reduce_scatter(
    array: Any, rank: int, size: int, *, op: str, dim: int, sizes: Sequence[int], reduces: Reduces
) -> Arranged:
    wide, wire_op, back = _reducible(array, op, size, reduces)
    if not reduces(wide.dtype, wire_op):  # every member gets its part of all
        parts = _all_to_all(wide[None], rank, size, dim=0, sizes=(1,) * size, to_dim=dim + 1, to_sizes=sizes)
        return Arranged(parts.buffer, parts.transfer, lambda x: back(_reduced(parts.result(x), wire_op)))
    moved = xp_of(wide).moveaxis(wide, dim, 0)
    rest = moved.shape[1:]
    counts = tuple(length * math.prod(rest) for length in sizes)
    transfer = Transfer("reduce_scatter", np.dtype(wide.dtype), sum(counts), counts[rank], op=wire_op, counts=counts)
    own = (sizes[rank], *rest)
    plain, finish = _as_it_lies(own, wide is array and dim == 0, op, wire_op, size)
    return Arranged(_flat(moved), transfer, _placed(back, own, dim), plain, finish)


def _reduce(array: Any, rank: int, size: int, *, op: str, root: int, reduces: Reduces) -> Arranged:
    wide, wire_op, back = _reducible(array, op, size, reduces)
    if not reduces(wide.dtype, wire_op):
        parts = _gather(wide[None], rank, size, dim=0, root=root, sizes=(1,) * size)

        def reduced(x: Any) -> Any:
            return back(_reduced(parts.result(x), wire_op)) if rank == root else None

        return Arranged(parts.buffer, parts.transfer, reduced)
    shape, count = wide.shape, math.prod(wide.shape)
    received = count * (rank == root)
    transfer = Transfer("reduce", np.dtype(wide.dtype), count, received, op=wire_op, root=root)
    plain, finish = _as_it_lies(shape if rank == root else (0,), wide is array, op, wire_op, size)
    result = (lambda x: back(x.reshape(shape))) if rank == root else _nothing
    return Arranged(_flat(wide), transfer, result, plain, finish, rank != root)


def pieces_of(counts: Sequence[int]) -> tuple[Piece, ...]:
    """Runs of so many items for each member, or from it, one after the other."""
    return tuple(Piece(i, sum(counts[:i]), count) for i, count in enumerate(counts))


def _placed(back: Callable[[Any], Any], shape: Shape, dim: int) -> Callable[[Any], Any]:
    """From a flat buffer to an array whose first dim belongs at `dim`, and back to its dtype."""
    return lambda x: back(xp_of(x).moveaxis(x.reshape(shape), 0, dim))


def _as_it_lies(
    shape: Shape, is_array: bool, op: str, wire_op: str, size: int
) -> tuple[Shape | None, Callable[[Any], Any] | None]:
    """The shape of a reduction that is what was received, and what is left to do to it; None where it is another."""
    if not is_array or (op, wire_op) not in ((wire_op, wire_op), ("mean", "sum")):
        return None, None

    def divided(out: Any) -> Any:
        out /= size
        return out

    return shape, divided if op != wire_op else None


def _nothing(buffer: Any) -> None:
    """What a member gets that gets nothing."""


def _gather(array: Any, rank: int, size: int, *, dim: int, root: int, sizes: Sequence[int]) -> Arranged:
    items, back = _items(array)
    moved = xp_of(items).moveaxis(items, dim, 0)
    rest = moved.shape[1:]
    counts = [length * math.prod(rest) for length in sizes]
    incoming = pieces_of(counts) if rank == root else ()
    transfer = Transfer(
        "exchange", np.dtype(items.dtype), counts[rank], sum(piece.count for piece in incoming),
        outgoing=(Piece(root, 0, counts[rank]),), incoming=incoming,
    )  # fmt: skip
    whole = (sum(sizes), *rest)
    result = _placed(back, whole, dim) if rank == root else _nothing
    plain = (whole if rank == root else (0,)) if items is array and dim == 0 else None
    return Arranged(_flat(moved), transfer, result, plain, None, rank != root)


def _scatter(array: Any, rank: int, size: int, *, dim: int, root: int, sizes: Sequence[int]) -> Arranged:
    items, back = _items(array)
    moved = xp_of(items).moveaxis(items, dim, 0)
    rest = moved.shape[1:]
    counts = [length * math.prod(rest) for length in sizes]
    outgoing = pieces_of(counts) if rank == root else ()
    transfer = Transfer(
        "exchange", np.dtype(items.dtype), sum(piece.count for piece in outgoing), counts[rank],
        outgoing=outgoing, incoming=(Piece(root, 0, counts[rank]),),
    )  # fmt: skip
    own = (sizes[rank], *rest)
    sent = _flat(moved) if rank == root else _flat(moved)[:0]
    plain = own if items is array and dim == 0 else None
    return Arranged(sent, transfer, _placed(back, own, dim), plain)


def _all_to_all_rows(
    array: Any, rank: int, size: int, *, dim: int, sends: Sequence[int], receives: Sequence[int]
) -> Arranged:
    items, back = _items(array)
    moved = xp_of(items).moveaxis(items, dim, 0)
    rest = moved.shape[1:]
    row = math.prod(rest)
    outgoing = pieces_of([count * row for count in sends])
    incoming = pieces_of([count * row for count in receives])
    transfer = Transfer(
        "exchange", np.dtype(items.dtype), sum(sends) * row, sum(receives) * row, outgoing=outgoing, incoming=incoming
    )
    whole = (sum(receives), *rest)
    plain = whole if items is array and dim == 0 else None
    return Arranged(_flat(moved), transfer, _placed(back, whole, dim), plain)


def _all_to_all(
    array: Any, rank: int, size: int, *, dim: int, sizes: Sequence[int], to_dim: int, to_sizes: Sequence[int]
) -> Arranged:
    items, back = _items(array)
    xp = xp_of(items)
    ends = np.cumsum(to_sizes).tolist()
    blocks = []
    for end, length in zip(ends, to_sizes, strict=True):
        block = items[(slice(None),) * to_dim + (slice(end - length, end),)]
        blocks.append(_flat(xp.moveaxis(block, dim, 0)))
    rest = math.prod(length for d, length in enumerate(array.shape) if d not in (dim, to_dim))
    sends = tuple(length * sizes[rank] * rest for length in to_sizes)
    counts = tuple(length * to_sizes[rank] * rest for length in sizes)
    total = sum(sizes) * sum(to_sizes) * rest
    transfer = Transfer(
        "all_to_all",
        np.dtype(items.dtype),
        sum(sends),
        sum(counts),
        counts=counts,
        sends=sends,
        total=total,
        some_empty=0 in sizes or 0 in to_sizes,
    )
    shape = [to_sizes[rank] if d == to_dim else length for d, length in enumerate(array.shape)]
    whole = (sum(sizes), *(length for d, length in enumerate(shape) if d != dim))
    return Arranged(xp.concatenate(blocks), transfer, _placed(back, whole, dim))


def _exchange(
    array: Any, rank: int, size: int, *, dim: int, have: Sequence[Bounds], want: Sequence[Bounds]
) -> Arranged:
    """Only what others want is packed; what is one's own goes from the array to the result."""
    items, back = _items(array)
    xp, own = xp_of(items), have[rank][0]
    row = math.prod(length for d, length in enumerate(array.shape) if d != dim)
    sent, outgoing, incoming = [], [], []
    at = 0
    for member, wanted in enumerate(want):
        for holder, (low, high) in cover(tuple(have), wanted, member) if member != rank else ():
            if holder == rank:
                sent.append(_flat(_along(items, dim, low - own, high - own)))
                outgoing.append(Piece(member, at, (high - low) * row))
                at += (high - low) * row
    tiles, received = cover(tuple(have), want[rank], rank), 0
    for holder, (low, high) in tiles:
        if holder != rank:
            incoming.append(Piece(holder, received, (high - low) * row))
            received += (high - low) * row
    transfer = Transfer(
        "exchange", np.dtype(items.dtype), at, received, outgoing=tuple(outgoing), incoming=tuple(incoming)
    )

    def result(buffer: Any) -> Any:
        parts, start = [], 0
        for holder, (low, high) in tiles:
            if holder == rank:
                parts.append(_along(items, dim, low - own, high - own))
                continue
            shape = [high - low if d == dim else length for d, length in enumerate(array.shape)]
            parts.append(buffer[start : start + (high - low) * row].reshape(shape))
            start += (high - low) * row
        if len(parts) == 1 and not isinstance(parts[0], jax.Array):
            parts = [parts[0].copy()]  # not a view of the argument
        return back(_joined(parts, dim) if parts else _along(items, dim, 0, 0))

    return Arranged(xp.concatenate(sent or [_flat(items)[:0]]), transfer, result)


def _joined(parts: list[Any], dim: int) -> Any:
    """Arrays one after the other along a dim. Inside XLA they are put around the longest, whose copy is then the only pass: its
    loop for a concatenation asks for every element where it comes from."""
    if len(parts) == 1 or not isinstance(parts[0], jax.Array):
        return parts[0] if len(parts) == 1 else xp_of(parts[0]).concatenate(parts, dim)
    lengths = [part.shape[dim] for part in parts]
    longest = max(range(len(parts)), key=lengths.__getitem__)
    starts = [sum(lengths[:at]) for at in range(len(parts))]
    room = (starts[longest], sum(lengths) - starts[longest] - lengths[longest], 0)
    around = [room if d == dim else (0, 0, 0) for d in range(parts[0].ndim)]
    full = lax.pad(parts[longest], jnp.zeros((), parts[0].dtype), around)
    for at, part in enumerate(parts):
        if at != longest and lengths[at]:
            full = lax.dynamic_update_slice_in_dim(full, part, starts[at], dim)
    return full


def _along(array: Any, dim: int, start: int, stop: int) -> Any:
    """A run of indices of one dim."""
    return array[(slice(None),) * dim + (slice(start, stop),)]


def _broadcast(array: Any, rank: int, size: int, *, root: int) -> Arranged:
    items, back = _items(array)
    shape, count = array.shape, math.prod(array.shape)
    transfer = Transfer("broadcast", np.dtype(items.dtype), count, count, root=root)
    return Arranged(_flat(items), transfer, lambda x: back(x.reshape(shape)), shape if items is array else None)


def _permute(array: Any, rank: int, size: int, *, pairs: Sequence[tuple[int, int]]) -> Arranged:
    items, back = _items(array)
    shape, count = array.shape, math.prod(array.shape)
    outgoing = tuple(Piece(destination, 0, count) for source, destination in pairs if source == rank)
    incoming = tuple(Piece(source, 0, count) for source, destination in pairs if destination == rank)
    sent, received = count * bool(outgoing), count * bool(incoming)
    transfer = Transfer("exchange", np.dtype(items.dtype), sent, received, outgoing=outgoing, incoming=incoming)

    def result(buffer: Any) -> Any:
        return back(buffer.reshape(shape) if incoming else xp_of(buffer).zeros(shape, items.dtype))

    return Arranged(_flat(items)[:sent], transfer, result)


ARRANGE: Final[dict[str, Callable[..., Arranged]]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "all_to_all_rows": _all_to_all_rows,
    "broadcast": _broadcast,
    "exchange": _exchange,
    "gather": _gather,
    "permute": _permute,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "scatter": _scatter,
}
"""The names are those of `simulated.GROUP`."""
