"""What all frameworks have in common: the model, its data and first weights, the loaders' samples, the clock.

Runs in the images, on Python 3.9 and newer.
"""

from __future__ import annotations

import importlib
import json
import statistics
import time
import zlib
from collections.abc import Callable, Iterable
from typing import Any

# The model: three 3x3 convolutions (padding 1) with ReLU, 2x2 max pooling after the second and third, two dense layers.
BATCH, SIDE, CHANNELS, CLASSES = 128, 32, 3, 10
CONVOLUTIONS = ((CHANNELS, 32), (32, 64), (64, 128))
DENSE = ((SIDE // 4 * (SIDE // 4) * 128, 256), (256, CLASSES))
RATE = 0.001  # of plain SGD, without momentum
CHECKED = 5  # steps after which every framework must have the same loss

# The samples of the data loaders: images kept as zlib streams; inflated, cropped, flipped at random, made float32.
FULL, CROP, LOAD_BATCH, SAMPLES, DIFFERENT = 128, 112, 64, 2048, 256
HALF = 127.5


def emit(**line: Any) -> None:
    """Prints a line for the host."""
    print(json.dumps(line), flush=True)


def numpy() -> Any:
    """NumPy, not imported earlier: the import of a framework is measured with as much of it as the framework needs."""
    return importlib.import_module("numpy")


def weights() -> dict[str, Any]:
    """The first weights, the same for all: convolutions as height, width, in, out; dense layers as in, out.

    The first dense layer takes its input flattened in the order height, width, channels.
    """
    np = numpy()
    generator = np.random.RandomState(0)
    arrays: dict[str, Any] = {}
    for number, (inputs, outputs) in enumerate(CONVOLUTIONS, 1):
        scale = (2 / (9 * inputs)) ** 0.5
        arrays[f"conv{number}"] = (generator.randn(3, 3, inputs, outputs) * scale).astype(np.float32)
        arrays[f"conv{number}_bias"] = np.zeros(outputs, np.float32)
    for number, (inputs, outputs) in enumerate(DENSE, 1):
        arrays[f"dense{number}"] = (generator.randn(inputs, outputs) * (2 / inputs) ** 0.5).astype(np.float32)
        arrays[f"dense{number}_bias"] = np.zeros(outputs, np.float32)
    return arrays


def batch() -> tuple[Any, Any]:
    """One batch of images (batch, height, width, channels) and their classes, the same for all."""
    np = numpy()
    generator = np.random.RandomState(1)
    images = generator.randn(BATCH, SIDE, SIDE, CHANNELS).astype(np.float32)
    return images, generator.randint(0, CLASSES, BATCH)


def packed() -> list[bytes]:
    """Images for the data loaders, compressed: noise on a slope, which deflates to about two thirds."""
    np = numpy()
    generator = np.random.RandomState(2)
    slope = np.arange(FULL * FULL * CHANNELS).reshape(FULL, FULL, CHANNELS) // 400
    noise = generator.randint(0, 32, (DIFFERENT, FULL, FULL, CHANNELS))
    return [zlib.compress((slope + image).astype(np.uint8).tobytes(), 6) for image in noise]


def sample(stream: bytes, generator: Any) -> Any:
    """One sample by NumPy, for the loaders that work in Python."""
    np = numpy()
    image = np.frombuffer(zlib.decompress(stream), np.uint8).reshape(FULL, FULL, CHANNELS)
    top, left = generator.randint(0, FULL - CROP + 1, 2)
    image = image[top : top + CROP, left : left + CROP]
    if generator.randint(2):
        image = image[:, ::-1]
    return (image.astype(np.float32) - HALF) / HALF


def median_s(action: Callable[[], object], count: int) -> float:
    """Median of the seconds of one call."""
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def step_s(step: Callable[[], object], wait: Callable[[], object], *, count: int, steps: int) -> float:
    """Median over blocks of the seconds per step. The clock of a block stops when its work is done, not started."""

    def block() -> None:
        for _ in range(steps):
            step()
        wait()

    return median_s(block, count) / steps


def drain(loader: Iterable[Any]) -> None:
    """Takes one epoch; raises RuntimeError if samples are missing."""
    samples = sum(int(images.shape[0]) for images in loader)
    if samples != SAMPLES:
        raise RuntimeError(f"the loader returned {samples} of {SAMPLES} samples")
