"""PyTorch: the version and CUDA that the tag says, libraries from the one place, and it learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_version_and_cuda_are_those_of_the_cell(
    subject: Any, python: Callable[[str], Any], attributes: dict[str, Any]
) -> None:
    code = "import torch, json; print(json.dumps([torch.__version__.split('+')[0], torch.version.cuda]))"
    assert python(code) == [subject.cell["release"], subject.cell["cuda"]]
    assert attributes["Config"]["Labels"]["gpu-images.framework.cuda"] == subject.cell["cuda"]


def test_cudnn_and_nccl_are_the_locked_ones(subject: Any, python: Callable[[str], Any]) -> None:
    code = """
import torch, json
from torch.cuda import nccl
print(json.dumps([torch.backends.cudnn.version(), list(nccl.version())]))
"""
    cudnn, nccl = python(code)
    locked = {
        name.rsplit("-cu", 1)[0]: version for name, version in subject.wheels.items() if name.startswith("nvidia-")
    }
    major, minor, patch = (int(part) for part in locked["nvidia-cudnn"].split(".")[:3])
    assert cudnn == major * 10000 + minor * 100 + patch
    assert ".".join(map(str, nccl[:3])) == locked["nvidia-nccl"]


def test_cuda_libraries_come_from_opt_nvidia(python: Callable[[str], Any]) -> None:
    code = """
import torch, json, re
paths = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
cuda = re.compile(r"lib(cu[a-z]+|nccl|nvrtc|nvJitLink|nvshmem)[A-Za-z_-]*[.]so")
print(json.dumps([path for path in paths if cuda.match(path.rsplit("/", 1)[1])]))
"""
    found = python(code)
    assert len(found) >= 10
    assert [path for path in found if not path.startswith("/opt/nvidia/nvidia/")] == []


def test_works_without_a_gpu(python: Callable[[str], Any]) -> None:
    code = """
import torch, json
print(json.dumps([torch.cuda.is_available(), torch.cuda.is_available() and torch.cuda.device_count() or 0,
                  float(torch.ones(3, device="cuda" if torch.cuda.is_available() else "cpu").sum())]))
"""
    assert python(code) == [False, 0, 3.0]  # this container was started without --gpus


def test_a_model_learns_on_the_cpu(python: Callable[[str], Any]) -> None:
    code = """
import torch, json
torch.manual_seed(0)
x = torch.randn(256, 8)
y = (x.sum(1, keepdim=True) > 0).float()
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
losses = []
for _ in range(60):
    optimizer.zero_grad()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
right = ((model(x) > 0).float() == y).float().mean().item()
print(json.dumps([losses[0], losses[-1], right]))
"""
    first, last, right = python(code)
    assert last < 0.3 * first
    assert right > 0.95


def test_torchvision_fits_this_torch(python: Callable[[str], Any]) -> None:
    """Its compiled operators load and compute: a build for another torch fails here, not at import."""
    code = """
import torch, torchvision, json
boxes = torch.tensor([[0.0, 0.0, 10.0, 10.0], [0.0, 0.0, 9.0, 9.0], [20.0, 20.0, 30.0, 30.0]])
print(json.dumps(torchvision.ops.nms(boxes, torch.tensor([0.9, 0.8, 0.7]), 0.5).tolist()))
"""
    assert python(code) == [0, 2]


def test_torchaudio_fits_this_torch(subject: Any, python: Callable[[str], Any]) -> None:
    """Where it is: 2.9.1 was its last release with compiled operators."""
    code = """
import json
try:
    import torchaudio
except ModuleNotFoundError:
    print(json.dumps(None))
else:
    import torch
    wave = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    filtered = torchaudio.functional.lfilter(wave, torch.tensor([1.0, -0.5]), torch.tensor([1.0, 0.0]))
    print(json.dumps(filtered.tolist()))
"""
    expected = [[1.0, 0.5, 0.25, 0.125]] if "torchaudio" in subject.wheels else None
    assert python(code) == expected


def test_architectures_are_those_of_the_label(python: Callable[[str], Any], attributes: dict[str, Any]) -> None:
    code = "import torch, json; print(json.dumps(torch._C._cuda_getArchFlags().split()))"
    labels = attributes["Config"]["Labels"]
    assert python(code) == labels["gpu-images.gpu.architectures"].split()
