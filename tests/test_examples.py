"""The examples run, reach what they promise, and agree with the undecorated functions."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from conftest import load_example

import spmd
from placements import Mesh

STEPS = 50


def plain_losses(digits, dtype: str) -> list[float]:
    """The loss of every step of the undecorated function, under plain jax.jit."""
    data, step = digits.load(dtype), jax.jit(digits.step)
    params = digits.initial_params(dtype)
    state, losses = digits.OPTIMIZER.init(params), []
    for _, (images, labels) in zip(range(STEPS), digits.batches(data, 256, 20), strict=False):
        params, state, value = step(params, state, images, labels)
        losses.append(float(value))
    return losses


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 1e-4)])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_the_loss_curve_is_that_of_one_machine(dtype: str, tolerance: float, ranks: int) -> None:
    """The first 50 steps, on one, three (uneven) and four simulated ranks."""
    digits = load_example("train_digits")
    with jax.enable_x64(dtype == "float64"):
        expected = plain_losses(digits, dtype)
        found = digits.train(Mesh(dp=ranks), digits.load(dtype), 20, 256, STEPS, quiet=True).losses
    assert len(found) == STEPS
    np.testing.assert_allclose(found, expected, rtol=tolerance)


def test_the_network_learns_to_read() -> None:
    """At least 97 % of the held-out fifth."""
    result = load_example("train_digits").main(["--ranks", "2"])
    assert result.accuracy >= 0.97
    assert result.losses[-1] < 0.1 * result.losses[0]


def test_the_step_communicates_gradients_and_nothing_else() -> None:
    """One all_reduce for each of six leaves, one for the loss; no fallback."""
    digits = load_example("train_digits")
    data, params = digits.load(), digits.initial_params()
    step, _ = digits.parallelize(Mesh(dp=4))
    program = step.lower(params, digits.OPTIMIZER.init(params), *next(digits.batches(data, 256, 1)))
    assert program.fallbacks == ()
    program.check(all_reduce=7)
    sizes = [1, *(leaf.size for leaf in jax.tree.leaves(params))]
    assert program.bytes == sum(4 * -(-2 * size * 3 // 4) for size in sizes)


def test_matmul_checks_every_pair(capsys: pytest.CaptureFixture[str]) -> None:
    """Sixteen pairs, asserted inside, printed one a line."""
    for ranks in ("1", "2", "3"):
        assert load_example("matmul").main(["--ranks", ranks]) == 16
        assert len(capsys.readouterr().out.splitlines()) == 16


def test_the_program_of_the_step_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """`--program` prints the plan and trains nothing."""
    result = load_example("train_digits").main(["--program", "--ranks", "3"])
    assert result.losses == []
    assert "7 collectives" in capsys.readouterr().out
    assert spmd.current_mesh() is None
