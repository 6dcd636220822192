"""GPU checks of TensorFlow 2.9 and newer. They share a process: `begin` restores settings."""

from __future__ import annotations

from typing import Any

from . import arrays, common, nvml
from .common import Checks, Figure, NotApplicable, Setup, at_least, at_most, between, equal, note

CHECKS = Checks()
SIZE = 4096  # rows and columns of the large matrices: 137 GFLOP, and sums of 4096 products
SEED = 20


def begin(system: nvml.System) -> Setup:
    """TensorFlow with a GPU; raises Failed if there is none."""
    tf = common.load("tensorflow")
    build = tf.sysconfig.get_build_info()
    cuda = str(build.get("cuda_version", "")) if build.get("is_cuda_build") else ""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        raise common.no_gpu(f"TensorFlow {tf.__version__}", cuda, system)
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    tf.config.set_soft_device_placement(False)  # otherwise operations without a GPU kernel would run on the CPU
    tf.keras.mixed_precision.set_global_policy("float32")
    tf.random.set_seed(SEED)
    return Setup(tf, "/GPU:0", tf.__version__, cuda)


@CHECKS.add("devices", uses_all=True)
def devices(tf: Any, device: Any) -> list[Figure]:
    """TensorFlow and NVML have the same GPUs: number, name, compute capability."""
    del device
    gpus = []
    for gpu in tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(gpu)
        capability = details.get("compute_capability")
        gpus.append({"name": details.get("device_name"), "capability": capability and ".".join(map(str, capability))})
    return common.same_devices(gpus, nvml.read())


@CHECKS.add("matmul")
def matmul(tf: Any, device: Any) -> list[Figure]:
    """A large matrix product in float32 agrees with float64 on the CPU."""
    tf.config.experimental.enable_tensor_float_32_execution(False)
    # Sums of 4096 products in float32 differ by 4e-7 to 1e-6 of the norm, TF32 by 3e-4, bf16 by 2e-3.
    return [at_most("relative error", _product_error(tf, device, "float32"), 1e-5), note("size", SIZE)]


@CHECKS.add("tf32")
def tf32(tf: Any, device: Any) -> list[Figure]:
    """A product in TF32 has the precision of TF32, so the tensor cores computed it."""
    _require_capability(tf, 8, "TF32")
    tf.config.experimental.enable_tensor_float_32_execution(True)
    # 10 bits of mantissa give 3e-4. Less than 5e-5 means float32 instead of TF32.
    return [between("relative error", _product_error(tf, device, "float32"), 5e-5, 2e-3)]


@CHECKS.add("bf16")
def bf16(tf: Any, device: Any) -> list[Figure]:
    """A product in bfloat16 has the precision of bfloat16."""
    _require_capability(tf, 8, "bfloat16 in hardware")
    # 7 bits of mantissa: 2.3e-3 from the inputs, 1.7e-3 from the result, and more if partial sums are in bf16.
    return [between("relative error", _product_error(tf, device, "bfloat16"), 5e-4, 1e-2)]


@CHECKS.add("convolution")
def convolution(tf: Any, device: Any) -> list[Figure]:
    """A convolution uses cuDNN and agrees with float64 on the CPU."""
    tf.config.experimental.enable_tensor_float_32_execution(False)
    image, kernel = arrays.normal(SEED, 8, 56, 56, 64), arrays.normal(SEED + 1, 3, 3, 64, 64)
    with tf.device(device):
        result = tf.nn.conv2d(tf.constant(image), tf.constant(kernel), strides=1, padding="VALID")
    _require_device(result, device)
    libraries = common.cudnn_at_work()
    error = common.relative_error(arrays.double(result), arrays.convolution(image, kernel))
    return [
        # Sums of 576 products: 1e-7 to 1e-6, some 1e-6 with Winograd's algorithm, 3e-4 with TF32.
        at_most("relative error", error, 5e-5),
        at_least("loaded libraries of cuDNN", len(libraries), 1),
        note("cuDNN", " ".join(libraries)),
    ]


