"""The machine model: what a step costs, in microseconds.

Constant data. A plan never depends on a measurement unless a `Machine` is passed explicitly, and the machine is part of
a program's digest: two ranks that measured differently would plan differently, and deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

LOCAL_STEP_US: Final = 0.01
"""A slice, mask or pad: small, so that of two paths that send the same the shorter one wins."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Latency of one collective in microseconds, bandwidth in GB/s (for all axes, and by axis), compute in GFLOP/s,
    memory in GB/s."""

    latency_us: float = 10.0
    bandwidth_gb_s: float = 10.0
    gflops: float = 100.0
    memory_gb_s: float = 10.0
    axis_bandwidth_gb_s: tuple[tuple[str, float], ...] = ()

    def bandwidth(self, axes: Iterable[str]) -> float:
        """The bandwidth over a group of axes, in GB/s: that of the slowest."""
        named = dict(self.axis_bandwidth_gb_s)
        return min((named.get(axis, self.bandwidth_gb_s) for axis in axes), default=self.bandwidth_gb_s)

    def collective_us(self, axes: tuple[str, ...], received: int) -> float:
        """The time of one collective in which the busiest coordinate receives so many bytes."""
        return self.latency_us + received / (self.bandwidth(axes) * 1e3)

    def memory_us(self, nbytes: int) -> float:
        """The time of writing memory."""
        return nbytes / (self.memory_gb_s * 1e3)

    def compute_us(self, flops: float) -> float:
        """The time of a local computation."""
        return flops / (self.gflops * 1e3)


DEFAULT: Final = Machine()
