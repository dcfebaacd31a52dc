"""Making DArrays: from whole arrays, from callbacks, from local pieces, and from nothing.

No data move, but for `distribute(source=...)` and `from_local(exchange=True)`. On real ranks these two functions are
collective: the ranks compare what they pass.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from collectives.jax_compat import ShapedArray, raw_bytes
from collectives.process import held_coordinates, is_simulated, on_mesh
from collectives.simulated import is_small_float
from placements import Layout, Mesh, P, Pieces, PlacementError, Split
from placements.layout import Shape
from placements.mesh import group_positions
from spmd.array import DArray, build_shards, refuse_in_trace, shards_of
from spmd.current import mesh_or_current
from spmd.errors import ArgumentError
from spmd.execute import VALUES_NOTE, agree_on, checksums, run_alone, run_collective
from spmd.prefix import PlacedLeaf, place_leaves
from spmd.validate import valid_layout


def layout_of(what: str, placements: P, mesh: Mesh, shape: Shape, dtype: Any) -> Layout:
    """The layout of an array, or the fact of the error with the array's shape and the mesh around it."""
    try:
        return valid_layout(placements, mesh, len(shape), dtype)
    except PlacementError as error:
        raise type(error)(f"{what} of shape {shape} on {mesh!r}: {error}") from error


def distribute(x: Any, placements: Any, mesh: Mesh | None = None, *, source: int | None = None) -> Any:
    """A whole array, the same on every rank, as a DArray; or a pytree of arrays, with a prefix of placements.

    The data are copied. `source=r` takes rank r's array and broadcasts it (in the simulator there is one array); without it no
    data move. Collective: on real ranks shapes, placements and checksums are compared (of 16 MB at most), since a rank's own
    piece in place of the whole array would be cut again. Pieces are for `from_local`, `from_callback` reads the data in parts.

    Raises `DivergenceError` on every rank where they pass different arrays, `InvalidPlacement` where the placements do not
    fit, `ArgumentError` for a DArray (move it with `x.redistribute`).

    >>> from placements import Shard
    >>> distribute(np.arange(5.0), P(dp=Shard(0)), Mesh(dp=4)).shards[(0,)].shape
    (2,)
    """
    refuse_in_trace("spmd.distribute")
    if isinstance(placements, Mesh):
        raise ArgumentError("spmd.distribute(x, placements, mesh): the placements come first, as in P(dp=Shard(0)).")
    found = mesh_or_current(mesh, "spmd.distribute")
    if source is not None and source not in found.ranks:
        raise ArgumentError(f"spmd.distribute: source={source} is no rank of {found!r}.")
    placed, treedef = place_leaves(placements, x, "x", "spmd.distribute", _aval)
    agree_on(found, lambda: _lines(placed, source))
    return jax.tree.unflatten(treedef, [_distribute(leaf, found, source) for leaf in placed])


def _lines(placed: list[PlacedLeaf], source: int | None) -> list[str]:
    """What the ranks must agree on: every leaf's shape, dtype, placements; without a source the values too."""
    lines = ["spmd.distribute", f"  source={source}"]
    lines += [f"  {leaf.path}: {leaf.aval.dtype}{list(leaf.aval.shape)} as {leaf.stated}" for leaf in placed]
    if source is None:
        found = checksums((leaf.path, leaf.value) for leaf in placed)
        lines += [f"  {path}: values of checksum {crc:08x}" for path, crc in found.items()]
    return [*lines, VALUES_NOTE]


def _from_rank(value: Any, source: int, mesh: Mesh) -> Any:
    """One rank's array, on every rank. Each passes one of the same shape and dtype."""
    here = on_mesh(mesh)
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        words = run_alone(here, "broadcast", jax.random.key_data(value), root=mesh.ranks.index(source))
        return jax.random.wrap_key_data(jnp.asarray(words), impl=jax.random.key_impl(value))
    return jnp.asarray(run_alone(here, "broadcast", value, root=mesh.ranks.index(source)))