@CHECKS.add("amp")
def amp(tf: Any, device: Any) -> list[Figure]:
    """Keras with mixed precision: it uses float16, and the loss falls."""
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    inputs = arrays.normal(SEED, 1024, 32)
    targets = inputs @ arrays.normal(SEED + 1, 32, 1)
    tf.config.set_soft_device_placement(True)  # Keras reads its inputs with operations that have no GPU kernel
    hidden = tf.keras.layers.Dense(64, activation="relu")
    model = tf.keras.Sequential([hidden, tf.keras.layers.Dense(1, dtype="float32")])
    model.compile(optimizer=tf.keras.optimizers.Adam(0.01), loss="mse")
    losses = model.fit(inputs, targets, epochs=20, batch_size=256, verbose=0).history["loss"]
    result = hidden(tf.constant(inputs))
    _require_device(result, device)
    return [
        equal("uses float16", int(result.dtype == tf.float16), 1),
        at_most("final loss / initial loss", losses[-1] / losses[0], 0.5),  # 0.1 in float32
    ]


@CHECKS.add("graph")
def graph(tf: Any, device: Any) -> list[Figure]:
    """A graph that is traced once gives the same results as eager calls, for new inputs."""
    tf.config.experimental.enable_tensor_float_32_execution(False)
    with tf.device(device):
        weights = tf.constant(arrays.normal(SEED, 256, 256))
        count = tf.Variable(0.0)

        def layer(inputs: Any) -> Any:
            return tf.nn.relu(inputs @ weights) - inputs

        @tf.function(autograph=False)  # type: ignore[untyped-decorator, unused-ignore]
        def traced(inputs: Any) -> Any:
            count.assign_add(1.0)
            return layer(inputs)

        errors = []
        for number in range(5):
            inputs = tf.constant(arrays.normal(number, 64, 256))
            result = traced(inputs)
            errors.append(common.relative_error(arrays.double(result), arrays.double(layer(inputs))))
    _require_device(result, device)
    return [
        # The same kernels with the same numbers; another algorithm of cuBLAS differs by 1e-6.
        at_most("largest relative error", max(errors), 1e-5),
        equal("calls counted on the GPU", float(count.numpy()), 5),
        equal("number of traces", traced.experimental_get_tracing_count(), 1),
    ]


@CHECKS.add("compile")
def compiled(tf: Any, device: Any) -> list[Figure]:
    """A function that XLA compiles for the GPU agrees with float64 on the CPU."""
    left, right = arrays.normal(SEED, 2, 1_000_003)  # a prime, so that the last block of a kernel is incomplete

    def smooth(first: Any, second: Any) -> Any:
        return tf.reduce_sum(tf.tanh(first * 2 + second), keepdims=True) + tf.sin(second)

    with tf.device(device):
        result = tf.function(smooth, jit_compile=True, autograph=False)(tf.constant(left), tf.constant(right))
    _require_device(result, device)
    expected = arrays.smooth(left, right)
    # The error is that of a sum over a million elements in float32: at most 1e-6. Without XLA, `jit_compile` fails.
    return [at_most("relative error", common.relative_error(arrays.double(result), expected), 1e-4)]


