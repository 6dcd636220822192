"""GPU checks of JAX 0.4.35 and newer. JAX captures CUDA graphs by itself and scales no loss."""

from __future__ import annotations

import importlib
from typing import Any

from . import arrays, common, nvml
from .common import Begun, Checks, Failed, Figure, NotApplicable, at_least, at_most, between, equal, note

CHECKS = Checks()
SIZE = 4096  # a side of the large matrices: 137 GFLOP, and sums of 4096 products
SEED = 20


def begin(system: nvml.System) -> Begun:
    """JAX with a GPU, or a Failed that says why there is none."""
    jax = common.load("jax")
    try:
        gpus = jax.devices("gpu")
    except RuntimeError as error:
        raise common.no_gpu(f"JAX {jax.__version__}", _built_for(jax), system) from error
    jax.config.update("jax_default_device", gpus[0])
    return Begun(jax, gpus[0], jax.__version__, _built_for(jax))


@CHECKS.add("devices", uses_all=True)
def devices(jax: Any, device: Any) -> list[Figure]:
    """The GPUs that JAX sees are those that NVML has: number, name, compute capability."""
    del device
    seen = []
    for gpu in jax.devices("gpu"):
        seen.append({"name": gpu.device_kind, "capability": str(getattr(gpu, "compute_capability", ""))})
    return common.same_devices(seen, nvml.read())


@CHECKS.add("matmul")
def matmul(jax: Any, device: Any) -> list[Figure]:
    """A large matrix product in float32 agrees with float64 on the CPU."""
    # Sums of 4096 products in float32 are off by 4e-7 to 1e-6 of the norm, TF32 by 3e-4, bf16 by 2e-3.
    return [at_most("relative error", _product_error(jax, device, "float32", "highest"), 1e-5), note("size", SIZE)]


@CHECKS.add("tf32")
def tf32(jax: Any, device: Any) -> list[Figure]:
    """A product in TF32 is as exact as TF32 is, and no more: the tensor cores did it."""
    _need_capability(device, 8, "TF32")
    # 10 bits of mantissa give 3e-4. Less than 5e-5 would be float32, which means that TF32 was not used.
    return [between("relative error", _product_error(jax, device, "float32", "tensorfloat32"), 5e-5, 2e-3)]


@CHECKS.add("bf16")
def bf16(jax: Any, device: Any) -> list[Figure]:
    """A product in bfloat16 is as exact as bfloat16 is."""
    _need_capability(device, 8, "bfloat16 in hardware")
    # 7 bits of mantissa: 2.3e-3 from the inputs, 1.7e-3 from the result, and some more where parts are summed in bf16.
    return [between("relative error", _product_error(jax, device, "bfloat16", "default"), 5e-4, 1e-2)]


