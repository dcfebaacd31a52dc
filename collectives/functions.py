"""Collectives for local functions: code inside `spmd.shard_map` (or `jax.shard_map`) that sees its own shard.

Every function takes a pytree `x` of arrays, this rank's, and `axes`: the name of a mesh axis, or several, the first major.
Ranks are numbered by their index over `axes`; n is their number. All ranks call the same functions, in the same order. Leaves
of one call share messages. Bytes are what the busiest rank receives, for leaves of B bytes together.

JAX's types are kept: a value *varies* over an axis, or is the same on all its ranks. A result that is the same everywhere
(all_reduce, all_gather, broadcast) counts so, and reducing it again is an error: it would be n times the value. Gradients are
those of the whole computation: the cotangent of such a result is not summed once per rank, no factor n appears.

Raises, all of them: `InvalidCollective` for an axis that is not local, for arguments that do not fit the shapes, for a value
that is the same on all ranks where one that varies is needed.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from collectives.errors import InvalidCollective
from collectives.jax_compat import local_axes, local_primitive, varying_axes

Axes = str | Sequence[str]
Pairs = tuple[tuple[int, int], ...]


def _names(what: str, axes: Axes) -> tuple[str, ...]:
    """The axes as a tuple, all of them local and different."""
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    known = local_axes()
    for name in names:
        if name not in known:
            found = f"the local axes here are {', '.join(known)}" if known else "this is no local function"
            raise InvalidCollective(
                f"{what} over {name!r}: {found}. Collectives are for functions under spmd.shard_map(..., axes=...); elsewhere "
                "a decorated function sees whole arrays, and jnp.sum(x) is that of all ranks."
            )
    if not names or len(set(names)) < len(names):
        raise InvalidCollective(f"{what} over {axes!r}: one or more different axes.")
    return names


def _varying(x: Any, names: tuple[str, ...]) -> Any:
    """The same values, typed as varying over the axes."""
    missing = tuple(name for name in names if name not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def _check_varies(what: str, x: Any, names: tuple[str, ...]) -> None:
    """Raise for a value that is the same on all ranks of an axis: reducing it would count it n times."""
    same = [name for name in names if name not in varying_axes(x)]
    if same:
        raise InvalidCollective(
            f"{what} over {', '.join(names)}: the value {jax.typeof(x)} is the same on all ranks of {', '.join(same)} already: "
            "reduced, gathered, never sharded, or a gradient with respect to such a value, which is its sum over the ranks. "
            "Use it as it is (for a mean of gradients divide by axis_size)."
        )


def _dim(what: str, x: Any, dim: int) -> int:
    ndim = jnp.ndim(x)
    if not -ndim <= dim < ndim:
        raise InvalidCollective(f"{what}: dim {dim} of an array of shape {jnp.shape(x)}.")
    return dim % ndim


def _divided(what: str, x: Any, dim: int, n: int) -> int:
    """The size of one of n equal pieces of a dim."""
    size = jnp.shape(x)[dim]
    if size % n:
        raise InvalidCollective(f"{what}: dim {dim} of {size} does not divide over {n} ranks; pad it.")
    return size // n


def axis_size(axes: Axes) -> int:
    """The number of ranks over `axes`. A Python integer."""
    known = local_axes()
    return math.prod(known[name] for name in _names("axis_size", axes))


def axis_index(axes: Axes) -> jax.Array:
    """This rank's number over `axes`, the first major: int32, 0-d."""
    known, index = local_axes(), jnp.int32(0)
    for name in _names("axis_index", axes):
        index = index * known[name] + lax.axis_index(name)
    return index


def vary(x: Any, axes: Axes) -> Any:
    """The same leaves, counted as values that differ from rank to rank: what a loop carries that makes them differ.

    A constant, as `jnp.zeros`, is the same on all ranks; where a loop's body gives back a value that differs, JAX wants it to
    come in as one. Gradient: the cotangents are summed over the ranks. Bytes: 0.
    """
    names = _names("vary", axes)
    return jax.tree.map(lambda leaf: _varying(jnp.asarray(leaf), names), x)


