"""TensorFlow: the version and CUDA of the tag, the CUDA libraries that it opens, and training."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from packaging.version import Version
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

# The libraries that TensorFlow opens for a GPU, with their wheels (without -cuNN).
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
        def offset(address):
            return next(h[2] + address - h[3] for h in headers if h[0] == 1 and h[3] <= address < h[3] + h[5])
        dynamic = next(h for h in headers if h[0] == 2)
        file.seek(dynamic[2])
        entries = list(struct.iter_unpack("<QQ", file.read(dynamic[5] // 16 * 16)))
        strings = next(value for tag, value in entries if tag == 5)
        paths = []
        for tag, value in entries:
            if tag in (15, 29):
                file.seek(offset(strings) + value)
                paths += file.read(65536).split(bytes(1))[0].decode().split(":")
        return paths
"""

QUESTIONS = {
    "version": "import tensorflow as tf; answer = tf.__version__",
    "build": """
import tensorflow as tf
info = tf.sysconfig.get_build_info()
answer = {name: info.get(name) for name in
          ("is_cuda_build", "cuda_version", "cudnn_version", "cuda_compute_capabilities")}
""",
    "libraries": f"""{RUNPATH}
import ctypes, glob, os, subprocess, sys
import tensorflow as tf
site = os.path.realpath("/opt/venv/lib/python%d.%d/site-packages" % sys.version_info[:2])
libraries = []
for name in ("libtensorflow_cc.so.2", "libtensorflow_framework.so.2", "python/_pywrap_tensorflow_internal.so"):
    libraries += glob.glob(site + "/tensorflow/" + name)
paths = []
for path in libraries:
    paths += [part.replace("$ORIGIN", os.path.dirname(path)) for part in runpath(path)]
answer = dict()
for name in {list(OPENS)!r}:
    files = []
    for folder in paths:
        files += glob.glob(folder + "/lib" + name + ".so.*")
    try:
        answer[name] = os.path.realpath(files[0])
        # In a new process, which has not loaded it yet.
        subprocess.run([sys.executable, "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", files[0]], check=True)
    except Exception as error:
        answer[name] = repr(error)
""",
    "gpus": """
import tensorflow as tf
answer = [len(tf.config.list_physical_devices("GPU")), float(tf.reduce_sum(tf.ones(3)))]
""",
    "training": """
import tensorflow as tf
tf.random.set_seed(0)
x = tf.random.normal((256, 8))
y = tf.cast(tf.reduce_sum(x, axis=1, keepdims=True) > 0, tf.float32)
model = tf.keras.Sequential([tf.keras.layers.Dense(16, activation="relu"), tf.keras.layers.Dense(1)])
model.compile(optimizer=tf.keras.optimizers.Adam(0.02), loss=tf.keras.losses.BinaryCrossentropy(from_logits=True))
history = model.fit(x, y, epochs=25, batch_size=64, verbose=0).history["loss"]
right = float(tf.reduce_mean(tf.cast((model(x) > 0) == (y > 0.5), tf.float32)))
answer = [history[0], history[-1], right]
""",
    "compiled function": """
import tensorflow as tf
f = tf.function(lambda a: tf.linalg.matmul(a, a), jit_compile=True)
answer = f(tf.constant([[1.0, 2.0], [3.0, 4.0]])).numpy().tolist()
""",
}

Answer = Callable[[str], Any]


@pytest.fixture(scope="module")
def answer(ask: Callable[[Mapping[str, str]], Answer]) -> Answer:
    return ask(QUESTIONS)


def test_version_is_that_of_the_cell(subject: Any, answer: Answer) -> None:
    """TensorFlow names the pre-release 2.22.0rc0 `2.22.0-rc0`."""
    assert Version(answer("version")) == Version(subject.cell["release"])


def test_build_info_agrees_with_the_labels(subject: Any, answer: Answer, attributes: dict[str, Any]) -> None:
    build, labels = answer("build"), attributes["Config"]["Labels"]
    if subject.cell["cuda"] == "cpu":
        assert not build["is_cuda_build"]
        assert "io.github.gpu-images.gpu.architectures" not in labels
        return
    assert build["is_cuda_build"]
    assert labels["io.github.gpu-images.framework.cuda"] == build["cuda_version"]
    assert labels["io.github.gpu-images.gpu.architectures"].split() == build["cuda_compute_capabilities"]
    built, cuda = (
        [int(part) for part in text.split(".")[:2]] for text in (build["cuda_version"], subject.cell["cuda"])
    )
    # Libraries of a newer minor version work with a framework that is built for an older one.
    assert built[0] == cuda[0]
    assert built[1] <= cuda[1]
    cudnn = next(version for name, version in subject.wheels.items() if name.startswith("nvidia-cudnn"))
    assert cudnn.split(".")[0] == build["cudnn_version"]


