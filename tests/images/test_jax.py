"""JAX: the version and CUDA of the tag, the CUDA libraries that it loads, and training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from testinfra.host import Host

from tests.images import examples
from tests.images.dist_check import (  # noqa: F401  pytest collects the tests and the fixture in this module
    pair,
    test_dist_check_names_the_missing_rank,
    test_dist_check_of_two_containers,
    test_dist_check_of_two_processes,
)
from tests.images.framework_packages import (  # noqa: F401
    test_a_package_of_the_image_is_not_installed_again,
    test_an_environment_with_the_image,
    test_another_framework_version_is_refused_with_both_versions,
    test_packages_are_built_with_the_framework_of_the_image,
    test_uv_sync_advises_an_environment_of_their_own,
    test_uv_sync_keeps_the_framework,
)

QUESTIONS = {
    "versions": "import jax, jaxlib; answer = [jax.__version__, jaxlib.__version__]",
    "gpus": """
import jax, jax.numpy as jnp
answer = [[d.platform for d in jax.devices()], float(jnp.ones(3).sum())]
""",
    "training": """
import jax, jax.numpy as jnp
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
answer = [first, float(loss(w)), right]
""",
}

Answer = Callable[[str], Any]


@pytest.fixture(scope="module")
def answer(ask: Callable[[Mapping[str, str]], Answer]) -> Answer:
    return ask(QUESTIONS)


def test_versions_are_those_of_the_cell(subject: Any, answer: Answer) -> None:
    jax, jaxlib = answer("versions")
    assert jax == subject.cell["release"]
    assert jaxlib == subject.wheels["jaxlib"]


def test_the_plugin_is_for_this_cuda(subject: Any, python: Callable[[str], Any], attributes: dict[str, Any]) -> None:
    """The plugin reports the CUDA that it was built with, and the versions of the loaded libraries.

    CUPTI is left out: that of CUDA 13.2 crashes without a driver.
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
def version(name):
    try:
        return getattr(v, name)()
    except Exception as error:
        return repr(error)
names = ["cuda_runtime_build_version", "cuda_runtime_get_version", "cudnn_build_version", "cudnn_get_version",
         "cublas_get_version", "cufft_get_version", "cusolver_get_version", "cusparse_get_version"]
print(json.dumps({{name: version(name) for name in names}}))
"""
    versions = python(code)
    assert {name: value for name, value in versions.items() if not isinstance(value, int)} == {}
    cuda = [int(part) for part in subject.cell["cuda"].split(".")]
    assert versions["cuda_runtime_get_version"] == cuda[0] * 1000 + cuda[1] * 10
    built = versions["cuda_runtime_build_version"]
    assert built // 1000 == cuda[0]
    labels = attributes["Config"]["Labels"]
    assert labels["io.github.gpu-images.framework.cuda"] == f"{built // 1000}.{built % 1000 // 10}"
    cudnn = next(version for name, version in subject.wheels.items() if name.startswith("nvidia-cudnn"))
    numbers = [int(part) for part in cudnn.split(".")[:3]]
    assert versions["cudnn_get_version"] == numbers[0] * 10000 + numbers[1] * 100 + numbers[2]
    assert versions["cudnn_build_version"] // 10000 == numbers[0]


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
    libraries = python(code)
    assert len(libraries) >= 6
    assert [path for path in libraries if not path.startswith("/opt/venv/lib/python/site-packages/nvidia/")] == []


def test_works_without_a_gpu(answer: Answer) -> None:
    assert answer("gpus") == [["cpu"], 3.0]  # this container was started without --gpus


def test_a_model_learns_on_the_cpu(answer: Answer) -> None:
    first, last, right = answer("training")
    assert last < 0.5 * first
    assert right > 0.95


def test_a_compiled_function_on_many_devices(python: Callable[[str], Any]) -> None:
    """With devices of XLA's CPU backend instead of GPUs."""
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


# ---- the examples


EXAMPLE = "/opt/examples/jax/train_data_parallel.py"


@pytest.fixture(scope="module")
def trained(host: Host) -> tuple[str, str]:
    """A folder, and the output of a training on two devices."""
    folder = examples.run(host, "mktemp -d").strip()
    return folder, examples.run(host, f"cd {folder} && python {EXAMPLE} --epochs 2 --devices 2 --checkpoint whole.npz")


@pytest.fixture(scope="module")
def starts(python: Callable[[str], Any], trained: tuple[str, str]) -> dict[str, tuple[int, str]]:
    """The status and the output of each start of the example."""
    code, two_processes = examples.program(EXAMPLE), "--coordinator {address} --processes 2 --process {rank}"
    listed = [
        examples.started("stopped", code, "--epochs 2 --devices 2 --checkpoint parts.npz --stop-after 1"),
        examples.started("resumed", code, "--epochs 2 --devices 2 --checkpoint parts.npz --resume"),
        examples.started("processes", code, f"--epochs 2 --devices 1 --checkpoint own.npz {two_processes}", ranks=2),
    ]
    return examples.start_all(python, "jax", "import jax, jax.numpy", trained[0], listed)


@pytest.mark.thorough
def test_data_parallel_training_on_two_devices_learns(trained: tuple[str, str]) -> None:
    _, text = trained
    epochs = examples.epochs(text)
    assert "2 devices (cpu) of 1 processes" in text
    assert list(epochs) == [1, 2]
    assert epochs[2][0] < 0.6 * epochs[1][0]
    assert epochs[2][1] > 0.75


@pytest.mark.thorough
def test_interrupted_training_ends_with_the_same_weights(
    trained: tuple[str, str], starts: dict[str, tuple[int, str]]
) -> None:
    (status, stopped), (status_resumed, resumed) = starts["stopped"], starts["resumed"]
    assert (status, status_resumed) == (0, 0), stopped + resumed
    assert "resuming from" in resumed
    assert list(examples.epochs(stopped)) == [1]
    assert examples.epochs(resumed) == {2: examples.epochs(trained[1])[2]}
    assert examples.weights(resumed) == examples.weights(trained[1]) != examples.weights(stopped)
    assert len(examples.weights(trained[1])) == 1


@pytest.mark.thorough
def test_two_processes_give_the_results_of_two_devices(
    trained: tuple[str, str], starts: dict[str, tuple[int, str]]
) -> None:
    status, output = starts["processes"]
    assert status == 0, output
    assert "2 devices (cpu) of 2 processes" in output
    assert examples.epochs(output) == examples.epochs(trained[1])
    assert examples.weights(output) == examples.weights(trained[1])


# ---- dist-check


@pytest.fixture(scope="module")
def library() -> str:
    """The library of this framework for the CPU."""
    return "gloo"


# ---- without a GPU


def test_without_a_gpu_it_prints_no_warnings(once: Callable[..., Any], subject: Any) -> None:
    """Only the launcher prints one. On a machine with a driver, the messages of JAX are not hidden."""
    status, out, err = once(["python", "-c", "import jax; print(jax.devices()[0].platform)"], shm_size="1g")
    assert (status, out) == (0, "cpu\n"), err
    assert err.count("\n") == (0 if subject.cell["cuda"] == "cpu" else 1), err
