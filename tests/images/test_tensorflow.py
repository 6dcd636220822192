"""TensorFlow: the version and CUDA that the tag says, its CUDA libraries within its reach, and it learns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from docker.models.containers import Container
from testinfra.host import Host

# What TensorFlow opens on its way to a GPU: library -> the wheel that has it, without -cuNN.
OPENS = {
    "cudart": "nvidia-cuda-runtime",
    "cublas": "nvidia-cublas",
    "cublasLt": "nvidia-cublas",
    "cudnn": "nvidia-cudnn",
    "cufft": "nvidia-cufft",
    "cusolver": "nvidia-cusolver",
    "cusparse": "nvidia-cusparse",
    "cupti": "nvidia-cuda-cupti",
}


def test_version_is_that_of_the_cell(subject: Any, python: Callable[[str], Any]) -> None:
    assert python("import tensorflow as tf, json; print(json.dumps(tf.__version__))") == subject.cell["release"]


def test_build_info_agrees_with_the_labels(
    subject: Any, python: Callable[[str], Any], attributes: dict[str, Any]
) -> None:
    code = """
import tensorflow as tf, json
told = tf.sysconfig.get_build_info()
print(json.dumps({name: told.get(name) for name in
                  ("is_cuda_build", "cuda_version", "cudnn_version", "cuda_compute_capabilities")}))
"""
    told, labels = python(code), attributes["Config"]["Labels"]
    if subject.cell["cuda"] == "cpu":
        assert not told["is_cuda_build"]
        assert "gpu-images.gpu.architectures" not in labels
        return
    assert told["is_cuda_build"]
    assert labels["gpu-images.framework.cuda"] == told["cuda_version"]
    assert labels["gpu-images.gpu.architectures"].split() == told["cuda_compute_capabilities"]
    built, has = ([int(part) for part in text.split(".")[:2]] for text in (told["cuda_version"], subject.cell["cuda"]))
    # Libraries of a newer minor version serve what was built for an older one.
    assert built[0] == has[0]
    assert built[1] <= has[1]
    cudnn = next(version for name, version in subject.wheels.items() if name.startswith("nvidia-cudnn"))
    assert cudnn.split(".")[0] == told["cudnn_version"]


def test_finds_the_cuda_libraries_that_it_opens(subject: Any, python: Callable[[str], Any]) -> None:
    """By its own search path: where the library that opens them looks, or else the system."""
    if subject.cell["cuda"] == "cpu":
        assert not [name for name in subject.wheels if name.startswith("nvidia-") and "-cu" in name]
        return
    code = f"""
import ctypes, glob, json, os, subprocess, sys, sysconfig
import tensorflow as tf
site = os.path.realpath(sysconfig.get_path("purelib"))
libraries = []
for name in ("libtensorflow_cc.so.2", "libtensorflow_framework.so.2", "python/_pywrap_tensorflow_internal.so"):
    libraries += glob.glob(site + "/tensorflow/" + name)
paths = []
for path in libraries:
    paths += [part.replace("$ORIGIN", os.path.dirname(path)) for part in runpath(path)]
result = dict()
for name in {list(OPENS)!r}:
    files = [f for p in paths for f in glob.glob(p + "/lib" + name + ".so.*")]
    files += glob.glob("/usr/lib/x86_64-linux-gnu/lib" + name + ".so.*")
    try:
        result[name] = os.path.realpath(files[0])
        # The soname alone for what the system finds, in a process that has loaded nothing yet.
        what = files[0] if files[0].startswith(site) else os.path.basename(files[0])
        subprocess.run([sys.executable, "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", what], check=True)
    except Exception as error:
        result[name] = repr(error)
