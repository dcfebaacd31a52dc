"""The errors and warnings of `spmd`: every error is a `SpmdError`, and the builtin that a caller would expect."""


class SpmdError(Exception):
    """The base class of every error raised by `spmd`."""


class ArgumentError(SpmdError, ValueError):
    """An argument that does not fit: its structure, its placement, its mesh."""


class AnnotationError(SpmdError, TypeError):
    """An annotation that cannot be evaluated, or a parameter whose placement is stated twice."""


class TransformationError(SpmdError, RuntimeError):
    """A decorated function or a DArray under a JAX transformation from outside.

    No `TypeError`: JAX catches those of an argument and raises its own, which would hide the remedy.
    """


class EagerError(SpmdError, TypeError):
    """Arithmetic on a DArray outside a decorated function."""


class NotReplicatedError(SpmdError, ValueError):
    """An array was read whole that this process holds in part."""


class DeletedError(SpmdError, RuntimeError):
    """A DArray was read after it was donated or deleted."""


class FallbackError(SpmdError, NotImplementedError):
    """An operation that has no rule, where `fallback="error"` or an effect forbids replicating it."""


class RuleError(SpmdError, ValueError):
    """A rule that does not fit its equation, or gives another value than the whole computation."""


class CommunicationMismatch(SpmdError, AssertionError):
    """A program communicates otherwise than `check` says."""


class PlacementWarning(UserWarning):
    """Something is right but costs more than it might: an operation without a rule, a large closed-over constant."""
