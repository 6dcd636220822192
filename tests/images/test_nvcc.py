"""nvcc from NVIDIA's wheels: it is the CUDA of the cell, and what it compiles links against the image's runtime."""

from __future__ import annotations

from typing import Any

from testinfra.host import Host

KERNEL = r"""
#include <cstdio>
__global__ void twice(float *x) { x[threadIdx.x] *= 2; }
int main() {
    int version = 0, count = -1;
    cudaRuntimeGetVersion(&version);
    cudaError_t told = cudaGetDeviceCount(&count);
    twice<<<1, 1>>>(nullptr);
    std::printf("%d %s", version, cudaGetErrorName(told));
}
"""


def test_is_of_the_cells_cuda(host: Host, subject: Any) -> None:
    assert f"release {subject.cell['cuda']}," in host.check_output("nvcc --version")


def test_compiles_links_and_runs(host: Host, subject: Any) -> None:
    """Without a GPU the program says so itself: it has found and loaded the runtime."""
    host.check_output("mkdir -p /tmp/cu && echo %s > /tmp/cu/twice.cu", KERNEL)
    done = host.run("cd /tmp/cu && nvcc -arch=sm_90 -o twice twice.cu")
    assert done.rc == 0, done.stderr
    major, minor = subject.cell["cuda"].split(".")
    version, told = host.check_output("/tmp/cu/twice").split()
    assert version == f"{major}0{minor}0"
    assert told in ("cudaErrorInsufficientDriver", "cudaErrorNoDevice", "cudaSuccess")
