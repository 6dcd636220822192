"""nvcc from NVIDIA's wheels: it has the CUDA version of the cell, and its programs use the image's runtime."""

from __future__ import annotations

from typing import Any

from testinfra.host import Host

KERNEL = r"""
#include <cstdio>
__global__ void twice(float *x) { x[threadIdx.x] *= 2; }
int main() {
    int version = 0, count = -1;
    cudaRuntimeGetVersion(&version);
    cudaError_t status = cudaGetDeviceCount(&count);
    twice<<<1, 1>>>(nullptr);
    std::printf("%d %s", version, cudaGetErrorName(status));
}
"""


def test_version_is_that_of_the_cell(host: Host, subject: Any) -> None:
    assert f"release {subject.cell['cuda']}," in host.check_output("nvcc --version")


def test_compiles_links_and_runs(host: Host, subject: Any) -> None:
    """Without a GPU, the program prints an error of the runtime, so it has loaded the runtime."""
    host.check_output("mkdir -p /tmp/cu && echo %s > /tmp/cu/twice.cu", KERNEL)
    result = host.run("cd /tmp/cu && nvcc -arch=sm_90 -o twice twice.cu")
    assert result.rc == 0, result.stderr
    major, minor = subject.cell["cuda"].split(".")
    version, error = host.check_output("/tmp/cu/twice").split()
    assert version == f"{major}0{minor}0"
    assert error in ("cudaErrorInsufficientDriver", "cudaErrorNoDevice", "cudaSuccess")
