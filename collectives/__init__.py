"""Collectives: functions for local-view code, the communicator contract, the primitives of local programs, the simulator.

Needs numpy and JAX alone. Back ends for real processes live in modules of their own. Importing this package narrows the core
affinity and makes dispatch synchronous where a launcher announced several processes: see `launch`.
"""

from collectives.communicator import Communicator, Receive, Send
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
from collectives.functions import (
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    axis_size,
    broadcast,
    gather,
    halo_exchange,
    permute,
    ragged_all_to_all,
    reduce,
    reduce_scatter,
    scatter,
    send_recv,
    shift,
    vary,
)
from collectives.launch import prepare_process
from collectives.process import register_backend, world
from collectives.work import Work

__all__ = [
    "BackendError",
    "CollectiveError",
    "CollectiveTimeout",
    "Communicator",
    "ConformanceError",
    "DivergenceError",
    "InvalidCollective",
    "PeerLeft",
    "Receive",
    "Send",
    "TransportError",
    "Work",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "axis_index",
    "axis_size",
    "broadcast",
    "gather",
    "halo_exchange",
    "permute",
    "ragged_all_to_all",
    "reduce",
    "reduce_scatter",
    "register_backend",
    "scatter",
    "send_recv",
    "shift",
    "vary",
    "world",
]

prepare_process()