def _aval(path: str, value: Any) -> Any:
    if isinstance(value, DArray):
        raise ArgumentError(
            f"spmd.distribute: {path} is distributed already, {value!r}; move it with x.redistribute(...)."
        )
    return jax.typeof(value)


def _distribute(leaf: PlacedLeaf, mesh: Mesh, source: int | None) -> DArray:
    placements, aval = leaf.stated or P(), leaf.aval
    layout = layout_of(f"spmd.distribute: {leaf.path}", placements, mesh, aval.shape, aval.dtype)
    value = _canonical(leaf.value, aval)
    if source is not None and not is_simulated(mesh):
        value = _from_rank(value, source, mesh)
    return DArray(aval, layout, shards_of(value, layout), placements)


def _canonical(x: Any, aval: Any) -> Any:
    """The value in the dtype that JAX gives it (float64 is float32 unless x64 is on)."""
    return x if isinstance(x, jax.Array) else np.asarray(x, aval.dtype)


def from_callback(
    fn: Callable[[tuple[slice, ...]], Any],
    shape: Sequence[int],
    placements: P,
    mesh: Mesh | None = None,
    dtype: Any = None,
) -> DArray:
    """A DArray of global `shape` whose parts `fn(index)` gives; `index` are the slices of the global array.

    `fn` is called once for each distinct part that this process holds: the common way to feed data. `dtype` defaults to that
    of what `fn` returns. Raises `ArgumentError` where a part has another shape or dtype than it should. Communication: none.
    """
    found = mesh_or_current(mesh, "spmd.from_callback")
    size = tuple(shape)
    layout = layout_of("spmd.from_callback: an array", placements, found, size, dtype and jnp.dtype(dtype))
    kinds: list[Any] = []

    def make(index: tuple[slice, ...]) -> jax.Array:
        part = jnp.array(fn(index), dtype=dtype, copy=True)
        wanted = tuple(s.stop - s.start for s in index)
        if part.shape != wanted or (kinds and part.dtype != kinds[0]):
            raise ArgumentError(
                f"spmd.from_callback: for {index} fn gave {part.dtype}{list(part.shape)}, expected "
                f"{kinds[0] if kinds else part.dtype}{list(wanted)}."
            )
        kinds.append(part.dtype)
        return part

    shards = build_shards(size, layout, make)
    layout_of("spmd.from_callback: an array", placements, found, size, shards[0].dtype)
    return DArray(ShapedArray(size, shards[0].dtype), layout, shards, placements)


def from_local(
    x: Any, placements: P, mesh: Mesh | None = None, *, shape: Sequence[int] | None = None, exchange: bool = False
) -> DArray:
    """A DArray from pieces that already lie distributed: in the simulator a list with one array per rank, in mesh order.

    The sizes along a sharded dim are compared and summed; `shape` states the global shape. Pieces whose sizes are not our
    chunks are an error, on all ranks alike, or moved with `exchange=True`. The data are copied. Raises `ArgumentError` where
    pieces do not fit together, or where ranks that should hold the same values do not.
    """
    refuse_in_trace("spmd.from_local")
    found = mesh_or_current(mesh, "spmd.from_local")
    pieces = tuple(jnp.array(piece, copy=True) for piece in _held_pieces(x, found))
    agree_on(found, lambda: [f"spmd.from_local as {placements!r}, shape={shape}, exchange={exchange}"])
    all_pieces = _described(pieces, found)
    kinds = [f"{piece.dtype}{list(piece.shape)}" for piece in all_pieces]
    if len({(piece.dtype, len(piece.shape)) for piece in all_pieces}) > 1:
        raise ArgumentError(f"spmd.from_local: the pieces differ in dtype or number of dims: {', '.join(kinds)}.")
    layout = layout_of("spmd.from_local: pieces", placements, found, pieces[0].shape, pieces[0].dtype)
    lengths = [_lengths(all_pieces, layout, dim) for dim in range(layout.ndim)]
    size = tuple(sum(along) if axes else along[0] for along, axes in zip(lengths, layout.dims, strict=True))
    if shape is not None and tuple(shape) != size:
        raise ArgumentError(
            f"spmd.from_local: the pieces {', '.join(kinds)} make an array of {size}, not {tuple(shape)}."
        )
    _check_replicas(all_pieces, layout)
    for dim, axes in enumerate(layout.dims):
        pieces = _to_chunks(pieces, layout, dim, lengths[dim], size, exchange) if axes else pieces
    return DArray(ShapedArray(size, pieces[0].dtype), layout, pieces, placements)


