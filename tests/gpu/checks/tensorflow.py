"""GPU checks of TensorFlow 2.9 and newer. Each runs in a process of its own, so settings need not be put back."""

from __future__ import annotations

from typing import Any

from . import arrays, common, nvml
from .common import Begun, Checks, Figure, NotApplicable, at_least, at_most, between, equal, note

CHECKS = Checks()
SIZE = 4096  # a side of the large matrices: 137 GFLOP, and sums of 4096 products
SEED = 20


def begin(system: nvml.System) -> Begun:
    """TensorFlow with a GPU, or a Failed that says why there is none."""
    tf = common.load("tensorflow")
    build = tf.sysconfig.get_build_info()
    cuda = str(build.get("cuda_version", "")) if build.get("is_cuda_build") else ""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        raise common.no_gpu(f"TensorFlow {tf.__version__}", cuda, system)
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    tf.config.set_soft_device_placement(False)  # what cannot run on the GPU fails, and is not run on the CPU
    tf.random.set_seed(SEED)
    return Begun(tf, "/GPU:0", tf.__version__, cuda)


@CHECKS.add("devices", uses_all=True)
def devices(tf: Any, device: Any) -> list[Figure]:
    """The GPUs that TensorFlow sees are those that NVML has: number, name, compute capability."""
    del device
    seen = []
    for gpu in tf.config.list_physical_devices("GPU"):
        told = tf.config.experimental.get_device_details(gpu)
        capability = told.get("compute_capability")
        seen.append({"name": told.get("device_name"), "capability": capability and ".".join(map(str, capability))})
    return common.same_devices(seen, nvml.read())


@CHECKS.add("matmul")
def matmul(tf: Any, device: Any) -> list[Figure]:
    """A large matrix product in float32 agrees with float64 on the CPU."""
    tf.config.experimental.enable_tensor_float_32_execution(False)
    # Sums of 4096 products in float32 are off by 4e-7 to 1e-6 of the norm, TF32 by 3e-4, bf16 by 2e-3.
    return [at_most("relative error", _product_error(tf, device, "float32"), 1e-5), note("size", SIZE)]


@CHECKS.add("tf32")
def tf32(tf: Any, device: Any) -> list[Figure]:
    """A product in TF32 is as exact as TF32 is, and no more: the tensor cores did it."""
    _need_capability(tf, 8, "TF32")
    tf.config.experimental.enable_tensor_float_32_execution(True)
    # 10 bits of mantissa give 3e-4. Less than 5e-5 would be float32, which means that TF32 was not used.
    return [between("relative error", _product_error(tf, device, "float32"), 5e-5, 2e-3)]


@CHECKS.add("bf16")
def bf16(tf: Any, device: Any) -> list[Figure]:
    """A product in bfloat16 is as exact as bfloat16 is."""
    _need_capability(tf, 8, "bfloat16 in hardware")
    # 7 bits of mantissa: 2.3e-3 from the inputs, 1.7e-3 from the result, and some more where parts are summed in bf16.
    return [between("relative error", _product_error(tf, device, "bfloat16"), 5e-4, 1e-2)]


@CHECKS.add("convolution")
def convolution(tf: Any, device: Any) -> list[Figure]:
    """A convolution goes through cuDNN and agrees with float64 on the CPU."""
    tf.config.experimental.enable_tensor_float_32_execution(False)
    image, kernel = arrays.normal(SEED, 8, 56, 56, 64), arrays.normal(SEED + 1, 3, 3, 64, 64)
    with tf.device(device):
        found = tf.nn.conv2d(tf.constant(image), tf.constant(kernel), strides=1, padding="VALID")
    _need_on(found, device)
    libraries = common.cudnn_at_work()
    return [
        # Sums of 576 products: 1e-7 to 1e-6, some 1e-6 if cuDNN takes Winograd's algorithm, 3e-4 if it took TF32.
        at_most("relative error", common.relative_error(arrays.double(found), arrays.convolution(image, kernel)), 5e-5),
        at_least("libraries of cuDNN at work", len(libraries), 1),
        note("cuDNN", " ".join(libraries)),
    ]


