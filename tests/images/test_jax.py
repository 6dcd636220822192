"""JAX: the version and CUDA that the tag says, its CUDA libraries within its reach, and it learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def test_versions_are_those_of_the_cell(subject: Any, python: Callable[[str], Any]) -> None:
    code = "import jax, jaxlib, json; print(json.dumps([jax.__version__, jaxlib.__version__]))"
    jax, jaxlib = python(code)
    assert jax == subject.cell["release"]
    assert jaxlib == subject.wheels["jaxlib"]


def test_plugin_is_of_the_cells_cuda(subject: Any, python: Callable[[str], Any], attributes: dict[str, Any]) -> None:
    """The plugin tells which CUDA it was built with, and which libraries it has loaded.

    Not asked is CUPTI: that of CUDA 13.2 crashes where no driver is.
    """
    major = subject.cell["cuda"].split(".")[0]
    plugins = sorted(name for name in subject.wheels if name.startswith("jax-cuda"))
    if subject.cell["cuda"] == "cpu":
        assert plugins == []
        return
    assert plugins == [f"jax-cuda{major}-pjrt", f"jax-cuda{major}-plugin"]
    code = f"""
import json
from jax_cuda{major}_plugin import _versions as v
def ask(name):
    try:
        return getattr(v, name)()
    except Exception as error:
        return repr(error)
names = ["cuda_runtime_build_version", "cuda_runtime_get_version", "cudnn_build_version", "cudnn_get_version",
         "cublas_get_version", "cufft_get_version", "cusolver_get_version", "cusparse_get_version"]
print(json.dumps({{name: ask(name) for name in names}}))
"""
    told = python(code)
    assert {name: value for name, value in told.items() if not isinstance(value, int)} == {}
    has = [int(part) for part in subject.cell["cuda"].split(".")]
    assert told["cuda_runtime_get_version"] == has[0] * 1000 + has[1] * 10
    built = told["cuda_runtime_build_version"]
    assert built // 1000 == has[0]
    labels = attributes["Config"]["Labels"]
    assert labels["gpu-images.framework.cuda"] == f"{built // 1000}.{built % 1000 // 10}"
    cudnn = next(version for name, version in subject.wheels.items() if name.startswith("nvidia-cudnn"))
    numbers = [int(part) for part in cudnn.split(".")[:3]]
    assert told["cudnn_get_version"] == numbers[0] * 10000 + numbers[1] * 100 + numbers[2]
    assert told["cudnn_build_version"] // 10000 == numbers[0]


def test_cuda_libraries_come_from_opt_nvidia(subject: Any, python: Callable[[str], Any]) -> None:
    if subject.cell["cuda"] == "cpu":
        assert subject.data["cuda_wheels"] == []
        return
    major = subject.cell["cuda"].split(".")[0]
    code = f"""
import jax, json, re
from jax_cuda{major}_plugin import _versions as v
for name in ("cudnn_get_version", "cublas_get_version", "cufft_get_version", "cusolver_get_version",
             "cusparse_get_version", "cuda_runtime_get_version"):
    getattr(v, name)()
paths = {{line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}}
cuda = re.compile(r"lib(cu[a-zA-Z]+|nccl|nvrtc|nvJitLink)[A-Za-z_-]*[.]so")
print(json.dumps([path for path in paths if cuda.match(path.rsplit("/", 1)[1])]))
"""
    found = python(code)
    assert len(found) >= 6
    assert [path for path in found if not path.startswith("/opt/nvidia/nvidia/")] == []


def test_works_without_a_gpu(python: Callable[[str], Any]) -> None:
    code = """
import jax, jax.numpy as jnp, json
print(json.dumps([[d.platform for d in jax.devices()], float(jnp.ones(3).sum())]))
"""
    assert python(code) == [["cpu"], 3.0]  # this container was started without --gpus


def test_a_model_learns_on_the_cpu(python: Callable[[str], Any]) -> None:
    code = """
import jax, jax.numpy as jnp, json
x = jax.random.normal(jax.random.key(0), (256, 8))
y = (x.sum(1) > 0).astype(jnp.float32)
def loss(w):
    z = x @ w[:8] + w[8]
    return jnp.mean(jnp.maximum(z, 0) - z * y + jnp.log1p(jnp.exp(-jnp.abs(z))))
step = jax.jit(lambda w: w - 0.5 * jax.grad(loss)(w))
w = jnp.zeros(9)
first = float(loss(w))
for _ in range(200):
    w = step(w)
right = float((((x @ w[:8] + w[8]) > 0) == (y > 0.5)).mean())
print(json.dumps([first, float(loss(w)), right]))
"""
    first, last, right = python(code)
    assert last < 0.5 * first
    assert right > 0.95


def test_a_compiled_function_on_many_devices(python: Callable[[str], Any]) -> None:
    """XLA's CPU backend stands in for several GPUs."""
    code = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, jax.numpy as jnp, json
from jax.sharding import Mesh, NamedSharding, PartitionSpec
mesh = Mesh(jax.devices(), ("batch",))
x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("batch")))
print(json.dumps([len(x.sharding.device_set), float(jax.jit(jnp.sum)(x))]))
"""
    assert python(code) == [4, pytest.approx(28.0)]
