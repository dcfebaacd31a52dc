"""Meshes, placements, layouts and intervals: pure data, checked by formulas and over all small cases."""

from __future__ import annotations

import copy
import itertools
import pickle

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placements import InvalidPlacement, Layout, Mesh, MeshError, P, Partial, Pieces, Replicate, Shard, Split
from placements.intervals import boundary, cover, longest, piece
from placements.layout import merge

SIZES = st.integers(0, 40)
COUNTS = st.integers(1, 9)
DETERMINISTIC = settings(derandomize=True, max_examples=200, deadline=None)


@DETERMINISTIC
@given(SIZES, COUNTS)
def test_pieces_tile_a_dim(size: int, n: int) -> None:
    """Consecutive, balanced, at most two lengths, empty only where size < n; the first is as long as torch.chunk's."""
    bounds = [piece(size, n, i) for i in range(n)]
    lengths = [high - low for low, high in bounds]
    assert [low for low, _ in bounds] + [size] == [0, *(high for _, high in bounds)]
    assert max(lengths) - min(lengths) <= 1
    assert lengths[0] == max(lengths) == longest(size, n)
    assert (0 in lengths) == (size < n)


@DETERMINISTIC
@given(SIZES, COUNTS, COUNTS)
def test_nested_splits_are_flat(size: int, a: int, b: int) -> None:
    """Two axes on one dim give the bounds of one axis of their product, each inside the outer axis's piece."""
    nested, flat = Layout.of(P(a=Shard(0), b=Shard(0)), Mesh(a=a, b=b), 1), Layout.of(P(c=Shard(0)), Mesh(c=a * b), 1)
    for i, j in itertools.product(range(a), range(b)):
        ((low, high),) = nested.bounds((size,), (i, j))
        assert ((low, high),) == flat.bounds((size,), (i * b + j,))
        outer = piece(size, a, i)
        assert outer[0] <= low <= high <= outer[1]
    assert {boundary(size, a, i) for i in range(a + 1)} <= {boundary(size, a * b, i) for i in range(a * b + 1)}


MESHES = (Mesh(a=1), Mesh(a=4), Mesh(a=2, b=3), Mesh(b=3, a=2), Mesh(a=2, b=1, c=2), Mesh(a=2, b=2, c=3))


def layouts(mesh: Mesh, ndim: int) -> list[Layout]:
    """Every layout without parts, both orders of axes on one dim included."""
    found = {}
    options = [Replicate(), *map(Shard, range(ndim))]
    for order in itertools.permutations(mesh.axis_names):
        for choice in itertools.product(options, repeat=len(order)):
            layout = Layout.of(P(**dict(zip(order, choice, strict=True))), mesh, ndim)
            found[layout] = None
    return list(found)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("shape", [(7, 5), (1, 4), (0, 3), (12, 6)])
def test_shards_tile_the_array(mesh: Mesh, shape: tuple[int, int]) -> None:
    """Over all coordinates every element is held exactly as often as the axes that do not shard say."""
    for layout in layouts(mesh, 2):
        held = np.zeros(shape, int)
        for coordinate in mesh.coordinates():
            index = layout.index(shape, coordinate)
            held[index] += 1
            assert held[index].shape == layout.local_shape(shape, coordinate)
            assert layout.offset(shape, coordinate) == tuple(part.start for part in index)
        copies = mesh.size // mesh.group_size(layout.axes)
        assert np.all(held == copies), layout
        local = [layout.local_shape(shape, at) for at in mesh.coordinates()]
        assert layout.largest_local_shape(shape) == max(local, key=lambda s: (s[0], s[1]))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_coordinates_and_groups(mesh: Mesh) -> None:
    """Rank and coordinate are inverse; groups along any axes partition the ranks and differ along those axes alone."""
    coordinates = list(mesh.coordinates())
    assert [mesh.rank(at) for at in coordinates] == list(range(mesh.size))
    assert [mesh.coordinate(rank) for rank in range(mesh.size)] == coordinates
    for count in range(len(mesh.axes) + 1):
        for axes in itertools.permutations(mesh.axis_names, count):
            groups = mesh.groups(axes)
            assert sorted(itertools.chain(*groups)) == list(range(mesh.size))
            for group in groups:
                assert [mesh.flat_index(mesh.coordinate(r), axes) for r in group] == list(range(mesh.group_size(axes)))
                rest = [axis for axis in mesh.axis_names if axis not in axes]
                assert len({mesh.flat_index(mesh.coordinate(r), rest) for r in group}) == 1


