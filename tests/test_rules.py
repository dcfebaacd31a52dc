"""Every row of the rule tables, on simulated ranks: `spmd.testing.check_rule` tries each strategy that a row admits."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from collectives.jax_compat import primitive, registered_primitives
from placements import Mesh
from spmd.errors import RuleError
from spmd.factors import Passes, Rule
from spmd.rules import OTHERWISE, REPLICATED, RULES, rule_of
from spmd.testing import MESHES, check_rule

Array = np.ndarray[Any, Any]


def reals(*shape: int, low: float = -2.0, high: float = 2.0) -> Array:
    """Position-dependent, mixed signs, no ties."""
    count = int(np.prod(shape))
    values = (np.arange(count) * 7 + 3) % max(count, 1) / max(count, 1)
    return (low + (high - low) * values + 1e-3 * np.arange(count)).astype(np.float32).reshape(shape)


def ints(*shape: int, dtype: str = "int32") -> Array:
    return ((np.arange(int(np.prod(shape))) * 7) % 11 - 5).astype(dtype).reshape(shape)


def bools(*shape: int) -> Array:
    return ints(*shape) > 0


X, Y, UNIT, POSITIVE = (
    reals(5, 3),
    reals(5, 3)[::-1].copy(),
    reals(5, 3, low=-0.9, high=0.9),
    reals(5, 3, low=0.1, high=3),
)
I, J, B, C = ints(5, 3), ints(5, 3)[:, ::-1].copy() + 2, bools(5, 3), bools(3, 5).T.copy()
Z = (X + 1j * Y).astype(np.complex64)
TABLE = reals(7, 4)
WITHIN, BEYOND = np.array([[1, -2, 3], [4, 6, -7]]), np.array([0, 3, 6, -1, 9, -20, 3])
"""Indices in the bounds of a table, and some beyond them."""

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def bound(name: str, *args: Any, **params: Any) -> Case:
    """A primitive bound directly."""
    found = primitive(name)
    return (lambda *xs: found.bind(*xs, **params)), args


UNARY: dict[str, Array] = {
    **dict.fromkeys(
        [
            "abs",
            "asinh",
            "atan",
            "bessel_i0e",
            "bessel_i1e",
            "cbrt",
            "ceil",
            "cos",
            "cosh",
            "erf",
            "erfc",
            "exp",
            "exp2",
            "expm1",
            "floor",
            "is_finite",
            "logistic",
            "neg",
            "round",
            "sign",
            "sin",
            "sinh",
            "square",
            "tan",
            "tanh",
        ],
        X,
    ),
    **dict.fromkeys(["acos", "asin", "atanh", "erf_inv", "one_minus_square"], UNIT),
    **dict.fromkeys(["digamma", "lgamma", "log", "log1p", "log2", "rsqrt", "sqrt"], POSITIVE),
    "acosh": POSITIVE + 1,
    "clz": I,
    "population_count": I,
    "not": B,
    "conj": Z,
    "real": Z,
    "imag": Z,
}
BINARY: dict[str, tuple[Array, Array]] = {
    **dict.fromkeys(
        [
            "add",
            "sub",
            "mul",
            "div",
            "max",
            "min",
            "atan2",
            "nextafter",
            "rem",
            "eq",
            "ne",
            "ge",
            "gt",
            "le",
            "lt",
            "add_jaxvals",
            "complex",
        ],
        (X, Y),
    ),
    **dict.fromkeys(["and", "or", "xor"], (I, J)),
    **dict.fromkeys(["shift_left", "shift_right_arithmetic", "shift_right_logical"], (I, np.abs(J))),
    **dict.fromkeys(["igamma", "igamma_grad_a", "igammac", "polygamma"], (POSITIVE, POSITIVE[::-1].copy())),
    **dict.fromkeys(["eq_to", "le_to", "lt_to"], (X, Y)),
    "mulhi": (I, J),
    "pow": (POSITIVE, Y),
    "zeta": (POSITIVE + 1, POSITIVE),
}
EXTRA: dict[str, Case] = {
    "exp": (lambda x: lax.exp_p.bind(x, accuracy=None), (X,)),
    "round": (jnp.round, (X * 3,)),
    "rsqrt": (lax.rsqrt, (POSITIVE,)),
    "add_int": (lax.add, (I, J)),
    "add_int8": (lax.add, (I.astype(np.int8), J.astype(np.int8))),
    "add_broadcast": (lambda x, y: x + y, (X, X[0])),
    "add_scalar": (lambda x: x + 2, (X,)),
    "mul_int": (lax.mul, (I, J)),
    "mul_complex": (lax.mul, (Z, Z)),
    "mul_scalar": (lambda x: 3 * x, (I,)),
    "div_int": (lax.div, (I, J * 2 + 1)),
    "div_complex": (lax.div, (Z, Z + 2)),
    "and_bool": (lax.bitwise_and, (B, C)),
    "or_bool": (lax.bitwise_or, (B, C)),
    "xor_bool": (lax.bitwise_xor, (B, C)),
    "max_int": (lax.max, (I, J)),
    "sub_int": (lax.sub, (I, J)),
    "neg_int": (lax.neg, (I,)),
    "clamp": (lambda x: lax.clamp(np.float32(-1), x, np.float32(1)), (X,)),
    "cast_wide": (lambda x: x.astype(jnp.float32), (X.astype(jnp.bfloat16),)),
    "cast_narrow": (lambda x: x.astype(jnp.bfloat16), (X,)),
    "cast_int": (lambda x: x.astype(jnp.int32), (X,)),
    "cast_widen_int": (lambda x: x.astype(jnp.int32), (I.astype(np.int8),)),
    "cast_bool": (lambda x: x.astype(bool), (I,)),
    "copy": (jnp.copy, (X,)),
    "integer_pow": (lambda x: x**3, (X,)),
    "name": (lambda x: checkpoint_name(x, "x"), (X,)),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 5, 10), (X,)),
    "regularized_incomplete_beta": (lax.betainc, (POSITIVE, POSITIVE[::-1].copy(), reals(5, 3, low=0.1, high=0.9))),
    "select_n": (lambda b, x, y: lax.select(b, x, y), (B, X, Y)),
    "select_n_int": (lambda b, x, y: lax.select(b, x, y), (B, I, J)),
    "select_scalar": (lambda b, x, y: lax.select(b, x, y), (np.bool_(True), X, Y)),
    "select_bool": (lambda b, x, y: lax.select(b, x, y), (B, C, B)),
    "sum": (lambda x: x.sum(0), (X,)),
    "sum_all": (lambda x: x.sum(), (X,)),
    "sum_int": (lambda x: lax.reduce_sum_p.bind(x, axes=(1,), out_sharding=None), (I.astype(np.int8),)),
    "sum_empty": (lambda x: x.sum(0), (reals(0, 3),)),
    "prod": (lambda x: x.prod(1), (X,)),
    "reduce_max": (lambda x: x.max(0), (X,)),
    "reduce_max_int": (lambda x: x.max(0), (I,)),
    "max_nan": (lambda x: x.max(1), (np.where(X > 1.5, np.nan, X),)),
    "reduce_min": (lambda x: x.min((0, 1)), (X,)),
    "all": (lambda x: x.all(0), (B,)),
    "any": (lambda x: x.any(1), (B,)),
    "reduce_xor": (lambda x: lax.reduce_xor(x, (0,)), (I,)),
    "reduce_and_int": (lambda x: lax.reduce_and(x, (0,)), (I,)),
    "reduce_or_int": (lambda x: lax.reduce_or(x, (1,)), (I,)),
    "argmax": (lambda x: x.argmax(1), (X,)),
    "argmin": (lambda x: x.argmin(0), (X,)),
    "cumsum": (lambda x: lax.cumsum(x, 0), (X,)),
    "cumsum_reverse": (lambda x: lax.cumsum(x, 1, reverse=True), (I,)),
    "cumprod": (lambda x: lax.cumprod(x, 0), (X,)),
    "cummax": (lambda x: lax.cummax(x, 1), (X,)),
    "cummin": (lambda x: lax.cummin(x, 1), (X,)),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 1), (X,)),
    "sort": (lambda x: lax.sort(x, dimension=1), (X,)),
    "sort_pairs": (lambda x, y: lax.sort((x, y), dimension=0, num_keys=1), (X, I)),
    "broadcast": (lambda x: jnp.broadcast_to(x[:, None], (5, 4, 3)), (X,)),
    "broadcast_unit": (lambda x: lax.broadcast_in_dim(x, (5, 3), (0, 1)), (X[:1],)),
    "broadcast_int": (lambda x: jnp.broadcast_to(x, (2, 5, 3)), (I,)),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 1), (X, Y[:, :2])),
    "concatenate_int": (lambda x, y: lax.concatenate([x, y], 0), (I, J)),
    "iota": (lambda: lax.broadcasted_iota(jnp.int32, (5, 3), 0), ()),
    "iota_float": (lambda: lax.broadcasted_iota(jnp.float32, (5, 3), 1), ()),
    "barrier": (lax.optimization_barrier, (X,)),
    "pad": (lambda x: lax.pad(x, np.float32(0), ((0, 0, 0), (1, 2, 1))), (X,)),
    "pad_value": (lambda x: lax.pad(x, np.float32(7), ((0, 0, 0), (1, -1, 0))), (X,)),
    "pad_int": (lambda x: lax.pad(x, np.int32(0), ((1, 2, 1), (0, 0, 0))), (I,)),
    "reshape_join": (lambda x: x.reshape(30), (reals(6, 5),)),
    "reshape_split": (lambda x: x.reshape(4, 2, 5), (reals(8, 5),)),
    "reshape_both": (lambda x: x.reshape(6, 4, 5), (reals(4, 6, 5),)),
    "reshape_unit": (lambda x: x.reshape(5, 1, 3), (X,)),
    "reshape_odd": (lambda x: x.reshape(3, 5), (X,)),
    "reshape_empty": (lambda x: x.reshape(3, 0, 2), (reals(0, 6),)),
    "reshape_bool": (lambda x: x.reshape(6, 2), (bools(12),)),
    "rev": (lambda x: lax.rev(x, (1,)), (X,)),
    "slice": (lambda x: lax.slice(x, (0, 1), (5, 3)), (X,)),
    "slice_stride": (lambda x: lax.slice(x, (1, 0), (5, 3), (2, 1)), (I,)),
    "split": (lambda x: lax.split(x, (1, 2), axis=1), (X,)),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), (X[:, None],)),
    "stack": (lambda x, y: lax.stack_p.bind(x, y, axis=1), (X, Y)),
    "stack_int": (lambda x, y: lax.stack_p.bind(x, y, axis=0), (I, J)),
    "tile": (lambda x: lax.tile_p.bind(x, reps=(1, 2)), (X,)),
    "unstack": (lambda x: lax.unstack_p.bind(x, axis=1), (X,)),
    "transpose": (lambda x: lax.transpose(x, (2, 0, 1)), (reals(2, 5, 3),)),
    "bitcast": (lambda x: lax.bitcast_convert_type(x, jnp.int32), (X,)),
    "bitcast_narrow": (lambda x: lax.bitcast_convert_type(x, jnp.int16), (X,)),
    "bitcast_wide": (lambda x: lax.bitcast_convert_type(x, jnp.int32), (ints(5, 3, 2, dtype="int16"),)),
    "gather": (lambda t, i: t[i], (TABLE, WITHIN)),
    "gather_columns": (lambda t, i: jnp.take(t, i, axis=1, mode="fill"), (TABLE, BEYOND)),
    "gather_pairs": (lambda t, i, j: t.at[i, j].get(mode="fill"), (TABLE, BEYOND, BEYOND % 6)),
    "gather_along": (lambda t, i: jnp.take_along_axis(t, i, axis=1), (TABLE, BEYOND[:, None] % 4)),
    "gather_empty": (lambda t, i: t[i], (TABLE, np.zeros((0,), np.int32))),
    "gather_batched": (lambda t, i: jax.vmap(lambda r, j: r[j])(t, i), (TABLE, BEYOND.reshape(7, 1) % 4)),
    **{
        f"gather_{mode}{np.asarray(t).dtype}{i.dtype}": (
            lambda t, i, mode=mode: jnp.take(t, i, axis=0, mode=mode),
            (t, i),
        )
        for mode in ("fill", "clip")
        for t, i in (
            (TABLE, BEYOND),
            (TABLE > 0, BEYOND),
            (TABLE.astype(np.int32), BEYOND.astype(np.int8)),
            (TABLE.astype(jnp.bfloat16), np.uint8([0, 3, 255, 6])),
            (Z, BEYOND),
        )
    },
    **{
        f"scatter_{kind}_{mode}": (
            lambda t, i, u, kind=kind, mode=mode: getattr(t.at[i], kind)(u, mode=mode),
            (TABLE, BEYOND, reals(7, 4)),
        )
        for kind in ("add", "set", "min", "max", "multiply", "subtract")
        for mode in ("drop", "clip")
    },
    "scatter_int": (lambda t, i, u: t.at[i].add(u), (TABLE.astype(np.int32), BEYOND, ints(7, 4))),
    "scatter_columns": (lambda t, i, u: t.at[:, i].add(u), (TABLE, BEYOND % 4, reals(7, 7))),
    "scatter_pairs": (lambda t, i, j, u: t.at[i, j].add(u), (TABLE, BEYOND, BEYOND % 5, reals(7))),
    "scatter_slice": (lambda t, u: t.at[2:5].add(u), (TABLE, reals(3, 4))),
    "scatter_batched": (lambda t, i: jax.vmap(lambda r, j: r.at[j].add(1.5))(t, i), (TABLE, BEYOND.reshape(7, 1) % 4)),
    "embedding_gradient": (jax.grad(lambda t, i: (t[i] ** 2).sum()), (TABLE, WITHIN)),
    "dynamic_slice": (lambda t, i: lax.dynamic_slice(t, (i, 0), (3, 4)), (TABLE, np.int32(5))),
    "dynamic_index": (lambda t, i: lax.dynamic_index_in_dim(t, i, 1), (TABLE, np.int32(2))),
    "dynamic_update_slice": (
        lambda t, u, i: lax.dynamic_update_slice(t, u, (i, 0)),
        (TABLE, TABLE[:3] * 2, np.int32(6)),
    ),
    **{
        f"random_bits{width}": (
            lambda key, width=width: jax.random.bits(key, (5, 3), f"uint{width}"),
            (jax.random.key(3),),
        )
        for width in (8, 16, 32)
    },
    "random_gamma": (
        lambda a: jax.vmap(lambda k, a: jax.random.gamma(k, a))(jax.random.split(jax.random.key(2), 5), a),
        (reals(5, 3, low=0.5, high=3.0),),
    ),
    "random_fold_in": (
        lambda keys: jax.vmap(jax.random.fold_in)(keys, jnp.arange(5)),
        (jax.random.split(jax.random.key(1), 5),),
    ),
    "random_split": (
        lambda keys: jax.vmap(lambda key: jax.random.split(key, 3))(keys),
        (jax.random.split(jax.random.key(1), 5),),
    ),
    "random_normal": (lambda key: jax.random.normal(key, (7,)), (jax.random.key(5),)),
    "random_keys": (
        lambda keys: jax.vmap(lambda key: jax.random.uniform(key, (5, 2)))(keys),
        (jax.random.split(jax.random.key(1), 3),),
    ),
    "dot": (jnp.matmul, (X, reals(3, 4))),
    "dot_batch": (lambda x, y: jnp.einsum("bij,bjk->bik", x, y), (reals(2, 5, 3), reals(2, 3, 4))),
    "dot_int": (lambda x, y: lax.dot(x, y), (I, ints(3, 4))),
    "dot_int8_wide": (
        lambda x, y: lax.dot(x, y, preferred_element_type=jnp.int32),
        (I.astype(np.int8), ints(3, 4, dtype="int8")),
    ),
    "dot_bf16_wide": (
        lambda x, y: lax.dot(x, y, preferred_element_type=jnp.float32),
        (X.astype(jnp.bfloat16), reals(3, 4).astype(jnp.bfloat16)),
    ),
    "dot_complex": (jnp.matmul, (Z, Z.T)),
    "dot_empty": (jnp.matmul, (reals(5, 0), reals(0, 4))),
}


def binding(name: str) -> Case | None:
    """The direct application of an elementwise primitive through its `lax` function."""
    functions = {
        "not": lax.bitwise_not,
        "and": lax.bitwise_and,
        "or": lax.bitwise_or,
        "xor": lax.bitwise_xor,
        "ceil": lax.ceil,
    }
    if name in UNARY:
        function = functions.get(name) or getattr(lax, name, None) or getattr(jnp, name, None)
        return (function, (UNARY[name],)) if function is not None else bound(name, UNARY[name])
    if name in BINARY:
        function = functions.get(name) or getattr(lax, name, None)
        return (function, BINARY[name]) if function is not None else bound(name, *BINARY[name])
    return None


ROWS: dict[str, Case] = {
    **{name: case for name in (*UNARY, *BINARY) if primitive(name) is not None and (case := binding(name)) is not None},
    **EXTRA,
}


def conv(**options: Any) -> Callable[..., Any]:
    """A convolution with options."""
    return lambda x, kernel: lax.conv_general_dilated(x, kernel, **options)


MATRICES = np.eye(3, dtype=np.float32) * 9 + reals(5, 3, 3) + np.swapaxes(reals(5, 3, 3), 1, 2)
LINE, KERNEL = (reals(2, 3, 9), reals(4, 3, 3)), (reals(2, 3, 9), reals(4, 3, 8))
ROWS |= {
    "conv_same": (conv(window_strides=(1,), padding="SAME"), LINE),
    "conv_strided": (conv(window_strides=(2,), padding=[(1, 2)]), LINE),
    "conv_spread": (conv(window_strides=(2,), padding=[(1, 3)], lhs_dilation=(3,)), LINE),
    "conv_dilated": (conv(window_strides=(1,), padding=[(2, 2)], rhs_dilation=(2,)), LINE),
    "conv_cut": (conv(window_strides=(1,), padding=[(-1, -2)]), LINE),
    "conv_large_kernel": (conv(window_strides=(1,), padding=[(1, 1)]), KERNEL),
    "conv_large_dilated": (
        conv(window_strides=(2,), padding=[(1, 1)], rhs_dilation=(2,)),
        (reals(1, 3, 19), reals(2, 3, 7)),
    ),
    "conv_of_images": (
        conv(window_strides=(1, 2), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        (reals(2, 5, 6, 2), reals(3, 3, 2, 3)),
    ),
    "conv_groups": (conv(window_strides=(1,), padding="SAME", feature_group_count=2), (reals(2, 4, 9), reals(6, 2, 3))),
    "conv_batches": (conv(window_strides=(1,), padding="SAME", batch_group_count=2), (reals(4, 3, 9), reals(6, 3, 3))),
    "window_max": (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (3, 1), (1, 1), "SAME"), (reals(9, 4),)),
    "window_min": (lambda x: lax.reduce_window(x, jnp.inf, lax.min, (2, 2), (2, 1), "VALID"), (reals(9, 4),)),
    "window_sum": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 3), (2, 1), ((0, 1), (1, 1)), (1, 2), (1, 1)),
        (reals(9, 4),),
    ),
    "window_of_integers": (lambda x: lax.reduce_window(x, 0, lax.add, (3, 1), (1, 1), "SAME"), (ints(9, 4),)),
    "window_max_gradient": (
        jax.grad(lambda x: (lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID") ** 2).sum()),
        (reals(3, 8, 3),),
    ),
    "cholesky": (lambda a: lax.linalg.cholesky(a, symmetrize_input=False), (MATRICES,)),
    "eig": (lambda a: lax.linalg.eig(a, compute_left_eigenvectors=False)[0], (MATRICES,)),
    "hessenberg": (lax.linalg.hessenberg, (MATRICES,)),
    "householder_product": (lax.linalg.householder_product, (MATRICES, reals(5, 3))),
    "lu": (lax.linalg.lu, (MATRICES,)),
    "ormqr": (lambda a, taus, c: lax.linalg.ormqr(a, taus, c), (MATRICES, reals(5, 3), MATRICES[::-1].copy())),
    "schur": (lax.linalg.schur, (MATRICES,)),
    "symmetric_product": (lax.linalg.symmetric_product, (MATRICES, MATRICES)),
    "tridiagonal": (lax.linalg.tridiagonal, (MATRICES,)),
    "triangular_solve": (
        lambda a, b: jax.scipy.linalg.solve_triangular(a + 9 * jnp.eye(3), b, lower=True),
        (reals(5, 3, 3), reals(5, 3, 4)),
    ),
    "triangular_solve_right": (
        lambda a, b: lax.linalg.triangular_solve(a + 9 * jnp.eye(3), b, lower=True),
        (reals(5, 3, 3), reals(5, 4, 3)),
    ),
    "tridiagonal_solve": (lambda d, b: lax.linalg.tridiagonal_solve(d, d + 9, d, b), (reals(5, 4), reals(5, 4, 3))),
    "qr": (lambda a: jnp.linalg.qr(a)[1], (reals(5, 3, 2),)),
    "svd": (lambda a: jnp.linalg.svd(a, compute_uv=False), (reals(5, 3, 4),)),
    "eigh": (lambda a: jnp.linalg.eigvalsh(a + jnp.swapaxes(a, 1, 2)), (reals(5, 3, 3),)),
    "fft": (lambda x: (jnp.fft.fft(x, axis=1), jnp.fft.rfft(x, axis=-1), jnp.fft.fft2(x)), (reals(5, 3, 4),)),
    "inverse_fft": (lambda z: (jnp.fft.irfft(z, axis=-1), jnp.fft.ifft(z)), (Z,)),
    "top_k": (lambda x: lax.top_k(x, 2), (reals(5, 6),)),
    "pivots": (
        lambda p: lax.linalg.lu_pivots_to_permutation(p, 4),
        (np.array([[1, 2, 3], [2, 2, 2], [0, 1, 3]], np.int32),),
    ),
    "slice_of_windows": (lambda x: (x[1:], x[2:5, 1:], x[::2], x[1::3]), (reals(9, 4),)),
    "pad_of_windows": (lambda x: lax.pad(x, 0.0, ((2, 1, 1), (-1, 0, 0))), (reals(9, 4),)),
    "concatenate_of_windows": (lambda x, y: jnp.concatenate([x, y, x[:2]]), (reals(9, 4), reals(2, 4))),
    "rev_of_windows": (lambda x: lax.rev(x, (0, 1)), (reals(9, 4),)),
}


@pytest.mark.parametrize("name", sorted(ROWS))
def test_row(name: str, request: pytest.FixtureRequest) -> None:
    """Every strategy of the row gives the shards or parts of the whole result; with `--all` on more meshes."""
    function, args = ROWS[name]
    few = (Mesh(a=4), Mesh(a=2, b=2)) if zlib.crc32(name.encode()) % 3 == 0 else (Mesh(a=4),)
    meshes = MESHES if request.config.getoption("--all") else few
    counts = check_rule(function, *args, meshes=meshes)
    assert sum(counts.values()) > 0


def test_every_primitive_has_a_row_or_a_reason() -> None:
    """What JAX registers has a rule, or is planned otherwise, or stands with a reason among those that replicate."""
    names = registered_primitives()
    assert len(names) > 150
    known = {p.name for p in RULES} | set(OTHERWISE) | set(REPLICATED)
    assert sorted(names - known) == []
    assert not {p.name for p in RULES} & (set(OTHERWISE) | set(REPLICATED))


def test_every_row_is_tried() -> None:
    """No primitive has a rule that no test tries."""
    tried = set()
    for function, args in ROWS.values():
        jaxpr = jax.make_jaxpr(function)(*args)
        for eqn in _equations(jaxpr.jaxpr):
            tried.add(eqn.primitive)
    missing = sorted(p.name for p in RULES if p not in tried)
    assert missing == []


def _equations(jaxpr: Any) -> list[Any]:
    found = []
    for eqn in jaxpr.eqns:
        found.append(eqn)
        for value in eqn.params.values():
            if hasattr(value, "jaxpr") or hasattr(value, "eqns"):
                found += _equations(getattr(value, "jaxpr", value))
    return found


WRONG: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Rule, str]] = {
    "too few operands": (lax.add, (X, Y), Rule((((0,), (1,)),), (((0,), (1,)),), (5, 3)), "1 operands"),
    "wrong dims": (lax.exp, (X,), Rule((((0,),),), (((0,), (1,)),), (5, 3)), "names 1 dims"),
    "wrong size": (lax.exp, (X,), Rule((((1,), (0,)),), (((0,), (1,)),), (5, 3)), "dim 0"),
    "lost factor": (lambda x: x.sum(0), (X,), Rule((((0,), (1,)),), (((1,),),), (5, 3)), "in no result"),
    "parts of a nonlinear op": (
        lax.abs, (X,), Rule((((0,), (1,)),), (((0,), (1,)),), (5, 3), passes=(Passes(("sum",), (0,)),)), "another value",
    ),
    "parts of one addend": (
        lax.add, (X, Y), Rule((((0,), (1,)),) * 2, (((0,), (1,)),), (5, 3), passes=(Passes(("sum",), (0,)),)), "another value",
    ),
    "parts through a widening of integers": (
        lambda x: lax.convert_element_type(x, jnp.int32), (I.astype(np.int8),),
        Rule((((0,), (1,)),), (((0,), (1,)),), (5, 3), passes=(Passes(("sum",), (0,)),)), "another value",
    ),
    "a sharded cumsum": (lambda x: lax.cumsum(x, 0), (X,), Rule((((0,), (1,)),), (((0,), (1,)),), (5, 3)), "another value"),
    "the wrong reduction": (
        lambda x: x.max(0), (X,), Rule((((0,), (1,)),), (((1,),),), (5, 3), reductions=((0, "sum"),)), "another value",
    ),
    "a slice without its own size": (
        lambda x: lax.slice(x, (0, 1), (5, 3)), (X,),
        Rule((((0,), (1,)),), (((0,), (2,)),), (5, 3, 2), replicated=(1, 2)), "fails",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_wrong_rule_is_caught(name: str) -> None:
    """The validator refuses rules of wrong arity, sizes, linearity, reduction or localisation."""
    function, args, rule, message = WRONG[name]
    with pytest.raises(RuleError, match=message):
        check_rule(function, *args, rule=lambda eqn: rule)


def test_rules_do_not_mistake_integer_casts_for_linear() -> None:
    """Casts to narrower or other kinds let no parts pass; casts to equal or wider floats let them."""
    for source, target, linear in (
        ("bfloat16", "float32", True), ("float32", "bfloat16", False), ("float32", "int32", False),
        ("int8", "int32", False), ("int32", "bool", False), ("float16", "bfloat16", False), ("float32", "complex64", False),
    ):  # fmt: skip
        jaxpr = jax.make_jaxpr(lambda x, target=target: lax.convert_element_type(x, target))(jnp.ones(3, source))
        rule = rule_of(jaxpr.eqns[-1])
        assert rule is not None
        assert bool(rule.passes) is linear, (source, target)