@CHECKS.add("memory")
def memory(tf: Any, device: Any) -> list[Figure]:
    """A tensor releases its memory to TensorFlow's allocator, which has not allocated the whole GPU."""
    size = 256 << 20

    def current() -> int:
        return int(tf.config.experimental.get_memory_info(device[1:])["current"])

    with tf.device(device):
        tf.zeros([1]).numpy()
        start = current()
        block = tf.ones([size // 4])
        block[-1].numpy()  # waits until it is computed
        allocated = current() - start
        del block
        tf.zeros([1]).numpy()
        remaining = current() - start
    gpu = nvml.read().visible[0]
    figures = [
        at_least("allocated / requested bytes", allocated / size, 0.99),
        at_most("not released / requested bytes", remaining / size, 0.01),
    ]
    if gpu.memory:
        # With memory growth: the context and 256 MiB; without: nearly all. Only a note, since others may use the GPU.
        figures.append(note("GPU's memory in use", f"{(gpu.memory - gpu.free) / gpu.memory:.0%}"))
    return figures


@CHECKS.add("all-reduce", uses_all=True)
def all_reduce(tf: Any, device: Any) -> list[Figure]:
    """NCCL adds up a tensor over all GPUs."""
    del device
    count = len(tf.config.list_logical_devices("GPU"))
    if count == 1:
        raise NotApplicable("only one GPU: TensorFlow calls NCCL only for several GPUs")
    return _all_reduce(tf, [f"/gpu:{number}" for number in range(count)], tf.distribute.NcclAllReduce())


@CHECKS.add("mirrored", uses_all=True)
def mirrored(tf: Any, device: Any) -> list[Figure]:
    """Training with MirroredStrategy: the first step agrees with float64 on the CPU, weights are equal on all GPUs."""
    del device
    tf.config.experimental.enable_tensor_float_32_execution(False)
    count = len(tf.config.list_logical_devices("GPU"))
    return _mirrored(tf, [f"/gpu:{number}" for number in range(count)], tf.distribute.NcclAllReduce())


def _require_device(result: Any, device: str) -> None:
    """Raises Failed for a result on another device, such as the CPU."""
    expected = device.rsplit("/", maxsplit=1)[-1].upper()
    if not result.device.endswith(expected):
        raise common.Failed(f"the result is on {result.device or 'no device'}, not on {expected}")


def _require_capability(tf: Any, major: int, what: str) -> None:
    details = tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[0])
    capability = details.get("compute_capability")
    if capability and capability[0] < major:
        raise NotApplicable(f"{what} needs compute capability {major}.0, this GPU has {capability[0]}.{capability[1]}")


def _product_error(tf: Any, device: str, dtype: str) -> float:
    left, right = arrays.normal(SEED, SIZE, SIZE), arrays.normal(SEED + 1, SIZE, SIZE)
    with tf.device(device):
        product = tf.matmul(tf.cast(tf.constant(left), dtype), tf.cast(tf.constant(right), dtype))
        result = tf.cast(product, "float32")
    _require_device(product, device)
    return common.relative_error(arrays.double(result), left.astype("float64") @ right.astype("float64"))


def _all_reduce(tf: Any, names: list[str], operations: Any) -> list[Figure]:
    tf.config.set_soft_device_placement(True)  # the strategy needs its own placement
    strategy = tf.distribute.MirroredStrategy(names, cross_device_ops=operations)
    world, values = strategy.num_replicas_in_sync, (arrays.indices(1 << 22) % 1024).astype("float32")

    def add() -> Any:
        context = tf.distribute.get_replica_context()
        rank = tf.cast(context.replica_id_in_sync_group, tf.float32)
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.constant(values) * (rank + 1.0))

    totals = strategy.experimental_local_results(tf.function(lambda: strategy.run(add), autograph=False)())
    wrong = sum(int((total.numpy() != values * (world * (world + 1) // 2)).sum()) for total in totals)
    return [equal("wrong elements on all GPUs", wrong, 0), equal("GPUs with a result", len(totals), len(names))]


def _mirrored(tf: Any, names: list[str], operations: Any) -> list[Figure]:
    """Linear regression, whose gradient has a simple formula."""
    tf.config.set_soft_device_placement(True)  # the strategy needs its own placement
    strategy = tf.distribute.MirroredStrategy(names, cross_device_ops=operations)
    world, each, rate = strategy.num_replicas_in_sync, 64, 0.1
    inputs = arrays.normal(SEED, world, each, 32)
    targets = inputs @ arrays.normal(SEED + 1, 32, 1)
    with strategy.scope():
        weights = tf.Variable(tf.zeros([32, 1]), aggregation=tf.VariableAggregation.MEAN)

    def replica(own: Any, target: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((own @ weights - target) ** 2)
        weights.assign_sub(rate * tape.gradient(loss, weights))  # all-reduce: the mean over the GPUs
        return loss

    def shard(values: Any) -> Any:
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(values[int(context.replica_id_in_sync_group)])
        )

    step = tf.function(lambda own, target: strategy.run(replica, args=(own, target)), autograph=False)
    shards = shard(inputs), shard(targets)
    losses, first = [], None
    for number in range(20):
        replica_losses = strategy.experimental_local_results(step(*shards))
        losses.append(sum(float(loss) for loss in replica_losses) / world)
        if number == 0:
            first = [copy.numpy() for copy in strategy.experimental_local_results(weights)]
    copies = strategy.experimental_local_results(weights)
    for name, copy in zip(names, copies):  # noqa: B905  Python 3.9 has no `strict`
        _require_device(copy, name)
    values = [copy.numpy() for copy in copies]
    difference = max(float(abs(value - values[0]).max()) for value in values)
    expected = -rate * arrays.regression_gradient(inputs.reshape(-1, 32), targets.reshape(-1, 1))
    return [
        # float32 over 64 to 512 samples: 1e-7 to 1e-6; without one of the GPUs: 0.1 and more.
        at_most("relative error of the first step", common.relative_error(arrays.double(first[0]), expected), 1e-4),  # type: ignore[index]
        equal("largest difference of a weight between GPUs", difference, 0),
        at_most("final loss / initial loss", losses[-1] / losses[0], 0.5),
        note("GPUs", world),
    ]
