"""Communicators: collectives and messages between processes, for numpy, JAX and cupy arrays, with or without JAX in play.

A communicator connects the `size` members of one group; the caller is member `rank`. Every collective is called by all members,
in the same order, with the same arguments but for the arrays. Arrays are returned, of the kind that came in, and never changed;
`out=` names numpy arrays that the result is written to as well, which may be the arguments themselves. An argument may be a
pytree: leaves of one dtype share a message. `sizes` and its kin list one entry per member and are the same on all of them, so
no sizes travel. `async_op=True` gives a `Work`, whose `wait()` gives the result.

`collectives.testing` states each method's result case by case; a back end conforms if it passes. A back end defines what is
abstract here: how one transfer of flat memory is begun, how messages are, and how a communicator of some members is made. It
may say more: what it reduces, where its arrays lie, a quicker way for a call that is made again (see docs/backends.md).

Raises, all of them: `InvalidCollective` for arguments that do not fit, `CollectiveTimeout`, `PeerLeft`, `TransportError`.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import functools
import os
import pickle
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from collectives.calls import (
    Ready,
    filled,
    name_of_objects,
    on_host,
    receives_into,
    sizes_of,
    whole_number,
)
from collectives.errors import DivergenceError, InvalidCollective, TransportError
from collectives.simulated import kind_of
from collectives.wire import FUNCTIONS, Arranged, Transfer, all_but_mean, arrange, join, xp_of
from collectives.work import BUSY, Messages, Pending, Queue, Work
from placements.intervals import Bounds
from placements.layout import partial_fault

KEPT: Final = 256
"""Calls that a communicator has at hand."""
TAGS: Final = 1000
"""Tags of messages are below this; those of our own are above."""


@dataclass(frozen=True, slots=True)
class Send:
    """A message of a batch: an array, and the member that it goes to."""

    array: Any
    to: int
    tag: int = 0


@dataclass(frozen=True, slots=True)
class Receive:
    """A message of a batch that comes from a member. Between devices no shapes travel: there `out` is what it is written to."""

    source: int
    tag: int = 0
    out: Any = None


OPEN: Final[weakref.WeakSet[Communicator]] = weakref.WeakSet()
"""The communicators of this process: they are drained and closed at its end."""


class Communicator(abc.ABC):
    """A group of processes, seen from one of them. Sizes are in elements along one dim, bounds are half-open."""

    def __init__(self, world_ranks: tuple[int, ...], local_rank: int = 0) -> None:
        self.world_ranks, self.local_rank = world_ranks, local_rank
        self.queue, self.messages = Queue(), Messages()
        self.poison: BaseException | None = None
        self.is_closed = self.is_world = False
        self.done = 0
        """How many operations are completed on it."""
        self._method = ""
        self._compares = os.environ.get("SPMD_DEBUG") == "detail"
        self._ready: dict[Any, Any] = {}
        """By kind of call and of array what is ready to be called again, or None."""
        self._made: dict[tuple[int, ...], int] = {}
        OPEN.add(self)

    @property
    @abc.abstractmethod
    def rank(self) -> int:
        """The index of this process in the group."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """The number of members."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Return when every member has called it."""

    @abc.abstractmethod
    def begin(self, transfer: Transfer, sent: Any, received: Any, what: Callable[[], str]) -> Pending:
        """A transfer of flat memory, from one contiguous array to another; it starts when it is polled first, or now.

        `what()` says in errors what it is.
        """

    @abc.abstractmethod
    def begin_messages(self, sends: Sequence[Send], receives: Sequence[Receive]) -> list[Pending]:
        """Messages, all at once: first the sends, then the receives; one that was received has its array as `array`."""

    @abc.abstractmethod
    def subgroup(self, ranks: tuple[int, ...], name: str) -> Communicator:
        """The communicator of some members (indices here), in that order. They all call it, with one name, and nobody else."""

    def partition(self, groups: Sequence[tuple[int, ...]], name: str) -> Communicator | None:
        """The communicator of this member's group, of disjoint ones; None where it is in none. Every member calls it."""
        own = next((ranks for ranks in groups if self.rank in ranks), None)
        return None if own is None else self.subgroup(own, name)

    def reduces(self, dtype: np.dtype[Any], op: str) -> bool:
        """Whether it reduces items of a dtype with an op; what it does not is moved, and reduced by the members."""
        return all_but_mean(dtype, op)

    def prepare(self, transfer: Transfer, what: Callable[[], str]) -> Callable[..., None]:
        """A transfer to be called with the addresses of what is sent and received: for programs, where XLA owns the memory."""
        counts = transfer.items_in, transfer.items_out

        def run(*addresses: int) -> None:
            sent, received = (_memory(at, n, transfer.dtype) for at, n in zip(addresses, counts, strict=True))
            work = Work(self, [self.begin(transfer, sent, received, what)], lambda: None, what)
            self.queue.add(work)
            work.wait()

        return run

    def ready(self, transfer: Transfer, what: Callable[[], str]) -> Callable[[Any, Any], None] | None:
        """The same, to be called with numpy arrays, again and again, which may be one. None where nothing is quicker."""
        return None

    def taken(self, name: str, leaf: Any) -> Any:
        """An argument as the array that is arranged and sent: by default numpy's, without a copy where that is possible."""
        if hasattr(leaf, "__cuda_array_interface__") and not isinstance(leaf, (np.ndarray, jax.Array)):
            raise InvalidCollective(
                f"{name}: an array on a device, for a communicator of hosts: collectives.world('nccl') takes it, or copy it."
            )
        return np.empty(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else on_host(name, leaf)

    def room(self, shape: tuple[int, ...], dtype: np.dtype[Any], like: Any) -> Any:
        """Memory to receive into, where an argument lies."""
        return np.empty(shape, dtype)

    def arrived(self, received: Any, like: Any) -> Any:
        """What was received, as the kind of array that was sent."""
        return received

    def delivered(self, result: Any, leaf: Any) -> Any:
        """A result as the kind of array that the argument was."""
        if isinstance(leaf, jax.Array):
            return jnp.asarray(result)
        return np.asarray(result) if isinstance(result, np.generic) else result

    def absent(self) -> list[int]:
        """The members, by world rank, that have left and will not come to the next operation, as far as it is known."""
        return []

    def fail(self, error: BaseException) -> None:
        """Let every later call raise `TransportError` for this first failure: members may be at different operations."""
        if self.poison is None:
            self.poison = error

    def close(self) -> None:
        """Give back what it holds, after its last operation. Every member calls it; the end of a script does too.

        A world stays open.
        """
        if self.is_world:
            return
        self.drain()
        self.is_closed = True
        self.fail(TransportError("closed"))

    def all_reduce(
        self, array: Any, op: str = "sum", *, factor: Any = None, out: Any = None, async_op: bool = False
    ) -> Any:
        """The reduction over all members, on every one. Numbers of 16 bits or fewer are reduced in 32.

        `op`: sum, mean, prod, max, min, and, or, xor (bitwise on integers, logical on bools). `factor` multiplies what this
        member gives to a sum.
        """
        return self._call("all_reduce", _scaled(array, op, factor), out, async_op, op=op)

    def reduce(
        self,
        array: Any,
        op: str = "sum",
        *,
        root: int = 0,
        factor: Any = None,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """The reduction over all members, on member `root`; None on the others. See `all_reduce`."""
        self._check_member("reduce", root)
        return self._call("reduce", _scaled(array, op, factor), out, async_op, root, op=op, root=root)

    def broadcast(self, array: Any, *, root: int = 0, out: Any = None, async_op: bool = False) -> Any:
        """The array of member `root`, on every member; of the others the shape and dtype count, which are the same."""
        self._check_member("broadcast", root)
        return self._call("broadcast", array, out, async_op, root=root)

    def all_gather(
        self, array: Any, *, dim: int = 0, sizes: Sequence[int] | None = None, out: Any = None, async_op: bool = False
    ) -> Any:
        """All members' arrays, joined along `dim`; member i contributes `sizes[i]` indices, by default as many as this one."""
        return self._call("all_gather", array, out, async_op, dim=dim, sizes=sizes_of("all_gather", sizes))

    def gather(
        self,
        array: Any,
        *,
        dim: int = 0,
        root: int = 0,
        sizes: Sequence[int] | None = None,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """All members' arrays, joined along `dim`, on member `root`; None on the others. `sizes`: see `all_gather`."""
        self._check_member("gather", root)
        return self._call("gather", array, out, async_op, root, dim=dim, root=root, sizes=sizes_of("gather", sizes))

    def scatter(
        self,
        array: Any,
        *,
        dim: int = 0,
        root: int = 0,
        sizes: Sequence[int] | None = None,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Of the array of member `root` the i-th run of `sizes[i]` indices along `dim`, on member i; balanced by default.

        The others give an array, or a `jax.ShapeDtypeStruct`, of its shape and dtype.
        """
        self._check_member("scatter", root)
        return self._call("scatter", array, out, async_op, dim=dim, root=root, sizes=sizes_of("scatter", sizes))

    def reduce_scatter(
        self,
        array: Any,
        op: str = "sum",
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        factor: Any = None,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """The reduction over all members, of which member i keeps the i-th run of `sizes[i]` indices along `dim`; by default
        balanced chunks."""
        given = _scaled(array, op, factor)
        return self._call(
            "reduce_scatter", given, out, async_op, op=op, dim=dim, sizes=sizes_of("reduce_scatter", sizes)
        )

    def all_to_all(
        self,
        array: Any,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        to_dim: int,
        to_sizes: Sequence[int] | None = None,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Member i holds `sizes[i]` indices of `dim`, all of `to_dim`; afterwards all of `dim`, `to_sizes[i]` of `to_dim`."""
        have, want = sizes_of("all_to_all", sizes), sizes_of("all_to_all", to_sizes)
        return self._call("all_to_all", array, out, async_op, dim=dim, sizes=have, to_dim=to_dim, to_sizes=want)

    def all_to_all_rows(
        self,
        array: Any,
        *,
        dim: int = 0,
        sends: Sequence[int] | None = None,
        receives: Sequence[int] | None = None,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Of `dim` the i-th run of `sends[i]` indices to member i; what all sent, joined along `dim` in their order.

        By default balanced chunks are sent. `receives` lists how many indices come from each member; where it is left out, the
        numbers travel first, and are waited for. Both are this member's own.
        """
        if receives is None:
            shapes = {np.shape(leaf) for leaf in jax.tree.leaves(array)}
            if len({shape[dim : dim + 1] for shape in shapes}) != 1:
                raise InvalidCollective(
                    "all_to_all_rows: leaves of other lengths along dim (or none); one call for each."
                )
            shape = shapes.pop()
            own = {"dim": dim, "sizes": sizes_of("all_to_all_rows", sends)}
            counts = filled("scatter", own, shape, self.rank, self.size)["sizes"]
            with self._within("all_to_all_rows"):
                told = self.all_to_all(np.array([counts], np.int64), dim=0, to_dim=1)
            receives = told[:, 0].tolist()
        have, want = sizes_of("all_to_all_rows", sends), sizes_of("all_to_all_rows", receives)
        return self._call("all_to_all_rows", array, out, async_op, dim=dim, sends=have, receives=want)

    def exchange(
        self, array: Any, *, dim: int, have: Sequence[Bounds], want: Sequence[Bounds], async_op: bool = False
    ) -> Any:
        """Member i holds the indices `have[i]` along `dim`; afterwards the indices `want[i]`. Wants may overlap."""
        return self._call("exchange", array, None, async_op, dim=dim, have=have, want=want)

    def permute(self, array: Any, *, pairs: Sequence[tuple[int, int]], out: Any = None, async_op: bool = False) -> Any:
        """For every pair (source, destination) the source's array; zeros where no pair leads. Destinations are distinct."""
        return self._call("permute", array, out, async_op, pairs=pairs)

    def send(self, array: Any, to: int, tag: int = 0, *, async_op: bool = False) -> Any:
        """A message to member `to`; its shape and dtype travel with it. Returns once the array may be written again."""
        work = self._exchanged([Send(array, to, tag)], alone=True)
        return work if async_op else work.wait()

    def recv(self, source: int, tag: int = 0, *, out: Any = None, async_op: bool = False) -> Any:
        """The next message of this tag from member `source`: a numpy array. `out`, if given, has its shape and dtype."""
        work = self._exchanged([Receive(source, tag, out)], alone=True)
        return work if async_op else work.wait()

    def batch(self, messages: Sequence[Send | Receive], *, async_op: bool = False) -> Any:
        """Messages to and from any members, all at once, so that no order of them can deadlock: what is received, in order."""
        work = self._exchanged(messages)
        return work if async_op else work.wait()

    def all_to_all_arrays(self, arrays: Sequence[Any]) -> list[Any]:
        """The i-th array to member i, of any shapes and dtypes: what they sent, in their order, as numpy arrays."""
        if len(arrays) != self.size:
            raise InvalidCollective(f"all_to_all_arrays: {len(arrays)} arrays for {self.size} members.")
        sends = [Send(array, to, TAGS + 1) for to, array in enumerate(arrays)]
        with self._within("all_to_all_arrays"):
            found: list[Any] = self.batch([*sends, *(Receive(source, TAGS + 1) for source in range(self.size))])
        return found

    def broadcast_object(self, value: Any = None, *, root: int = 0) -> Any:
        """A Python object of member `root`, on every member. Pickled: only from members that you trust to run code here.

        Where an object cannot be pickled, all who wait for it raise `InvalidCollective`; so with the other objects.
        """
        self._check_member("broadcast_object", root)
        with self._within("broadcast_object"):
            data = _pickled(value) if self.rank == root else np.empty(0, np.uint8)
            length = int(self.broadcast(np.array([len(data)], np.int64), root=root)[0])
            data = self.broadcast(data if self.rank == root else np.empty(length, np.uint8), root=root)
        return _unpickled("broadcast_object", data)

    def all_gather_object(self, value: Any) -> list[Any]:
        """A Python object from every member, on every member, in their order. Pickled: see `broadcast_object`."""
        data = _pickled(value)
        with self._within("all_gather_object"):
            lengths = self.all_gather(np.array([len(data)], np.int64)).tolist()
            joined = self.all_gather(data, sizes=lengths)
        return [_unpickled("all_gather_object", part) for part in np.split(joined, np.cumsum(lengths)[:-1])]

    def gather_object(self, value: Any, *, root: int = 0) -> list[Any] | None:
        """A Python object from every member, in their order, on member `root`; None on the others. See `broadcast_object`."""
        self._check_member("gather_object", root)
        data = _pickled(value)
        receives = [Receive(source, TAGS + 2) for source in range(self.size)] if self.rank == root else []
        with self._within("gather_object"):
            found = self.batch([Send(data, root, TAGS + 2), *receives])
        if self.rank != root:
            _check_pickled("gather_object", data)
            return None
        return [_unpickled("gather_object", each) for each in found]

    def scatter_object(self, values: Sequence[Any] | None = None, *, root: int = 0) -> Any:
        """Of a list of Python objects on member `root` the i-th, on member i. See `broadcast_object`."""
        self._check_member("scatter_object", root)
        sends: list[Send | Receive] = []
        if self.rank == root:
            fits = isinstance(values, Sequence) and len(values) == self.size
            fault = _Failed(f"the root gave {type(values).__name__}, and not a list of {self.size} objects.")
            sends = [
                Send(_pickled(value), to, TAGS + 3)
                for to, value in enumerate(values if fits and values is not None else [fault] * self.size)
            ]
        with self._within("scatter_object"):
            return _unpickled("scatter_object", self.batch([*sends, Receive(root, TAGS + 3)])[0])

    def send_object(self, value: Any, to: int, tag: int = 0) -> None:
        """A Python object to member `to`, pickled. Returns once it may be changed."""
        data = _pickled(value)
        with self._within("send_object"):
            self.send(data, to, tag, async_op=True)
        _check_pickled("send_object", data)

    def recv_object(self, source: int, tag: int = 0) -> Any:
        """The next Python object of this tag from member `source`. Unpickling runs its code: see `broadcast_object`."""
        with self._within("recv_object"):
            return _unpickled("recv_object", self.recv(source, tag))

    def group(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator of some members (their indices here), in that order; None on the others, which need not call it."""
        self.check_usable()
        for rank in ranks:
            self._check_member("group", rank)
        chosen = tuple(int(rank) for rank in ranks)
        if len(set(chosen)) < len(chosen) or not chosen:
            raise InvalidCollective(f"group: {chosen}: different members, at least one.")
        if self.rank not in chosen:
            return None
        number = self._made[chosen] = self._made.get(chosen, 0) + 1
        return self.subgroup(chosen, f"group {number}")

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """A communicator of all members of the same color, ordered by key, then by rank; None for color None. Collective."""
        with self._within("split"):
            found = self.all_gather_object((color, key))
        colors = dict.fromkeys(each[0] for each in found if each[0] is not None)
        groups = [
            tuple(rank for _, rank in sorted((each[1], rank) for rank, each in enumerate(found) if each[0] == one))
            for one in colors
        ]
        number = self._made[()] = self._made.get((), 0) + 1
        return self.partition(groups, f"split {number}")

    def shrink(self, excluding: Sequence[int]) -> Communicator | None:
        """A communicator of all members but some; None on those. The members that stay call it."""
        return self.group([rank for rank in range(self.size) if rank not in set(excluding)])

    def world_rank(self, rank: int) -> int:
        """The rank in the world of a member."""
        self._check_member("world_rank", rank)
        return self.world_ranks[rank]

    def rank_of(self, world_rank: int) -> int | None:
        """The index here of a rank of the world; None if it is no member."""
        return self.world_ranks.index(world_rank) if world_rank in self.world_ranks else None

    def drain(self) -> None:
        """Return once nothing is underway, or something has failed."""
        while self.poison is None and (self.queue.works or self.messages.works):
            for work in (*self.queue.works, *self.messages.works):
                work.settle()

    def check_usable(self) -> None:
        """Raise `TransportError`, naming the first failure, once an operation has failed underway."""
        if self.is_closed:
            raise TransportError(f"the communicator of world ranks {self.world_ranks} was closed.") from self.poison
        if self.poison is not None:
            raise TransportError(
                f"the communicator of world ranks {self.world_ranks} is poisoned: an operation failed underway, "
                f"and members may be at different ones. The first failure was {type(self.poison).__name__}: {self.poison}"
            ) from self.poison

    def __repr__(self) -> str:
        state = " (closed)" if self.is_closed else " (given up)" if self.poison is not None else ""
        return f"{type(self).__name__}(rank {self.rank} of {self.size}, world ranks {list(self.world_ranks)}){state}"

    def _check_member(self, what: str, rank: int) -> None:
        if not 0 <= whole_number(what, "member", rank) < self.size:
            raise InvalidCollective(f"{what}: member {rank} of {self.size}.")

    @contextlib.contextmanager
    def _within(self, name: str) -> Iterator[None]:
        """Name what is begun in this block after the method that was called."""
        before, self._method = self._method, f"{name}: "
        try:
            yield
        finally:
            self._method = before

    def _compare(self, text: str) -> None:
        """With `SPMD_DEBUG=detail`: raise `DivergenceError` on every member, showing two sides, unless all make one call."""
        if not self._compares:
            return
        self._compares = False
        try:
            digests = self.all_gather(np.array([zlib.crc32(text.encode())], np.int64)).tolist()
            if len(set(digests)) == 1:
                return
            texts = self.all_gather_object(text)
        finally:
            self._compares = True
        other = next(rank for rank, each in enumerate(texts) if each != texts[0])
        shown = "".join(f"\n  rank {self.world_ranks[rank]}: {texts[rank]}" for rank in (0, other))
        raise DivergenceError(f"the members of {self!r} make different calls; nothing was sent:{shown}")

    def _call(self, name: str, tree: Any, out: Any, async_op: bool, only: int | None = None, **arguments: Any) -> Any:
        """Begin a collective on every leaf. With `only`, the other members get None."""
        if type(tree) is np.ndarray and not (async_op or BUSY or self.poison or self._compares):
            key = name, tree.shape, tree.dtype, *arguments.values()
            try:
                ready = self._ready.get(key, ...)
            except TypeError:  # indices in lists
                ready = None
            if ready is ...:
                ready = self._ready[key] = self._ready_for(name, tree, arguments)
            if ready is not None and ready.fits(tree, out):
                return ready(tree, out)
        self.check_usable()
        leaves, treedef = jax.tree.flatten(tree)
        if not leaves:
            raise InvalidCollective(
                f"{name}: {tree!r} has no array. Every member passes arrays, alike in shape and dtype; what they hold counts "
                f"where it is sent from. Other objects: {name_of_objects(name)}."
            )
        taken = [self.taken(name, leaf) for leaf in leaves]
        outs, fault = _outs(name, treedef, out)  # a fault of this member's alone is raised once the others are served
        parts = []
        for at, array in enumerate(taken):
            try:
                parts.append(self._arranged(name, array, arguments))
            except InvalidCollective as error:
                if len(leaves) == 1:
                    raise
                path = jax.tree_util.keystr(jax.tree_util.tree_flatten_with_path(tree)[0][at][0])
                raise InvalidCollective(f"leaf {path}: {error}") from None
        self._compare(_call_text(name, arguments, treedef, taken))
        groups: dict[Any, list[int]] = {}
        for at, part in enumerate(parts):
            groups.setdefault((part.transfer.kind, part.transfer.dtype, part.transfer.op, type(taken[at])), []).append(
                at
            )
        what = functools.partial(_described, self._method + name, [f"{x.dtype}{list(x.shape)}" for x in taken])
        pending, finishing = [], []
        for places in groups.values():
            into = outs[0] if len(leaves) == 1 else None  # else another leaf's argument may lie there
            begun, made = self._begun([parts[at] for at in places], taken[places[0]], into, what)
            pending.append(begun)
            finishing.append((places, made))

        def finish() -> Any:
            results: list[Any] = [None] * len(parts)
            for places, made in finishing:
                for at, result in zip(places, made(), strict=True):
                    results[at] = self._given(name, result, leaves[at], outs[at])
            if fault is not None:
                raise fault
            return jax.tree.unflatten(treedef, results) if only in (None, self.rank) else None

        work = Work(self, pending, finish, what)
        self.queue.add(work)
        return work if async_op else work.wait()

    def _arranged(self, name: str, array: Any, arguments: dict[str, Any]) -> Arranged:
        """A collective on one array, its arguments checked."""
        if "op" in arguments:
            _check_op(name, arguments["op"], array.dtype)
        filled_in = filled(name, arguments, array.shape, self.rank, self.size)
        return arrange(name, array, self.rank, self.size, reduces=self.reduces, **filled_in)

    def _begun(
        self, parts: Sequence[Arranged], like: Any, out: Any, what: Callable[[], str]
    ) -> tuple[Pending, Callable[[], list[Any]]]:
        """One transfer for several arranged collectives, and what gives their results once it is done."""
        (first, *others), joined = parts, join(parts)
        transfer = joined.transfer
        plain = first.plain if not others and first.finish is None else None  # what lies in memory, as it is
        sent = like if plain is not None else joined.buffer
        if not isinstance(sent, jax.Array):
            sent = xp_of(sent).ascontiguousarray(sent)
        on_host = type(like) is np.ndarray and plain is not None and receives_into(out, plain, transfer.dtype)
        if on_host and not np.may_share_memory(out, sent):
            received = out
        else:
            received = self.room((transfer.items_out,) if plain is None else plain, transfer.dtype, like)
        try:
            begun = self.begin(transfer, sent, received, what)
        except BaseException as error:
            self.fail(error)
            raise

        def results() -> list[Any]:
            found = self.arrived(received, like)
            return joined.results(found) if plain is None else [None if first.is_elsewhere else found]

        return begun, results

    def _ready_for(self, name: str, array: Any, arguments: dict[str, Any]) -> Ready | None:
        """A call that can be made again, if what is sent and received is what lies in memory."""
        if self.taken(name, array) is not array:
            return None
        arranged = self._arranged(name, array, arguments)
        kind = _described(name, [f"{array.dtype}{list(array.shape)}"])
        run = None if arranged.plain is None else self.ready(arranged.transfer, lambda: self._method + kind)
        if len(self._ready) >= KEPT:
            self._ready.clear()
        return None if run is None else Ready(run, arranged, self.fail)

    def _given(self, name: str, result: Any, leaf: Any, out: Any) -> Any:
        """A result, in `out` if there is one; None where the other members alone have one."""
        if result is None or result is out:
            return result
        if out is None:
            return self.delivered(result, leaf)
        if out.shape != result.shape or out.dtype != result.dtype:
            raise InvalidCollective(
                f"{name}: the result is {result.dtype}{list(result.shape)}, and out {out.dtype}{list(out.shape)}."
            )
        out[...] = result
        return out

    def _exchanged(self, messages: Sequence[Send | Receive], alone: bool = False) -> Work:
        """Begin messages, as one work: what is received, in order; with `alone` the one thing, or None."""
        self.check_usable()
        sends, receives = [], []
        for message in messages:
            if not isinstance(message, (Send, Receive)):
                raise InvalidCollective(f"batch: {message!r} is neither a Send nor a Receive.")
            if isinstance(message, Send):
                self._check_member("send to", message.to)
            else:
                self._check_member("recv from", message.source)
            if not 0 <= whole_number("message", "tag", message.tag) < (TAGS if not self._method else 2 * TAGS):
                raise InvalidCollective(f"message: tag {message.tag}; tags are below {TAGS}.")
            if isinstance(message, Receive):
                fault = _outs("recv", jax.tree.structure(0), message.out)[1]
                if fault is not None:
                    raise fault
                receives.append(message)
                continue
            array = self.taken("send", message.array)
            is_whole = array.ndim == 0 or isinstance(array, jax.Array)
            whole = array if is_whole else xp_of(array).ascontiguousarray(array)
            sends.append(Send(whole, message.to, message.tag))
        pending, method = self.begin_messages(sends, receives), self._method

        def finish() -> Any:
            coming = zip(pending[len(sends) :], receives, strict=True)
            found = [self._received(each, message.out) for each, message in coming]
            return next(iter(found), None) if alone else found

        def what() -> str:
            words = [f"send to {m.to}" if isinstance(m, Send) else f"recv from {m.source}" for m in messages]
            return method + ", ".join(words)

        work = Work(self, pending, finish, what, at_once=True)
        self.messages.add(work)
        return work

    def _received(self, pending: Any, out: Any) -> Any:
        return out if pending.array is out else self._given("recv", pending.array, None, out)


def _described(name: str, kinds: Sequence[str]) -> str:
    return f"{name} of {', '.join(kinds)}"


def _memory(address: int, items: int, dtype: np.dtype[Any]) -> Any:
    """Memory at an address as a flat array."""
    if items == 0:
        return np.empty(0, dtype)
    memory: Any = (ctypes.c_uint8 * (items * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, dtype)


def _check_op(name: str, op: str, dtype: Any) -> None:
    if op not in FUNCTIONS and op != "mean":
        raise InvalidCollective(f"{name}: op={op!r}; there are {', '.join(FUNCTIONS)} and mean.")
    fault = partial_fault(op, kind_of(dtype))
    if fault is not None:
        raise InvalidCollective(f"{name}: {fault.partition('. Use Partial')[0].format(dtype=dtype)}")


def _outs(name: str, treedef: Any, out: Any) -> tuple[list[Any], InvalidCollective | None]:
    """Where results are written, and what is wrong with that."""
    nowhere = [None] * treedef.num_leaves
    if out is None:
        return nowhere, None
    found, structure = jax.tree.flatten(out)
    if structure != treedef:
        return nowhere, InvalidCollective(f"{name}: out is {structure}, and the argument {treedef}.")
    for each in found:
        if isinstance(each, jax.Array) or not hasattr(each, "dtype"):
            text = f"{name}: out is no array that can be written to: {type(each).__name__}."
            return nowhere, InvalidCollective(text)
        if isinstance(each, np.ndarray) and not each.flags.writeable:
            return nowhere, InvalidCollective(f"{name}: out is read-only.")
    return found, None


def _call_text(name: str, arguments: dict[str, Any], treedef: Any, taken: Sequence[Any]) -> str:
    """A call, as far as it is the same on all members."""
    stated = {key: value for key, value in arguments.items() if key not in ("sends", "receives", "factor")}
    own = "dim" in stated and (name in ("all_to_all_rows", "exchange") or stated.get("sizes") is not None)
    kinds = []
    for array in taken:
        lengths: list[Any] = list(array.shape)
        if own and name not in ("scatter", "reduce_scatter"):
            lengths[stated["dim"]] = "any"
        kinds.append(f"{array.dtype}[{', '.join(map(str, lengths))}]")
    words = ", ".join(f"{key}={value}" for key, value in stated.items())
    return f"{name}({words}) of {treedef}: {', '.join(kinds)}"


def _scaled(tree: Any, op: str, factor: Any) -> Any:
    if factor is None:
        return tree
    if op != "sum":
        raise InvalidCollective(f"factor={factor!r} is for sums, not for {op}.")

    def scaled(leaf: Any) -> Any:
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.inexact) and not jnp.issubdtype(jnp.result_type(factor), jnp.integer):
            raise InvalidCollective(f"factor={factor!r} of {dtype} is no {dtype}; cast first.")
        return (leaf * factor).astype(dtype) if hasattr(leaf, "astype") else np.asarray(leaf * factor, dtype)

    return jax.tree.map(scaled, tree)


@dataclass(frozen=True, slots=True)
class _Failed:
    """What travels in place of an object that cannot: all who wait for it get the error."""

    text: str


def _pickled(value: Any) -> np.ndarray[Any, Any]:
    try:
        data = pickle.dumps(value)
    except Exception as error:
        data = pickle.dumps(_Failed(f"a member's object cannot be pickled: {type(error).__name__}: {error}"))
    return np.frombuffer(data, np.uint8)


def _unpickled(name: str, data: Any) -> Any:
    try:
        found = pickle.loads(np.asarray(data).tobytes())
    except pickle.UnpicklingError as error:
        raise InvalidCollective(f"{name}: what came is no object but an array: {error}.") from None
    if isinstance(found, _Failed):
        raise InvalidCollective(f"{name}: {found.text}")
    return found


def _check_pickled(name: str, data: Any) -> None:
    """Raise on the member that sends it what those who receive it raise."""
    if b"_Failed" in data[:200].tobytes():
        _unpickled(name, data)
