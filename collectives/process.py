"""This process: its world, and its place on a mesh.

In a lone process a mesh is simulated. If a launcher announced several, MPI starts with the first world or mesh that is asked
for, and a mesh runs on the processes of the world; `Mesh(..., backend="simulated")` forces the simulator. Every launch on real
ranks begins with an agreement: ranks that run different programs neither hang nor exchange numbers.

How a rank ends: an uncaught exception prints its traceback and ends the job, `sys.exit` with a status that is not zero does
too; a normal end is announced, so that a peer that still waits for this rank gets an error at once.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import io
import itertools
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
import numpy as np

from collectives import watch
from collectives.communicator import OPEN, Communicator, Receive, Send
from collectives.errors import BackendError, DivergenceError, TransportError
from collectives.launch import launch, visible_gpus
from collectives.wire import Transfer
from collectives.work import Pending
from placements.mesh import Coordinate, Mesh, group_positions


class Alone(Communicator):
    """The communicator of a lone process: rank 0 of 1."""

    def __init__(self) -> None:
        super().__init__((0,))
        self.mail: dict[int, list[Any]] = {}

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def size(self) -> int:
        """Always 1."""
        return 1

    def barrier(self) -> None:
        """Return at once."""
        self.check_usable()

    def begin(self, transfer: Transfer, sent: Any, received: Any, what: Callable[[], str]) -> Pending:
        """See `Communicator.begin`: what is sent is what is received."""
        received.reshape(-1)[:] = sent.reshape(-1)
        return Done()

    def begin_messages(self, sends: Sequence[Send], receives: Sequence[Receive]) -> list[Any]:
        """See `Communicator.begin_messages`: messages to oneself, in order."""
        for message in sends:
            self.mail.setdefault(message.tag, []).append(message.array.copy())
        return [*(Done() for _ in sends), *(Mail(self.mail, message.tag) for message in receives)]

    def subgroup(self, ranks: tuple[int, ...], name: str) -> Communicator:
        """Another of itself."""
        return Alone()


class Done:
    """What is done already."""

    def poll(self) -> bool:
        """It is."""
        return True

    def absent(self) -> list[int]:
        """Nobody."""
        return []


class Mail(Done):
    """A message to oneself that may not be sent yet."""

    def __init__(self, mail: dict[int, list[Any]], tag: int) -> None:
        self.mail, self.tag, self.array = mail, tag, None

    def poll(self) -> bool:
        """Whether it is there."""
        if self.array is None and self.mail.get(self.tag):
            self.array = self.mail[self.tag].pop(0)
        return self.array is not None


def world(backend: str | None = None) -> Communicator:
    """The communicator of all processes of this job. Communication: none, but for the first call on several processes.

    `backend` is "mpi", for arrays in host memory, "nccl", for arrays on GPUs too, or one that was registered; by default that
    of the devices that JAX computes on. Raises `BackendError` where it cannot run here.

    >>> world().rank, world().size
    (0, 1)
    """
    name = default_backend() if backend is None else backend
    host = host_world()
    if name == "mpi":
        return host
    if name not in _BACKENDS:
        raise BackendError(f"no back end is called {name!r}; there are {', '.join(('mpi', *_BACKENDS))}.")
    if name not in _WORLDS:
        with watch.ends_job(f"connecting {host.size} processes by {name!r}", functools.partial(end_job, host)):
            made = _BACKENDS[name](host)
        if not isinstance(made, Communicator):
            raise BackendError(f"back end {name!r} made {type(made).__name__}, and no Communicator.")
        if (made.rank, made.size) != (host.rank, host.size):
            raise BackendError(
                f"back end {name!r} made rank {made.rank} of {made.size} of what is rank {host.rank} of {host.size}."
            )
        made.is_world = True
        _WORLDS[name] = made
    return _WORLDS[name]


def default_backend() -> str:
    """The back end of the devices that JAX computes on; a lone process talks to nobody."""
    return "nccl" if launch() is not None and visible_gpus() and jax.default_backend() == "gpu" else "mpi"


def register_backend(name: str, factory: Callable[[Communicator], Communicator]) -> None:
    """Let meshes (`Mesh(..., backend=name)`) and `world(name)` run on a back end of one's own. See docs/backends.md.

    `factory` gets the communicator of all processes in host memory, over which it may exchange addresses or keys, and gives
    the back end's own of the same ranks. It is called once, when the back end is first used, by every rank. Raises
    `BackendError` for a name that is taken.
    """
    if not name or not callable(factory):
        raise BackendError(f"register_backend: {name!r} and {factory!r}: a name, and a function of a communicator.")
    if name in _BACKENDS or name in ("mpi", "simulated"):
        raise BackendError(f"register_backend: a back end is called {name!r} already.")
    _BACKENDS[name] = factory


def _nccl(host: Communicator) -> Communicator:
    from collectives import nccl

    return nccl.connect(host)


_BACKENDS: Final[dict[str, Callable[[Communicator], Communicator]]] = {"nccl": _nccl}
_WORLDS: Final[dict[str, Communicator]] = {}


def end_job(host: Any, status: int) -> None:
    """End every process of the job."""
    if host.size > 1:
        host.abort(status)
    os._exit(status)


@functools.cache
def host_world() -> Communicator:
    """The communicator of all processes of this job, for arrays in host memory."""
    found = launch()
    if found is None:
        alone = Alone()
        alone.is_world = True
        return alone
    if os.environ.get("SPMD_CHECK", "") not in ("", "off", "values"):
        raise BackendError(f"SPMD_CHECK={os.environ['SPMD_CHECK']!r}: it may be 'off' or 'values'.")
    mpi = _start_mpi(found.size)
    with watch.ends_job(f"making the communicators of all {found.size} processes (some rank uses no mesh)", mpi.abort):
        connected = mpi.connect(found)
    connected.is_world = True
    watch.watch_interrupts()
    _install_hooks(connected)
    return connected


def _start_mpi(size: int) -> Any:
    """The MPI back end. A start that the other processes do not join ends this one: it holds the interpreter's lock."""
    faulthandler.dump_traceback_later(watch.timeout_s(), exit=True)
    try:
        from collectives import mpi
    finally:
        faulthandler.cancel_dump_traceback_later()
    return mpi


