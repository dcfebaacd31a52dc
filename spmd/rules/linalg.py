"""Batched computations on whole vectors and matrices: factorisations, solves, Fourier transforms, the largest of a dim.

The dims in front are a batch, and sharded at will; the last ones are computed whole. Where they are sharded the batch is
sharded instead, by an all_to_all, if that is cheaper than gathering.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Final

from jax import lax

from collectives import jax_compat
from collectives.jax_compat import JaxprEqn
from spmd.factors import Rule


def batched(core: int, cost: float = 1.0, shared: int = 0) -> Callable[[JaxprEqn], Rule | None]:
    """A rule for `core` last dims of the first operand that are computed whole; all other operands and results have the same
    batch. `cost` times their size is the work. Of the last operand and the result `shared` last dims are a batch too."""

    def maker(eqn: JaxprEqn) -> Rule | None:
        first = eqn.invars[0].aval.shape
        batch = len(first) - core
        sizes, whole = list(first[:batch]), []
        last = []
        for _ in range(shared):
            last.append(len(sizes))
            sizes.append(eqn.invars[-1].aval.shape[-1])

        def dims(atom: Any, tail: bool) -> tuple[tuple[int, ...], ...] | None:
            shape = atom.aval.shape
            if shape[:batch] != first[:batch]:
                return None
            found = list(range(batch))
            for size in shape[batch : len(shape) - (len(last) if tail else 0)]:
                whole.append(len(sizes))
                found.append(len(sizes))
                sizes.append(size)
            return tuple((factor,) for factor in (*found, *(last if tail else ())))

        count = len(eqn.invars)
        operands = [dims(atom, at == count - 1) for at, atom in enumerate(eqn.invars)]
        results = [dims(atom, True) for atom in eqn.outvars]

        def local(call: Any, values: list[Any]) -> list[Any]:
            shapes = [tuple(value.shape) for value in values]
            if any(0 in shape for shape in (*shapes, *call.result_shapes)):
                pairs = zip(call.result_shapes, eqn.outvars, strict=True)
                return [lax.full(shape, 0, var.aval.dtype) for shape, var in pairs]
            return jax_compat.bind(eqn, values, eqn.params)

        if any(each is None for each in (*operands, *results)):
            return None
        flops = cost * math.prod(first) * (first[-1] if core and len(first) else 1)
        return Rule(
            tuple(each for each in operands if each is not None),
            tuple(each for each in results if each is not None),
            tuple(sizes),
            replicated=tuple(whole),
            local=local,
            flops=flops,
        )

    return maker


def _fft(eqn: JaxprEqn) -> Rule | None:
    rule = batched(len(eqn.params["fft_lengths"]))(eqn)
    length = math.prod(eqn.params["fft_lengths"])
    size = max(math.prod(atom.aval.shape) for atom in (*eqn.invars, *eqn.outvars))
    return None if rule is None else dataclasses.replace(rule, flops=5.0 * size * math.log2(max(length, 2)))


def _triangular_solve(eqn: JaxprEqn) -> Rule | None:
    """Right-hand sides are independent: columns of `b`, or rows where the matrix is on its right."""
    if eqn.params["left_side"]:
        return batched(2, shared=1)(eqn)
    return batched(2)(eqn)


TABLE: Final[dict[str, Callable[[JaxprEqn], Rule | None]]] = {
    "cholesky": batched(2),
    "eig": batched(2, 25.0),
    "eigh": batched(2, 9.0),
    "fft": _fft,
    "hessenberg": batched(2, 3.0),
    "householder_product": batched(2),
    "lu": batched(2),
    "lu_pivots_to_permutation": batched(1),
    "ormqr": batched(2),
    "qr": batched(2, 2.0),
    "schur": batched(2, 25.0),
    "svd": batched(2, 20.0),
    "symmetric_product": batched(2),
    "triangular_solve": _triangular_solve,
    "tridiagonal": batched(2, 3.0),
    "tridiagonal_solve": batched(1, shared=1),
}