def all_reduce(x: Any, axes: Axes, op: str = "sum") -> Any:
    """The reduction over all ranks, on every rank: leaves of any shape to the same.

    `op`: sum, mean (of inexact numbers), max, min (both carry NaN), prod, and, or, xor (bitwise on integers, logical on bools).
    Gradients: of a sum and a mean the cotangent, on every rank; of max and min shared equally by the ranks that hold the
    extreme, as in `jnp.max`; of a product that of `jnp.prod`; and, or, xor have none. Bytes: 2 B (n-1)/n; a product gathers,
    B (n-1).
    """
    names = _names("all_reduce", axes)
    if op not in REDUCTIONS:
        raise InvalidCollective(f"all_reduce: no op {op!r}; they are {', '.join(REDUCTIONS)}.")

    def one(leaf: Any) -> Any:
        _check_varies(f"all_reduce of {op}", leaf, names)
        return REDUCTIONS[op](leaf, names)

    return jax.tree.map(one, x)


def _mean(x: Any, names: tuple[str, ...]) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise InvalidCollective(f"all_reduce: the mean of {x.dtype} is no {x.dtype}; cast first.")
    return lax.psum(x, names) / axis_size(names)


def _extreme(reduce: Callable[..., Any]) -> Callable[[Any, tuple[str, ...]], Any]:
    """max or min with a gradient: JAX has none for them."""

    @functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
    def extreme(x: Any, names: tuple[str, ...]) -> Any:
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise InvalidCollective(f"all_reduce: {x.dtype} has no max and no min.")
        return reduce(x, names)

    def derivative(names: tuple[str, ...], primals: Any, tangents: Any) -> Any:
        (x,), (tangent,) = primals, tangents
        found = extreme(x, names)
        holds = x == _varying(found, names)
        total = lax.psum((jnp.where(holds, tangent, 0), holds.astype(x.dtype)), names)
        return found, total[0] / total[1]

    extreme.defjvp(derivative)
    return extreme


def _product(x: Any, names: tuple[str, ...]) -> Any:
    return jnp.prod(lax.all_gather(x, names, to="invarying"), axis=0, dtype=x.dtype)


def _bitwise(op: str) -> Callable[[Any, tuple[str, ...]], Any]:
    def reduce(x: Any, names: tuple[str, ...]) -> Any:
        if not (x.dtype == jnp.bool_ or jnp.issubdtype(x.dtype, jnp.integer)):
            raise InvalidCollective(f"all_reduce: {op} of {x.dtype}; it is for integers and bools.")
        return reduce_p.bind(x, axes=names, op=op)[0]

    return reduce


REDUCTIONS: Final[dict[str, Callable[[Any, tuple[str, ...]], Any]]] = {
    "sum": lambda x, names: lax.psum(x, names),
    "mean": _mean,
    "max": _extreme(lax.pmax),
    "min": _extreme(lax.pmin),
    "prod": _product,
    "and": _bitwise("and"),
    "or": _bitwise("or"),
    "xor": _bitwise("xor"),
}
"""Per op the reduction of one array over axes."""


def all_gather(x: Any, axes: Axes, dim: int = 0) -> Any:
    """The leaves of all ranks joined along `dim`, in the order of the ranks, on every rank: size s to n s.

    Gradient: every rank's own piece of the cotangent. Bytes: B (n-1).
    """
    names = _names("all_gather", axes)

    def one(leaf: Any) -> Any:
        _check_varies("all_gather", leaf, names)
        return lax.all_gather(leaf, names, axis=_dim("all_gather", leaf, dim), tiled=True, to="invarying")

    return jax.tree.map(one, x)


def reduce_scatter(x: Any, axes: Axes, dim: int = 0, op: str = "sum") -> Any:
    """The reduction over all ranks, of which each keeps its piece of `dim`: size s to s/n. `op`: sum or mean.

    Gradient: the pieces of the cotangent, gathered. Bytes: B (n-1)/n.
    """
    names = _names("reduce_scatter", axes)
    if op not in ("sum", "mean"):
        raise InvalidCollective(f"reduce_scatter: no op {op!r}; they are sum, mean.")

    def one(leaf: Any) -> Any:
        _check_varies("reduce_scatter", leaf, names)
        at, n = _dim("reduce_scatter", leaf, dim), axis_size(names)
        _divided("reduce_scatter", leaf, at, n)
        total = lax.psum_scatter(leaf, names, scatter_dimension=at, tiled=True)
        return total if op == "sum" else total / n

    return jax.tree.map(one, x)


