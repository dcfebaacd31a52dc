"""The planner's plans beside the cheapest there are (`tests/optimum.py`; the optima are committed in `optima.json`)."""

from __future__ import annotations

import json

import optimum
import pytest

OPTIMA = {name: found["optimum_us"] for name, found in json.loads(optimum.OPTIMA.read_text()).items()}

REASONS = {
    "step dp, small batch": "the optimum gathers the small activations and computes rows of a weight's gradient on each rank; "
    "the planner shards only factors that an operand is sharded on, or that a later use wishes for",
}
"""The programs whose plans cost more than 1.1 times the optimum, and why."""


def test_plans_are_near_the_optimum() -> None:
    """Within 1.1 times on all but those with a stated reason, within twice on all; never below, which would be a fault of the
    integer program."""
    assert len(OPTIMA) >= 30
    assert set(OPTIMA) == set(optimum.PROGRAMS)
    plans = {name: program.plan() for name, program in optimum.PROGRAMS.items()}
    ratios = {name: optimum.cost_us(plan) / OPTIMA[name] for name, plan in plans.items()}
    for name, ratio in ratios.items():
        print(f"{name:32} {len(plans[name].eqns):3} equations  {ratio:.3f}")
    assert all(len(plan.eqns) <= 60 for plan in plans.values())
    assert {name for name, ratio in ratios.items() if ratio > 1.1} == set(REASONS)
    assert max(ratios.values()) <= 2
    assert min(ratios.values()) > 0.999


@pytest.mark.parametrize("name", ["step fsdp, small batch", "residual dp", "attention over the sequence"])
def test_the_committed_optima_are_those(name: str) -> None:
    """Solved again."""
    found, bound = optimum.Model(optimum.PROGRAMS[name].plan()).solve(60)
    assert found == pytest.approx(OPTIMA[name], rel=1e-3)
    assert bound == pytest.approx(found, rel=1e-3)
