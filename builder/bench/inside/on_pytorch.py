"""PyTorch: torch.nn modules in its own layout (NCHW), torch.optim.SGD, torch.utils.data.DataLoader.

Runs in the images, on Python 3.9 and newer.
"""

from __future__ import annotations

import contextlib
import importlib
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from builder.bench.inside import shared

MODULE = "torch"
USUAL, COMPILED = "eager", "torch.compile"
LOADER = "torch.utils.data.DataLoader, worker processes"


class Framework:
    """What `child.py` measures."""

    def __init__(self, gpu: bool) -> None:
        self._torch: Any = importlib.import_module(MODULE)
        self._gpu = gpu
        if gpu and not self._torch.cuda.is_available():
            raise RuntimeError("PyTorch sees no GPU")
        self._device = self._torch.device("cuda" if gpu else "cpu")

    @property
    def version(self) -> str:
        return str(self._torch.__version__)

    def no_compiler(self) -> str:
        """Why the second way of training is not there; empty where it is."""
        if not (shutil.which("g++") or shutil.which("gcc")):
            return "torch.compile needs a C++ compiler, which the image does not have"
        if not Path(sysconfig.get_path("include"), "Python.h").is_file():
            return "torch.compile needs Python.h, which the image does not have"
        return ""

    def precision(self, name: str) -> None:
        """float32 is that of IEEE 754, without TF32."""
        self._torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        self._torch.backends.cudnn.allow_tf32 = name == "tf32"

    def wait(self) -> None:
        if self._gpu:
            self._torch.cuda.synchronize()

    def product(self, size: int, precision: str) -> Product:
        return Product(self, self._torch, self._device, size, precision)

    def trainer(self, precision: str, *, compiled: bool) -> Trainer:
        return Trainer(self, self._torch, self._device, precision, compiled)

    @contextlib.contextmanager
    def loader(self, workers: int) -> Iterator[Any]:
        """Batches of one epoch, each time it is iterated; worker processes live as long as the block."""
        made = self._torch.utils.data.DataLoader(
            _Samples(self._torch), batch_size=shared.LOAD_BATCH, num_workers=workers, persistent_workers=workers > 0
        )
        yield made


class Product:
    def __init__(self, framework: Framework, torch: Any, device: Any, size: int, precision: str) -> None:
        framework.precision(precision)
        kind = torch.bfloat16 if precision == "bfloat16" else torch.float32
        torch.manual_seed(0)
        self._left = torch.randn(size, size, device=device).to(kind)
        self._right = torch.randn(size, size, device=device).to(kind)
        self._framework = framework
        self._torch = torch

    def __call__(self) -> None:
        self._torch.matmul(self._left, self._right)
        self._framework.wait()


class Trainer:
    """The model and its optimiser; `step` may return before the work is done, `loss` not."""

    def __init__(self, framework: Framework, torch: Any, device: Any, precision: str, compiled: bool) -> None:
        framework.precision(precision)
        nn = torch.nn
        layers: list[Any] = []
        for number, (inputs, outputs) in enumerate(shared.CONVOLUTIONS, 1):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if number > 1 else []
        layers += [nn.Flatten(), nn.Linear(*shared.DENSE[0]), nn.ReLU(), nn.Linear(*shared.DENSE[1])]
        self._model = nn.Sequential(*layers)
        _fill(torch, [one for one in layers if isinstance(one, (nn.Conv2d, nn.Linear))])
        self._model.to(device)
        images, classes = shared.batch()
        self._images = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous().to(device)
        self._classes = torch.from_numpy(classes).to(device)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=shared.RATE)
        half = precision == "bfloat16"
        self._cast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=half)
        self._forward = torch.compile(self._loss_of) if compiled else self._loss_of
        self._torch = torch
        self._last: Any = None
        self.wait = framework.wait

    def _loss_of(self, images: Any, classes: Any) -> Any:
        return self._torch.nn.functional.cross_entropy(self._model(images), classes)

    def step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        with self._cast:
            loss = self._forward(self._images, self._classes)
        loss.backward()
        self._optimizer.step()
        self._last = loss.detach()

    def loss(self) -> float:
        return float(self._last)


def _fill(torch: Any, layers: list[Any]) -> None:
    """Puts the common weights into PyTorch's order."""
    values = shared.weights()
    names = [f"conv{number}" for number in (1, 2, 3)] + [f"dense{number}" for number in (1, 2)]
    for number, name in enumerate(names):
        weight = values[name]
        if name.startswith("conv"):
            weight = weight.transpose(3, 2, 0, 1)
        elif name == "dense1":
            edge = shared.SIDE // 4
            weight = weight.reshape(edge, edge, -1, weight.shape[1]).transpose(2, 0, 1, 3).reshape(weight.shape).T
        else:
            weight = weight.T
        with torch.no_grad():
            layers[number].weight.copy_(torch.from_numpy(weight.copy()))
            layers[number].bias.copy_(torch.from_numpy(values[f"{name}_bias"]))


class _Samples:
    """A data set as DataLoader wants it: a length and an item."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._streams = shared.packed()
        self._generator = shared.numpy().random.RandomState(3)

    def __len__(self) -> int:
        return shared.SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self._torch.from_numpy(shared.sample(self._streams[index % len(self._streams)], self._generator))
