"""PyTorch on a GPU. Each test first makes sure that the device is there: none may pass on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from builder import gpu

DEVICE = """
import json, torch
assert torch.cuda.is_available(), "no GPU in the container"
device = torch.device("cuda:0")
"""


def test_sees_every_gpu_that_nvml_sees(python: Callable[[str], Any]) -> None:
    assert python(DEVICE + "print(json.dumps(torch.cuda.device_count()))") == gpu.count()


def test_matrix_product_agrees_with_the_cpu(python: Callable[[str], Any]) -> None:
    code = """
torch.manual_seed(0)
torch.backends.cuda.matmul.allow_tf32 = False
a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
product = (a.to(device) @ b.to(device))
assert product.is_cuda
reference = a.double() @ b.double()
print(json.dumps(((product.cpu().double() - reference).norm() / reference.norm()).item()))
"""
    assert python(DEVICE + code) < 1e-5


def test_convolution_goes_through_cudnn_and_agrees_with_the_cpu(python: Callable[[str], Any]) -> None:
    code = """
torch.manual_seed(0)
assert torch.backends.cudnn.is_acceptable(torch.zeros(1, device=device))
torch.backends.cudnn.allow_tf32 = False
image, kernel = torch.randn(4, 3, 64, 64), torch.randn(8, 3, 3, 3)
result = torch.nn.functional.conv2d(image.to(device), kernel.to(device)).cpu().double()
reference = torch.nn.functional.conv2d(image.double(), kernel.double())
print(json.dumps(((result - reference).norm() / reference.norm()).item()))
"""
    assert python(DEVICE + code) < 1e-5