def _held_pieces(x: Any, mesh: Mesh) -> Sequence[Any]:
    """The pieces that this process gives: one on a real rank, one per rank in the simulator."""
    count = len(held_coordinates(mesh))
    if count == 1 and not isinstance(x, (list, tuple)):
        return [x]
    if not isinstance(x, (list, tuple)) or len(x) != count:
        given = f"{len(x)}" if isinstance(x, (list, tuple)) else f"a {type(x).__name__}"
        where = "is simulated: pass a list of" if is_simulated(mesh) else "is on real ranks: pass"
        raise ArgumentError(f"spmd.from_local: {mesh!r} {where} {count} arrays, one per rank; got {given}.")
    return x


@dataclass(frozen=True, slots=True)
class _Piece:
    """What all ranks know of one rank's piece."""

    shape: Shape
    dtype: Any
    checksum: int


def _described(pieces: tuple[jax.Array, ...], mesh: Mesh) -> list[_Piece]:
    """Every rank's piece, in mesh order. Communication on real ranks: one all_gather of some words."""
    if is_simulated(mesh):
        return [_Piece(piece.shape, piece.dtype, zlib.crc32(raw_bytes(piece))) for piece in pieces]
    (piece,) = pieces
    words = np.zeros(40, np.int64)
    name = str(piece.dtype).encode()
    words[: 3 + piece.ndim] = (len(name), zlib.crc32(raw_bytes(piece)), piece.ndim, *piece.shape)
    words[20 : 20 + len(name)] = list(name)
    rows = run_alone(on_mesh(mesh), "all_gather", words, dim=0, sizes=(40,) * mesh.size).reshape(mesh.size, 40).tolist()
    dtypes = {str(piece.dtype): piece.dtype}
    found = []
    for length, checksum, ndim, *rest in rows:
        text = bytes(rest[17 : 17 + length]).decode()
        found.append(_Piece(tuple(rest[:ndim]), dtypes.get(text, text), checksum))
    return found


def _lengths(pieces: list[_Piece], layout: Layout, dim: int) -> tuple[int, ...]:
    """The lengths along one dim by flat coordinate; ranks of one flat coordinate must agree."""
    axes = layout.dims[dim]
    found: dict[int, int] = {}
    for coordinate, piece in zip(layout.mesh.coordinates(), pieces, strict=True):
        at = layout.mesh.flat_index(coordinate, axes)
        if found.setdefault(at, piece.shape[dim]) != piece.shape[dim]:
            sizes = [p.shape for p in pieces]
            raise ArgumentError(
                f"spmd.from_local: {layout} says that ranks hold pieces of one length along dim {dim}"
                f"{' where they share a coordinate on ' + ', '.join(axes) if axes else ''}; the pieces are {sizes}."
            )
    return tuple(found[at] for at in range(len(found)))


def _to_chunks(
    pieces: tuple[jax.Array, ...], layout: Layout, dim: int, lengths: tuple[int, ...], size: Shape, exchange: bool
) -> tuple[jax.Array, ...]:
    """Pieces with the lengths of our chunks along one dim."""
    axes, mesh = layout.dims[dim], layout.mesh
    want = Split(size[dim], axes)
    at = {mesh.flat_index(coordinate, axes): want.bounds(mesh, coordinate) for coordinate in mesh.coordinates()}
    chunks = tuple(at[i][1] - at[i][0] for i in range(len(at)))
    if lengths == chunks:
        return pieces
    if not exchange:
        raise ArgumentError(
            f"spmd.from_local: along dim {dim} the pieces have lengths {list(lengths)}, the chunks of {size[dim]} over "
            f"{', '.join(axes)} have {list(chunks)}. Pass exchange=True to move them."
        )
    params = {"mesh": mesh, "axes": axes, "dim": dim, "have": Pieces.of_lengths(axes, lengths), "want": want}
    return run_collective("exchange", pieces, params)


