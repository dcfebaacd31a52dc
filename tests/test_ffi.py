"""The FFI handlers, on call frames that are built by hand: what XLA passes on CPUs, and on GPUs with a stream."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from collectives import ffi

WORD = ctypes.c_uint64
KEPT: list[Any] = []
"""What a frame points to."""
MESSAGES: list[tuple[bytes, int]] = []


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ffi._ErrorArgs))
def create_error(arguments: Any) -> int:
    MESSAGES.append((arguments[0].message, arguments[0].code))
    return 4321


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ffi._StreamArgs))
def get_stream(arguments: Any) -> Any:
    assert arguments[0].struct_size == ctypes.sizeof(ffi._StreamArgs) == 32
    arguments[0].stream = arguments[0].context + 1
    return None


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ffi._StreamArgs))
def get_no_stream(arguments: Any) -> int:
    return 99


def words(*values: int) -> int:
    """The address of some words."""
    KEPT.append((WORD * len(values))(*values))
    return ctypes.addressof(KEPT[-1])


def buffer(data: int) -> int:
    """An XLA_FFI_Buffer: size, extension and dtype, then its address."""
    return words(48, 0, 11, data)


def frame(number: int, stream: Any = get_stream, stage: int = 3, extension: int = 0) -> int:
    """An XLA_FFI_CallFrame of the layout of c_api.h, API 0.3: a token and an array in, a token and an array out."""
    api = words(144, 0, 24, 0, 3 << 32, 0, ctypes.cast(create_error, ctypes.c_void_p).value or 0, 0, 0, 0,
                ctypes.cast(stream, ctypes.c_void_p).value or 0)  # fmt: skip
    operands, results = words(buffer(0x70), buffer(0x1000)), words(buffer(0x70), buffer(0x2000))
    scalar = words(8, words(number))
    attributes = words(scalar)
    arguments = (48, 0, 2, words(0, 0), operands)
    returned = (48, 0, 2, words(0, 0), results)
    given = (56, 0, 1, words(0), words(0), attributes)
    return words(168, extension, api, 0x500, stage, *arguments, *returned, *given, 0)


@pytest.fixture
def seen() -> Any:
    """What a transfer is called with."""
    calls: list[tuple[int, ...]] = []
    ffi._RUNS.append(lambda *addresses: calls.append(addresses))
    MESSAGES.clear()
    yield calls
    ffi._RUNS.pop()


def test_on_cpus_the_addresses_are_those_of_the_second_buffers(seen: Any) -> None:
    assert ffi._handle(frame(len(ffi._RUNS) - 1)) is None
    assert seen == [(0x1000, 0x2000)]


def test_on_gpus_xlas_stream_comes_along(seen: Any) -> None:
    assert ffi._handle_on_stream(frame(len(ffi._RUNS) - 1)) is None
    assert seen == [(0x1000, 0x2000, 0x501)]
    assert not MESSAGES


def test_other_stages_do_nothing(seen: Any) -> None:
    """The stage is 32 bits wide: what lies in the other half of the word does not count."""
    for handler in (ffi._handle, ffi._handle_on_stream):
        assert handler(frame(len(ffi._RUNS) - 1, stage=1)) is None
        assert seen == []
        assert handler(frame(len(ffi._RUNS) - 1, stage=3 | 7 << 32)) is None
        assert len(seen) == 1
        seen.clear()


def test_the_version_is_answered(seen: Any) -> None:
    """A frame with the metadata extension: the API version is written, nothing runs."""
    metadata = words(40, 0, 0, 0, 0)
    extension = words(32, 1, 0, metadata)
    assert ffi._handle_on_stream(frame(len(ffi._RUNS) - 1, extension=extension)) is None
    assert (ctypes.c_int32 * 2).from_address(metadata + 24)[:] == [0, 3]
    assert seen == []


def test_failures_are_returned_and_kept(seen: Any) -> None:
    """No exception leaves a handler: XLA gets an error with the message, and the caller the exception."""
    assert ffi._handle_on_stream(frame(len(ffi._RUNS) - 1, get_no_stream)) == 4321
    assert MESSAGES == [(b"RuntimeError: XLA gave no stream", 13)]
    assert isinstance(ffi.take_failure(), RuntimeError)

    def fail(*addresses: int) -> None:
        raise ValueError("a transfer that fails")

    ffi._RUNS.append(fail)
    assert ffi._handle(frame(len(ffi._RUNS) - 1)) == 4321
    ffi._RUNS.pop()
    assert MESSAGES[-1] == (b"ValueError: a transfer that fails", 13)
    assert isinstance(ffi.take_failure(), ValueError)
    assert ffi.take_failure() is None
    assert seen == []
