"""Collectives: the communicator contract, the primitives that stand for them in a local program, the simulator's side.

Needs numpy and JAX alone. Back ends for real processes live in modules of their own.
"""

from collectives.communicator import Communicator
from collectives.errors import BackendError, CollectiveError, ConformanceError, InvalidCollective
from collectives.process import world

__all__ = ["BackendError", "CollectiveError", "Communicator", "ConformanceError", "InvalidCollective", "world"]