def test_the_cuda_libraries_are_on_its_search_path(subject: Any, answer: Answer) -> None:
    """On the RUNPATH of the libraries that open them."""
    if subject.cell["cuda"] == "cpu":
        assert not [name for name in subject.wheels if name.startswith("nvidia-") and "-cu" in name]
        return
    libraries = answer("libraries")
    assert libraries.keys() == OPENS.keys()
    assert {
        name: path
        for name, path in libraries.items()
        if not path.startswith("/opt/venv/lib/python/site-packages/nvidia/")
    } == {}


def test_works_without_a_gpu(answer: Answer) -> None:
    assert answer("gpus") == [0, 3.0]  # this container was started without --gpus


def test_a_model_learns_on_the_cpu(answer: Answer) -> None:
    first, last, right = answer("training")
    assert last < 0.5 * first
    assert right > 0.95


def test_a_compiled_function_computes(answer: Answer) -> None:
    expected = [[pytest.approx(7.0), pytest.approx(10.0)], [pytest.approx(15.0), pytest.approx(22.0)]]
    assert answer("compiled function") == expected


# ---- the examples


@pytest.fixture(scope="module")
def trained(host: Host) -> tuple[str, str]:
    """A folder with the checkpoints of an uninterrupted training with two workers, and its output."""
    folder = examples.run(host, "mktemp -d").strip()
    program = "python /opt/examples/tensorflow/train_multiworker.py --local-workers 2 --epochs 2"
    return folder, examples.run(host, f"cd {folder} && {program} --checkpoints whole")


@pytest.fixture(scope="module")
def starts(python: Callable[[str], Any], trained: tuple[str, str]) -> dict[str, tuple[int, str]]:
    """The status and the output of each start of an example."""
    mirrored, workers = (
        examples.program(f"/opt/examples/tensorflow/train_{name}.py") for name in ("mirrored", "multiworker")
    )
    listed = [
        examples.started("mirrored", mirrored, "--epochs 3 --samples 4096"),
        examples.started("stopped", workers, "--epochs 2 --checkpoints parts --stop-after 1", ranks=2),
        examples.started("resumed", workers, "--epochs 2 --checkpoints parts", ranks=2),
    ]
    return examples.start_all(python, "tensorflow", "import tensorflow", trained[0], listed)


@pytest.mark.thorough
def test_mirrored_training_learns_and_its_export_agrees(
    host: Host, trained: tuple[str, str], starts: dict[str, tuple[int, str]]
) -> None:
    status, text = starts["mirrored"]
    assert status == 0, text
    last = re.search(r"^loss ([\d.]+) accuracy ([\d.]+)$", text, re.MULTILINE)
    assert last is not None
    assert float(last[1]) < 1.0
    assert float(last[2]) > 0.75
    assert "exported/mirrored: agrees" in text
    written = examples.run(host, f"cd {trained[0]} && ls exported/mirrored/saved_model.pb runs/train_mirrored/train/*")
    assert "events.out.tfevents" in written


@pytest.mark.thorough
def test_two_workers_learn(trained: tuple[str, str]) -> None:
    """Started as one command."""
    assert "workers: 2, replicas: 2" in trained[1]
    epochs = examples.epochs(trained[1])
    assert list(epochs) == [1, 2]  # only the chief prints
    assert epochs[2][0] < 0.6 * epochs[1][0]
    assert epochs[2][1] > 0.75
    assert "exported/multiworker: agrees" in trained[1]


@pytest.mark.thorough
def test_two_workers_continue_after_an_interruption(
    trained: tuple[str, str], starts: dict[str, tuple[int, str]]
) -> None:
    """Both workers have the same weights, as in a training without an interruption."""
    (status, stopped), (status_resumed, resumed) = starts["stopped"], starts["resumed"]
    assert (status, status_resumed) == (0, 0), stopped + resumed
    assert list(examples.epochs(stopped)) == [1]
    assert "resuming from" in resumed
    assert examples.epochs(resumed) == {2: examples.epochs(trained[1])[2]}
    both = [dict(re.findall(r"^worker (\d): weights ([\d.]+)$", text, re.MULTILINE)) for text in (trained[1], resumed)]
    assert both[0].keys() == {"0", "1"}
    assert both[0]["0"] == both[0]["1"]
    assert both[1] == both[0]


# ---- dist-check


@pytest.fixture(scope="module")
def library() -> str:
    """The library of this framework for the CPU."""
    return "ring over gRPC"


# ---- without a GPU


def test_without_a_gpu_it_prints_no_warnings(once: Callable[..., Any], subject: Any) -> None:
    """Only the launcher prints one. On a machine with a driver, the messages of TensorFlow are not hidden."""
    code = "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))"
    status, out, err = once(["python", "-c", code], shm_size="1g")
    assert (status, out) == (0, "0\n"), err
    if subject.cell["cuda"] == "cpu":  # it still prints messages about the processor
        assert "cuda" not in err.lower(), err
    else:
        assert err.count("\n") == 1, err