def test_a_mesh_is_a_value() -> None:
    """Equal by axes, ranks and backend; hashable, picklable, frozen; axes called ranks need the mapping form."""
    assert Mesh(dp=2, tp=2) == Mesh({"dp": 2, "tp": 2})
    assert Mesh(dp=2, tp=2) != Mesh(tp=2, dp=2)
    assert Mesh(dp=2) != Mesh(dp=2, ranks=[1, 0])
    assert Mesh(dp=2) != Mesh(dp=2, backend="simulated")
    assert pickle.loads(pickle.dumps(Mesh(dp=2, ranks=[3, 1]))) == Mesh(dp=2, ranks=[3, 1])
    assert len({Mesh(dp=2), Mesh(dp=2)}) == 1
    assert Mesh({"ranks": 2}).shape == {"ranks": 2}
    permuted = Mesh(dp=2, tp=2, ranks=[3, 1, 0, 2])
    assert permuted.coordinate(0) == (1, 0)
    assert permuted.groups("tp") == ((3, 1), (0, 2))
    assert permuted.submesh("tp", dp=1) == Mesh(tp=2, ranks=[0, 2])
    assert Mesh(dp=3).submesh("dp") == Mesh(dp=3, ranks=[0, 1, 2])
    with pytest.raises(AttributeError):
        permuted.axes = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mesh(dp=0), "at least 1"),
        (lambda: Mesh({"": 2}), "has a name"),
        (lambda: Mesh(dp=2, ranks=[0, 0]), "2 different ranks"),
        (lambda: Mesh(dp=2, ranks=[0]), "2 different ranks"),
        (lambda: Mesh({"dp": 2}, tp=2), "not both"),
        (lambda: Mesh(dp=2).axis_size("tp"), "has no axis 'tp'"),
        (lambda: Mesh(dp=2).coordinate(2), "Rank 2 is not in"),
        (lambda: Mesh(dp=2).rank((2,)), "no coordinate"),
        (lambda: Mesh(dp=2).groups(["dp", "dp"]), "occurs twice"),
        (lambda: Mesh(dp=2, tp=2).submesh("tp"), "either kept or fixed"),
    ],
)
def test_mesh_errors(make, message: str) -> None:
    """What cannot be is said."""
    with pytest.raises(MeshError, match=message):
        make()


def test_p_is_a_leaf_and_a_value() -> None:
    """No tuple, no pytree node; frozen; equal by what was written; prints as it is written."""
    placements = P(tp=Shard(0), dp=Shard(0), pp=Partial())
    assert jax.tree.leaves({"x": placements}) == [placements]
    assert repr(placements) == "P(tp=S(0), dp=S(0), pp=sum)"
    assert repr(P(Shard(0), Replicate(), None)) == "P(S(0), R, None)"
    assert placements == P(tp=Shard(0), dp=Shard(0), pp=Partial())
    assert placements != P(dp=Shard(0), tp=Shard(0), pp=Partial())
    assert copy.deepcopy(placements) == pickle.loads(pickle.dumps(placements)) == placements
    with pytest.raises(AttributeError, match="frozen"):
        placements.named = ()  # type: ignore[misc]


def test_partition_specs_are_translated() -> None:
    """JAX users' forms raise with the translation; from_spec and to_spec are inverse."""
    spec = jax.sharding.PartitionSpec
    with pytest.raises(InvalidPlacement, match=r"P\(dp=S\(0\)\)"):
        P("dp", None)
    with pytest.raises(InvalidPlacement, match=r"P\(dp=S\(1\), tp=S\(1\)\)"):
        P(spec(None, ("dp", "tp")))
    mesh = Mesh(dp=2, tp=2)
    for given_spec in (spec("dp"), spec(None, ("tp", "dp")), spec("tp", "dp"), spec()):
        layout = Layout.of(P.from_spec(given_spec), mesh, 2)
        assert spec(*layout.to_spec()) == spec(*given_spec, *[None] * (2 - len(given_spec)))
    with pytest.raises(InvalidPlacement, match="occurs twice"):
        P.from_spec(("dp", "dp"))
    with pytest.raises(InvalidPlacement, match="cannot say Partial"):
        Layout.of(P(dp=Partial()), mesh, 1).to_spec()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: P(dp=0), r"write Shard\(0\)"),
        (lambda: P(dp=Shard), r"is a class; write Shard\(0\)"),
        (lambda: P(dp=Partial), r"write Partial\(\)"),
        (lambda: P(dp=3.0), "is no placement"),
        (lambda: Shard("0"), "a dim is an integer"),
        (lambda: Partial("avg"), "an op is one of"),
    ],
)
def test_placement_errors(make, message: str) -> None:
    """What is no placement is refused where it is written."""
    with pytest.raises(InvalidPlacement, match=message):
        make()


