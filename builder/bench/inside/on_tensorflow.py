"""TensorFlow: tf.nn operations in its own layout (NHWC) inside a tf.function, without Keras; tf.data.

Runs in the images, on Python 3.9 and newer, TensorFlow 2.9 and newer.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from builder.bench.inside import shared

MODULE = "tensorflow"
USUAL, COMPILED = "tf.function", "tf.function, XLA"
LOADER = "tf.data, threads"


class Framework:
    """What `child.py` measures."""

    def __init__(self, gpu: bool) -> None:
        self._tf: Any = importlib.import_module(MODULE)
        if gpu and not self._tf.config.list_physical_devices("GPU"):
            raise RuntimeError("TensorFlow sees no GPU")
        self._device = "/GPU:0" if gpu else "/CPU:0"

    @property
    def version(self) -> str:
        return str(self._tf.__version__)

    def no_compiler(self) -> str:
        """XLA is part of TensorFlow."""
        return ""

    def precision(self, name: str) -> None:
        """float32 is that of IEEE 754, without TF32."""
        self._tf.config.experimental.enable_tensor_float_32_execution(name == "tf32")

    def product(self, size: int, precision: str) -> Product:
        return Product(self, self._tf, self._device, size, precision)

    def trainer(self, precision: str, *, compiled: bool) -> Trainer:
        return Trainer(self, self._tf, self._device, precision, compiled)

    @contextlib.contextmanager
    def loader(self, workers: int) -> Iterator[Any]:
        """Batches of one epoch, each time it is iterated. Without workers one thread does all, when it is asked."""
        tf = self._tf
        streams = shared.packed()

        def sample(stream: Any) -> Any:
            plain = tf.io.decode_raw(tf.io.decode_compressed(stream, "ZLIB"), tf.uint8)
            image = tf.reshape(plain, (shared.FULL, shared.FULL, shared.CHANNELS))
            start = tf.random.uniform((2,), 0, shared.FULL - shared.CROP + 1, tf.int32)
            image = tf.slice(image, tf.concat([start, [0]], 0), (shared.CROP, shared.CROP, shared.CHANNELS))
            image = tf.image.random_flip_left_right(image)
            return (tf.cast(image, tf.float32) - shared.HALF) / shared.HALF

        options = tf.data.Options()
        options.threading.private_threadpool_size = max(1, workers)
        options.threading.max_intra_op_parallelism = 1
        with tf.device("/CPU:0"):
            made = tf.data.Dataset.from_tensor_slices(streams).repeat(shared.SAMPLES // len(streams))
            made = made.map(sample, num_parallel_calls=workers or None).batch(shared.LOAD_BATCH)
            yield (made.prefetch(2) if workers else made).with_options(options)


class Product:
    def __init__(self, framework: Framework, tf: Any, device: str, size: int, precision: str) -> None:
        framework.precision(precision)
        kind = tf.bfloat16 if precision == "bfloat16" else tf.float32
        self._tf, self._device = tf, device
        with tf.device(device):
            self._left = tf.cast(tf.random.normal((size, size), seed=0), kind)
            self._right = tf.cast(tf.random.normal((size, size), seed=1), kind)

    def __call__(self) -> None:
        with self._tf.device(self._device):
            made = self._tf.matmul(self._left, self._right)
            made[0, 0].numpy()  # one number is brought back, which waits for the product


class Trainer:
    """The model and its optimiser; `step` may return before the work is done, `loss` not."""

    def __init__(self, framework: Framework, tf: Any, device: str, precision: str, compiled: bool) -> None:
        framework.precision(precision)
        self._tf, self._device = tf, device
        self._kind = tf.bfloat16 if precision == "bfloat16" else tf.float32
        images, classes = shared.batch()
        with tf.device(device):
            self._weights = {name: tf.Variable(value) for name, value in shared.weights().items()}
            self._images, self._classes = tf.constant(images), tf.constant(classes.astype("int32"))
        self._step = tf.function(self._one, jit_compile=True if compiled else None)
        self._last: Any = None

    def _loss_of(self, images: Any, classes: Any) -> Any:
        tf = self._tf
        weights = {name: tf.cast(value, self._kind) for name, value in self._weights.items()}
        hidden = tf.cast(images, self._kind)
        for number in range(1, len(shared.CONVOLUTIONS) + 1):
            hidden = tf.nn.conv2d(hidden, weights[f"conv{number}"], strides=1, padding="SAME")
            hidden = tf.nn.relu(tf.nn.bias_add(hidden, weights[f"conv{number}_bias"]))
            hidden = tf.nn.max_pool2d(hidden, 2, 2, "VALID") if number > 1 else hidden
        hidden = tf.reshape(hidden, (shared.BATCH, shared.DENSE[0][0]))
        hidden = tf.nn.relu(tf.matmul(hidden, weights["dense1"]) + weights["dense1_bias"])
        logits = tf.cast(tf.matmul(hidden, weights["dense2"]) + weights["dense2_bias"], tf.float32)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=classes, logits=logits))

    def _one(self, images: Any, classes: Any) -> Any:
        with self._tf.GradientTape() as tape:
            loss = self._loss_of(images, classes)
        names = list(self._weights)
        gradients = tape.gradient(loss, [self._weights[name] for name in names])
        for number, name in enumerate(names):
            self._weights[name].assign_sub(shared.RATE * gradients[number])
        return loss

    def step(self) -> None:
        with self._tf.device(self._device):
            self._last = self._step(self._images, self._classes)

    def wait(self) -> None:
        """The first layer's gradient is the last to come."""
        self._weights["conv1_bias"].numpy()

    def loss(self) -> float:
        return float(self._last)
