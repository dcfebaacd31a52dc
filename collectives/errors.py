"""The errors of `collectives`: every one is a `CollectiveError`, and the builtin that a caller would expect."""


class CollectiveError(Exception):
    """The base class of every error raised by `collectives`."""


class InvalidCollective(CollectiveError, ValueError):
    """Arguments that do not describe a collective: sizes that do not add up, a root outside the group."""


class BackendError(CollectiveError, RuntimeError):
    """What is asked for cannot run on the processes that exist."""


class ConformanceError(CollectiveError, AssertionError):
    """A communicator gave another result than the conformance suite states."""