@CHECKS.add("amp")
def amp(tf: Any, device: Any) -> list[Figure]:
    """Keras in mixed precision: float16 inside, and a loss that falls."""
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    inputs = arrays.normal(SEED, 1024, 32)
    wanted = inputs @ arrays.normal(SEED + 1, 32, 1)
    tf.config.set_soft_device_placement(True)  # Keras feeds itself by operators that no GPU has
    hidden = tf.keras.layers.Dense(64, activation="relu")
    model = tf.keras.Sequential([hidden, tf.keras.layers.Dense(1, dtype="float32")])
    model.compile(optimizer=tf.keras.optimizers.Adam(0.01), loss="mse")
    losses = model.fit(inputs, wanted, epochs=20, batch_size=256, verbose=0).history["loss"]
    result = hidden(tf.constant(inputs))
    _need_on(result, device)
    return [
        equal("float16 inside", int(result.dtype == tf.float16), 1),
        at_most("loss at the end by that at the start", losses[-1] / losses[0], 0.5),  # 0.1 in float32
    ]


@CHECKS.add("graph")
def graph(tf: Any, device: Any) -> list[Figure]:
    """A function traced once to a graph gives what eager calls give, for inputs that it has not seen."""
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
    _need_on(result, device)
    return [
        # The same kernels on the same numbers; another algorithm of cuBLAS would be 1e-6 off.
        at_most("largest relative error", max(errors), 1e-5),
        equal("calls that the GPU counted", float(count.numpy()), 5),
        equal("times that it was traced", traced.experimental_get_tracing_count(), 1),
    ]


@CHECKS.add("compile")
def compiled(tf: Any, device: Any) -> list[Figure]:
    """A function that XLA compiles for the GPU agrees with float64 on the CPU."""
    left, right = arrays.normal(SEED, 2, 1_000_003)  # a prime: no block of a kernel divides it

    def smooth(one: Any, other: Any) -> Any:
        return tf.reduce_sum(tf.tanh(one * 2 + other), keepdims=True) + tf.sin(other)

    with tf.device(device):
        found = tf.function(smooth, jit_compile=True, autograph=False)(tf.constant(left), tf.constant(right))
    _need_on(found, device)
    expected = arrays.smooth(left, right)
    # A sum over a million elements in float32 is the inexact part: 1e-6 and less. Without XLA, `jit_compile` fails.
    return [at_most("relative error", common.relative_error(arrays.double(found), expected), 1e-4)]


