"""TensorFlow: tf.nn operations in its own layout (NHWC) inside a tf.function, without Keras; tf.data.

Runs in the images, on Python 3.9 and newer, TensorFlow 2.9 and newer.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.inside import shared

MODULE = "tensorflow"
USUAL, COMPILED = "tf.function", "tf.function, XLA"
LOADER = "tf.data, threads"


class Framework:
    """What `child.py` measures."""

    def __init__(self, gpu: bool) -> None:
        self._tf: Any = importlib.import_module(MODULE)
        if gpu and not self._tf.config.list_physical_devices("GPU"):
            raise RuntimeError("TensorFlow finds no GPU")
        self._device = "/GPU:0" if gpu else "/CPU:0"

    @property
    def version(self) -> str:
        return str(self._tf.__version__)

    def no_compiler(self) -> str:
        """XLA is part of TensorFlow."""
        return ""

    def _precision(self, name: str) -> Any:
        """Sets the precision and returns the type of numbers. float32 is IEEE 754, without TF32."""
        self._tf.config.experimental.enable_tensor_float_32_execution(name == "tf32")
        return self._tf.bfloat16 if name == "bfloat16" else self._tf.float32

    def product(self, size: int, precision: str) -> Callable[[], None]:
        tf, kind = self._tf, self._precision(precision)
        with tf.device(self._device):
            left, right = (tf.cast(tf.random.normal((size, size), seed=seed), kind) for seed in (0, 1))

        def multiply() -> None:
            with tf.device(self._device):
                tf.matmul(left, right)[0, 0].numpy()  # copying one number waits for the product

        return multiply

    def trainer(self, precision: str, *, compiled: bool) -> tuple[Callable[[], Any], Callable[[], None]]:
        """A step, which returns the loss, and a wait until all work is done."""
        tf, kind = self._tf, self._precision(precision)
        images, classes = shared.batch()
        with tf.device(self._device):
            weights = {name: tf.Variable(value) for name, value in shared.weights().items()}
            images, classes = tf.constant(images), tf.constant(classes.astype("int32"))

        def update(images: Any, classes: Any) -> Any:
            with tf.GradientTape() as tape:
                cast = {name: tf.cast(value, kind) for name, value in weights.items()}
                loss = _loss(tf, cast, tf.cast(images, kind), classes)
            for name, gradient in tape.gradient(loss, weights).items():
                weights[name].assign_sub(shared.RATE * gradient)
            return loss

        compiled_update = tf.function(update, jit_compile=True if compiled else None)

        def step() -> Any:
            with tf.device(self._device):
                return compiled_update(images, classes)

        # Reading a weight of the first layer waits: its gradient is computed last.
        return step, weights["conv1_bias"].numpy

    @contextlib.contextmanager
    def loader(self, workers: int) -> Iterator[Any]:
        """Batches of one epoch, each time it is iterated. Without workers one thread does all, on demand."""
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
            batches = tf.data.Dataset.from_tensor_slices(streams).repeat(shared.SAMPLES // len(streams))
            batches = batches.map(sample, num_parallel_calls=workers or None).batch(shared.LOAD_BATCH)
            yield (batches.prefetch(2) if workers else batches).with_options(options)


def _loss(tf: Any, weights: Any, hidden: Any, classes: Any) -> Any:
    """The model, in the type of the weights; the loss in float32."""
    for number in range(1, len(shared.CONVOLUTIONS) + 1):
        hidden = tf.nn.conv2d(hidden, weights[f"conv{number}"], strides=1, padding="SAME")
        hidden = tf.nn.relu(tf.nn.bias_add(hidden, weights[f"conv{number}_bias"]))
        hidden = tf.nn.max_pool2d(hidden, 2, 2, "VALID") if number > 1 else hidden
    hidden = tf.reshape(hidden, (shared.BATCH, shared.DENSE[0][0]))
    hidden = tf.nn.relu(tf.matmul(hidden, weights["dense1"]) + weights["dense1_bias"])
    logits = tf.cast(tf.matmul(hidden, weights["dense2"]) + weights["dense2_bias"], tf.float32)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=classes, logits=logits))
