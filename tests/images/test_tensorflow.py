"""TensorFlow: the version and CUDA that the tag says, its CUDA libraries within its reach, and it learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

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
