"""Pytree prefixes of placements, as in JAX's `in_shardings`: one P stands for a whole subtree.

A leaf of a prefix is a `P`, `None` (not stated), or a function `(path, aval) -> P`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from placements import P, Partial, Replicate, Shard
from spmd.errors import ArgumentError

Leaf = P | None | Callable[[str, Any], P]


def is_leaf(value: Any) -> bool:
    """Whether a value is a leaf of a prefix."""
    if value is None or isinstance(value, P):
        return True
    return callable(value) and not isinstance(value, type) and jax.tree_util.all_leaves([value])


def describe(value: Any) -> str:
    """Why a value is no placement, with the translation where it is JAX's, or the placement of one axis."""
    if isinstance(value, jax.sharding.PartitionSpec):
        return (
            f"{value!r} is a JAX PartitionSpec, here {P.from_spec(value)!r} (P.from_spec translates; S(d) is Shard(d))"
        )
    if isinstance(value, (Shard, Replicate, Partial)):
        return f"{value!r} is the placement of one axis; name the axis, as in P(dp={value!r})"
    return f"{value!r} is no placement"


def broadcast_prefix(prefix: Any, tree: Any, what: str) -> list[Leaf]:
    """One leaf of the prefix for every leaf of the tree. Raises `ArgumentError`, saying where they differ."""
    leaves = jax.tree.leaves(prefix, is_leaf=is_leaf)
    for leaf in leaves:
        if not is_leaf(leaf):
            raise ArgumentError(f"{what}: {describe(leaf)}; a leaf is a P, None, or a function (path, aval) -> P.")
    if is_leaf(prefix):
        return [prefix] * len(jax.tree.leaves(tree))
    found: list[Leaf] = []
    try:
        jax.tree.map(lambda leaf, sub: found.extend([leaf] * len(jax.tree.leaves(sub))), prefix, tree, is_leaf=is_leaf)
    except (ValueError, TypeError) as error:
        differences = "; ".join(_differences(prefix, tree, "")) or str(error)
        raise ArgumentError(f"{what} do not fit: {differences}.") from error
    return found


def _differences(prefix: Any, tree: Any, at: str) -> Iterator[str]:
    """Where a prefix differs from the tree that it describes."""
    if is_leaf(prefix):
        return
    where = at or "the whole"
    if isinstance(prefix, dict) and isinstance(tree, dict):
        for key in (key for key in tree if key not in prefix):
            yield f"no placement for {at}[{key!r}]"
        for key in (key for key in prefix if key not in tree):
            yield f"a placement for {at}[{key!r}], but the keys are {', '.join(map(repr, tree))}"
        for key in (key for key in tree if key in prefix):
            yield from _differences(prefix[key], tree[key], f"{at}[{key!r}]")
    elif type(prefix) is type(tree) and isinstance(prefix, (list, tuple)):
        if len(prefix) != len(tree):
            yield f"{len(prefix)} placements for the {len(tree)} entries of {where}"
            return
        for index, (inner, value) in enumerate(zip(prefix, tree, strict=True)):
            yield from _differences(inner, value, f"{at}[{index}]")
    elif type(prefix) is not type(tree):
        kind = "one array" if jax.tree_util.all_leaves([tree]) else f"a {type(tree).__name__}"
        yield f"a {type(prefix).__name__} of placements for {where}, which is {kind}"


@dataclass(frozen=True, slots=True)
class PlacedLeaf:
    """One leaf of a tree: its path for messages, its value and aval, and the placement stated for it."""

    path: str
    value: Any
    aval: Any
    stated: P | None


def place_leaves(
    prefix: Any, tree: Any, name: str, what: str, aval_of: Callable[[str, Any], Any]
) -> tuple[list[PlacedLeaf], Any]:
    """The leaves of `tree`, called `name`, with what a prefix states for each; and the tree's structure.

    `aval_of(path, leaf)` gives the aval that functions in the prefix see.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    found = []
    for (path, leaf), stated in zip(paths, broadcast_prefix(prefix, tree, what), strict=True):
        where = f"{name}{jax.tree_util.keystr(path)}"
        aval = aval_of(where, leaf)
        placed = stated if stated is None or isinstance(stated, P) else stated(where, aval)
        if placed is not None and not isinstance(placed, P):
            raise ArgumentError(f"{what}: for {where} the function gave {placed!r}, which is no P.")
        found.append(PlacedLeaf(where, leaf, aval, placed))
    return found, treedef


def placements_like(tree: Any, params: Any, placements: Any) -> Any:
    """The placements of a tree that holds copies of `params`, as an optimizer state does; `P()` for all other leaves.

    Every subtree with the structure and shapes of `params` gets `placements` (a prefix of `params`). Leaves may be arrays or
    `jax.ShapeDtypeStruct`s. Communication: none.
    """
    placed, structure = place_leaves(placements, params, "params", "placements_like", lambda path, leaf: leaf)
    stated = jax.tree.unflatten(structure, [leaf.stated or P() for leaf in placed])
    shapes = [np.shape(leaf.value) for leaf in placed]

    def is_copy(node: Any) -> bool:
        found, treedef = jax.tree.flatten(node)
        return bool(treedef == structure) and [np.shape(leaf) for leaf in found] == shapes

    return jax.tree.map(lambda node: stated if is_copy(node) else P(), tree, is_leaf=is_copy)
