"""Operations underway: what a communicator gives for `async_op=True`.

The operations of one communicator run one after the other, in the order in which they were begun, so all members run them
alike; messages go on each by itself. MPI makes progress inside MPI calls only: whoever begins or waits for anything of ours, on
whichever communicator, lets all go on that are underway.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from collectives import watch
from collectives.errors import CollectiveTimeout, TransportError

GIVEN_UP: Final[list[Any]] = []
"""What was underway when a wait for it failed: a back end may still use its memory."""


class Pending(Protocol):
    """A transfer that a back end has to get done."""

    def poll(self) -> bool:
        """Go on; whether it is done. Raises what went wrong."""

    def absent(self) -> list[int]:
        """The members, by world rank, that have left and will not take part."""


class Work:
    """An operation underway. `wait()` gives its result; until then its arrays are not to be written."""

    def __init__(
        self,
        owner: Any,
        pending: Sequence[Pending],
        finish: Callable[[], Any],
        what: Callable[[], str],
        at_once: bool = False,
    ) -> None:
        self._owner, self._pending, self._finish, self._what = owner, list(pending), finish, what
        self._at_once = at_once
        self._error: BaseException | None = None
        self._result: Any = None
        self._is_done = False

    def wait(self, timeout: float | None = None) -> Any:
        """The result, once the operation is done. `timeout` is in seconds, by default `SPMD_TIMEOUT`.

        Raises what went wrong underway, and `CollectiveTimeout` where it is not done in time: with `timeout` it goes on, and
        can be waited for again; without one the communicator is given up.
        """
        if not self.is_completed():
            if timeout is None:
                try:
                    watch.wait(self.is_completed, self._what, self._absent)
                except BaseException as error:
                    self._owner.fail(error)
                    self._end(error)
            else:
                end = time.monotonic() + timeout
                while not self.is_completed():
                    if time.monotonic() > end:
                        raise CollectiveTimeout(f"{self._what()}: not done after {timeout:g} s; it goes on.")
                    os.sched_yield()
        if self._error is not None:
            raise self._error
        return self._result

    def is_completed(self) -> bool:
        """Whether it is done, well or not. Lets it go on; never waits."""
        if not self._is_done:
            advance_all()
        return self._is_done

    def exception(self) -> BaseException | None:
        """What went wrong underway, or None. Lets it go on; never waits."""
        self.is_completed()
        return self._error

    def __repr__(self) -> str:
        state = "underway" if not self._is_done else "done" if self._error is None else f"failed: {self._error}"
        return f"Work({self._what()}; {state})"

    def _absent(self) -> list[int]:
        """Who has left and will not take part in what is underway now: in this, or in what comes before it."""
        first = self if self._at_once else next((work for work in self._owner.queue.works if work._pending), self)
        return sorted({rank for work in (first, self) if work._pending for rank in work._pending[0].absent()})

    def settle(self) -> None:
        """Return once it is done, well or not. Raises what a wait raises for its own reasons."""
        if not self.is_completed():
            self.wait()

    def _advance(self) -> bool:
        """Go on; whether it is done."""
        if self._owner.poison is not None and self._pending:
            self._end(TransportError(f"{self._what()}: not done, as something failed before: {self._owner.poison}"))
            return True
        try:
            if self._at_once:
                self._pending = [each for each in self._pending if not each.poll()]
            else:
                while self._pending and self._pending[0].poll():
                    del self._pending[0]
            if self._pending:
                return False
            self._result = self._finish()
        except BaseException as error:
            if self._pending:  # what the members did may differ
                self._owner.fail(error)
            self._end(error)
            if not isinstance(error, Exception):  # Ctrl-C is for whoever waits
                raise
        self._is_done = True
        return True

    def _end(self, error: BaseException) -> None:
        """It is done, and not well."""
        if self._pending:
            GIVEN_UP.append(self._pending)
        self._error, self._pending, self._is_done = error, [], True


class Queue:
    """The collectives of one communicator that are not done, in order: one after the other, on all members alike."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.lock = threading.RLock()
        self.goes_on = False

    def add(self, work: Work) -> None:
        """Begin one, once its turn comes."""
        with self.lock:
            self.works.append(work)
            if self not in BUSY:
                BUSY.append(self)
        advance_all()

    def advance(self) -> None:
        """Let them go on as far as they get without waiting."""
        with self.lock:
            if self.goes_on:  # what goes on here looked at something else that is underway
                return
            self.goes_on = True
            try:
                self.go_on()
            finally:
                self.goes_on = False
                if not self.works and self in BUSY:
                    BUSY.remove(self)

    def go_on(self) -> None:
        """The first; the next once it is done."""
        while self.works and self.works[0]._advance():
            del self.works[0]


class Messages(Queue):
    """The messages of one communicator that are not done: each goes on by itself."""

    def go_on(self) -> None:
        """All of them."""
        done = {id(work) for work in list(self.works) if work._advance()}
        self.works = [work for work in self.works if id(work) not in done]


BUSY: Final[list[Queue]] = []
"""Where something is underway in this process."""


def advance_all() -> None:
    """Let everything go on that is underway, on any communicator: members may wait for it in other orders."""
    for queue in list(BUSY):
        queue.advance()


watch.PROGRESS.append(advance_all)