@CHECKS.add("convolution")
def convolution(jax: Any, device: Any) -> list[Figure]:
    """A convolution goes through cuDNN and agrees with float64 on the CPU."""
    image, kernel = arrays.normal(SEED, 8, 56, 56, 64), arrays.normal(SEED + 1, 3, 3, 64, 64)
    with jax.default_matmul_precision("highest"):
        found = jax.lax.conv_general_dilated(
            _put(jax, image, device), _put(jax, kernel, device), (1, 1), "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip
    _need_on(found, device)
    libraries = common.cudnn_at_work()
    return [
        # Sums of 576 products: 1e-7 to 1e-6, some 1e-6 if cuDNN takes Winograd's algorithm, 3e-4 if it took TF32.
        at_most("relative error", common.relative_error(arrays.double(found), arrays.convolution(image, kernel)), 5e-5),
        at_least("libraries of cuDNN at work", len(libraries), 1),
        note("cuDNN", " ".join(libraries)),
    ]


@CHECKS.add("compile")
def compiled(jax: Any, device: Any) -> list[Figure]:
    """A function that XLA compiles for the GPU is fused to kernels, and agrees with float64 on the CPU."""
    left, right = arrays.normal(SEED, 2, 1_000_003)  # a prime: no block of a kernel divides it

    def smooth(one: Any, other: Any) -> Any:
        return jax.numpy.tanh(one * 2 + other).sum(keepdims=True) + jax.numpy.sin(other)

    inputs = _put(jax, left, device), _put(jax, right, device)
    program = jax.jit(smooth).lower(*inputs).compile()
    found = program(*inputs)
    _need_on(found, device)
    return [
        # A sum over a million elements in float32 is the inexact part: 1e-6 and less.
        at_most("relative error", common.relative_error(arrays.double(found), arrays.smooth(left, right)), 1e-4),
        at_least("fused kernels", program.as_text().count(" fusion("), 1),
    ]


@CHECKS.add("memory")
def memory(jax: Any, device: Any) -> list[Figure]:
    """Memory of an array returns to JAX's allocator after release."""
    size = 256 << 20

    def current() -> int:
        told = device.memory_stats()
        if not told:
            raise Failed("JAX tells nothing of this GPU's memory: XLA_PYTHON_CLIENT_ALLOCATOR=platform has no figures")
        return int(told["bytes_in_use"])

    jax.numpy.zeros(1).block_until_ready()
    start = current()
    block = jax.device_put(jax.numpy.ones(size, dtype="uint8"), device).block_until_ready()
    took = current() - start
    block.delete()
    kept = current() - start
    return [
        at_least("bytes taken, of what was asked", took / size, 0.99),
        at_most("bytes not returned, of what was asked", kept / size, 0.01),
    ]


@CHECKS.add("all-reduce", uses_all=True)
def all_reduce(jax: Any, device: Any) -> list[Figure]:
    """NCCL adds up an array over all GPUs."""
    del device
    gpus = jax.devices("gpu")
    if len(gpus) == 1:
        raise NotApplicable("one GPU: XLA calls NCCL only where there are several")
    return [*_all_reduce(jax, gpus), note("NCCL", " ".join(common.loaded("libnccl")))]


@CHECKS.add("sharded", uses_all=True)
def sharded(jax: Any, device: Any) -> list[Figure]:
    """A training step on data that is spread over all GPUs: the first step as in float64 on the CPU, and it learns."""
    del device
    return _sharded(jax, jax.devices("gpu"))


def _built_for(jax: Any) -> str:
    """Major version of CUDA, by the plugin that is installed; empty without one."""
    del jax
    for major in range(20, 10, -1):
        try:
            importlib.import_module(f"jax_cuda{major}_plugin")
        except ImportError:
            continue
        return str(major)
    return ""


def _put(jax: Any, values: Any, device: Any) -> Any:
    return jax.device_put(values, device)


def _need_on(result: Any, device: Any) -> None:
    if set(result.devices()) != {device}:
        raise Failed(f"the result is on {result.devices()}, not on {device}")


def _need_capability(device: Any, major: int, what: str) -> None:
    has = str(getattr(device, "compute_capability", ""))
    if has and float(has) < major:
        raise NotApplicable(f"{what} came with compute capability {major}.0, this GPU has {has}")


def _product_error(jax: Any, device: Any, dtype: str, precision: str) -> float:
    left, right = arrays.normal(SEED, SIZE, SIZE), arrays.normal(SEED + 1, SIZE, SIZE)
    with jax.default_matmul_precision(precision):
        found = _put(jax, left, device).astype(dtype) @ _put(jax, right, device).astype(dtype)
    _need_on(found, device)
    if str(found.dtype) != dtype:
        raise Failed(f"the product is {found.dtype}")
    wide = arrays.double(found.astype("float32"))
    return common.relative_error(wide, left.astype("float64") @ right.astype("float64"))


def _mesh(jax: Any, gpus: list[Any]) -> tuple[Any, Any]:
    """A mesh of one axis, and how an array is spread over it."""
    sharding = jax.sharding
    mesh = sharding.Mesh(gpus, ("gpu",))
    return mesh, sharding.NamedSharding(mesh, sharding.PartitionSpec("gpu"))


def _all_reduce(jax: Any, gpus: list[Any]) -> list[Figure]:
    world = len(gpus)
    mesh, spread = _mesh(jax, gpus)
    share = getattr(jax, "shard_map", None) or importlib.import_module("jax.experimental.shard_map").shard_map
    spec = jax.sharding.PartitionSpec("gpu")
    place = (arrays.indices(1 << 22) % 1024).astype("float32")
    ranks = arrays.indices(world).astype("float32")[:, None] + 1

    def add(mine: Any) -> Any:
        return jax.lax.psum(mine, "gpu")

    total = jax.jit(share(add, mesh=mesh, in_specs=spec, out_specs=spec))(jax.device_put(ranks * place, spread))
    wrong = sum(
        int((arrays.double(one.data) != place * (world * (world + 1) // 2)).sum()) for one in total.addressable_shards
    )
    return [equal("wrong elements on all GPUs", wrong, 0), equal("GPUs", len(total.addressable_shards), world)]


def _sharded(jax: Any, gpus: list[Any]) -> list[Figure]:
    """Linear regression: its gradient can be written down."""
    world, each, rate = len(gpus), 64, 0.1
    mesh, spread = _mesh(jax, gpus)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    inputs = arrays.normal(SEED, world * each, 32)
    wanted = inputs @ arrays.normal(SEED + 1, 32, 1)
    weights = jax.device_put(arrays.normal(SEED, 32, 1) * 0, everywhere)
    data = jax.device_put(inputs, spread), jax.device_put(wanted, spread)

    def loss(held: Any, mine: Any, goal: Any) -> Any:
        return ((mine @ held - goal) ** 2).mean()

    @jax.jit  # type: ignore[untyped-decorator, unused-ignore]
    def step(held: Any, mine: Any, goal: Any) -> Any:
        lost, gradient = jax.value_and_grad(loss)(held, mine, goal)
        return held - rate * gradient, lost

    losses, first = [], None
    with jax.default_matmul_precision("highest"):
        for number in range(20):
            weights, lost = step(weights, *data)
            losses.append(float(lost))
            if number == 0:
                first = arrays.double(weights)
    held = [arrays.double(one.data) for one in weights.addressable_shards]
    expected = -rate * arrays.regression_gradient(inputs, wanted)
    return [
        # float32 over 64 to 512 samples: 1e-7 to 1e-6; a GPU left out: 0.1 and more.
        at_most("relative error of the first step", common.relative_error(first, expected), 1e-4),
        equal("largest difference of a weight between GPUs", max(float(abs(one - held[0]).max()) for one in held), 0),
        at_most("loss at the end by that at the start", losses[-1] / losses[0], 0.5),
        equal("GPUs", len(held), world),
    ]
