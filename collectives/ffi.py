"""Collectives inside an XLA executable: explicit custom calls whose handler is Python.

One FFI target serves all calls; an attribute says which prepared transfer to run, on the raw addresses of XLA's buffers: no
copies, no compiled extension. A token (one int32) is threaded through every call, enters and leaves the executable, and is
handed from each launch to the next. Without it XLA would merge equal calls, hoist them out of loops, drop unused ones and run
independent ones in any order.

Invariants: no exception escapes the handler (it is kept, and an FFI error is returned in its place); a thread of XLA's pool
keeps its Python thread state from its first callback on. Offsets are those of `xla/ffi/api/c_api.h`, API version 0.3.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from collectives.jax_compat import Primitive, ShapedArray, register_ffi_lowering
from collectives.wire import Reduces, Transfer, all_but_mean, arrange, join

TARGET: Final = "spmd_collective"
Run = Callable[..., None]

_RUNS: Final[list[Run]] = []
"""Every prepared transfer that an executable may call, by the number in its custom call."""
_FAILURES: Final[list[BaseException]] = []
"""What the last failed handler raised."""
_PINNED: Final[set[int]] = set()
"""Threads whose Python thread state is pinned."""

_U64 = ctypes.c_uint64
_EXECUTE: Final = 3
_METADATA: Final = 1


class _ErrorArgs(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
        ("code", ctypes.c_int),
    )


class _StreamArgs(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    )


_Frame = _U64 * 22
_Buffer = _U64 * 4
_CREATE_ERROR = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_ErrorArgs))
_GET_STREAM = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_StreamArgs))


def _handle(address: int) -> int | None:
    """The handler on CPUs."""
    return _handled(address, False)


def _handle_on_stream(address: int) -> int | None:
    """The handler on GPUs: what it runs is put on XLA's stream, and nothing waits for it here."""
    return _handled(address, True)


def _handled(address: int, on_stream: bool) -> int | None:
    """Words of the call frame: 1 extension, 2 api, 3 context, 4 stage, 9 arguments, 14 results, 20 attributes."""
    frame = _Frame.from_address(address)
    try:
        if frame[1]:
            _answer_metadata(frame[1])
            return None
        if frame[4] & 0xFFFFFFFF != _EXECUTE:
            return None
        thread = threading.get_ident()
        if thread not in _PINNED:
            _PINNED.add(thread)
            ctypes.pythonapi.PyGILState_Ensure()
        scalar = _U64.from_address(frame[20]).value
        run = _RUNS[_U64.from_address(_U64.from_address(scalar + 8).value).value]
        operand = _Buffer.from_address(_U64.from_address(frame[9] + 8).value)[3]
        result = _Buffer.from_address(_U64.from_address(frame[14] + 8).value)[3]
        if on_stream:
            run(operand, result, _stream(frame[2], frame[3]))
        else:
            run(operand, result)
        return None
    except BaseException as error:  # an exception that left a callback would be printed and swallowed
        _FAILURES[:] = [error]
        return _error(frame[2], f"{type(error).__name__}: {error}")


def _stream(api: int, context: int) -> int:
    """The stream that the executable runs on."""
    arguments = _StreamArgs(32, None, context, None)
    failed = _GET_STREAM(_U64.from_address(api + 80).value)(ctypes.byref(arguments))
    if failed:
        raise RuntimeError("XLA gave no stream")
    return arguments.stream or 0


def _answer_metadata(extension: int) -> None:
    if _U64.from_address(extension + 8).value & 0xFFFFFFFF == _METADATA:
        metadata = _U64.from_address(extension + 24).value
        version = (ctypes.c_int32 * 2).from_address(metadata + 8 + 16)
        version[0], version[1] = 0, 3


def _error(api: int, message: str) -> int:
    arguments = _ErrorArgs(28, None, message.encode(), 13)
    return int(_CREATE_ERROR(_U64.from_address(api + 48).value)(ctypes.byref(arguments)))


_HANDLER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_CALLBACKS: Final = {"cpu": _HANDLER(_handle), "cuda": _HANDLER(_handle_on_stream)}


def take_failure() -> BaseException | None:
    """What the handler that failed raised, once."""
    return _FAILURES.pop() if _FAILURES else None


call_p: Final = Primitive("collective_call")
"""(token, flat buffer) -> (token, flat buffer); `number` is that of the transfer, `items` and `dtype` those received."""
call_p.multiple_results = True
call_p.def_abstract_eval(lambda token, buffer, *, number, items, dtype: (token, ShapedArray((items,), dtype)))
register_ffi_lowering(call_p, TARGET, _CALLBACKS, lambda params: {"number": np.int64(params["number"])})


def new_token() -> jax.Array:
    """A first token."""
    return jnp.zeros((), jnp.int32)


def collective(
    token: Any,
    values: Sequence[Any],
    name: str,
    rank: int,
    size: int,
    prepare: Callable[[Transfer], Run],
    each: Sequence[dict[str, Any]],
    reduces: Reduces = all_but_mean,
) -> tuple[Any, list[Any]]:
    """The collective `name` on traced values, as one custom call: the next token, and the results.

    `each` has the arguments of `Communicator.<name>` per value; `prepare` and `reduces` are the communicator's. Typed keys move
    as their words.
    """
    impls = [
        jax.random.key_impl(value) if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key) else None
        for value in values
    ]
    words = [value if impl is None else jax.random.key_data(value) for value, impl in zip(values, impls, strict=True)]
    joined = join(
        [arrange(name, x, rank, size, reduces, **arguments) for x, arguments in zip(words, each, strict=True)]
    )
    transfer = joined.transfer
    number = len(_RUNS)
    _RUNS.append(prepare(transfer))
    token, received = call_p.bind(token, joined.buffer, number=number, items=transfer.items_out, dtype=transfer.dtype)
    return token, [
        result if impl is None else jax.random.wrap_key_data(result, impl=impl)
        for result, impl in zip(joined.results(received), impls, strict=True)
    ]