def is_simulated(mesh: Mesh) -> bool:
    """Whether a mesh runs on the simulator: in a lone process, or by its own word."""
    return mesh.backend == "simulated" or launch() is None


def held_coordinates(mesh: Mesh) -> tuple[Coordinate, ...]:
    """The coordinates whose shards this process holds: all in the simulator, its own on real ranks.

    Raises `BackendError` for a mesh that does not fit the processes that exist, or that this process is not on.
    """
    return tuple(mesh.coordinates()) if is_simulated(mesh) else (on_mesh(mesh).coordinate,)


class MeshProcess:
    """This process's place on a mesh: its coordinate, the communicator of all ranks of the mesh, those of groups of axes."""

    def __init__(self, mesh: Mesh) -> None:
        everyone = world(mesh.backend)
        _check_fits(mesh, everyone)
        self.mesh = mesh
        self.coordinate = mesh.coordinate(everyone.rank)
        self.communicator: Any = everyone.subgroup(mesh.ranks, f"{mesh!r}")
        self.agreement: Any = host_world().subgroup(mesh.ranks, f"{mesh!r} agreement")
        self.groups: dict[tuple[str, ...], Any] = {}
        self.poison: BaseException | None = None
        self.calls = 0
        self.token: Any = None
        self._words = np.zeros(5, np.uint64)
        self._largest = np.zeros(5, np.uint64)
        _MADE.append(self)

    def group(self, axes: tuple[str, ...]) -> Any:
        """The communicator along `axes`, members in their order. Collective over the mesh the first time."""
        if axes not in self.groups:
            groups = group_positions(self.mesh, axes)
            self.groups[axes] = self.communicator.partition(groups, f"{self.mesh!r} {axes}")
        return self.groups[axes]

    def members(self, axes: tuple[str, ...]) -> list[Coordinate]:
        """The coordinates of this process's group along `axes`, in order."""
        return [self.mesh.coordinate_at(position) for position in self._positions(axes)]

    def _positions(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        own = self.mesh.position(self.coordinate)
        return next(group for group in group_positions(self.mesh, axes) if own in group)

    def check_usable(self) -> None:
        """Raise `TransportError`, naming the first failure, once a program or collective has failed underway."""
        if self.poison is not None:
            raise TransportError(
                f"{self.mesh!r} is poisoned: a program on it failed underway, and ranks may be at different collectives. "
                f"Start the job anew. The first failure was {type(self.poison).__name__}: {self.poison}"
            ) from self.poison

    @contextlib.contextmanager
    def underway(self) -> Iterator[None]:
        """A collective of the mesh outside a program: raises if the mesh is poisoned; a failure in the block poisons it."""
        self.check_usable()
        try:
            yield
        except BaseException as error:
            self.poison = error
            raise

    def agree(self, digest: int, text: Callable[[], str], asks: bool = False) -> bool:
        """Return if all ranks of the mesh launch the same program, as their call of the same number.

        The result says whether any rank `asks`: what follows on one rank then follows on all. Communication: one all_reduce
        of 40 bytes; `SPMD_CHECK=off` leaves it out. Raises `DivergenceError` on every rank, with the first line of `text()`
        that differs; and again the error that poisoned the mesh.
        """
        self.check_usable()
        _forget_exit()
        watch.forget_interrupts()
        self.calls += 1
        if os.environ.get("SPMD_CHECK") == "off":
            return False
        mask = (1 << 64) - 1
        self._words[:] = (digest, digest ^ mask, self.calls, self.calls ^ mask, asks)
        try:
            self.agreement.compare(
                self._words,
                self._largest,
                lambda: f"launch {self.calls} on {self.mesh!r}, of {text().partition(' on ')[0]}",
            )
        except BaseException as error:
            self.poison = error
            raise
        if self._words[:4].tobytes() != self._largest[:4].tobytes():
            self.explain(f"{text()}\ncall {self.calls} on this mesh", "make different calls")
        return bool(self._largest[4])

    def explain(self, text: str, what: str) -> None:
        """Compare a text on all ranks, and raise `DivergenceError` on every one, with the first line that differs.

        `text` begins with the name of what is called; its lines that begin with `note: ` end the message. Collective.
        """
        data = np.frombuffer(text.encode(), np.uint8)
        size = self.agreement.size
        lengths = self.agreement.all_gather(np.array([len(data)]), dim=0, sizes=(1,) * size).tolist()
        joined = self.agreement.all_gather(data, dim=0, sizes=lengths).tobytes()
        ends = np.cumsum(lengths).tolist()
        pieces = [joined[end - n : end].decode().splitlines() for end, n in zip(ends, lengths, strict=True)]
        texts = [
            [" ".join(line.split()) for line in lines] for lines in pieces
        ]  # columns are padded to the longest line
        other = next((rank for rank in range(1, size) if texts[rank] != texts[0]), 0)
        pairs = [
            pair for pair in itertools.zip_longest(texts[0], texts[other], fillvalue="(nothing)") if pair[0] != pair[1]
        ]
        named = [pair for pair in pairs if any(line.startswith("argument ") for line in pair)]
        first = [*named, *pairs, ("(no difference that shows)",) * 2][0]
        heads = [texts[rank][0].partition(" on ")[0] for rank in (0, other)]
        notes = [line.removeprefix("note: ") for line in texts[0] if line.startswith("note: ")]
        raise DivergenceError(
            f"{' and '.join(dict.fromkeys(heads))}: the ranks of {self.mesh!r} {what}; nothing was sent. "
            "The first line that differs:\n"
            f"  rank {self.agreement.world_ranks[0]}: {first[0]}\n"
            f"  rank {self.agreement.world_ranks[other]}: {first[1]}" + "".join(f"\n{note}" for note in notes)
        )


@functools.cache
def on_mesh(mesh: Mesh) -> MeshProcess:
    """This process on a mesh of real ranks; its communicators are made at the first call. Collective over the mesh."""
    return MeshProcess(mesh)


def _check_fits(mesh: Mesh, everyone: Communicator) -> None:
    if mesh.rank_list is None and mesh.size != everyone.size:
        raise BackendError(
            f"{mesh!r} is of size {mesh.size}, and the job has {everyone.size} processes. Start as many, name the mesh's ranks "
            "with Mesh(..., ranks=[...]), or simulate it with Mesh(..., backend='simulated')."
        )
    if max(mesh.ranks) >= everyone.size:
        raise BackendError(f"{mesh!r} names rank {max(mesh.ranks)}; the job has ranks 0 to {everyone.size - 1}.")
    if everyone.rank not in mesh.ranks:
        raise BackendError(f"rank {everyone.rank} is not on {mesh!r}, and runs something on it.")
    if everyone is host_world() and default_backend() == "nccl":
        raise BackendError(
            f"{mesh!r}: programs run on GPUs here, and MPI takes host memory. Set JAX_PLATFORMS=cpu for MPI."
        )


_MADE: Final[list[MeshProcess]] = []
"""Every mesh that this process has run something on."""
_EXIT: Final[dict[str, Any]] = {"status": 0}
"""The status of the last `sys.exit` since a program was launched: atexit handlers do not see it."""


def _forget_exit() -> None:
    _EXIT["status"] = 0


def _install_hooks(connected: Any) -> None:
    """End the job when this rank fails, and announce a normal end. Forked children do nothing."""
    owner, hook, leave = os.getpid(), sys.excepthook, sys.exit

    def excepthook(kind: Any, value: BaseException, trace: Any) -> None:
        if os.getpid() != owner:
            hook(kind, value, trace)
            return
        text = io.StringIO()
        with contextlib.redirect_stderr(text):
            hook(kind, value, trace)
        sys.stderr.write(f"rank {connected.rank}:\n{text.getvalue()}")  # in one piece: ranks write at the same time
        _EXIT["status"] = 130 if issubclass(kind, KeyboardInterrupt) else 1
        connected.abort(_EXIT["status"])

    def exit_recording(status: Any = None) -> Any:
        if threading.current_thread() is threading.main_thread():
            _EXIT["status"] = 0 if status is None else (status % 256 or bool(status)) if isinstance(status, int) else 1
        leave(status)

    def at_exit() -> None:
        if os.getpid() != owner:  # a forked child must not finalize MPI, which is its parent's
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(_EXIT["status"]))
        if _EXIT["status"]:
            print(f"rank {connected.rank} exits with status {_EXIT['status']}: the job ends", file=sys.stderr)
            connected.abort(int(_EXIT["status"]))
        try:
            for made in _MADE:
                jax.block_until_ready(made.token)  # with asynchronous dispatch a program may be underway
            for each in list(OPEN):  # what is underway ends, that others wait for
                each.drain()
            connected.job.announce()
            for each in list(OPEN):
                each.close()
        except Exception:
            sys.stderr.write(f"rank {connected.rank}, at the end of the script:\n{traceback.format_exc()}")
            connected.abort(1)

    sys.excepthook = excepthook
    sys.exit = exit_recording
    atexit.register(at_exit)