@CHECKS.add("memory")
def memory(tf: Any, device: Any) -> list[Figure]:
    """Memory of a tensor returns to TensorFlow's allocator after release, which itself has not taken the whole GPU."""
    size = 256 << 20

    def current() -> int:
        return int(tf.config.experimental.get_memory_info(device[1:])["current"])

    with tf.device(device):
        tf.zeros([1]).numpy()
        start = current()
        block = tf.ones([size // 4])
        block[-1].numpy()  # waits until it is there
        took = current() - start
        del block
        tf.zeros([1]).numpy()
        kept = current() - start
    gpu = nvml.read().visible[0]
    figures = [
        at_least("bytes taken, of what was asked", took / size, 0.99),
        at_most("bytes not returned, of what was asked", kept / size, 0.01),
    ]
    if gpu.memory:
        # With memory growth the context and 256 MiB; without, nearly all. Others may use the GPU, so it is only shown.
        figures.append(note("GPU's memory in use", f"{(gpu.memory - gpu.free) / gpu.memory:.0%}"))
    return figures


@CHECKS.add("all-reduce", uses_all=True)
def all_reduce(tf: Any, device: Any) -> list[Figure]:
    """NCCL adds up a tensor over all GPUs."""
    del device
    count = len(tf.config.list_logical_devices("GPU"))
    if count == 1:
        raise NotApplicable("one GPU: TensorFlow calls NCCL only where there are several")
    return _all_reduce(tf, [f"/gpu:{number}" for number in range(count)], tf.distribute.NcclAllReduce())


@CHECKS.add("mirrored", uses_all=True)
def mirrored(tf: Any, device: Any) -> list[Figure]:
    """Training under MirroredStrategy: the first step as in float64 on the CPU, weights equal on all GPUs."""
    del device
    tf.config.experimental.enable_tensor_float_32_execution(False)
    count = len(tf.config.list_logical_devices("GPU"))
    return _mirrored(tf, [f"/gpu:{number}" for number in range(count)], tf.distribute.NcclAllReduce())


def _need_on(result: Any, device: str) -> None:
    """None may pass on the CPU, whatever the placement."""
    wanted = device.rsplit("/", maxsplit=1)[-1].upper()
    if not result.device.endswith(wanted):
        raise common.Failed(f"the result is on {result.device or 'no device'}, not on {wanted}")


def _need_capability(tf: Any, major: int, what: str) -> None:
    has = tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[0]).get("compute_capability")
    if has and has[0] < major:
        raise NotApplicable(f"{what} came with compute capability {major}.0, this GPU has {has[0]}.{has[1]}")


def _product_error(tf: Any, device: str, dtype: str) -> float:
    left, right = arrays.normal(SEED, SIZE, SIZE), arrays.normal(SEED + 1, SIZE, SIZE)
    with tf.device(device):
        found = tf.matmul(tf.cast(tf.constant(left), dtype), tf.cast(tf.constant(right), dtype))
        wide = tf.cast(found, "float32")
    _need_on(found, device)
    return common.relative_error(arrays.double(wide), left.astype("float64") @ right.astype("float64"))


def _all_reduce(tf: Any, names: list[str], operations: Any) -> list[Figure]:
    tf.config.set_soft_device_placement(True)  # the strategy places what it needs itself
    strategy = tf.distribute.MirroredStrategy(names, cross_device_ops=operations)
    world, place = strategy.num_replicas_in_sync, (arrays.indices(1 << 22) % 1024).astype("float32")

    def add() -> Any:
        here = tf.distribute.get_replica_context()
        rank = tf.cast(here.replica_id_in_sync_group, tf.float32)
        return here.all_reduce(tf.distribute.ReduceOp.SUM, tf.constant(place) * (rank + 1.0))

    totals = strategy.experimental_local_results(tf.function(lambda: strategy.run(add), autograph=False)())
    wrong = sum(int((total.numpy() != place * (world * (world + 1) // 2)).sum()) for total in totals)
    return [equal("wrong elements on all GPUs", wrong, 0), equal("GPUs that took part", len(totals), len(names))]


def _mirrored(tf: Any, names: list[str], operations: Any) -> list[Figure]:
    """Linear regression: its gradient can be written down."""
    tf.config.set_soft_device_placement(True)  # the strategy places what it needs itself
    strategy = tf.distribute.MirroredStrategy(names, cross_device_ops=operations)
    world, each, rate = strategy.num_replicas_in_sync, 64, 0.1
    inputs = arrays.normal(SEED, world, each, 32)
    wanted = inputs @ arrays.normal(SEED + 1, 32, 1)
    with strategy.scope():
        weights = tf.Variable(tf.zeros([32, 1]), aggregation=tf.VariableAggregation.MEAN)

    def replica(mine: Any, goal: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((mine @ weights - goal) ** 2)
        weights.assign_sub(rate * tape.gradient(loss, weights))  # its mean over the GPUs, by all-reduce
        return loss

    def shard(values: Any) -> Any:
        return strategy.experimental_distribute_values_from_function(
            lambda here: tf.constant(values[int(here.replica_id_in_sync_group)])
        )

    step = tf.function(lambda mine, goal: strategy.run(replica, args=(mine, goal)), autograph=False)
    shards = shard(inputs), shard(wanted)
    losses, first = [], None
    for number in range(20):
        lost = step(*shards)
        losses.append(sum(float(one) for one in strategy.experimental_local_results(lost)) / world)
        if number == 0:
            first = [one.numpy() for one in strategy.experimental_local_results(weights)]
    copies = strategy.experimental_local_results(weights)
    for name, copy in zip(names, copies):  # noqa: B905  Python 3.9 has no `strict`
        _need_on(copy, name)
    held = [one.numpy() for one in copies]
    expected = -rate * arrays.regression_gradient(inputs.reshape(-1, 32), wanted.reshape(-1, 1))
    return [
        # float32 over 64 to 512 samples: 1e-7 to 1e-6; a GPU left out: 0.1 and more.
        at_most("relative error of the first step", common.relative_error(arrays.double(first[0]), expected), 1e-4),  # type: ignore[index]
        equal("largest difference of a weight between GPUs", max(float(abs(one - held[0]).max()) for one in held), 0),
        at_most("loss at the end by that at the start", losses[-1] / losses[0], 0.5),
        note("GPUs", world),
    ]
