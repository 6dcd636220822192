"""GPU checks of JAX 0.4.35 and newer. JAX captures CUDA graphs automatically and has no loss scaling."""

from __future__ import annotations

import importlib
from typing import Any

from . import arrays, common, nvml
from .common import Checks, Failed, Figure, NotApplicable, Setup, at_least, at_most, between, equal, note

CHECKS = Checks()
SIZE = 4096  # rows and columns of the large matrices: 137 GFLOP, and sums of 4096 products
SEED = 20


def begin(system: nvml.System) -> Setup:
    """JAX with a GPU; raises Failed if there is none."""
    jax = common.load("jax")
    try:
        gpus = jax.devices("gpu")
    except RuntimeError as error:
        raise common.no_gpu(f"JAX {jax.__version__}", _built_for(jax), system) from error
    jax.config.update("jax_default_device", gpus[0])
    return Setup(jax, gpus[0], jax.__version__, _built_for(jax))


@CHECKS.add("devices", uses_all=True)
def devices(jax: Any, device: Any) -> list[Figure]:
    """JAX and NVML have the same GPUs: number, name, compute capability."""
    del device
    gpus = []
    for gpu in jax.devices("gpu"):
        gpus.append({"name": gpu.device_kind, "capability": str(getattr(gpu, "compute_capability", ""))})
    return common.same_devices(gpus, nvml.read())


@CHECKS.add("matmul")
def matmul(jax: Any, device: Any) -> list[Figure]:
    """A large matrix product in float32 agrees with float64 on the CPU."""
    # Sums of 4096 products in float32 differ by 4e-7 to 1e-6 of the norm, TF32 by 3e-4, bf16 by 2e-3.
    return [at_most("relative error", _product_error(jax, device, "float32", "highest"), 1e-5), note("size", SIZE)]


@CHECKS.add("tf32")
def tf32(jax: Any, device: Any) -> list[Figure]:
    """A product in TF32 has the precision of TF32, so the tensor cores computed it."""
    _require_capability(device, 8, "TF32")
    # 10 bits of mantissa give 3e-4. Less than 5e-5 means float32 instead of TF32.
    return [between("relative error", _product_error(jax, device, "float32", "tensorfloat32"), 5e-5, 2e-3)]


@CHECKS.add("bf16")
def bf16(jax: Any, device: Any) -> list[Figure]:
    """A product in bfloat16 has the precision of bfloat16."""
    _require_capability(device, 8, "bfloat16 in hardware")
    # 7 bits of mantissa: 2.3e-3 from the inputs, 1.7e-3 from the result, and more if partial sums are in bf16.
    return [between("relative error", _product_error(jax, device, "bfloat16", "default"), 5e-4, 1e-2)]