def _check_replicas(pieces: list[_Piece], layout: Layout) -> None:
    axes = tuple(axis for axis in layout.mesh.axis_names if axis not in layout.axes)
    for group in group_positions(layout.mesh, axes):
        for position in group[1:]:
            if pieces[position] != pieces[group[0]]:
                a, b = (layout.mesh.coordinate_at(p) for p in (group[0], position))
                raise ArgumentError(
                    f"spmd.from_local: coordinates {a} and {b} should hold the same values, as {layout} replicates over "
                    f"{', '.join(axes)}, but they differ. State Partial or Shard, or pass equal pieces."
                )


def full(
    shape: Sequence[int] | int, value: Any, placements: P = P(), mesh: Mesh | None = None, dtype: Any = None
) -> DArray:  # fmt: skip
    """An array of one value; only the shards are built. Communication: none."""
    return _filled("spmd.full", shape, value, placements, mesh, dtype)


def as_shape(shape: Sequence[int] | int) -> Shape:
    """A shape, of which a number is one dim."""
    return (shape,) if isinstance(shape, int) else tuple(shape)


def _filled(what: str, shape: Any, value: Any, placements: P, mesh: Mesh | None, dtype: Any) -> DArray:
    found = mesh_or_current(mesh, what)
    size = as_shape(shape)
    kind = jax.typeof(jnp.full((), value, dtype))
    layout = layout_of(f"{what}: an array", placements, found, size, kind.dtype)
    shards = build_shards(size, layout, lambda index: jnp.full([s.stop - s.start for s in index], value, kind.dtype))
    return DArray(ShapedArray(size, kind.dtype, weak_type=kind.weak_type), layout, shards, placements)


def zeros(shape: Sequence[int] | int, placements: P = P(), mesh: Mesh | None = None, dtype: Any = None) -> DArray:
    """An array of zeros; only the shards are built. `dtype` defaults to JAX's default float. Communication: none."""
    return _filled("spmd.zeros", shape, 0, placements, mesh, jnp.zeros((), dtype).dtype)


def ones(shape: Sequence[int] | int, placements: P = P(), mesh: Mesh | None = None, dtype: Any = None) -> DArray:
    """An array of ones; only the shards are built. `dtype` defaults to JAX's default float. Communication: none."""
    return _filled("spmd.ones", shape, 1, placements, mesh, jnp.zeros((), dtype).dtype)


def arange(
    start: Any, stop: Any = None, step: Any = None, placements: P = P(), mesh: Mesh | None = None, dtype: Any = None
) -> DArray:
    """`jnp.arange` of Python numbers, bit for bit; only the shards are built. Communication: none."""
    found = mesh_or_current(mesh, "spmd.arange")
    step_given = step is not None
    start, stop = (0, start) if stop is None else (start, stop)
    step = 1 if step is None else step
    if not all(isinstance(number, (int, float, np.number)) for number in (start, stop, step)) or step == 0:
        raise ArgumentError(f"spmd.arange({start!r}, {stop!r}, {step!r}): Python numbers, and a step other than 0.")
    kind = jax.eval_shape(lambda: jnp.arange(start, stop, step if step_given else None, dtype)).dtype
    count = max(0, math.ceil((stop - start) / step))
    layout = layout_of("spmd.arange: an array", placements, found, (count,), kind)
    wide = jnp.dtype("float32") if step_given and is_small_float(kind) else kind

    def make(index: tuple[slice, ...]) -> jax.Array:
        at = jnp.asarray(np.arange(index[0].start, index[0].stop).astype(wide))
        steps = lax.mul(jnp.asarray(step, wide), at) if step_given else at
        return lax.add(jnp.asarray(start, wide), steps).astype(kind)

    return DArray(ShapedArray((count,), kind), layout, build_shards((count,), layout, make), placements)