def all_to_all(x: Any, axes: Axes, split_dim: int, join_dim: int) -> Any:
    """Cut `split_dim` into n pieces, send the i-th to rank i, and join what comes along `join_dim`, in the order of the ranks.

    Split size s to s/n, join size s to n s (the same dim: unchanged). From shards of `join_dim` to shards of `split_dim`.
    Gradient: the same with the dims exchanged. Bytes: B (n-1)/n.
    """
    names = _names("all_to_all", axes)

    def one(leaf: Any) -> Any:
        split, join = _dim("all_to_all", leaf, split_dim), _dim("all_to_all", leaf, join_dim)
        _divided("all_to_all", leaf, split, axis_size(names))
        return lax.all_to_all(_varying(leaf, names), names, split, join, tiled=True)

    return jax.tree.map(one, x)


def ragged_all_to_all(
    x: jax.Array, sizes: jax.Array, axes: Axes, limit: int | None = None, capacity: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Rows to ranks, so many as `sizes` say: this rank's rows lie in the order of their destinations, `sizes[i]` go to rank i.

    `x`: (rows, ...), of which the first `sizes.sum()` are sent; `sizes`: (n,) of integers, which may differ on every rank and
    in every call. `limit` is the most that one rank sends another (static; all rows by default), `capacity` the most that one
    receives (n times `limit` by default). Returns (capacity, ...), the rows received in the order of their sources, zeros after
    them; and (n,), how many of them are from each. Smaller limits save memory and bytes, and rows beyond them are lost: then
    the sizes of all ranks add up to more than what they received. Gradient: the cotangents travel back. Bytes: n - 1 blocks of
    `limit` rows, however full.
    """
    names = _names("ragged_all_to_all", axes)
    x, sizes = jnp.asarray(x), jnp.asarray(sizes)
    n, rows = axis_size(names), x.shape[0]
    if jnp.shape(sizes) != (n,):
        raise InvalidCollective(f"ragged_all_to_all: sizes of shape {jnp.shape(sizes)} for {n} ranks.")
    if not jnp.issubdtype(jnp.result_type(sizes), jnp.integer):
        raise InvalidCollective(f"ragged_all_to_all: sizes are integers, not {jnp.result_type(sizes)}.")
    limit = rows if limit is None else limit
    capacity = n * limit if capacity is None else capacity
    sizes = sizes.astype(jnp.int32)
    x = x if rows else jnp.zeros_like(x, shape=(1, *x.shape[1:]))  # nothing of it is taken
    starts = jnp.cumsum(sizes) - sizes
    sent = jnp.minimum(sizes, limit)
    within = jnp.arange(limit)
    taken = (within < sent[:, None]) & (starts[:, None] + within < rows)
    blocks = jnp.where(
        _over(taken, x.ndim + 1), x[jnp.where(taken, starts[:, None] + within, 0)], jnp.zeros((), x.dtype)
    )
    came = all_to_all(sent, names, 0, 0)
    blocks = all_to_all(blocks, names, 0, 0)
    came = jnp.clip(capacity - (jnp.cumsum(came) - came), 0, came)  # what there is room for
    places = (jnp.cumsum(came) - came)[:, None] + within
    places = jnp.where(within < came[:, None], places, capacity)
    flat = blocks.reshape(n * limit, *blocks.shape[2:])
    out = jnp.zeros_like(flat, shape=(capacity, *flat.shape[1:]))
    return out.at[places.reshape(-1)].set(flat, mode="drop"), came


def _over(mask: Any, ndim: int) -> Any:
    return mask.reshape(mask.shape + (1,) * (ndim - mask.ndim))


def broadcast(x: Any, axes: Axes, root: int = 0) -> Any:
    """The leaves of rank `root`, on every rank. Gradient: the cotangent goes to the root; zero elsewhere. Bytes: B."""
    names = _names("broadcast", axes)
    _check_rank("broadcast", "root", root, names)
    leaves, treedef = jax.tree.flatten(x)
    for leaf in leaves:
        _check_varies("broadcast", leaf, names)
    return jax.tree.unflatten(treedef, broadcast_p.bind(*leaves, axes=names, root=root) if leaves else [])


def reduce(x: Any, axes: Axes, op: str = "sum", root: int = 0) -> Any:
    """The reduction over all ranks on rank `root`, zeros on the others. Ops and gradient: see `all_reduce`. Bytes: the same."""
    names = _names("reduce", axes)
    _check_rank("reduce", "root", root, names)
    here = axis_index(names) == root
    return jax.tree.map(lambda leaf: jnp.where(here, leaf, jnp.zeros_like(leaf)), all_reduce(x, names, op))


def gather(x: Any, axes: Axes, dim: int = 0, root: int = 0) -> Any:
    """The leaves of all ranks joined along `dim` on rank `root`, and zeros on the others: size s to n s.

    Gradient: the root's cotangent, scattered. Bytes: B (n-1), on the root.
    """
    names = _names("gather", axes)
    _check_rank("gather", "root", root, names)
    n = axis_size(names)

    def joined(*pieces: Any) -> Any:
        return lax.concatenate(pieces, _dim("gather", pieces[0], dim))

    sent = [_permuted(x, names, ((source, root),)) for source in range(n)]
    return jax.tree.map(joined, *_together(names, sent))


def scatter(x: Any, axes: Axes, dim: int = 0, root: int = 0) -> Any:
    """Every rank's piece of `dim` of the leaves of rank `root`: size s to s/n; what the others pass is not read.

    Gradient: the pieces' cotangents, gathered on the root; zero elsewhere. Bytes: B/n.
    """
    names = _names("scatter", axes)
    _check_rank("scatter", "root", root, names)
    n = axis_size(names)

    def piece(leaf: Any, index: int) -> Any:
        at = _dim("scatter", leaf, dim)
        size = _divided("scatter", leaf, at, n)
        return lax.slice_in_dim(leaf, index * size, (index + 1) * size, axis=at)

    sent = [_permuted(jax.tree.map(functools.partial(piece, index=to), x), names, ((root, to),)) for to in range(n)]
    index = axis_index(names)
    own = (lambda *found: lax.select_n(index, *found)) if n > 1 else lambda found: found
    return jax.tree.map(own, *_together(names, sent))


def permute(x: Any, axes: Axes, pairs: Sequence[tuple[int, int]]) -> Any:
    """For every pair (source, destination) the source's leaves; zeros where no pair leads. Destinations are different.

    Gradient: the cotangents travel back. Bytes: B.
    """
    names = _names("permute", axes)
    return _together(names, [_permuted(x, names, tuple((int(i), int(j)) for i, j in pairs))])[0]


def shift(x: Any, axes: Axes, by: int = 1, periodic: bool = True) -> Any:
    """The leaves of the rank `by` before: rank i's go to rank i + `by`. A ring if `periodic`; else zeros come in at the end.

    Gradient: the cotangents travel back. Bytes: B.
    """
    n = axis_size(_names("shift", axes))
    targets = ((source, source + by) for source in range(n))
    return permute(x, axes, [(i, j % n) for i, j in targets if periodic or 0 <= j < n])


def send_recv(x: Any, axes: Axes, source: int, destination: int) -> Any:
    """The leaves of rank `source` on rank `destination`, zeros on the others. Gradient: it travels back. Bytes: B."""
    return permute(x, axes, [(source, destination)])


def _check_rank(what: str, word: str, rank: int, names: tuple[str, ...]) -> None:
    if not 0 <= rank < axis_size(names):
        raise InvalidCollective(f"{what}: {word} {rank} of {axis_size(names)} ranks over {', '.join(names)}.")


def _permuted(x: Any, names: tuple[str, ...], pairs: Pairs) -> tuple[Any, Pairs]:
    """What is to be sent, once the pairs are checked."""
    for each in itertools.chain.from_iterable(pairs):
        _check_rank("permute", "rank", each, names)
    if len({destination for _, destination in pairs}) < len(pairs):
        raise InvalidCollective(f"permute: {pairs}: a destination twice.")
    return jax.tree.map(lambda leaf: _varying(leaf, names), x), pairs


def _together(names: tuple[str, ...], sent: Sequence[tuple[Any, Pairs]]) -> list[Any]:
    """Several permutations in one call for each dtype, so that what two ranks have for one another is one message."""
    flat = [(leaf, pairs) for x, pairs in sent for leaf in jax.tree.leaves(x)]
    found: dict[int, Any] = {}
    for dtype in dict.fromkeys(leaf.dtype for leaf, _ in flat):
        chosen = [at for at, (leaf, _) in enumerate(flat) if leaf.dtype == dtype]
        results = permute_p.bind(*(flat[at][0] for at in chosen), axes=names, pairs=tuple(flat[at][1] for at in chosen))
        found.update(zip(chosen, results, strict=True))
    received, out = iter([found[at] for at in range(len(flat))]), []
    for x, _ in sent:
        leaves, treedef = jax.tree.flatten(x)
        out.append(jax.tree.unflatten(treedef, list(itertools.islice(received, len(leaves)))))
    return out


FILLS: Final = ("periodic", "edge", "zeros")


def halo_exchange(x: Any, dims: Mapping[str, int], width: int = 1, fill: str | Mapping[str, str] = "periodic") -> Any:
    """Fields with `width` rows of the neighbours around them, corners included: size s to s + 2 `width` in each dim of `dims`.

    `dims`: per mesh axis the array dim that is sharded over it. What lies beyond the ends of the whole is the other end
    (`fill="periodic"`), the last row again (`"edge"`), or zeros (`"zeros"`); per axis, if `fill` is a dict. All leaves of one
    dtype go in one call, one message to each neighbour. Gradient: halos' cotangents are added where they came from. Bytes: the
    halo.
    """
    if not isinstance(dims, Mapping) or not all(isinstance(name, str) for name in dims):
        raise InvalidCollective(f"halo_exchange: dims={dims!r}; it gives the array dim for each axis: {{'x': 0}}.")
    names = _names("halo_exchange", tuple(dims))
    fills = {name: fill if isinstance(fill, str) else fill.get(name, "periodic") for name in names}
    if width == 0:
        return x
    unknown = [each for each in fills.values() if each not in FILLS]
    if unknown or (not isinstance(fill, str) and not set(fill) <= set(names)):
        raise InvalidCollective(f"halo_exchange: fill={fill!r}; {', '.join(FILLS)}, for all or per axis of {names}.")
    leaves, treedef = jax.tree.flatten(x)
    alike: dict[Any, list[int]] = {}  # such leaves are stacked: fewer and longer copies
    for index, leaf in enumerate(leaves):
        alike.setdefault((jnp.shape(leaf), jnp.result_type(leaf)), []).append(index)
    halos = []
    for (shape, _), places in alike.items():
        at = {name: _dim("halo_exchange", leaves[places[0]], dim) for name, dim in dims.items()}
        _check_halo(shape, list(at.values()), width)
        field = jnp.stack([_varying(jnp.asarray(leaves[index]), names) for index in places])
        halos.append(_Halo(field, {name: 1 + dim for name, dim in at.items()}, width))
    made = _with_halos(halos, names, fills)
    out = {
        index: full[at] for places, full in zip(alike.values(), made, strict=True) for at, index in enumerate(places)
    }
    return jax.tree.unflatten(treedef, [out[index] for index in range(len(leaves))])


def _with_halos(halos: list[_Halo], names: tuple[str, ...], fills: Mapping[str, str]) -> list[Any]:
    """Fill along the axes of one rank by itself, along the others from neighbours."""
    known = local_axes()
    names, alone = (tuple(name for name in names if (known[name] > 1) == is_shared) for is_shared in (True, False))
    for halo, name in itertools.product(halos, alone):
        halo.fill(name, fills[name])
    sizes = [known[name] for name in names]
    offsets = [offset for offset in itertools.product((0, -1, 1), repeat=len(names)) if any(offset)]
    sent = []
    for offset in offsets:
        pairs = _neighbours(offset, sizes, [fills[name] == "periodic" for name in names])
        sent.append(_permuted([halo.slab(dict(zip(names, offset, strict=True))) for halo in halos], names, pairs))
    received = dict(zip(offsets, _together(names, sent), strict=True)) if offsets else {}
    ends = {
        (at, side): lax.axis_index(name) == (0 if side < 0 else sizes[at] - 1)
        for at, name in enumerate(names)
        for side in (-1, 1)
        if fills[name] == "edge"
    }
    return [
        halo.assembled(names, {offset: found[index] for offset, found in received.items()}, ends)
        for index, halo in enumerate(halos)
    ]


def _neighbours(offset: Sequence[int], sizes: Sequence[int], periodic: Sequence[bool]) -> Pairs:
    """(source, destination) for all ranks that have a neighbour at an offset: it sends what they see there."""
    pairs = []
    for destination, coordinate in enumerate(itertools.product(*map(range, sizes))):
        there = [c + o for c, o in zip(coordinate, offset, strict=True)]
        if all(wraps or 0 <= c < n for c, n, wraps in zip(there, sizes, periodic, strict=True)):
            pairs.append((int(np.ravel_multi_index(there, sizes, mode="wrap")), destination))
    return tuple(pairs)


def _check_halo(shape: tuple[int, ...], dims: list[int], width: int) -> None:
    if width < 0 or any(width > shape[dim] for dim in dims) or len(set(dims)) < len(dims):
        raise InvalidCollective(
            f"halo_exchange: width {width} along dims {dims} of a shard of shape {shape}; different dims, each at least as "
            "long as the width: a halo comes from the next rank alone."
        )


class _Halo:
    """One field with room around it along some dims, by the names of their axes; what is there is put in its place."""

    def __init__(self, field: Any, dims: Mapping[str, int], width: int) -> None:
        self.dims, self.width = dims, width
        self.sizes = {name: field.shape[dim] for name, dim in dims.items()}
        room = [(width, width, 0) if dim in dims.values() else (0, 0, 0) for dim in range(field.ndim)]
        self.full = lax.pad(field, jnp.zeros((), field.dtype), room)

    def fill(self, name: str, fill: str) -> None:
        """What lies around it along a dim that is whole here."""
        if fill != "zeros":
            for side in (-1, 1):
                block = (
                    self.slab({name: side}) if fill == "periodic" else self.repeated(self.full, name, side, self.width)
                )
                self.full = self.put(self.full, block, {name: side})

    def slab(self, sides: Mapping[str, int]) -> Any:
        """What another rank sees of this one, which lies at these sides of it: before it (-1) the last rows, after it (1) the
        first, neither (0) all."""
        found = self.full
        for name, side in sides.items():
            size, width = self.sizes[name], self.width
            start, stop = {-1: (size, width + size), 0: (width, width + size), 1: (width, 2 * width)}[side]
            found = lax.slice_in_dim(found, start, stop, axis=self.dims[name])
        return found

    def put(self, full: Any, block: Any, sides: Mapping[str, int]) -> Any:
        """A block around it, before its first rows (-1) or after its last (1)."""
        starts = [np.int32(0)] * full.ndim
        for name, side in sides.items():
            starts[self.dims[name]] = np.int32({-1: 0, 0: self.width, 1: self.width + self.sizes[name]}[side])
        return lax.dynamic_update_slice(full, block, starts)

    def assembled(self, names: tuple[str, ...], received: Mapping[Sequence[int], Any], ends: Mapping[Any, Any]) -> Any:
        """The field with what was received around it, per offset; at the ends of the whole its own rows, if `ends` say so."""

        @functools.cache
        def block(offset: tuple[int, ...]) -> Any:
            found = received[offset] if any(offset) else self.slab(dict.fromkeys(names, 0))
            for at in reversed(range(len(offset))):
                if offset[at] and (at, offset[at]) in ends:
                    inner = block((*offset[:at], 0, *offset[at + 1 :]))
                    found = jnp.where(ends[at, offset[at]], self.repeated(inner, names[at], offset[at]), found)
            return found

        full = self.full
        for offset in received:
            full = self.put(full, block(tuple(offset)), dict(zip(names, offset, strict=True)))
        return full

    def repeated(self, block: Any, name: str, side: int, room: int = 0) -> Any:
        """The first or last row of a block that has `room` around it, `width` times."""
        dim = self.dims[name]
        at = room if side < 0 else block.shape[dim] - room - 1
        row = lax.slice_in_dim(block, at, at + 1, axis=dim)
        shape = tuple(self.width if d == dim else size for d, size in enumerate(block.shape))
        return jnp.broadcast_to(row, shape)


def _returned(cotangents: list[Any], *, axes: tuple[str, ...], pairs: tuple[Pairs, ...]) -> list[Any]:
    """Back to where it came from. What one source sent to several is added: it comes back in as many rounds."""
    rounds = [_rounds(each) for each in pairs]
    sent = [cotangent for cotangent, each in zip(cotangents, rounds, strict=True) for _ in each]
    found = iter(permute_p.bind(*sent, axes=axes, pairs=tuple(itertools.chain(*rounds))))
    return [functools.reduce(lax.add, list(itertools.islice(found, len(each)))) for each in rounds]


def _rounds(pairs: Pairs) -> list[Pairs]:
    """Pairs the other way, in as few rounds as have different destinations; one at least."""
    rounds: list[list[tuple[int, int]]] = [[]]
    for source, destination in pairs:
        free = next((made for made in rounds if all(source != to for _, to in made)), None)
        if free is None:
            free = []
            rounds.append(free)
        free.append((destination, source))
    return list(map(tuple, rounds))


def _to_root(cotangents: list[Any], *, axes: tuple[str, ...], root: int) -> list[Any]:
    here = axis_index(axes) == root
    return [jnp.where(here, _varying(each, axes), jnp.zeros_like(each)) for each in cotangents]


permute_p: Final = local_primitive("local_permute", _returned, varies=True)
"""Several permutations in one call; `pairs` per operand."""
broadcast_p: Final = local_primitive("local_broadcast", _to_root, varies=False)
reduce_p: Final = local_primitive("local_reduce", None, varies=False)
