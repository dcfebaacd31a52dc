"""The errors of `collectives`: every one is a `CollectiveError`, and the builtin that a caller would expect."""


class CollectiveError(Exception):
    """The base class of every error raised by `collectives`."""


class InvalidCollective(CollectiveError, ValueError):
    """Arguments that do not describe a collective: sizes that do not add up, a root outside the group."""


class BackendError(CollectiveError, RuntimeError):
    """What is asked for cannot run on the processes that exist."""


class DivergenceError(CollectiveError, RuntimeError):
    """The ranks of a mesh run different programs, or gave different values where equal ones are promised."""


class TransportError(CollectiveError, RuntimeError):
    """A collective failed underway. The mesh is poisoned: every later collective on it raises this again."""


class CollectiveTimeout(TransportError, TimeoutError):
    """A collective did not end within `SPMD_TIMEOUT` seconds: some rank never came."""


class PeerLeft(TransportError, ConnectionError):
    """A rank that a collective waits for has left: its interpreter has ended."""


class ConformanceError(CollectiveError, AssertionError):
    """A communicator gave another result than the conformance suite states."""
