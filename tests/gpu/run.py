"""The NCCL back end on real GPUs: `python tests/gpu/run.py`, or `mpiexec -n 2 python tests/gpu/run.py` with two of them.

Prints what it ran. Where no GPU, cupy or JAX for CUDA is there it says so, and ends with status 77.
"""

from __future__ import annotations

import sys
import time
from typing import Any

SKIPPED = 77


def why_not() -> str | None:
    """Why this machine cannot run it."""
    from collectives.launch import visible_gpus

    if not visible_gpus():
        return "no NVIDIA GPU is visible (or JAX_PLATFORMS keeps to CPUs)"
    try:
        import cupy
        from cupy.cuda import nccl

        if not nccl.available:
            return "cupy finds no NCCL library: pip install '.[nccl]'"
        cupy.cuda.runtime.getDeviceCount()
    except ImportError as error:
        return f"cupy is not installed: pip install '.[nccl]' ({error})"
    except Exception as error:
        return f"cupy finds no GPU: {error}"
    import jax

    if jax.default_backend() != "gpu":
        return f"JAX computes on {jax.default_backend()}: pip install 'jax[cuda12]'"
    return None


def say(*words: Any) -> None:
    import collectives

    if collectives.world("nccl").rank == 0:
        print(*words, flush=True)


def conformance() -> str:
    """Every case of the suite on cupy's arrays and on JAX's."""
    import cupy
    import jax
    import jax.numpy as jnp

    import collectives
    from collectives import testing

    world = collectives.world("nccl")
    counts = []
    for put in (cupy.asarray, jnp.asarray):
        count = 0
        for case, arguments, given in testing.member_cases(world):
            if put is cupy.asarray and given.dtype.isbuiltin != 1:
                continue
            result = getattr(world, case.name)(put(given), **arguments)
            kind = jax.Array if put is jnp.asarray else cupy.ndarray
            assert result is None or isinstance(result, kind), (case, type(result))
            testing.compare(case, world.rank, cupy.asnumpy(result) if isinstance(result, cupy.ndarray) else result)
            count += 1
        counts.append(count)
    return f"{counts[0]} cases on cupy's arrays, {counts[1]} on JAX's"


def no_copies() -> str:
    """A JAX array is sent from where it lies, and the result is one."""
    import jax.numpy as jnp

    import collectives

    world: Any = collectives.world("nccl")
    x = jnp.arange(12.0).reshape(3, 4)
    assert world.device.pointer(world.device.adopted(x)) == x.unsafe_buffer_pointer()
    found = world.all_reduce(x)
    assert (found == x * world.size).all()
    return f"an all_reduce of {x.nbytes} bytes by address"


def in_executables() -> str:
    """Custom calls on XLA's stream: in a loop, between matrix products, for several dtypes and kinds."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import collectives
    from collectives import ffi

    world: Any = collectives.world("nccl")
    done = 0

    def call(token: Any, name: str, x: Any, **arguments: Any) -> Any:
        def prepare(transfer: Any) -> Any:
            return world.prepare(transfer, lambda: name)

        return ffi.collective(token, [x], name, world.rank, world.size, prepare, [arguments], world.reduces)

    ones = (1,) * world.size
    for dtype in ("float32", "float64", "int32", "bfloat16", "complex64", "bool"):
        with jax.enable_x64(True):
            x = np.asarray(jnp.asarray((np.arange(6.0) * 7 % 5 - 2).reshape(1, 6)).astype(dtype))
            for name, arguments in {
                "all_reduce": {"op": "or" if dtype == "bool" else "sum"},
                "all_gather": {"dim": 0, "sizes": ones},
                "broadcast": {"root": 0},
                "permute": {"pairs": [(i, (i + 1) % world.size) for i in range(world.size)]},
            }.items():
                run = jax.jit(lambda token, x, name=name, more=arguments: call(token, name, x, **more))
                _, (found,) = run(ffi.new_token(), x)
                every = [x] * world.size
                expected = {
                    "all_reduce": np.asarray(sum(every[1:], x)).astype(x.dtype),
                    "all_gather": np.concatenate(every),
                }
                np.testing.assert_array_equal(np.asarray(found), expected.get(name, x), err_msg=f"{name} {dtype}")
                done += 1

    @jax.jit
    def loop(token: Any, x: Any) -> Any:
        def step(_: Any, carry: Any) -> Any:
            token, x = carry
            token, (total,) = call(token, "all_reduce", (x @ x) / 64, op="sum")
            return token, jnp.tanh(total / world.size)

        return jax.lax.fori_loop(0, 50, step, (token, x))

    x = jnp.asarray(np.sin(np.arange(64 * 64)).reshape(64, 64), jnp.float32)
    _, found = loop(ffi.new_token(), x)
    expected = np.asarray(x, np.float64)
    with jax.default_matmul_precision("highest"):
        _, found = loop(ffi.new_token(), x)
    for _ in range(50):
        expected = np.tanh(expected @ expected / 64)
    np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-3)
    world.drain()
    return f"{done} calls by dtype and kind, and a loop of 50 with matrix products"


def kernels_are_waited_for_f16() -> str:
    """A long kernel, then a reduction, 200 times: on a stream of one's own, on the default one, and from JAX."""
    import cupy
    import jax
    import jax.numpy as jnp

    import collectives

    world: Any = collectives.world("nccl")
    a = cupy.random.default_rng(0).standard_normal((1500, 1500), dtype=cupy.float32)
    for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.null):
        with stream:
            stream.synchronize()
            first = None
            for _ in range(100):
                found = float(world.all_reduce((a @ a @ a).sum(keepdims=True), "mean")[0, 0])
                first = found if first is None else first
                assert found == first, (found, first)
    product = jax.jit(lambda a: (a @ a @ a).sum())
    x = jnp.asarray(cupy.asnumpy(a))
    found = {float(world.all_reduce(product(x), "mean")) for _ in range(200)}
    assert len(found) == 1, found
    return "400 reductions behind products of 1500 x 1500, all alike"