@pytest.mark.parametrize(
    ("placements", "ndim", "message"),
    [
        (P(pp=Shard(0)), 1, "axis 'pp' is not on Mesh"),
        (P(dp=Shard(2)), 2, "dim 2 is out of range"),
        (P(dp=Shard(-3)), 2, "dim -3 is out of range"),
        (P(dp=Shard(0)), 0, "0-d array has no dim"),
        (P(one=Shard(3)), 2, "out of range"),
        (P(dp=Partial(), tp=Partial("max")), 1, "do not mix"),
        (P(Shard(0), Shard(0), Shard(0), Shard(0)), 1, "has 4 placements, but the mesh has 3"),
    ],
)
def test_layout_errors(placements: P, ndim: int, message: str) -> None:
    """A placement that does not fit is refused, on axes of size 1 too."""
    with pytest.raises(InvalidPlacement, match=message):
        Layout.of(placements, Mesh(dp=2, tp=2, one=1), ndim)


def test_layouts_are_canonical() -> None:
    """Equal exactly if every coordinate holds the same: replicated and size-1 axes drop, order counts on one dim alone."""
    mesh = Mesh(dp=2, tp=2, one=1)
    assert Layout.of(P(one=Shard(0), tp=Replicate()), mesh, 1) == Layout.of(P(), mesh, 1)
    assert Layout.of(P(tp=Shard(1), dp=Shard(0)), mesh, 2) == Layout.of(P(dp=Shard(0), tp=Shard(-1)), mesh, 2)
    assert Layout.of(P(tp=Shard(0), dp=Shard(0)), mesh, 1) != Layout.of(P(dp=Shard(0), tp=Shard(0)), mesh, 1)
    assert Layout.of(P(Shard(0), Partial()), mesh, 1).placements == P(dp=Shard(0), tp=Partial())


def test_merge_keeps_what_is_left_to_propagation() -> None:
    """None keeps an axis as it is; a batch dim keeps the axes that are not stated."""
    mesh = Mesh(a=2, b=2)
    current = Layout.of(P(a=Shard(0), b=Shard(1)), mesh, 2)
    assert merge(P(a=None), current) == Layout.of(P(a=Shard(0)), mesh, 2)
    assert merge(P(a=None, b=Shard(0)), current) == Layout.of(P(a=Shard(0), b=Shard(0)), mesh, 2)
    assert merge(P(b=Shard(1)), current, free_dims=(0,)) == current
    assert merge(P(a=Replicate(), b=Shard(1)), current, free_dims=(0,)) == Layout.of(P(b=Shard(1)), mesh, 2)


def test_cover_prefers_what_one_has() -> None:
    """Own indices come from oneself, others from whoever reaches furthest; a hole is an error."""
    haves = ((0, 4), (2, 6), (4, 6))
    assert cover(haves, (0, 6), own=0) == ((0, (0, 4)), (1, (4, 6)))
    assert cover(haves, (3, 6), own=1) == ((1, (3, 6)),)
    assert cover(haves, (2, 2)) == ()
    with pytest.raises(InvalidPlacement, match="nobody holds index 6"):
        cover(haves, (5, 7))
    with pytest.raises(InvalidPlacement, match="0 <= low <= high"):
        Pieces(("a",), ((3, 2),))


def test_halos_stay_inside_the_dim() -> None:
    """A widened split overlaps its neighbours and ends at the array's ends."""
    mesh = Mesh(a=3)
    halo = Split(7, ("a",), before=1, after=2)
    assert [halo.bounds(mesh, at) for at in mesh.coordinates()] == [(0, 5), (2, 7), (4, 7)]
