"""The planner of redistributions: every pair of layouts on small meshes, in numpy; costs against an exhaustive search."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest

from collectives.simulated import identity
from placements import ItemSizes, Layout, Mesh, P, Partial, RedistributionError, Replicate, Shard, plan_steps
from placements.cost import DEFAULT
from placements.mesh import Coordinate, group_positions
from placements.redistribute import Step, movable_axes, step_bytes, step_us, steps_from

SIZES = ItemSizes(4, 4)
REDUCE: dict[str, Any] = {"sum": np.add, "mean": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
Shards = dict[Coordinate, np.ndarray]


def all_layouts(mesh: Mesh, ndim: int, op: str | None = "sum") -> list[Layout]:
    """Every layout, both orders of axes on one dim included, with parts of one op."""
    options: list[Any] = [Replicate(), *map(Shard, range(ndim)), *([Partial(op)] if op else [])]
    found: dict[Layout, None] = {}
    for order in itertools.permutations(mesh.axis_names):
        for choice in itertools.product(options, repeat=len(order)):
            found[Layout.of(P(**dict(zip(order, choice, strict=True))), mesh, ndim)] = None
    return list(found)


def reduced(parts: list[np.ndarray], op: str) -> np.ndarray:
    total = functools.reduce(REDUCE[op], parts)
    return total / len(parts) if op == "mean" else total


def spread(whole: np.ndarray, layout: Layout) -> Shards:
    """Shards of a whole array; parts are unequal and reduce to it."""
    axes = tuple(axis for axis, _ in layout.partial)
    n = layout.mesh.group_size(axes)
    op = layout.partial[0][1] if axes else "sum"
    rng = np.random.default_rng(1)
    if op in ("max", "min"):
        shift = -1.0 if op == "max" else 1.0
        parts = [whole + (shift * rng.integers(0, 4, whole.shape) if i else 0) for i in range(n)]
    elif op == "prod":
        parts = [rng.choice([-1.0, 2.0, 0.5], whole.shape) for _ in range(n - 1)]
        parts.append(whole / functools.reduce(np.multiply, parts, np.ones(whole.shape)))
    else:
        parts = [rng.integers(-9, 10, whole.shape).astype(float) for _ in range(n - 1)]
        parts.append((whole * n if op == "mean" else whole) - sum(parts))
    mesh = layout.mesh
    return {at: parts[mesh.flat_index(at, axes)][layout.index(whole.shape, at)] for at in mesh.coordinates()}


def gather(shards: Shards, layout: Layout, shape: tuple[int, ...], group: list[Coordinate]) -> np.ndarray:
    """What the members of one group hold together; NaN where nobody holds anything."""
    whole = np.full(shape, np.nan)
    for at in group:
        whole[layout.index(shape, at)] = shards[at]
    return whole


def apply(step: Step, shards: Shards, shape: tuple[int, ...]) -> Shards:
    """One step, in numpy, from the shards of each group alone."""
    mesh, out = step.source.mesh, {}
    for positions in group_positions(mesh, step.axes):
        group = [mesh.coordinate_at(position) for position in positions]
        for at in group:
            index = step.target.index(shape, at)
            if step.name == "mask":
                keeps = step.op not in ("sum", "prod", "xor") or not mesh.flat_index(at, step.axes)
                out[at] = shards[at] if keeps else np.full_like(shards[at], identity(step.op or "", np.float64))
            elif step.name == "pad":
                outer = np.full(shape, identity(step.op or "", np.float64))
                scale = len(group) if step.op == "mean" else 1
                outer[step.source.index(shape, at)] = shards[at] * scale
                out[at] = outer[index]
            elif step.name in ("all_reduce", "reduce_scatter"):
                total = np.full(shape, np.nan)
                total[step.source.index(shape, at)] = reduced([shards[other] for other in group], step.op or "")
                out[at] = total[index]
            else:
                members = [at] if step.name == "slice" else group
                out[at] = gather(shards, step.source, shape, members)[index]
            assert not np.isnan(out[at]).any(), step
    return out


def check_holds(shards: Shards, layout: Layout, whole: np.ndarray) -> None:
    """Assert that shards are those of a layout."""
    mesh, axes = layout.mesh, tuple(axis for axis, _ in layout.partial)
    for positions in group_positions(mesh, axes):
        group = [mesh.coordinate_at(position) for position in positions]
        held = [shards[at] for at in group]
        total = reduced(held, layout.partial[0][1]) if axes else held[0]
        np.testing.assert_allclose(total, whole[layout.index(whole.shape, group[0])], rtol=1e-12)


CASES = [
    (Mesh(a=3), (5, 4), "sum"),
    (Mesh(a=4), (3, 1), "mean"),
    (Mesh(a=2), (0, 3), "sum"),
    (Mesh(a=2, b=3), (7, 5), "sum"),
    (Mesh(b=3, a=2), (4, 5), "max"),
    (Mesh(a=2, b=2), (5, 3), "prod"),
    (Mesh(a=2, b=2), (3, 2), "mean"),
    (Mesh(a=2, b=2), (1, 6), "min"),
]


@pytest.mark.parametrize(("mesh", "shape", "op"), CASES, ids=str)
def test_every_pair_of_layouts(mesh: Mesh, shape: tuple[int, int], op: str) -> None:
    """The planned steps, applied to numpy shards, give the target; they never cost more than gathering and slicing."""
    whole = (np.arange(np.prod(shape)) * 7 % 11 - 4.5).reshape(shape)
    replicated = Layout.replicated(mesh, 2)
    for source, target in itertools.product(all_layouts(mesh, 2, op), repeat=2):
        steps = plan_steps(source, target, shape, SIZES)
        shards = spread(whole, source)
        at = source
        for step in steps:
            assert step.source == at
            shards, at = apply(step, shards, shape), step.target
        assert at == target
        check_holds(shards, target, whole)
        naive = [*plan_steps(source, replicated, shape, SIZES), *plan_steps(replicated, target, shape, SIZES)]
        assert cost(steps) <= cost(naive) + 1e-9


def cost(steps: Any) -> float:
    return sum(step_us(step, SIZES) for step in steps)


@pytest.mark.slow
def test_every_pair_on_three_axes() -> None:
    """As above, on a mesh of three axes."""
    mesh, shape = Mesh(a=2, b=2, c=2), (5, 6)
    whole = (np.arange(30) * 7 % 11 - 4.5).reshape(shape)
    layouts = all_layouts(mesh, 2)
    for number, (source, target) in enumerate(itertools.product(layouts, repeat=2)):
        if number % 7 == 0:
            shards = spread(whole, source)
            for step in plan_steps(source, target, shape, SIZES):
                shards = apply(step, shards, shape)
            check_holds(shards, target, whole)


@pytest.mark.parametrize(
    ("mesh", "shape"), [(Mesh(a=3), (5, 4)), (Mesh(a=2, b=3), (7, 4)), (Mesh(a=2, b=2), (64, 2048))], ids=str
)
def test_costs_equal_those_of_an_exhaustive_search(mesh: Mesh, shape: tuple[int, int]) -> None:
    """Bellman-Ford over the same steps: relax every edge until nothing changes."""
    layouts = all_layouts(mesh, 2)
    for source, target in itertools.product(layouts, repeat=2):
        if source == target:
            continue
        movable = movable_axes(source, target)
        best = {source: 0.0}
        changed = True
        while changed:
            changed = False
            for layout in list(best):
                for step in steps_from(layout, target, movable, shape):
                    total = best[layout] + step_us(step, SIZES, DEFAULT)
                    if total < best.get(step.target, np.inf) - 1e-9:
                        best[step.target], changed = total, True
        assert cost(plan_steps(source, target, shape, SIZES)) == pytest.approx(best[target], abs=1e-4)


@pytest.mark.parametrize(
    ("source", "target", "name", "elements"),
    [
        (P(a=Shard(0)), P(), "all_gather", 12 * 8 * 3 // 4),
        (P(a=Partial()), P(), "all_reduce", 2 * 12 * 8 * 3 // 4),
        (P(a=Partial()), P(a=Shard(0)), "reduce_scatter", 12 * 8 * 3 // 4),
        (P(a=Shard(0)), P(a=Shard(1)), "all_to_all", 12 * 8 * 3 // 16),
        (P(), P(a=Shard(1)), "slice", 0),
        (P(), P(a=Partial()), "mask", 0),
        (P(a=Shard(1)), P(a=Partial()), "pad", 0),
    ],
)
def test_the_table_of_steps(source: P, target: P, name: str, elements: int) -> None:
    """One step for each row of the table, with its bytes: n = 4 ranks, an array of [12, 8]."""
    mesh = Mesh(a=4)
    (step,) = plan_steps(Layout.of(source, mesh, 2), Layout.of(target, mesh, 2), (12, 8), SIZES)
    assert (step.name, step.elements, step_bytes(step, ItemSizes(2, 4))) == (
        name, elements, elements * (4 if "reduce" in name else 2),
    )  # fmt: skip


def test_bytes_are_those_of_the_busiest_coordinate() -> None:
    """5 over 4 is 2, 1, 1, 1: a rank with one row receives four; a swap of axes is an exchange of what is missing."""
    mesh = Mesh(a=4)
    (step,) = plan_steps(Layout.of(P(a=Shard(0)), mesh, 2), Layout.replicated(mesh, 2), (5, 3), SIZES)
    assert step.elements == 4 * 3
    grid = Mesh(a=2, b=2)
    (swap,) = plan_steps(
        Layout.of(P(a=Shard(0), b=Shard(0)), grid, 1), Layout.of(P(b=Shard(0), a=Shard(0)), grid, 1), (8,), SIZES
    )
    assert (swap.name, swap.elements) == ("exchange", 2)


def test_axes_that_stay_do_not_move() -> None:
    """A gather over one axis leaves another, sharded or partial, alone."""
    mesh = Mesh(a=2, b=2, c=2)
    source = Layout.of(P(a=Shard(0), b=Shard(1), c=Partial()), mesh, 2)
    target = Layout.of(P(b=Shard(1), c=Partial()), mesh, 2)
    (step,) = plan_steps(source, target, (8, 8), SIZES)
    assert (step.name, step.axes, step.elements) == ("all_gather", ("a",), 4 * 4)


def test_groups_of_axes_go_together() -> None:
    """Parts over two axes are one all_reduce over both; a dim over two axes is one all_gather."""
    mesh = Mesh(a=2, b=3)
    for source, name in ((P(a=Partial(), b=Partial()), "all_reduce"), (P(b=Shard(0), a=Shard(0)), "all_gather")):
        (step,) = plan_steps(Layout.of(source, mesh, 1), Layout.replicated(mesh, 1), (12,), SIZES)
        assert step.name == name
        assert set(step.axes) == {"a", "b"}


def test_impossible_pairs_are_refused() -> None:
    """Other meshes, other numbers of dims; parts of one op become those of another by way of whole values."""
    one, two = Mesh(a=2), Mesh(a=3)
    with pytest.raises(RedistributionError, match="on one mesh"):
        plan_steps(Layout.replicated(one, 1), Layout.of(P(a=Shard(0)), two, 1), (4,), SIZES)
    with pytest.raises(RedistributionError, match="numbers of dims"):
        plan_steps(Layout.replicated(one, 1), Layout.of(P(a=Shard(0)), one, 1), (4, 4), SIZES)
    source, target = (Layout.of(P(a=Partial(op)), one, 1) for op in ("sum", "max"))
    names = [step.name for step in plan_steps(source, target, (4,), SIZES)]
    assert names == ["all_reduce", "mask"]