def programs() -> str:
    """Decorated functions on a mesh of all GPUs."""
    import jax
    import numpy as np

    import collectives
    import spmd
    from placements import Mesh, P, Shard

    n = collectives.world("nccl").size
    if n == 1:
        return "left out: one GPU is a mesh of one rank, which sends nothing"
    mesh = Mesh(x=n)
    x = np.sin(np.arange(12.0 * n)).reshape(2 * n, 6).astype(np.float32)
    f = spmd.jit(lambda x: (x.T @ x, jax.nn.softmax(x, 0)), mesh=mesh, in_placements=P(x=Shard(0)))
    for found, expected in zip(f(x), jax.jit(f.__wrapped__)(x), strict=True):
        np.testing.assert_allclose(found.full(), expected, rtol=2e-4, atol=1e-5)
    return f"a product and a softmax over {n} GPUs"


def times() -> str:
    """Microseconds of an all_reduce of 8 bytes and of 64 MB, alone and in a loop of an executable."""
    import jax
    import jax.numpy as jnp

    import collectives
    from collectives import ffi

    world: Any = collectives.world("nccl")
    found = []
    for items in (2, 16_777_216):
        x = jnp.ones(items, jnp.float32)
        steps = 200 if items == 2 else 20

        @jax.jit
        def loop(token: Any, x: Any, steps: int = steps) -> Any:
            def step(_: Any, carry: Any) -> Any:
                token, (total,) = ffi.collective(
                    carry[0], [carry[1]], "all_reduce", world.rank, world.size,
                    lambda transfer: world.prepare(transfer, lambda: "all_reduce"), [{"op": "max"}], lambda *_: True,
                )  # fmt: skip
                return token, total

            return jax.lax.fori_loop(0, steps, step, (token, x))

        jax.block_until_ready(loop(ffi.new_token(), x))
        start = time.perf_counter()
        jax.block_until_ready(loop(ffi.new_token(), x))
        inside = (time.perf_counter() - start) / steps * 1e6
        world.all_reduce(x)
        start = time.perf_counter()
        for _ in range(steps):
            world.all_reduce(x)
        alone = (time.perf_counter() - start) / steps * 1e6
        found.append(f"{items * 4} bytes: {alone:.1f} us alone, {inside:.1f} us in a loop")
    return "; ".join(found)


def main() -> int:
    reason = why_not()
    if reason is not None:
        print(f"skipped: {reason}")
        return SKIPPED
    import cupy
    import jax
    from cupy.cuda import nccl

    import collectives

    start = time.perf_counter()
    world = collectives.world("nccl")
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    say(f"{world.size} x {name}; JAX {jax.__version__}, cupy {cupy.__version__}, NCCL {nccl.get_version()}")
    for step in (conformance, no_copies, in_executables, kernels_are_waited_for_f16, programs, times):
        say(f"{step.__name__}: {step()}")
    say(f"all passed in {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
