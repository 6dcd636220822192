"""JAX: jax.lax and jax.numpy in NHWC, SGD by jax.tree_util, compiled by jax.jit; no other package.

Runs in the images, on Python 3.9 and newer. JAX has no data loader: a pool of processes replaces it.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.inside import shared

MODULE = "jax"
USUAL = COMPILED = "jax.jit"
LOADER = "multiprocessing.Pool (JAX has no loader of its own)"


class Framework:
    """What `child.py` measures."""

    def __init__(self, gpu: bool) -> None:
        self._jax: Any = importlib.import_module(MODULE)
        platform = self._jax.devices()[0].platform
        if gpu and platform != "gpu":
            raise RuntimeError(f"JAX finds no GPU, only: {platform}")

    @property
    def version(self) -> str:
        return str(self._jax.__version__)

    def no_compiler(self) -> str:
        """XLA is part of JAX."""
        return ""

    def _precision(self, name: str) -> Any:
        """Sets the precision and returns the type of numbers. float32 is IEEE 754, without TF32."""
        precisions = {"float32": "highest", "tf32": "tensorfloat32", "bfloat16": "default"}
        self._jax.config.update("jax_default_matmul_precision", precisions[name])
        return self._jax.numpy.bfloat16 if name == "bfloat16" else self._jax.numpy.float32

    def product(self, size: int, precision: str) -> Callable[[], None]:
        jax, kind = self._jax, self._precision(precision)
        keys = jax.random.split(jax.random.PRNGKey(0))
        left, right = (jax.random.normal(key, (size, size)).astype(kind) for key in keys)
        return lambda: jax.numpy.matmul(left, right).block_until_ready()

    def trainer(self, precision: str, *, compiled: bool) -> tuple[Callable[[], Any], Callable[[], None]]:
        """A step, which returns the loss, and a wait until all work is done. JAX always compiles."""
        del compiled
        jax, kind = self._jax, self._precision(precision)
        images, classes = shared.batch()
        images, classes = jax.device_put(images), jax.device_put(classes.astype("int32"))
        weights = jax.device_put(shared.weights())

        def update(weights: Any, images: Any, classes: Any) -> tuple[Any, Any]:
            loss, gradients = jax.value_and_grad(loss_of)(weights, images, classes)
            return jax.tree_util.tree_map(lambda old, slope: old - shared.RATE * slope, weights, gradients), loss

        def loss_of(weights: Any, images: Any, classes: Any) -> Any:
            return _loss(jax, {name: value.astype(kind) for name, value in weights.items()}, images, classes)

        compiled_update = jax.jit(update, donate_argnums=(0,))

        def step() -> Any:
            nonlocal weights
            weights, loss = compiled_update(weights, images, classes)
            return loss

        return step, lambda: jax.block_until_ready(weights)

    @contextlib.contextmanager
    def loader(self, workers: int) -> Iterator[Any]:
        """Batches of one epoch, each time it is iterated."""
        if not workers:
            _begin()
            yield _Epochs(map)
            return
        # Spawned, not forked: JAX has threads.
        with multiprocessing.get_context("spawn").Pool(workers, _begin) as pool:
            yield _Epochs(pool.imap)


def _loss(jax: Any, weights: Any, images: Any, classes: Any) -> Any:
    """The model, in the type of the weights; the loss in float32."""
    jnp, lax = jax.numpy, jax.lax
    hidden = images.astype(weights["conv1"].dtype)
    for number in range(1, len(shared.CONVOLUTIONS) + 1):
        hidden = lax.conv_general_dilated(
            hidden, weights[f"conv{number}"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        hidden = jax.nn.relu(hidden + weights[f"conv{number}_bias"])
        if number > 1:
            hidden = lax.reduce_window(hidden, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    hidden = hidden.reshape(shared.BATCH, shared.DENSE[0][0])
    hidden = jax.nn.relu(hidden @ weights["dense1"] + weights["dense1_bias"])
    logits = (hidden @ weights["dense2"] + weights["dense2_bias"]).astype(jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), classes[:, None], axis=1).mean()


_streams: list[bytes] = []


def _begin() -> None:
    """In each worker, once."""
    _streams[:] = shared.packed()


def _batch(number: int) -> Any:
    np = shared.numpy()
    generator = np.random.RandomState(number)
    first = number * shared.LOAD_BATCH
    indices = range(first, first + shared.LOAD_BATCH)
    return np.stack([shared.sample(_streams[index % len(_streams)], generator) for index in indices])


class _Epochs:
    """An epoch of batches each time it is iterated."""

    def __init__(self, apply: Any) -> None:
        self._apply = apply

    def __iter__(self) -> Iterator[Any]:
        yield from self._apply(_batch, range(shared.SAMPLES // shared.LOAD_BATCH))