print(json.dumps(result))
"""
    found = python(RUNPATH + code)
    assert {name: path for name, path in found.items() if not path.startswith("/opt/nvidia/nvidia/")} == {}


# DT_RPATH and DT_RUNPATH of an ELF file. Source: System V ABI, "Dynamic Section".
RUNPATH = """
import struct
def runpath(path):
    with open(path, "rb") as file:
        head = file.read(64)
        at, = struct.unpack_from("<Q", head, 32)
        size, count = struct.unpack_from("<HH", head, 54)
        file.seek(at)
        headers = [struct.unpack("<IIQQQQQQ", file.read(size)[:56]) for _ in range(count)]
        def place(address):
            return next(h[2] + address - h[3] for h in headers if h[0] == 1 and h[3] <= address < h[3] + h[5])
        dynamic = next(h for h in headers if h[0] == 2)
        file.seek(dynamic[2])
        entries = list(struct.iter_unpack("<QQ", file.read(dynamic[5] // 16 * 16)))
        strings = next(value for tag, value in entries if tag == 5)
        found = []
        for tag, value in entries:
            if tag in (15, 29):
                file.seek(place(strings) + value)
                found += file.read(65536).split(bytes(1))[0].decode().split(":")
        return found
"""


def test_works_without_a_gpu(python: Callable[[str], Any]) -> None:
    code = """
import tensorflow as tf, json
print(json.dumps([len(tf.config.list_physical_devices("GPU")), float(tf.reduce_sum(tf.ones(3)))]))
"""
    assert python(code) == [0, 3.0]  # this container was started without --gpus


def test_a_model_learns_on_the_cpu(python: Callable[[str], Any]) -> None:
    code = """
import tensorflow as tf, json
tf.random.set_seed(0)
x = tf.random.normal((256, 8))
y = tf.cast(tf.reduce_sum(x, axis=1, keepdims=True) > 0, tf.float32)
model = tf.keras.Sequential([tf.keras.layers.Dense(16, activation="relu"), tf.keras.layers.Dense(1)])
model.compile(optimizer=tf.keras.optimizers.Adam(0.02), loss=tf.keras.losses.BinaryCrossentropy(from_logits=True))
history = model.fit(x, y, epochs=25, batch_size=64, verbose=0).history["loss"]
right = float(tf.reduce_mean(tf.cast((model(x) > 0) == (y > 0.5), tf.float32)))
print(json.dumps([history[0], history[-1], right]))
"""
    first, last, right = python(code)
    assert last < 0.5 * first
    assert right > 0.95


def test_a_compiled_function_computes(python: Callable[[str], Any]) -> None:
    code = """
import tensorflow as tf, json
f = tf.function(lambda a: tf.linalg.matmul(a, a), jit_compile=True)
print(json.dumps(f(tf.constant([[1.0, 2.0], [3.0, 4.0]])).numpy().tolist()))
"""
    assert python(code) == [[pytest.approx(7.0), pytest.approx(10.0)], [pytest.approx(15.0), pytest.approx(22.0)]]


# ---- the examples


def _run(host: Host, command: str) -> str:
    done = host.run(command)
    assert done.rc == 0, done.stdout + done.stderr[-3000:]
    return str(done.stdout)


def _epochs(text: str) -> dict[int, tuple[float, float]]:
    """Loss and accuracy by epoch, as the examples print them."""
    found = re.findall(r"^epoch (\d+): loss ([\d.]+) accuracy ([\d.]+)$", text, re.MULTILINE)
    return {int(epoch): (float(loss), float(accuracy)) for epoch, loss, accuracy in found}


def test_mirrored_training_learns_and_its_export_agrees(host: Host) -> None:
    program = "python /opt/examples/tensorflow/train_mirrored.py --epochs 3 --samples 4096"
    text = _run(
        host, f"cd $(mktemp -d) && {program} && ls exported/mirrored/saved_model.pb runs/train_mirrored/train/*"
    )
    last = re.search(r"^loss ([\d.]+) accuracy ([\d.]+)$", text, re.MULTILINE)
    assert last is not None
    assert float(last[1]) < 1.0
    assert float(last[2]) > 0.75
    assert "exported/mirrored: agrees" in text
    assert "events.out.tfevents" in text


def test_two_workers_learn_and_go_on_where_they_were_interrupted(host: Host) -> None:
    """Both workers have the same weights, which are those of a training without the interruption."""
    program = "python /opt/examples/tensorflow/train_multiworker.py --local-workers 2 --epochs 2"
    folder = _run(host, "mktemp -d").strip()
    whole = _run(host, f"cd {folder} && {program} --checkpoints whole")
    stopped = _run(host, f"cd {folder} && {program} --checkpoints parts --stop-after 1")
    resumed = _run(host, f"cd {folder} && {program} --checkpoints parts")
    assert "workers: 2, replicas: 2" in whole
    epochs = _epochs(whole)
    assert list(epochs) == [1, 2]  # the chief alone tells
    assert epochs[2][0] < 0.6 * epochs[1][0]
    assert epochs[2][1] > 0.75
    assert "exported/multiworker: agrees" in whole
    assert list(_epochs(stopped)) == [1]
    assert "goes on from" in resumed
    assert _epochs(resumed) == {2: epochs[2]}
    weights = [dict(re.findall(r"^worker (\d): weights ([\d.]+)$", one, re.MULTILINE)) for one in (whole, resumed)]
    assert weights[0].keys() == {"0", "1"}
    assert weights[0]["0"] == weights[0]["1"]
    assert weights[1] == weights[0]


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
    assert report["library"] == "ring over gRPC"
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