@CHECKS.add("convolution")
def convolution(jax: Any, device: Any) -> list[Figure]:
    """A convolution uses cuDNN and agrees with float64 on the CPU."""
    image, kernel = arrays.normal(SEED, 8, 56, 56, 64), arrays.normal(SEED + 1, 3, 3, 64, 64)
    with jax.default_matmul_precision("highest"):
        result = jax.lax.conv_general_dilated(
            _put(jax, image, device), _put(jax, kernel, device), (1, 1), "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip
    _require_device(result, device)
    libraries = common.cudnn_at_work()
    error = common.relative_error(arrays.double(result), arrays.convolution(image, kernel))
    return [
        # Sums of 576 products: 1e-7 to 1e-6, some 1e-6 with Winograd's algorithm, 3e-4 with TF32.
        at_most("relative error", error, 5e-5),
        at_least("loaded libraries of cuDNN", len(libraries), 1),
        note("cuDNN", " ".join(libraries)),
    ]


@CHECKS.add("compile")
def compiled(jax: Any, device: Any) -> list[Figure]:
    """A function that XLA compiles for the GPU is fused to kernels, and agrees with float64 on the CPU."""
    left, right = arrays.normal(SEED, 2, 1_000_003)  # a prime, so that the last block of a kernel is incomplete

    def smooth(first: Any, second: Any) -> Any:
        return jax.numpy.tanh(first * 2 + second).sum(keepdims=True) + jax.numpy.sin(second)

    inputs = _put(jax, left, device), _put(jax, right, device)
    program = jax.jit(smooth).lower(*inputs).compile()
    result = program(*inputs)
    _require_device(result, device)
    return [
        # The error is that of a sum over a million elements in float32: at most 1e-6.
        at_most("relative error", common.relative_error(arrays.double(result), arrays.smooth(left, right)), 1e-4),
        at_least("fused kernels", program.as_text().count(" fusion("), 1),
    ]


@CHECKS.add("memory")
def memory(jax: Any, device: Any) -> list[Figure]:
    """Memory of an array returns to JAX's allocator after release."""
    size = 256 << 20

    def current() -> int:
        statistics = device.memory_stats()
        if not statistics:
            raise Failed("JAX has no memory statistics of this GPU: unset XLA_PYTHON_CLIENT_ALLOCATOR")
        return int(statistics["bytes_in_use"])

    jax.numpy.zeros(1).block_until_ready()
    start = current()
    block = jax.device_put(jax.numpy.ones(size, dtype="uint8"), device).block_until_ready()
    allocated = current() - start
    block.delete()
    remaining = current() - start
    return [
        at_least("allocated / requested bytes", allocated / size, 0.99),
        at_most("not released / requested bytes", remaining / size, 0.01),
    ]


@CHECKS.add("all-reduce", uses_all=True)
def all_reduce(jax: Any, device: Any) -> list[Figure]:
    """NCCL adds up an array over all GPUs."""
    del device
    gpus = jax.devices("gpu")
    if len(gpus) == 1:
        raise NotApplicable("only one GPU: XLA calls NCCL only for several GPUs")
    return [*_all_reduce(jax, gpus), note("NCCL", " ".join(common.loaded("libnccl")))]


@CHECKS.add("sharded", uses_all=True)
def sharded(jax: Any, device: Any) -> list[Figure]:
    """Training on data that is sharded over all GPUs: the first step agrees with float64 on the CPU, and it learns."""
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


def _require_device(result: Any, device: Any) -> None:
    if set(result.devices()) != {device}:
        raise Failed(f"the result is on {result.devices()}, not on {device}")


def _require_capability(device: Any, major: int, what: str) -> None:
    capability = str(getattr(device, "compute_capability", ""))
    if capability and float(capability) < major:
        raise NotApplicable(f"{what} needs compute capability {major}.0, this GPU has {capability}")


def _product_error(jax: Any, device: Any, dtype: str, precision: str) -> float:
    left, right = arrays.normal(SEED, SIZE, SIZE), arrays.normal(SEED + 1, SIZE, SIZE)
    with jax.default_matmul_precision(precision):
        product = _put(jax, left, device).astype(dtype) @ _put(jax, right, device).astype(dtype)
    _require_device(product, device)
    if str(product.dtype) != dtype:
        raise Failed(f"the product is {product.dtype}")
    result = arrays.double(product.astype("float32"))
    return common.relative_error(result, left.astype("float64") @ right.astype("float64"))


def _mesh(jax: Any, gpus: list[Any]) -> tuple[Any, Any]:
    """A mesh with one axis, and the sharding of an array over it."""
    sharding = jax.sharding
    mesh = sharding.Mesh(gpus, ("gpu",))
    return mesh, sharding.NamedSharding(mesh, sharding.PartitionSpec("gpu"))


def _all_reduce(jax: Any, gpus: list[Any]) -> list[Figure]:
    world = len(gpus)
    mesh, sharding = _mesh(jax, gpus)
    shard_map = getattr(jax, "shard_map", None) or importlib.import_module("jax.experimental.shard_map").shard_map
    spec = jax.sharding.PartitionSpec("gpu")
    values = (arrays.indices(1 << 22) % 1024).astype("float32")
    ranks = arrays.indices(world).astype("float32")[:, None] + 1

    def add(local: Any) -> Any:
        return jax.lax.psum(local, "gpu")

    total = jax.jit(shard_map(add, mesh=mesh, in_specs=spec, out_specs=spec))(jax.device_put(ranks * values, sharding))
    wrong = sum(
        int((arrays.double(shard.data) != values * (world * (world + 1) // 2)).sum())
        for shard in total.addressable_shards
    )
    return [equal("wrong elements on all GPUs", wrong, 0), equal("GPUs", len(total.addressable_shards), world)]


def _sharded(jax: Any, gpus: list[Any]) -> list[Figure]:
    """Linear regression, whose gradient has a simple formula."""
    world, each, rate = len(gpus), 64, 0.1
    mesh, sharding = _mesh(jax, gpus)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    inputs = arrays.normal(SEED, world * each, 32)
    targets = inputs @ arrays.normal(SEED + 1, 32, 1)
    weights = jax.device_put(arrays.normal(SEED, 32, 1) * 0, everywhere)
    data = jax.device_put(inputs, sharding), jax.device_put(targets, sharding)

    def loss(parameters: Any, local: Any, target: Any) -> Any:
        return ((local @ parameters - target) ** 2).mean()

    @jax.jit  # type: ignore[untyped-decorator, unused-ignore]
    def step(parameters: Any, local: Any, target: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(parameters, local, target)
        return parameters - rate * gradient, value

    losses, first = [], None
    with jax.default_matmul_precision("highest"):
        for number in range(20):
            weights, value = step(weights, *data)
            losses.append(float(value))
            if number == 0:
                first = arrays.double(weights)
    copies = [arrays.double(shard.data) for shard in weights.addressable_shards]
    difference = max(float(abs(copy - copies[0]).max()) for copy in copies)
    expected = -rate * arrays.regression_gradient(inputs, targets)
    return [
        # float32 over 64 to 512 samples: 1e-7 to 1e-6; without one of the GPUs: 0.1 and more.
        at_most("relative error of the first step", common.relative_error(first, expected), 1e-4),
        equal("largest difference of a weight between GPUs", difference, 0),
        at_most("final loss / initial loss", losses[-1] / losses[0], 0.5),
        equal("GPUs", len(copies), world),
    ]
