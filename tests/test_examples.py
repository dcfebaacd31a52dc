"""The examples run, reach what they promise, and agree with the undecorated functions."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from conftest import load_example

import spmd

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


CURVES = [
    *((kind, "float64", 3) for kind in ("dp", "fsdp", "tp")),
    *((kind, "float64", 4) for kind in ("dp_tp", "fsdp_tp")),
    *(
        pytest.param(*curve, marks=pytest.mark.slow)
        for curve in (
            *(("dp", "float64", ranks) for ranks in (1, 4)),
            *(("dp", "float32", ranks) for ranks in (1, 3)),
            ("zero1", "float64", 4),
            ("dp", "float32", 4),
            ("fsdp_tp", "float64", 3),
            ("fsdp_tp", "float32", 4),
        )
    ),
]


@pytest.mark.parametrize(("kind", "dtype", "ranks"), CURVES)
def test_the_loss_curve_is_that_of_one_machine(kind: str, dtype: str, ranks: int) -> None:
    """The first 50 steps, of every kind, on simulated ranks: one, three (uneven), four."""
    digits = load_example("train_digits")
    with jax.enable_x64(dtype == "float64"):
        expected = plain_losses(digits, dtype)
        places = digits.parallel(kind, ranks)
        found = digits.train(places, digits.load(dtype), 20, 256, STEPS, quiet=True).losses
    assert len(found) == STEPS
    np.testing.assert_allclose(found, expected, rtol={"float64": 1e-9, "float32": 1e-4}[dtype])


def test_what_a_rank_holds() -> None:
    """Bytes of parameters and Adam's two moments: whole under dp; the larger chunks of all leaves under fsdp; zero1 between."""
    digits = load_example("train_digits")
    leaves = [leaf.shape for leaf in jax.tree.leaves(digits.initial_params())]
    whole = sum(4 * int(np.prod(shape)) for shape in leaves)
    for ranks in (1, 3, 4):
        chunk = sum(4 * -(-shape[0] // ranks) * int(np.prod(shape[1:])) for shape in leaves)
        expected = {"dp": 3 * whole, "fsdp": 3 * chunk, "zero1": whole + 2 * chunk}
        for kind, size in expected.items():
            found = digits.train(digits.parallel(kind, ranks), digits.load(), 1, 256, 0, quiet=True).bytes_per_rank
            assert found == size + 4  # and the count of steps


def test_the_network_learns_to_read() -> None:
    """At least 97 % of the held-out fifth."""
    result = load_example("train_digits").main(["--ranks", "2"])
    assert result.accuracy >= 0.97
    assert result.losses[-1] < 0.1 * result.losses[0]


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        ("dp", {"all_reduce": 7}),
        ("fsdp", {"all_gather": 6, "reduce_scatter": 6, "all_reduce": 1}),
        ("zero1", {"all_gather": 6, "reduce_scatter": 6, "all_reduce": 1}),
        ("tp", {"all_reduce": 1}),  # one block; its input needs no gradient
        ("dp_tp", {"all_reduce": 8}),
        ("fsdp_tp", {"all_gather": 6, "reduce_scatter": 6, "all_reduce": 2}),
    ],
)
def test_the_step_communicates_what_the_textbook_says(kind: str, counts: dict[str, int]) -> None:
    """No fallback; small messages are sent together."""
    digits = load_example("train_digits")
    data, params = digits.load(), digits.initial_params()
    step = digits.parallelize(digits.parallel(kind, 4)).step
    program = step.lower(params, digits.OPTIMIZER.init(params), *next(digits.batches(data, 256, 1)))
    assert program.fallbacks == ()
    program.check(**counts)
    assert len(program.messages) < len(program.collectives) or kind == "tp"
    if kind == "dp":
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
