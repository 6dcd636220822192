"""JAX: jax.lax and jax.numpy in NHWC, SGD by jax.tree_util, compiled by jax.jit; no other package.

Runs in the images, on Python 3.9 and newer. JAX has no data loader of its own: a pool of processes stands in for one.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
from collections.abc import Iterator
from typing import Any

from builder.bench.inside import shared

MODULE = "jax"
USUAL = COMPILED = "jax.jit"
LOADER = "multiprocessing.Pool (JAX has no loader of its own)"


class Framework:
    """What `child.py` measures."""

    def __init__(self, gpu: bool) -> None:
        self._jax: Any = importlib.import_module(MODULE)
        found = self._jax.devices()[0].platform
        if gpu and found != "gpu":
            raise RuntimeError(f"JAX sees no GPU, only: {found}")

    @property
    def version(self) -> str:
        return str(self._jax.__version__)

    def no_compiler(self) -> str:
        """XLA is part of JAX."""
        return ""

    def precision(self, name: str) -> None:
        """float32 is that of IEEE 754, without TF32."""
        kinds = {"float32": "highest", "tf32": "tensorfloat32", "bfloat16": "default"}
        self._jax.config.update("jax_default_matmul_precision", kinds[name])

    def product(self, size: int, precision: str) -> Product:
        return Product(self, self._jax, size, precision)

    def trainer(self, precision: str, *, compiled: bool) -> Trainer:
        del compiled  # there is no other way
        return Trainer(self, self._jax, precision)

    @contextlib.contextmanager
    def loader(self, workers: int) -> Iterator[Any]:
        """Batches of one epoch, each time it is iterated."""
        if not workers:
            _begin()
            yield _Epochs(map)
            return
        # Started anew, not forked: JAX has threads.
        with multiprocessing.get_context("spawn").Pool(workers, _begin) as pool:
            yield _Epochs(pool.imap)


class Product:
    def __init__(self, framework: Framework, jax: Any, size: int, precision: str) -> None:
        framework.precision(precision)
        kind = jax.numpy.bfloat16 if precision == "bfloat16" else jax.numpy.float32
        keys = jax.random.split(jax.random.PRNGKey(0))
        self._left = jax.random.normal(keys[0], (size, size)).astype(kind)
        self._right = jax.random.normal(keys[1], (size, size)).astype(kind)
        self._jax = jax

    def __call__(self) -> None:
        self._jax.numpy.matmul(self._left, self._right).block_until_ready()


class Trainer:
    """The model and its optimiser; `step` may return before the work is done, `loss` not."""

    def __init__(self, framework: Framework, jax: Any, precision: str) -> None:
        framework.precision(precision)
        self._jax = jax
        self._kind = jax.numpy.bfloat16 if precision == "bfloat16" else jax.numpy.float32
        images, classes = shared.batch()
        self._weights = jax.device_put(shared.weights())
        self._images, self._classes = jax.device_put(images), jax.device_put(classes.astype("int32"))
        self._step = jax.jit(self._one, donate_argnums=(0,))
        self._last: Any = None

    def _loss_of(self, weights: Any, images: Any, classes: Any) -> Any:
        jnp, lax = self._jax.numpy, self._jax.lax
        weights = {name: value.astype(self._kind) for name, value in weights.items()}
        hidden = images.astype(self._kind)
        for number in range(1, len(shared.CONVOLUTIONS) + 1):
            hidden = lax.conv_general_dilated(
                hidden, weights[f"conv{number}"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            hidden = self._jax.nn.relu(hidden + weights[f"conv{number}_bias"])
            if number > 1:
                hidden = lax.reduce_window(hidden, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        hidden = hidden.reshape(shared.BATCH, shared.DENSE[0][0])
        hidden = self._jax.nn.relu(hidden @ weights["dense1"] + weights["dense1_bias"])
        logits = (hidden @ weights["dense2"] + weights["dense2_bias"]).astype(jnp.float32)
        chances = self._jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(chances, classes[:, None], axis=1).mean()

    def _one(self, weights: Any, images: Any, classes: Any) -> tuple[Any, Any]:
        loss, gradients = self._jax.value_and_grad(self._loss_of)(weights, images, classes)
        changed = self._jax.tree_util.tree_map(lambda old, slope: old - shared.RATE * slope, weights, gradients)
        return changed, loss

    def step(self) -> None:
        self._weights, self._last = self._step(self._weights, self._images, self._classes)

    def wait(self) -> None:
        self._jax.block_until_ready(self._weights)

    def loss(self) -> float:
        return float(self._last)


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

    def __init__(self, each: Any) -> None:
        self._each = each

    def __iter__(self) -> Iterator[Any]:
        yield from self._each(_batch, range(shared.SAMPLES // shared.LOAD_BATCH))
