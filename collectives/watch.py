"""Waiting with a limit: no collective waits for ever, or for a rank that has left.

`wait` polls; `SPMD_TIMEOUT` (seconds, default 300) bounds it. While it waits it looks whether a peer has left before it
came here, and whether the user has pressed Ctrl-C: a signal does not reach a thread inside MPI, so it is taken from a pipe
that the interpreter's C handler writes to.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from collectives.errors import CollectiveTimeout, PeerLeft

SPINS: Final = 2000
"""Polls before the first look at the clock: some hundreds of microseconds."""

PROGRESS: Final[list[Callable[[], None]]] = []
"""What goes on while something is waited for."""

_wakeup: list[int] = []
_ENDING: Final = threading.Event()
"""Set once this process ends the job."""


def end() -> None:
    """From here on `check_end` does not return: the job is being ended, by whichever thread."""
    _ENDING.set()


def check_end() -> None:
    """Return, unless the job is being ended: what a program gave may then be garbage, and nobody is to see it."""
    if _ENDING.is_set():
        time.sleep(10)
        os._exit(1)


def timeout_s() -> float:
    """The limit in seconds. Raises `ValueError`, naming the variable, where it is no number above zero."""
    text = os.environ.get("SPMD_TIMEOUT", "300")
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not found > 0:
        raise ValueError(f"SPMD_TIMEOUT={text!r}: a number of seconds, above zero")
    return found


def wait(test: Callable[[], bool], what: Callable[[], str], absent: Callable[[], list[int]]) -> None:
    """Return when `test()` is true.

    Raises `CollectiveTimeout` after the limit, `PeerLeft` where `absent()` names ranks, `KeyboardInterrupt` after Ctrl-C.
    `what()` says what is waited for.
    """
    for _ in range(SPINS):
        if test():
            return
    limit = timeout_s()
    start = time.monotonic()
    looked = start
    while not test():
        os.sched_yield()
        for go_on in PROGRESS:
            go_on()
        now = time.monotonic()
        if now - looked < 0.001:
            continue
        looked = now
        if _interrupted():
            raise KeyboardInterrupt
        gone = absent()
        if gone and not test():
            who = f"rank {gone[0]} has" if len(gone) == 1 else f"ranks {', '.join(map(str, gone))} have"
            raise PeerLeft(f"{what()}: {who} left without coming here: the interpreter has ended.")
        if now - start > limit:
            raise CollectiveTimeout(
                f"{what()}: not done after {limit:g} s (SPMD_TIMEOUT). Some rank did not come to it, or came to another."
            )


@contextlib.contextmanager
def ends_job(what: str, abort: Callable[[int], None]) -> Iterator[None]:
    """For a call that cannot be polled: end the job, saying `what`, if the block is not done within the limit."""

    def late() -> None:
        print(f"{what}: not done after {timeout_s():g} s (SPMD_TIMEOUT); the job ends", file=sys.stderr, flush=True)
        abort(1)

    timer = threading.Timer(timeout_s(), late)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def watch_interrupts() -> None:
    """Let `wait` see SIGINT, whichever thread it runs on. Only from the main thread, and not over another wakeup pipe."""
    if _wakeup or threading.current_thread() is not threading.main_thread():
        return
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if previous != -1:
        signal.set_wakeup_fd(previous)
        return
    _wakeup.append(reader)


def forget_interrupts() -> None:
    """Forget signals that the main thread has seen: it runs Python now, so it has handled them."""
    if _wakeup:
        with contextlib.suppress(BlockingIOError):
            os.read(_wakeup[0], 4096)


def _interrupted() -> bool:
    """Whether Ctrl-C was pressed, and means KeyboardInterrupt."""
    if not _wakeup or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    try:
        return signal.SIGINT in os.read(_wakeup[0], 64)
    except BlockingIOError:
        return False
