"""JAX: the version and CUDA that the tag says, its CUDA libraries within its reach, and it learns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from docker.models.containers import Container
from testinfra.host import Host


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


# ---- the examples


def _run(host: Host, command: str) -> str:
    done = host.run(command)
    assert done.rc == 0, done.stdout + done.stderr[-3000:]
    return str(done.stdout)


def _epochs(text: str) -> dict[int, tuple[float, float]]:
    """Loss and accuracy by epoch, as the examples print them."""
    found = re.findall(r"^epoch (\d+): loss ([\d.]+) accuracy ([\d.]+)$", text, re.MULTILINE)
    return {int(epoch): (float(loss), float(accuracy)) for epoch, loss, accuracy in found}


EXAMPLE = "python /opt/examples/jax/train_data_parallel.py --epochs 3 --batch-size 32"


def _weights(text: str) -> list[str]:
    return re.findall(r"^weights (\w+)$", text, re.MULTILINE)


@pytest.fixture(scope="module")
def trained(host: Host) -> tuple[str, str]:
    """A folder, and what a training on two devices printed."""
    folder = _run(host, "mktemp -d").strip()
    return folder, _run(host, f"cd {folder} && {EXAMPLE} --devices 2 --checkpoint whole.npz")


def test_data_parallel_training_on_two_devices_learns(trained: tuple[str, str]) -> None:
    _, text = trained
    epochs = _epochs(text)
    assert "2 devices (cpu) of 1 processes" in text
    assert list(epochs) == [1, 2, 3]
    assert epochs[3][0] < 0.6 * epochs[1][0]
    assert epochs[3][1] > 0.75


def test_interrupted_training_ends_with_the_same_weights(host: Host, trained: tuple[str, str]) -> None:
    folder, text = trained
    program = f"cd {folder} && {EXAMPLE} --devices 2 --checkpoint parts.npz"
    stopped = _run(host, f"{program} --stop-after 1")
    resumed = _run(host, f"{program} --resume")
    assert "goes on from" in resumed
    assert list(_epochs(resumed)) == [2, 3]
    assert _weights(resumed) == _weights(text) != _weights(stopped)
    assert len(_weights(text)) == 1


def test_two_processes_compute_what_two_devices_do(host: Host, trained: tuple[str, str]) -> None:
    folder, text = trained
    program = f"{EXAMPLE} --devices 1 --coordinator 127.0.0.1:23456 --processes 2 --checkpoint processes.npz"
    both = f"cd {folder} && ({program} --process 1 & {program} --process 0; status=$?; wait $! && exit $status)"
    told = _run(host, both)
    assert "2 devices (cpu) of 2 processes" in told
    assert _epochs(told) == _epochs(text)
    assert _weights(told) == _weights(text)


# ---- dist-check


def _told(container: Container, *options: str) -> tuple[int, str, str]:
    done: Any = container.exec_run(["dist-check", *options], demux=True)
    out, err = (part.decode() if part else "" for part in done.output)
    return int(done.exit_code), out, err


def _agreed(report: dict[str, Any]) -> None:
    """Every sum of at least three types was exact on both ranks, and something was measured."""
    assert report["problems"] == []
    assert report["ok"]
    assert report["world"] == 2
    assert report["library"] == "gloo"
    assert [check for check in report["checks"] if check["wrong_ranks"]] == []
    assert {check["dtype"] for check in report["checks"]} >= {"float32", "float64", "int64"}
    assert [row["bytes"] for row in report["bandwidth"]] == [2**10, 2**16, 2**20]
    # Of two ranks each moves the data once.
    assert all(row["bus"] == row["algorithm"] > 0 for row in report["bandwidth"])


def test_dist_check_of_two_processes(container: Container) -> None:
    code, out, err = _told(container, "-n", "2", "--max-size", "1M", "--json")
    assert code == 0, out + err
    report = json.loads(out)
    _agreed(report)
    assert [rank["transports"] for rank in report["ranks"]] == [["TCP"], ["TCP"]]


@pytest.fixture(scope="module")
def pair(start: Callable[..., Container]) -> list[tuple[Container, str]]:
    """Two containers on the default network, with their addresses."""
    found = []
    for _ in range(2):
        one = start(["sleep", "infinity"])
        one.reload()
        found.append((one, str(one.attrs["NetworkSettings"]["Networks"]["bridge"]["IPAddress"])))
    return found


def test_dist_check_of_two_containers(pair: list[tuple[Container, str]]) -> None:
    """Each goes through its own interface, by its own address, to the other."""
    (first, address), (second, other) = pair
    where = ["--nodes", "2", "--master", f"{address}:29500", "--max-size", "1M"]
    with ThreadPoolExecutor(1) as background:
        there = background.submit(_told, second, "--rank", "1", *where)
        code, out, err = _told(first, "--rank", "0", "--json", *where)
        assert there.result()[0] == 0, there.result()
    assert code == 0, out + err
    report = json.loads(out)
    _agreed(report)
    assert [rank["host"] for rank in report["ranks"]] == [str(one.id)[:12] for one in (first, second)]
    assert [rank["interfaces"] for rank in report["ranks"]] == [["eth0"], ["eth0"]]
    assert [rank["addresses"] for rank in report["ranks"]] == [[address], [other]]
    assert other in report["ranks"][0]["peers"]


def test_dist_check_names_the_rank_that_does_not_come(pair: list[tuple[Container, str]]) -> None:
    (first, address), (second, _) = pair
    where = ["--nodes", "2", "--master", f"{address}:29500", "--timeout", "2"]
    code, out, _ = _told(first, "--rank", "0", *where)
    assert code == 1
    assert f"node 1 (rank 1) did not come to {address}:29500 within 2 s" in out
    assert f"--rank 1 --master {address}:29500" in out  # what to start there
    code, out, err = _told(second, "--rank", "1", *where)
    assert code == 1
    assert "Connection refused" in err
    assert "start the one with --rank 0" in err
