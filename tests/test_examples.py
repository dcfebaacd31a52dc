"""The examples run, reach what they promise, and agree with the undecorated functions."""

from __future__ import annotations

from pathlib import Path

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


def test_shallow_water_on_blocks_is_that_on_one() -> None:
    """Values on meshes of several shapes; mass to rounding; one message a step; the picture."""
    example = load_example("shallow_water")
    with jax.enable_x64(True):
        expected, _ = example.run(Mesh(y=1, x=1), 24, 30, 1, quiet=True)
        for mesh in (Mesh(y=2, x=3), Mesh(y=1, x=4)):
            state, mass = example.run(mesh, 24, 30, 2, quiet=True)
            assert max(abs(each / mass[0] - 1) for each in mass) < 1e-13
            once, _ = example.run(mesh, 24, 30, 1, quiet=True)
            for found, other in zip(once, expected, strict=True):
                np.testing.assert_allclose(found.full(), other.full(), rtol=1e-11, atol=1e-11)
            assert not np.allclose(state[0].full(), once[0].full(), rtol=1e-6)
        fields = [jax.ShapeDtypeStruct((24, 24), np.float64)] * 3
        program = example.simulation(Mesh(y=2, x=3), 1e3, 1.0, 30).lower(*fields)
        program.check(permute=..., all_reduce=1, max_messages=2)


def test_the_pictures_and_programs_of_the_stencils(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each example runs as its page says, and its Program has neighbours' rows and sums alone."""
    output = tmp_path / "water.png"
    change = load_example("shallow_water").main(
        ["--ranks", "2", "--size", "16", "--steps", "20", "--calls", "2", "--output", str(output)]
    )
    assert change < 1e-12
    assert output.stat().st_size > 10_000
    load_example("heat_global").main(
        ["--ranks", "4", "--rows", "23", "--columns", "18", "--steps", "25", "--calls", "2"]
    )
    assert load_example("cg").main(["--ranks", "3", "--rows", "11", "--columns", "8"]) > 0
    for name in ("shallow_water", "heat_global", "cg"):
        load_example(name).main(["--ranks", "4", "--program"])
        assert "gather" not in capsys.readouterr().out
