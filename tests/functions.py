"""The table of functions of `jax.numpy`, `jax.lax`, `jax.nn`, `jax.scipy` that users call, with small arguments for each.

Sizes are odd and do not divide; values depend on the position and have both signs, where a function's domain allows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = Any


class Case(NamedTuple):
    """A function of arrays, and arguments. `smooth`: its gradient is compared too."""

    function: Callable[..., Any]
    args: tuple[Array, ...]
    smooth: bool = True


def real(*shape: int, low: float = -2.0, high: float = 2.0) -> Array:
    """Position-dependent, no ties."""
    count = math.prod(shape)
    values = ((np.arange(count) * 7 + 3) % max(count, 1)) / max(count, 1)
    return (low + (high - low) * (values + 0.3 / max(count, 1))).astype(np.float32).reshape(shape)


def whole(*shape: int) -> Array:
    return ((np.arange(math.prod(shape)) * 7) % 11 - 5).astype(np.int32).reshape(shape)


def flags(*shape: int) -> Array:
    return whole(*shape) > 0


X, Y, V, W = real(5, 3), real(5, 3)[::-1].copy() + 0.1, real(7), real(3)
UNIT, POSITIVE, ABOVE = real(5, 3, low=-0.9, high=0.9), real(5, 3, low=0.1, high=3), real(5, 3, low=1.1, high=3)
I, J, B, C = whole(5, 3), whole(5, 3)[::-1].copy() + 1, flags(5, 3), flags(3, 5).T.copy()
CUBE, MATRICES, IMAGES = real(3, 4, 5), real(5, 3, 3) + 4 * np.eye(3, dtype=np.float32), real(2, 7, 5, 3)
INDEX, PLACES = np.array([4, 0, -1, 2], np.int32), np.array([[0, 2], [1, 1], [-1, 0], [2, 0], [0, 1]], np.int32)

Table = dict[str, Case]


def unary(module: Any, prefix: str, arg: Array, names: str, smooth: bool = True) -> Table:
    return {f"{prefix}.{name}": Case(getattr(module, name), (arg,), smooth) for name in names.split()}


def binary(module: Any, prefix: str, args: tuple[Array, ...], names: str, smooth: bool = True) -> Table:
    return {f"{prefix}.{name}": Case(getattr(module, name), args, smooth) for name in names.split()}


def along(names: str, smooth: bool = True, arg: Array = X) -> Table:
    """Functions with an axis: each axis, and all."""
    found = {}
    for name in names.split():
        function = getattr(jnp, name)
        for axis in (0, 1, None):
            found[f"jnp.{name}[{axis}]"] = Case(lambda x, f=function, a=axis: f(x, axis=a), (arg,), smooth)
    return found


def several(cases: dict[str, tuple[Callable[..., Any], tuple[Array, ...]]], smooth: bool = True) -> Table:
    return {name: Case(function, args, smooth) for name, (function, args) in cases.items()}


FUNCTIONS: Table = {
    **unary(jnp, "jnp", X, "abs sin cos tanh sinh cosh exp exp2 expm1 square negative positive arctan arcsinh sinc reciprocal cbrt"),
    **unary(jnp, "jnp", UNIT, "arcsin arccos arctanh tan log1p"),
    **unary(jnp, "jnp", POSITIVE, "log log2 log10 sqrt"),
    **unary(jnp, "jnp", ABOVE, "arccosh"),
    **unary(jnp, "jnp", X, "ceil floor rint trunc sign signbit isnan isinf isfinite real imag conj deg2rad rad2deg fabs", False),
    **unary(jnp, "jnp", X, "i0 nan_to_num angle round spacing frexp modf isreal iscomplex", False),
    **unary(jnp, "jnp", I, "invert bitwise_count", False),
    **binary(jnp, "jnp", (X, Y), "add subtract multiply divide arctan2 hypot maximum minimum fmax fmin logaddexp logaddexp2 heaviside"),
    **binary(jnp, "jnp", (X, Y), "equal not_equal less less_equal greater greater_equal copysign nextafter isclose array_equal allclose", False),
    **binary(jnp, "jnp", (X, Y), "remainder fmod floor_divide divmod mod", False),
    **binary(jnp, "jnp", (POSITIVE, Y), "power float_power"),
    **binary(jnp, "jnp", (I, J), "bitwise_and bitwise_or bitwise_xor gcd lcm left_shift right_shift", False),
    **binary(jnp, "jnp", (B, C), "logical_and logical_or logical_xor", False),
    **{f"{name} of a row": case for name, case in binary(jnp, "jnp", (X, W), "add multiply dot inner matmul vecdot").items()},
    **along("sum mean prod max min std var ptp nansum nanmean nanmax nanmin nanstd nanvar"),
    **along("any all count_nonzero argmax argmin nanargmax nanargmin", False),
    **along("cumsum cumprod nancumsum nancumprod"),
    **along("median nanmedian sort", True),
    **along("argsort", False),
    **several({
        "jnp.matmul": (jnp.matmul, (X, X.T.copy())),
        "jnp.dot": (jnp.dot, (CUBE, real(5, 2))),
        "jnp.tensordot": (lambda a, b: jnp.tensordot(a, b, ((1, 2), (1, 0))), (CUBE, real(5, 4, 2))),
        "jnp.einsum": (lambda a, b: jnp.einsum("ijk,kl->lij", a, b), (CUBE, real(5, 2))),
        "jnp.einsum.trace": (lambda a: jnp.einsum("bii->b", a), (MATRICES,)),
        "jnp.outer": (jnp.outer, (V, W)),
        "jnp.vdot": (jnp.vdot, (X, Y)),
        "jnp.kron": (jnp.kron, (real(2, 3), real(3, 2))),
        "jnp.cross": (jnp.cross, (X, Y)),
        "jnp.trace": (jnp.trace, (X,)),
        "jnp.average": (lambda x, w: jnp.average(x, 0, w), (X, POSITIVE)),
        "jnp.cov": (jnp.cov, (X,)),
        "jnp.corrcoef": (jnp.corrcoef, (X,)),
        "jnp.percentile": (lambda x: jnp.percentile(x, 30.0, 0), (X,)),
        "jnp.quantile": (lambda x: jnp.quantile(x, jnp.array([0.2, 0.7]), 1), (X,)),
        "jnp.nanquantile": (lambda x: jnp.nanquantile(x, 0.4), (X,)),
        "jnp.logsumexp": (lambda x: jax.nn.logsumexp(x, 0), (X,)),
        "jnp.linalg.norm": (jnp.linalg.norm, (X,)),
        "jnp.linalg.norm.axis": (lambda x: jnp.linalg.norm(x, axis=0), (X,)),
        "jnp.linalg.det": (jnp.linalg.det, (MATRICES,)),
        "jnp.linalg.inv": (jnp.linalg.inv, (MATRICES,)),
        "jnp.linalg.slogdet": (lambda a: jnp.linalg.slogdet(a)[1], (MATRICES,)),
        "jnp.linalg.solve": (jnp.linalg.solve, (MATRICES, real(5, 3, 2))),
        "jnp.linalg.cholesky": (lambda a: jnp.linalg.cholesky(a @ jnp.swapaxes(a, 1, 2)), (MATRICES,)),
        "jnp.linalg.qr": (lambda a: jnp.abs(jnp.linalg.qr(a)[1]), (MATRICES,)),
        "jnp.linalg.eigvalsh": (lambda a: jnp.linalg.eigvalsh(a + jnp.swapaxes(a, 1, 2)), (MATRICES,)),
        "jnp.linalg.svdvals": (jnp.linalg.svdvals, (MATRICES,)),
        "jnp.linalg.matrix_power": (lambda a: jnp.linalg.matrix_power(a, 3), (MATRICES,)),
        "jnp.linalg.multi_dot": (lambda a, b: jnp.linalg.multi_dot([a, b, a]), (X, real(3, 5))),
        "jnp.linalg.pinv": (jnp.linalg.pinv, (MATRICES,)),
        "jax.scipy.linalg.expm": (jax.scipy.linalg.expm, (MATRICES[0] / 8,)),
        "jax.scipy.linalg.solve_triangular": (lambda a, b: jax.scipy.linalg.solve_triangular(a, b), (MATRICES, real(5, 3, 2))),
        "jax.scipy.linalg.cho_solve": (lambda a, b: jax.scipy.linalg.cho_solve((a, True), b), (np.tril(MATRICES), real(5, 3, 2))),
    }),
    **several({
        "jnp.reshape": (lambda x: jnp.reshape(x, (3, 5)), (X,)),
        "jnp.ravel": (jnp.ravel, (CUBE,)),
        "jnp.transpose": (jnp.transpose, (CUBE,)),
        "jnp.moveaxis": (lambda x: jnp.moveaxis(x, 0, -1), (CUBE,)),
        "jnp.swapaxes": (lambda x: jnp.swapaxes(x, 0, 2), (CUBE,)),
        "jnp.expand_dims": (lambda x: jnp.expand_dims(x, 1), (X,)),
        "jnp.squeeze": (lambda x: jnp.squeeze(x[:, None], 1), (X,)),
        "jnp.broadcast_to": (lambda x: jnp.broadcast_to(x, (4, 5, 3)), (X,)),
        "jnp.concatenate.0": (lambda x, y: jnp.concatenate([x, y, x]), (X, Y)),
        "jnp.concatenate.1": (lambda x, y: jnp.concatenate([x, y], 1), (X, Y)),
        "jnp.stack": (lambda x, y: jnp.stack([x, y], 1), (X, Y)),
        "jnp.vstack": (lambda x, y: jnp.vstack([x, y]), (X, Y)),
        "jnp.hstack": (lambda x, y: jnp.hstack([x, y]), (X, Y)),
        "jnp.dstack": (lambda x, y: jnp.dstack([x, y]), (X, Y)),
        "jnp.column_stack": (lambda x, y: jnp.column_stack([x, y]), (X, Y)),
        "jnp.append": (lambda x, y: jnp.append(x, y, 0), (X, Y)),
        "jnp.split": (lambda x: jnp.split(x, (1, 3)), (X,)),
        "jnp.array_split": (lambda x: jnp.array_split(x, 3), (X,)),
        "jnp.unstack": (lambda x: jnp.unstack(x, axis=1), (X,)),
        "jnp.tile": (lambda x: jnp.tile(x, (2, 3)), (X,)),
        "jnp.repeat": (lambda x: jnp.repeat(x, 3, 0), (X,)),
        "jnp.flip": (lambda x: jnp.flip(x, 0), (X,)),
        "jnp.fliplr": (jnp.fliplr, (X,)),
        "jnp.rot90": (jnp.rot90, (X,)),
        "jnp.roll": (lambda x: jnp.roll(x, 2, 0), (X,)),
        "jnp.roll.all": (lambda x: jnp.roll(x, -4), (X,)),
        "jnp.pad": (lambda x: jnp.pad(x, ((1, 2), (0, 1)), constant_values=1.5), (X,)),
        "jnp.pad.edge": (lambda x: jnp.pad(x, 2, mode="edge"), (X,)),
        "jnp.pad.reflect": (lambda x: jnp.pad(x, ((2, 1), (1, 1)), mode="reflect"), (X,)),
        "jnp.pad.wrap": (lambda x: jnp.pad(x, ((2, 1), (1, 1)), mode="wrap"), (X,)),
        "jnp.pad.linear": (lambda x: jnp.pad(x, ((2, 1), (1, 1)), mode="linear_ramp"), (X,)),
        "jnp.diff": (lambda x: jnp.diff(x, 2, 0), (X,)),
        "jnp.ediff1d": (jnp.ediff1d, (V,)),
        "jnp.gradient": (lambda x: jnp.gradient(x), (X,)),
        "jnp.trapezoid": (lambda x: jnp.trapezoid(x, axis=0), (X,)),
        "jnp.tril": (jnp.tril, (X,)),
        "jnp.triu": (lambda x: jnp.triu(x, 1), (X,)),
        "jnp.diag": (jnp.diag, (V,)),
        "jnp.diagonal": (jnp.diagonal, (X,)),
        "jnp.where": (lambda c, x, y: jnp.where(c, x, y), (B, X, Y)),
        "jnp.select": (lambda c, x, y: jnp.select([c, x > 1], [x, y], 0.5), (B, X, Y)),
        "jnp.clip": (lambda x: jnp.clip(x, -0.7, 0.9), (X,)),
        "jnp.convolve": (lambda x, k: jnp.convolve(x, k), (V, W)),
        "jnp.correlate": (lambda x, k: jnp.correlate(x, k, "same"), (V, W)),
        "jnp.interp": (lambda x, f: jnp.interp(x, jnp.linspace(-2.0, 2.0, 7), f), (X, V)),
        "jnp.polyval": (lambda p, x: jnp.polyval(p, x), (W, X)),
        "jnp.vander": (lambda x: jnp.vander(x, 4), (V,)),
        "jnp.meshgrid": (lambda x, y: jnp.meshgrid(x, y), (V, W)),
        "jnp.apply_along_axis": (lambda x: jnp.apply_along_axis(lambda r: r * r.sum(), 0, x), (X,)),
        "jnp.vectorize": (lambda x: jnp.vectorize(lambda r: r / (1 + r @ r), signature="(n)->(n)")(x), (X,)),
    }),
    **several({
        "x[i]": (lambda x: x[1], (X,)),
        "x[-1]": (lambda x: x[-1, 1:], (X,)),
        "x[a:b]": (lambda x: x[1:-1], (X,)),
        "x[::2]": (lambda x: x[::2, ::-1], (X,)),
        "x[::-2]": (lambda x: x[::-2], (X,)),
        "x[None]": (lambda x: x[None, :, None], (X,)),
        "x[index]": (lambda x, i: x[i], (X, INDEX)),
        "x[:, index]": (lambda x, i: x[:, i % 3], (X, INDEX)),
        "x[i, j]": (lambda x, i: x[i[:, 0], i[:, 1]], (X, PLACES % 3)),
        "x[arange, j]": (lambda x, i: x[jnp.arange(5), i[:, 0]], (X, PLACES)),
        "jnp.take": (lambda x, i: jnp.take(x, i, 0), (X, INDEX)),
        "jnp.take.clip": (lambda x, i: jnp.take(x, i + 3, 1, mode="clip"), (X, INDEX)),
        "jnp.take_along_axis": (lambda x, i: jnp.take_along_axis(x, i, 1), (X, PLACES)),
        "jnp.choose": (lambda i, x, y: jnp.choose(i % 2, [x, y], mode="wrap"), (np.abs(I), X, Y)),
        "x.at.set": (lambda x, y: x.at[1:4].set(y[:3]), (X, Y)),
        "x.at.add": (lambda x, i: x.at[i].add(2.0), (X, INDEX)),
        "x.at.max": (lambda x, i: x.at[:, i % 3].max(0.3), (X, INDEX)),
        "x.at.multiply": (lambda x, i: x.at[i, 1].multiply(2.0), (X, INDEX[:3])),
        "x.at.get": (lambda x, i: x.at[i + 3].get(mode="fill", fill_value=7.0), (X, INDEX)),
        "jnp.put_along_axis": (lambda x, i: jnp.put_along_axis(x, i, 9.0, 1, inplace=False), (X, PLACES[:, :1])),
        "jax.ops.segment_sum": (lambda x: jax.ops.segment_sum(x, jnp.array([0, 2, 0, 1, 2]), 4), (X,)),
        "jax.ops.segment_max": (lambda x: jax.ops.segment_max(x, jnp.array([0, 2, 0, 1, 2]), 3), (X,)),
    }),
    **several({
        "jnp.searchsorted": (lambda v: jnp.searchsorted(jnp.linspace(-2.0, 2.0, 9), v), (V,)),
        "jnp.digitize": (lambda v: jnp.digitize(v, jnp.linspace(-2.0, 2.0, 5)), (V,)),
        "jnp.bincount": (lambda i: jnp.bincount(i, length=8), (np.abs(whole(9)),)),
        "jnp.histogram": (lambda v: jnp.histogram(v, 4, (-2.0, 2.0))[0], (V,)),
        "jnp.unique": (lambda i: jnp.unique(i, size=11), (whole(9),)),
        "jnp.nonzero": (lambda x: jnp.nonzero(x > 0, size=9), (V,)),
        "jnp.flatnonzero": (lambda x: jnp.flatnonzero(x > 0, size=5), (V,)),
        "jnp.argwhere": (lambda x: jnp.argwhere(x > 0, size=6), (X,)),
        "jnp.isin": (lambda i: jnp.isin(i, jnp.array([1, 3, -2])), (I,)),
        "jnp.lexsort": (lambda x, y: jnp.lexsort((x, y)), (whole(7), whole(7)[::-1].copy())),
        "jnp.partition": (lambda x: jnp.sort(jnp.partition(x, 2, 0)[:2], 0), (X,)),
        "jnp.packbits": (lambda b: jnp.packbits(b, 0), (flags(9, 3),)),
        "jnp.unravel_index": (lambda i: jnp.unravel_index(i, (3, 5)), (np.abs(whole(7)),)),
        "jnp.indices": (lambda x: x + jnp.indices((5, 3)).sum(0), (X,)),
        "jnp.fill_diagonal": (lambda x: jnp.fill_diagonal(x, 5.0, inplace=False), (X,)),
        "jnp.trim_zeros": (lambda x: x[:-1], (V,)),
    }, smooth=False),
    **several({
        "jnp.fft.fft": (lambda x: jnp.abs(jnp.fft.fft(x, axis=0)), (X,)),
        "jnp.fft.ifft": (lambda x: jnp.abs(jnp.fft.ifft(x, axis=1)), (X,)),
        "jnp.fft.rfft": (lambda x: jnp.abs(jnp.fft.rfft(x, axis=0)), (X,)),
        "jnp.fft.irfft": (lambda x: jnp.fft.irfft(x.astype(jnp.complex64), axis=1), (X,)),
        "jnp.fft.fft2": (lambda x: jnp.abs(jnp.fft.fft2(x)), (CUBE,)),
        "jnp.fft.rfftn": (lambda x: jnp.abs(jnp.fft.rfftn(x)), (CUBE,)),
        "jnp.fft.fftshift": (jnp.fft.fftshift, (X,)),
        "jnp.fft.ifftshift": (jnp.fft.ifftshift, (X,)),
    }),
    **unary(jax.nn, "jax.nn", X, "relu sigmoid softplus silu gelu elu celu selu leaky_relu hard_tanh softmax log_softmax soft_sign log_sigmoid squareplus mish standardize relu6 hard_sigmoid hard_swish tanh"),
    **several({
        "jax.nn.softmax.0": (lambda x: jax.nn.softmax(x, 0), (X,)),
        "jax.nn.glu": (lambda x: jax.nn.glu(x, 1), (real(5, 4),)),
        "jax.nn.one_hot": (lambda i: jax.nn.one_hot(i, 5), (np.abs(I),)),
        "jax.nn.dot_product_attention": (jax.nn.dot_product_attention, (real(2, 5, 3, 4), real(2, 6, 3, 4), real(2, 6, 3, 4))),
        "jax.nn.logmeanexp": (lambda x: jax.nn.logsumexp(x, 1) - 1.0, (X,)),
    }),
    **unary(jax.scipy.special, "jax.scipy.special", POSITIVE, "gammaln digamma erf erfc i0 i0e i1 i1e entr expit log_ndtr ndtr"),
    **unary(jax.scipy.special, "jax.scipy.special", real(5, 3, low=0.1, high=0.9), "erfinv logit ndtri"),
    **several({
        "jax.scipy.special.xlogy": (jax.scipy.special.xlogy, (POSITIVE, POSITIVE[::-1].copy())),
        "jax.scipy.special.betainc": (lambda x: jax.scipy.special.betainc(2.0, 3.0, x), (real(5, 3, low=0.1, high=0.9),)),
        "jax.scipy.special.gammainc": (lambda x: jax.scipy.special.gammainc(2.0, x), (POSITIVE,)),
        "jax.scipy.special.logsumexp": (lambda x: jax.scipy.special.logsumexp(x, 1), (X,)),
        "jax.scipy.stats.norm.logpdf": (jax.scipy.stats.norm.logpdf, (X,)),
        "jax.scipy.stats.norm.cdf": (jax.scipy.stats.norm.cdf, (X,)),
        "jax.scipy.stats.t.logpdf": (lambda x: jax.scipy.stats.t.logpdf(x, 3.0), (X,)),
        "jax.scipy.stats.poisson.logpmf": (lambda x: jax.scipy.stats.poisson.logpmf(jnp.array([1, 2, 0]), x), (POSITIVE,)),
        "jax.scipy.stats.multivariate_normal.logpdf": (lambda x: jax.scipy.stats.multivariate_normal.logpdf(x, jnp.zeros(3), jnp.eye(3)), (X,)),
        "jax.scipy.signal.convolve2d": (lambda x, k: jax.scipy.signal.convolve2d(x, k, mode="same"), (X, real(3, 2))),
        "jax.scipy.ndimage.map_coordinates": (lambda x: jax.scipy.ndimage.map_coordinates(x, [jnp.array([0.5, 2.2]), jnp.array([1.1, 0.3])], 1), (X,)),
        "jax.image.resize": (lambda x: jax.image.resize(x, (8, 4), "linear"), (X,)),
    }),
    **several({
        "lax.conv": (lambda x, k: lax.conv(jnp.moveaxis(x, 3, 1), k, (1, 1), "SAME"), (IMAGES, real(4, 3, 3, 3))),
        "lax.conv.strided": (lambda x, k: lax.conv_general_dilated(x, k, (2, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")), (IMAGES, real(3, 3, 3, 2))),
        "lax.conv_transpose": (lambda x, k: lax.conv_transpose(x, k, (2, 2), "SAME"), (IMAGES, real(3, 3, 3, 2))),
        "lax.depthwise": (lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=3), (IMAGES, real(3, 3, 1, 3))),
        "lax.reduce_window.max": (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"), (IMAGES,)),
        "lax.reduce_window.sum": (lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3, 1, 1), (1, 1, 1, 1), "SAME"), (IMAGES,)),
        "lax.cummax": (lambda x: lax.cummax(x, 0), (X,)),
        "lax.cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 0, reverse=True), (X,)),
        "lax.associative_scan": (lambda x: lax.associative_scan(jnp.add, x, axis=0), (X,)),
        "lax.top_k": (lambda x: lax.top_k(x, 2), (X,)),
        "lax.sort.pairs": (lambda x, y: lax.sort((x, y), dimension=0, num_keys=1), (X, Y)),
        "lax.pad": (lambda x: lax.pad(x, 0.5, ((1, -1, 1), (0, 2, 0))), (X,)),
        "lax.dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (i[0], i[1]), (2, 2)), (X, INDEX)),
        "lax.dynamic_update_slice": (lambda x, y, i: lax.dynamic_update_slice(x, y[:2, :2], (i[0], i[1])), (X, Y, INDEX)),
        "lax.map": (lambda x: lax.map(lambda r: r * r.sum(), x), (X,)),
        "lax.scan": (lambda x: lax.scan(lambda c, r: (c * 0.5 + r, c.sum()), jnp.zeros(3), x), (X,)),
        "lax.fori_loop": (lambda x: lax.fori_loop(0, 3, lambda i, u: jnp.sin(u) + i, x), (X,)),
        "lax.cond": (lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), (X,)),
        "lax.batch_matmul": (lax.batch_matmul, (MATRICES, real(5, 3, 2))),
        "lax.clamp": (lambda x: lax.clamp(-0.5, x, 0.5), (X,)),
        "lax.rsqrt": (lax.rsqrt, (POSITIVE,)),
        "lax.integer_pow": (lambda x: x**3 + x**-2, (POSITIVE,)),
        "lax.reduce_precision": (lambda x: lax.reduce_precision(x, 8, 10), (X,)),
        "lax.linalg.tridiagonal_solve": (lambda d, b: lax.linalg.tridiagonal_solve(d, d + 5, d, b), (real(4, 5), real(4, 5, 2))),
        "lax.split": (lambda x: lax.split(x, (2, 3)), (X,)),
        "jax.vmap": (lambda x, y: jax.vmap(jnp.dot, (1, 1))(x, y), (X, Y)),
        "jax.checkpoint": (lambda x: jax.checkpoint(lambda x: jnp.tanh(x @ x.T))(x), (X,)),
    }),
}  # fmt: skip
"""Every function by name."""
