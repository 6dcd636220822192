"""PyTorch: torch.nn modules in its own layout (NCHW), torch.optim.SGD, torch.utils.data.DataLoader.

Runs in the images, on Python 3.9 and newer.
"""

from __future__ import annotations

import contextlib
import importlib
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.inside import shared

MODULE = "torch"
USUAL, COMPILED = "eager", "torch.compile"
LOADER = "torch.utils.data.DataLoader, worker processes"


class Framework:
    """What `child.py` measures."""

    def __init__(self, gpu: bool) -> None:
        self._torch: Any = importlib.import_module(MODULE)
        self._gpu = gpu
        if gpu and not self._torch.cuda.is_available():
            raise RuntimeError("PyTorch finds no GPU")
        self._device = self._torch.device("cuda" if gpu else "cpu")

    @property
    def version(self) -> str:
        return str(self._torch.__version__)

    def no_compiler(self) -> str:
        """Why torch.compile cannot be measured; empty if it can."""
        if not (shutil.which("g++") or shutil.which("gcc")):
            return "torch.compile needs a C++ compiler, which the image does not have"
        if not Path(sysconfig.get_path("include"), "Python.h").is_file():
            return "torch.compile needs Python.h, which the image does not have"
        return ""

    def _precision(self, name: str) -> None:
        """float32 is IEEE 754, without TF32."""
        self._torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        self._torch.backends.cudnn.allow_tf32 = name == "tf32"

    def _wait(self) -> None:
        if self._gpu:
            self._torch.cuda.synchronize()

    def product(self, size: int, precision: str) -> Callable[[], None]:
        torch = self._torch
        self._precision(precision)
        kind = torch.bfloat16 if precision == "bfloat16" else torch.float32
        torch.manual_seed(0)
        left, right = (torch.randn(size, size, device=self._device).to(kind) for _ in range(2))

        def multiply() -> None:
            torch.matmul(left, right)
            self._wait()

        return multiply

    def trainer(self, precision: str, *, compiled: bool) -> tuple[Callable[[], Any], Callable[[], None]]:
        """A step, which returns the loss, and a wait until all work is done."""
        torch = self._torch
        self._precision(precision)
        model = _model(torch).to(self._device)
        images, classes = shared.batch()
        images = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous().to(self._device)
        classes = torch.from_numpy(classes).to(self._device)
        optimizer = torch.optim.SGD(model.parameters(), lr=shared.RATE)
        cast = torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16")

        def loss_of(images: Any, classes: Any) -> Any:
            return torch.nn.functional.cross_entropy(model(images), classes)

        forward = torch.compile(loss_of) if compiled else loss_of

        def step() -> Any:
            optimizer.zero_grad(set_to_none=True)
            with cast:
                loss = forward(images, classes)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, self._wait

    @contextlib.contextmanager
    def loader(self, workers: int) -> Iterator[Any]:
        """Batches of one epoch, each time it is iterated; worker processes live as long as the block."""
        yield self._torch.utils.data.DataLoader(
            _Samples(self._torch), batch_size=shared.LOAD_BATCH, num_workers=workers, persistent_workers=workers > 0
        )


def _model(torch: Any) -> Any:
    """The model with the common weights, in PyTorch's order."""
    nn, values = torch.nn, shared.weights()
    layers: list[Any] = []
    for number, (inputs, outputs) in enumerate(shared.CONVOLUTIONS, 1):
        layers += [_filled(torch, nn.Conv2d(inputs, outputs, 3, padding=1), values, f"conv{number}"), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if number > 1 else []
    # The flattened input of the first dense layer is in the order channels, height, width.
    edge = shared.SIDE // 4
    dense = values["dense1"]
    values["dense1"] = dense.reshape(edge, edge, -1, dense.shape[1]).transpose(2, 0, 1, 3).reshape(dense.shape)
    first, second = (
        _filled(torch, nn.Linear(*sizes), values, f"dense{number}") for number, sizes in enumerate(shared.DENSE, 1)
    )
    return nn.Sequential(*layers, nn.Flatten(), first, nn.ReLU(), second)


def _filled(torch: Any, layer: Any, values: dict[str, Any], name: str) -> Any:
    """The layer with weights whose last two axes are in and out: PyTorch has out and in first."""
    weight = values[name]
    weight = weight.transpose(3, 2, 0, 1) if name.startswith("conv") else weight.T
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(weight.copy()))
        layer.bias.copy_(torch.from_numpy(values[f"{name}_bias"]))
    return layer


class _Samples:
    """A data set for DataLoader: a length and items."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._streams = shared.packed()
        self._generator = shared.numpy().random.RandomState(3)

    def __len__(self) -> int:
        return shared.SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self._torch.from_numpy(shared.sample(self._streams[index % len(self._streams)], self._generator))
