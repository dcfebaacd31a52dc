"""Collectives: the communicator contract, the primitives that stand for them in a local program, the simulator's side.

Needs numpy and JAX alone. Back ends for real processes live in modules of their own. Importing this package narrows the core
affinity and makes dispatch synchronous where a launcher announced several processes: see `launch`.
"""

from collectives.communicator import Communicator
from collectives.errors import (
    BackendError,
    CollectiveError,
    CollectiveTimeout,
    ConformanceError,
    DivergenceError,
    InvalidCollective,
    PeerLeft,
    TransportError,
)
from collectives.launch import prepare_process
from collectives.process import world

__all__ = [
    "BackendError",
    "CollectiveError",
    "CollectiveTimeout",
    "Communicator",
    "ConformanceError",
    "DivergenceError",
    "InvalidCollective",
    "PeerLeft",
    "TransportError",
    "world",
]

prepare_process()
