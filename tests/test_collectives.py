"""The collectives: the conformance suite on the simulator and on a lone process; primitives over meshes; refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import collectives
from collectives import primitives, testing, wire
from collectives.communicator import Communicator
from collectives.simulated import GROUP, identity, reduce_parts
from placements import Mesh, Pieces, Split


@pytest.mark.parametrize("size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4, 5))])
def test_the_simulator_conforms(size: int) -> None:
    """Every case of the suite, on groups of one to five; without `--all` of three. Ranks run it too."""
    assert testing.check_group(GROUP, size) > 400


def test_a_lone_process_conforms() -> None:
    """The world of one passes the suite of its size, and states every method of the contract."""
    world = collectives.world()
    assert (world.rank, world.size) == (0, 1)
    assert testing.check_communicator(world) > 400
    world.barrier()
    assert set(GROUP) == set(primitives.TABLE)
    assert {case.name for case in testing.cases(1)} == set(wire.ARRANGE) <= set(dir(Communicator))


def test_the_suite_can_fail() -> None:
    """A collective that permutes its result, or sums without the last rank, does not conform."""
    for name, wrong in {
        "all_gather": lambda parts, **kw: GROUP["all_gather"](parts, **kw)[::-1][:1] * len(parts),
        "all_reduce": lambda parts, op: [*GROUP["all_reduce"](parts[:-1], op=op), parts[-1]],
    }.items():
        broken = {**GROUP, name: wrong}
        if name == "all_gather":
            broken[name] = lambda parts, **kw: [jnp.flip(x, kw["dim"]) for x in GROUP["all_gather"](parts, **kw)]
        with pytest.raises(collectives.ConformanceError, match=name):
            testing.check_group(broken, 3)


MESH = Mesh(a=2, b=3)


def buffers(*lengths: int) -> tuple[jax.Array, ...]:
    """One array for each position, mixed signs, no two alike."""
    return tuple(jnp.arange(n, dtype=jnp.float32) * (-1) ** p + 10 * p for p, n in enumerate(lengths))


def test_groups_of_several_axes_and_their_order() -> None:
    """A gather over (b, a) joins the pieces in b-major order; over b alone each row of the mesh for itself."""
    parts = buffers(1, 1, 1, 1, 1, 1)
    both = primitives.simulate(
        "all_gather", parts, {"mesh": MESH, "axes": ("b", "a"), "dim": 0, "split": Split(6, ("b", "a"))}
    )
    assert both[0].tolist() == [0, 30, 10, 40, 20, 50]
    rows = primitives.simulate(
        "all_gather", parts, {"mesh": MESH, "axes": ("b",), "dim": 0, "split": Split(6, ("a", "b"))}
    )
    assert [r.tolist() for r in rows] == [[0, 10, 20]] * 3 + [[30, 40, 50]] * 3


def test_uneven_reduce_scatter_and_exchange() -> None:
    """Sizes that do not divide, and pieces from a table to balanced ones with a halo."""
    mesh = Mesh(a=3)
    whole = jnp.arange(5.0)
    out = primitives.simulate(
        "reduce_scatter",
        (whole, -2 * whole, 4 * whole),
        {"mesh": mesh, "axes": ("a",), "op": "sum", "dim": 0, "split": Split(5, ("a",))},
    )
    assert [x.tolist() for x in out] == [[0, 3], [6, 9], [12]]
    have = Pieces.of_lengths(("a",), (0, 4, 1))
    params = {"mesh": mesh, "axes": ("a",), "dim": 0, "have": have, "want": Split(5, ("a",), before=1, after=1)}
    out = primitives.simulate("exchange", (whole[:0], whole[:4], whole[4:]), params)
    assert [x.tolist() for x in out] == [[0, 1, 2], [1, 2, 3, 4], [3, 4]]


def test_abstract_shapes_are_those_of_the_simulation() -> None:
    """Bound in a jaxpr, a collective has the local shape that it produces."""
    mesh = Mesh(a=2)
    jaxpr = jax.make_jaxpr(
        lambda x: primitives.bind(
            "all_gather",
            [x],
            mesh=mesh,
            axes=("a",),
            each=[{"dim": 0, "split": Split(5, ("a",)), "out_sizes": ((0, 5),)}],
        )
    )(jnp.zeros((3, 2)))
    assert jaxpr.out_avals[0].shape == (5, 2)


def test_what_is_no_collective_is_refused() -> None:
    """Sizes that do not add up, a root outside the group, two sources for one destination."""
    parts = list(buffers(2, 2))
    for call, message in (
        (lambda: GROUP["all_gather"](parts, dim=0, sizes=(2, 3)), "the members hold"),
        (lambda: GROUP["broadcast"](parts, root=2), "outside a group"),
        (lambda: GROUP["permute"](parts, pairs=((0, 1), (1, 1))), "destinations are distinct"),
    ):
        with pytest.raises(collectives.InvalidCollective, match=message):
            call()


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint8", "int32", "float16", "bfloat16", "float32", "float8_e4m3fn", "complex64"]
)
def test_identities(dtype: str) -> None:
    """The identity leaves every value, zeros of both signs and extremes included, as it is."""
    kind = jnp.dtype(dtype)
    if dtype == "bool":
        values, ops = [True, False], ["prod", "max", "min", "and", "or", "xor"]
    elif kind.kind in "iu":
        info = jnp.iinfo(kind)
        values, ops = [info.min, 0, 1, info.max], ["sum", "prod", "max", "min", "and", "or", "xor"]
    else:
        values, ops = [-1.5, -0.0, 0.0, 2.0], ["sum", "prod"] + ([] if kind.kind == "c" else ["max", "min"])
    x = jnp.asarray(values, kind)
    for op in ops:
        unit = jnp.full(x.shape, identity(op, kind), kind)
        for pair in ([x, unit], [unit, x]):
            result = reduce_parts(pair, op)
            assert np.asarray(result).tobytes() == np.asarray(x).tobytes(), op
