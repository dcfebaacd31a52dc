"""The Program: its text (golden), collectives, check, digest, classes, and what a mesh of any size costs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from placements import Mesh, P, Partial, Shard

GOLDEN = Path(__file__).parent / "golden"
F32 = np.float32


def struct(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def loss(params: Any, x: Any) -> Any:
    h = x
    for w in params:
        h = jax.nn.relu(h @ w)
    return jnp.mean(h**2)


LAYERS = [struct(8, 16), struct(16, 6)]
ROWS, COLUMNS = P(tp=Shard(0)), P(tp=Shard(1))


def mixed(x: Any) -> Any:
    y = x.reshape(6, 4).T
    s = jnp.concatenate([y, 2 * y], axis=0)
    return jax.nn.softmax(s, axis=1), jnp.cumsum(x)


def pinned(x: Any) -> Any:
    return spmd.constrain(x + 1, P(dp=Shard(1))) * 2


CANONICAL: dict[str, tuple[Mesh, Any, Any, Any, tuple[Any, ...]]] = {
    "data_parallel": (Mesh(dp=4), jax.value_and_grad(loss), (P(), P(dp=Shard(0))), None, (LAYERS, struct(10, 8))),
    "tensor_parallel": (Mesh(tp=4), jax.grad(loss), ([COLUMNS, ROWS], P()), None, (LAYERS, struct(10, 8))),
    "both": (
        Mesh(dp=2, tp=2), jax.grad(loss), ([COLUMNS, ROWS], P(dp=Shard(0))), [COLUMNS, ROWS], (LAYERS, struct(10, 8)),
    ),
    "gather": (Mesh(dp=3), lambda x: x, (P(dp=Shard(0)),), P(), (struct(7, 2),)),
    "reduce_scatter": (Mesh(dp=3), lambda x: x, (P(dp=Partial()),), P(dp=Shard(1)), (struct(7, 2),)),
    "transpose": (Mesh(dp=3), lambda x: x.T, (P(dp=Shard(0)),), P(dp=Shard(0)), (struct(7, 2),)),
    "swap_axes": (Mesh(a=2, b=2), lambda x: x, (P(a=Shard(0), b=Shard(0)),), P(b=Shard(0), a=Shard(0)), (struct(7),)),
    "bfloat16_mean": (Mesh(dp=2), lambda x: x.mean(0), (P(dp=Shard(0)),), None, (struct(6, 3, dtype=jnp.bfloat16),)),
    "mixed": (Mesh(dp=2), mixed, (P(dp=Shard(0)),), None, (struct(24),)),
    "pinned": (Mesh(dp=2), pinned, (P(dp=Shard(0)),), None, (struct(4, 5),)),
    "fallback": (Mesh(dp=2), lambda x: jax.lax.approx_max_k(x, 2)[0] + 1, (P(dp=Shard(0)),), None, (struct(4, 5),)),
    "constants": (Mesh(dp=2), lambda x: x @ np.eye(3, dtype=F32) + jnp.arange(3.0), (P(dp=Shard(0)),), None, (struct(4, 3),)),
}  # fmt: skip


def lowered(name: str) -> spmd.Program:
    mesh, function, placements, out, args = CANONICAL[name]
    decorated = spmd.jit(function, mesh=mesh, in_placements=placements, out_placements=out, fallback="allow")
    return decorated.lower(*args)


@pytest.mark.parametrize("name", sorted(CANONICAL))
def test_golden_text(name: str) -> None:
    """The printed Program is word for word the one in `tests/golden` (write anew with UPDATE_GOLDEN=1, and read the diff)."""
    text = str(lowered(name)).replace("one_minus_square", "sub 1.0")
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text + "\n")
    assert text + "\n" == path.read_text()


@pytest.mark.parametrize("name", sorted(CANONICAL))
def test_names_in_the_text_are_those_of_one_value(name: str) -> None:
    """Every operand was defined on an earlier line; a moved value and the original keep names of their own."""
    defined: set[str] = set()
    for line in str(lowered(name)).splitlines()[1:-2]:
        left, _, right = line.split("  # ")[0].strip().partition(" = ")
        if not right:
            defined.add(re.sub(r"^(argument|closed over|constant) ", "", left.split("  ")[0]))
            continue
        operands = re.sub(r"^\w+(\[.*?\](?= |$))?", "", right.split("  ")[0]).split()
        for operand in operands:
            assert operand in defined or re.fullmatch(r"-?(\d.*|inf|True|False)", operand), line
        defined.update(left.split())
    program = spmd.jit(lambda x: (jnp.cumsum(x, 0), jnp.sin(x)), mesh=Mesh(dp=3), in_placements=P(dp=Shard(0)))
    text = str(program.lower(struct(5, 2)))
    assert "= sin x" in text
    assert "local_slice" not in text


def test_texts_and_digests_do_not_depend_on_hashing() -> None:
    """Two processes with other hash seeds print the same, and have the same digests."""
    script = textwrap.dedent(
        """
        import sys; sys.path.insert(0, "tests")
        import test_program as t
        for name in sorted(t.CANONICAL):
            program = t.lowered(name)
            print(program, program.digest, program.jaxpr())
        """
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=GOLDEN.parents[1],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert str(GOLDEN.parents[1]) not in runs[0]


def test_collectives_are_data() -> None:
    """Name, axes, op, global shape, dtype, bytes, source, reason, count and message of each."""
    program = lowered("data_parallel")
    assert [c.name for c in program.collectives] == ["all_reduce"] * 3
    (gradient,) = (c for c in program.collectives if c.shape == (8, 16))
    assert (gradient.axes, gradient.op, gradient.shape, gradient.dtype) == (("dp",), "sum", (8, 16), "float32")
    assert gradient.bytes == 2 * 8 * 16 * 4 * 3 // 4
    assert (gradient.source.function, gradient.source.offset, gradient.count) == ("loss", "loss+3", 1)
    assert program.bytes == sum(c.bytes for c in program.collectives)
    assert [m.collectives for m in program.messages] == [program.collectives]  # small, and ready together
    assert all(c in program.messages[c.message].collectives for c in program.collectives)
    assert lowered("bfloat16_mean").collectives[0].dtype == "float32"


def test_check() -> None:
    """Counts, axes, bytes and messages; the Ellipsis leaves a name free; a mismatch shows the table."""
    program = lowered("both")
    counts = {c.name: sum(o.name == c.name for o in program.collectives) for c in program.collectives}
    program.check(**counts)
    program.check(**counts, max_bytes=program.bytes, max_messages=len(program.messages))
    program.check(**dict.fromkeys(counts, ...))
    over = [c for c in program.collectives if "tp" in c.axes]
    program.check(axis="tp", all_reduce=len(over), all_gather=..., all_to_all=...)
    for wrong in (
        {}, {**counts, "all_gather": 9}, {**counts, "max_bytes": program.bytes - 1}, {**counts, "max_messages": 0},
    ):  # fmt: skip
        with pytest.raises(spmd.CommunicationMismatch, match=r"(?s)expected|allowed.*all_reduce\[") as caught:
            program.check(**wrong)
        assert isinstance(caught.value, AssertionError)
    with pytest.raises(spmd.ArgumentError, match="has no such axis"):
        program.check(axis="pp")
    checked = spmd.jit(lambda x: x.sum(), mesh=Mesh(dp=2), in_placements=P(dp=Shard(0)), check={"all_reduce": 0})
    with pytest.raises(spmd.CommunicationMismatch, match="all_reduce: 1, expected 0"):
        checked(np.ones(4, F32))


def test_digests_tell_programs_apart() -> None:
    """Another function, shape, placement, mesh or constant: another digest; the same: the same, whichever coordinate."""
    mesh = Mesh(dp=2)

    def digest(function: Any, placements: P = P(), x: Any = struct(4, 3), mesh: Mesh = mesh, **options: Any) -> str:
        return spmd.jit(function, mesh=mesh, in_placements=placements, fallback="allow").lower(x, **options).digest

    def f(x: Any) -> Any:
        return 2 * x

    base = digest(f)
    assert base == digest(f) == digest(f, coordinate=(1,))
    others = [
        digest(lambda x: 2 * x), digest(f, P(dp=Shard(0))), digest(f, x=struct(4, 2)), digest(f, mesh=Mesh(dp=3)),
        digest(f, mesh=Mesh(tp=2)), digest(f, x=struct(4, 3, dtype=np.int32)), digest(f, mesh=Mesh(dp=2, ranks=[1, 0])),
    ]  # fmt: skip
    assert len({base, *others}) == len(others) + 1
    constants = [digest(lambda x, c=c: x + np.full(3, c, F32)) for c in (1, 2)]
    loops = [digest(lambda x, c=c: jax.lax.fori_loop(0, c, lambda i, v: v + 1, x)) for c in (1, 2)]
    assert len({*constants, *loops}) == 4


def test_shape_classes() -> None:
    """At most two per uneven dim; each has a jaxpr of its own; the text names the others."""
    program = spmd.jit(jnp.tanh, mesh=Mesh(a=4, b=3), in_placements=P(a=Shard(0), b=Shard(1))).lower(struct(5, 7))
    assert len(program.classes) == 4
    shapes = {at: program.jaxpr(at).jaxpr.outvars[0].aval.shape for at in program.classes.values()}
    assert sorted(shapes.values()) == [(1, 2), (1, 3), (2, 2), (2, 3)]
    assert "other shapes at" in str(program)
    even = spmd.jit(jnp.tanh, mesh=Mesh(a=4), in_placements=P(a=Shard(0))).lower(struct(8))
    assert list(even.classes.values()) == [(0,)]
    assert even.jaxpr((0,)) is even.jaxpr((3,))


def test_a_mesh_of_any_size_is_lowered() -> None:
    """65,536 ranks, no process: the plan, the text, another coordinate's shapes."""
    mesh = Mesh(dp=256, tp=256)
    step = spmd.jit(jax.grad(loss), mesh=mesh, in_placements=([COLUMNS, ROWS], P(dp=Shard(0))))
    args = ([struct(512, 4096), struct(4096, 512)], struct(100_000, 512))
    program = step.lower(*args)
    program.check(axis="dp", all_reduce=2)
    text = str(step.lower(*args, coordinate=(255, 3)))
    assert "float32[390,512]" in text
    assert "float32[391,512]" in str(program)


def test_cost_and_memory() -> None:
    """The machine model's time grows with the bytes; liveness counts arguments, results and the peak."""
    total = spmd.jit(lambda x: jnp.tanh(x).sum(), mesh=Mesh(dp=2), in_placements=P(dp=Shard(0)))
    small, large = total.lower(struct(8, 10)), total.lower(struct(8000, 10))
    assert small.cost.communication_us == large.cost.communication_us > 0
    assert small.cost.compute_us < large.cost.compute_us
    assert small.cost.total_us == small.cost.communication_us + small.cost.compute_us
    memory = small.memory_analysis()
    assert (memory.argument_bytes, memory.output_bytes) == (4 + 4 * 10 * 4, 4)
    assert memory.peak_bytes >= memory.argument_bytes + 4 * 10 * 4


def test_compile_runs_the_program() -> None:
    """`compile()` is a function of every rank's shards."""
    program = spmd.jit(lambda x: x.sum(), mesh=Mesh(dp=2), in_placements=P(dp=Shard(0))).lower(struct(3))
    (total,) = program.compile()([(jnp.asarray([1.0, 2.0]), jnp.asarray([4.0]))])
    assert [float(t) for t in total] == [7.0, 7.0]
