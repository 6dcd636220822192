"""PyTorch: the version and CUDA of the tag, its libraries, training, examples and compilation."""

from __future__ import annotations

import re
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
    "versions": "import torch; answer = [torch.__version__.split('+')[0], torch.version.cuda]",
    "cudnn and nccl": """
import torch
from torch.cuda import nccl
answer = torch.version.cuda and [torch.backends.cudnn.version(), list(nccl.version())]
""",
    "libraries": """
import torch, re
paths = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
cuda = re.compile(r"lib(cu[a-z]+|nccl|nvrtc|nvJitLink|nvshmem)[A-Za-z_-]*[.]so")
answer = [path for path in paths if cuda.match(path.rsplit("/", 1)[1])]
""",
    "gpus": """
import torch
answer = [torch.cuda.is_available(), torch.cuda.is_available() and torch.cuda.device_count() or 0,
          float(torch.ones(3, device="cuda" if torch.cuda.is_available() else "cpu").sum())]
""",
    "training": """
import torch
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
answer = [losses[0], losses[-1], right]
""",
    "torchvision": """
import torch, torchvision
boxes = torch.tensor([[0.0, 0.0, 10.0, 10.0], [0.0, 0.0, 9.0, 9.0], [20.0, 20.0, 30.0, 30.0]])
answer = torchvision.ops.nms(boxes, torch.tensor([0.9, 0.8, 0.7]), 0.5).tolist()
""",
    "torchaudio": """
try:
    import torchaudio
except ModuleNotFoundError:
    answer = None
else:
    import torch
    wave = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    answer = torchaudio.functional.lfilter(wave, torch.tensor([1.0, -0.5]), torch.tensor([1.0, 0.0])).tolist()
""",
    "architectures": """
import torch
answer = torch._C._cuda_getArchFlags().split() if torch.version.cuda else []
""",
    "logs of a training": """
import contextlib, glob, os, runpy, sys, tempfile
os.chdir(tempfile.mkdtemp())
sys.argv = ["train_ddp.py", "--epochs", "1", "--samples", "64"]
with contextlib.suppress(SystemExit):
    runpy.run_path("/opt/examples/pytorch/train_ddp.py", run_name="__main__")
answer = glob.glob("runs/**/events.*", recursive=True)
""",
}

Answer = Callable[[str], Any]


@pytest.fixture(scope="module")
def answer(ask: Callable[[Mapping[str, str]], Answer]) -> Answer:
    return ask(QUESTIONS)


def test_version_and_cuda_are_those_of_the_cell(subject: Any, answer: Answer, attributes: dict[str, Any]) -> None:
    cuda = None if subject.cell["cuda"] == "cpu" else subject.cell["cuda"]
    assert answer("versions") == [subject.cell["release"], cuda]
    assert attributes["Config"]["Labels"].get("io.github.gpu-images.framework.cuda") == cuda


def test_cudnn_and_nccl_are_the_locked_ones(subject: Any, answer: Answer) -> None:
    if subject.cell["cuda"] == "cpu":
        assert answer("cudnn and nccl") is None
        return
    cudnn, nccl = answer("cudnn and nccl")
    locked = {
        name.rsplit("-cu", 1)[0]: version for name, version in subject.wheels.items() if name.startswith("nvidia-")
    }
    major, minor, patch = (int(part) for part in locked["nvidia-cudnn"].split(".")[:3])
    assert cudnn == major * 10000 + minor * 100 + patch
    assert ".".join(map(str, nccl[:3])) == locked["nvidia-nccl"]


def test_cuda_libraries_come_from_opt_nvidia(subject: Any, answer: Answer) -> None:
    libraries = answer("libraries")
    assert not libraries if subject.cell["cuda"] == "cpu" else len(libraries) >= 10
    assert [path for path in libraries if not path.startswith("/opt/venv/lib/python/site-packages/nvidia/")] == []


def test_works_without_a_gpu(answer: Answer) -> None:
    assert answer("gpus") == [False, 0, 3.0]  # this container was started without --gpus


def test_a_model_learns_on_the_cpu(answer: Answer) -> None:
    first, last, right = answer("training")
    assert last < 0.3 * first
    assert right > 0.95


def test_torchvision_is_built_for_this_torch(answer: Answer) -> None:
    """Its compiled operators load and compute: a build for another torch fails here, not at import."""
    assert answer("torchvision") == [0, 2]


def test_torchaudio_is_built_for_this_torch(subject: Any, answer: Answer) -> None:
    """Only in some images: 2.9.1 is its last release with compiled operators."""
    assert answer("torchaudio") == ([[1.0, 0.5, 0.25, 0.125]] if "torchaudio" in subject.wheels else None)


def test_architectures_are_those_of_the_label(answer: Answer, attributes: dict[str, Any]) -> None:
    labels = attributes["Config"]["Labels"]
    assert answer("architectures") == labels.get("io.github.gpu-images.gpu.architectures", "").split()


# ---- the examples

# More threads than processors wait for each other, which took three times as long.
SETUP = """
os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun does
import torch, torch._dynamo, torch.distributed, torch.utils.data
"""
TRAIN = examples.program("/opt/examples/pytorch/train_ddp.py")
# On two ranks, which exchange gradients only once for each update. The last update has fewer samples.
GRADIENTS = """
import contextlib, os, runpy
import torch
from torch.nn.parallel import DistributedDataParallel
updates, without_exchange = [], 0
def step(optimizer):
    updates.append(torch.cat([p.grad.flatten() for group in optimizer.param_groups for p in group["params"]]))
@contextlib.contextmanager
def counted(model):
    global without_exchange
    without_exchange += 1
    with original(model):
        yield
original, DistributedDataParallel.no_sync, torch.optim.AdamW.step = DistributedDataParallel.no_sync, counted, step
torch.nn.Dropout = lambda probability: torch.nn.Identity()  # the batches would have other random numbers
runpy.run_path("/opt/examples/pytorch/train_ddp.py", run_name="train")["main"]()
torch.save((torch.stack(updates), without_exchange), f"{__name__}-of-rank-{os.environ['RANK']}.pt")
"""
COMPARE = """
import torch
(large, never), (small, often), (other, _) = [torch.load(f"{name}.pt") for name in
    ("large-of-rank-0", "small-of-rank-0", "small-of-rank-1")]
torch.testing.assert_close(small, large, rtol=1e-4, atol=1e-6)
print(len(small), bool(torch.equal(small, other)), never, often)
"""
# The second time, the results of onnxruntime are shifted.
EXPORT = """
import contextlib, runpy, sys
import onnxruntime
original = onnxruntime.InferenceSession.run
def shifted(self, *inputs):
    return [array + 0.01 for array in original(self, *inputs)]
for arguments, run in (["--checkpoint", "whole.pt"], original), (["--output", "other"], shifted):
    sys.argv[1:], onnxruntime.InferenceSession.run = arguments, run
    try:
        runpy.run_path("/opt/examples/pytorch/export_onnx.py", run_name="__main__")
    except SystemExit as end:
        print("status", end.code)
"""
POSITION = "import torch; s = torch.load('stopped.pt', weights_only=True); print(s['epoch'], s['step'])"
BATCHES = "--batch-size 4 --accumulate 4"
ENDLESS = "--epochs 1000 --samples 1024 --checkpoint stopped.pt"


@pytest.fixture(scope="module")
def trained(host: Host) -> tuple[str, str]:
    """A folder with the checkpoint of an uninterrupted training with two processes, and its output."""
    folder = examples.run(host, "mktemp -d").strip()
    program = f"torchrun --nproc-per-node=2 /opt/examples/pytorch/train_ddp.py --checkpoint {folder}/whole.pt"
    return folder, examples.run(host, f"cd {folder} && {program} --epochs 2")


@pytest.fixture(scope="module")
def starts(python: Callable[[str], Any], trained: tuple[str, str]) -> dict[str, tuple[int, str]]:
    """The status and the output of each start of an example. The tests below say what the starts are for."""
    gradients = "--epochs 1 --samples 436"
    listed = [
        examples.started("parts", TRAIN, "--epochs 2 --checkpoint parts.pt --stop-after 1", ranks=2),
        examples.started("resumed", TRAIN, "--epochs 2 --checkpoint parts.pt --resume", ranks=2),
        examples.started("large", GRADIENTS, f"{gradients} --batch-size 64", ranks=2),
        examples.started("small", GRADIENTS, f"{gradients} --batch-size 16 --accumulate 4", ranks=2),
        examples.started("compared", COMPARE),
        examples.started("stopped", TRAIN, f"{ENDLESS} {BATCHES}", stop_at="epoch 1:"),
        examples.started("position", POSITION),
        examples.started("refused", TRAIN, f"{ENDLESS} --resume"),
        examples.started("exported", EXPORT),
    ]
    return examples.start_all(python, "pytorch", SETUP, trained[0], listed)


@pytest.mark.thorough
def test_data_parallel_training_of_two_processes_learns(trained: tuple[str, str]) -> None:
    epochs = examples.epochs(trained[1])
    assert "ranks: 2, on cpu" in trained[1]
    assert list(epochs) == [1, 2]  # only rank 0 prints
    assert epochs[2][0] < 0.6 * epochs[1][0]
    assert epochs[2][1] > 0.75


def test_training_writes_logs_for_tensorboard_if_it_is_installed(subject: Any, answer: Answer) -> None:
    assert bool(answer("logs of a training")) is ("tensorboard" in subject.wheels)


@pytest.mark.thorough
def test_interrupted_training_ends_with_the_same_weights(
    trained: tuple[str, str], starts: dict[str, tuple[int, str]]
) -> None:
    (status, stopped), (status_resumed, resumed) = starts["parts"], starts["resumed"]
    assert (status, status_resumed) == (0, 0), stopped + resumed
    assert "resuming from" in resumed
    assert list(examples.epochs(stopped)) == [1]
    assert examples.epochs(resumed) == {2: examples.epochs(trained[1])[2]}
    weights = [examples.weights(output) for output in (trained[1], stopped, resumed)]
    assert weights[2] == weights[0] != weights[1]
    assert len(weights[0]) == 1


@pytest.mark.thorough
def test_the_gradients_of_small_batches_are_those_of_a_large_one(starts: dict[str, tuple[int, str]]) -> None:
    assert [starts[name][0] for name in ("large", "small")] == [0, 0], starts["large"][1] + starts["small"][1]
    assert starts["compared"] == (0, "4 True 0 10\n")


@pytest.mark.thorough
def test_sigterm_saves_and_ends_without_error(starts: dict[str, tuple[int, str]]) -> None:
    """The checkpoint has the epoch and step of the message, and is only for batches of the same size.

    The step is where an update begins, here of every second one.
    """
    status, log = starts["stopped"]
    assert status == 0, log
    assert "stopping: saved" in log
    position = re.search(r"at epoch (\d+), step (\d+)", log)
    assert position is not None
    assert starts["position"] == (0, f"{position[1]} {position[2]}\n")
    assert int(position[2]) % 8 == 0
    status, message = starts["refused"]
    assert status == 1
    assert f"is of a run with {BATCHES}: use these" in message


@pytest.mark.thorough
def test_exported_models_agree_with_the_model(starts: dict[str, tuple[int, str]]) -> None:
    """A program of torch.export, and ONNX in onnxruntime, for batches of 1 and 7."""
    agreed, ended, _ = starts["exported"][1].partition("status 0\n")
    assert ended, agreed
    assert sorted(line.split(" (")[0] for line in agreed.splitlines() if line.startswith("exported/")) == [
        "exported/model.onnx, batch of 1: agrees",
        "exported/model.onnx, batch of 7: agrees",
        "exported/model.pt2, batch of 1: agrees",
        "exported/model.pt2, batch of 7: agrees",
    ]


@pytest.mark.thorough
def test_the_exporter_detects_different_results(starts: dict[str, tuple[int, str]]) -> None:
    """Its comparison can fail: the results of onnxruntime are shifted."""
    text = starts["exported"][1].partition("status 0\n")[2]
    assert text.endswith("status 1\n")
    assert "other/model.onnx, batch of 7: DIFFERS" in text
    assert "other/model.pt2, batch of 7: agrees" in text


# ---- dist-check


@pytest.fixture(scope="module")
def library() -> str:
    """The library of this framework for the CPU."""
    return "gloo"


# ---- torch.compile and extensions


@pytest.mark.thorough
def test_a_cpp_extension_is_compiled(python: Callable[[str], Any]) -> None:
    """torch.utils.cpp_extension needs ninja, a compiler and Python's headers.

    The source includes the headers of tensors and of pybind11: all of torch/extension.h took four times as long.
    """
    code = r"""
import json, pathlib, tempfile, torch
from torch.utils import cpp_extension
source = pathlib.Path(tempfile.mkdtemp()) / "own.cpp"
source.write_text('''
#include <torch/csrc/utils/pybind.h>
at::Tensor twice(at::Tensor x) { return x.add(x); }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("twice", &twice); }
''')
own = cpp_extension.load(name="own", sources=[str(source)], extra_cflags=["-O0"])
print(json.dumps(own.twice(torch.ones(2)).tolist()))
"""
    assert python(code) == [2.0, 2.0]


@pytest.mark.thorough
def test_a_compiled_function_agrees_with_eager_in_docker_exec(shell: Callable[..., Any]) -> None:
    """As a user without an entry in /etc/passwd, with only the documented folders writable.

    torch.compile generates C++, which needs a compiler, Python's headers and setuptools. Its own check whether vector
    instructions compile is left out: the function uses them, and the check took a quarter of the time.
    """
    code = """
import os
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
import torch
def f(x):
    return torch.nn.functional.gelu(x @ x.T).sum(dim=1)
torch.manual_seed(0)
x = torch.randn(64, 64)
print((torch.compile(f)(x) - f(x)).abs().max().item())
"""
    tmpfs = {"/tmp": "exec", "/run": "", "/home/user": "exec,mode=1777"}
    output = shell(user="1234:0", read_only=True, tmpfs=tmpfs).run(["python", "-W", "ignore", "-c", code])
    assert float(output.splitlines()[-1]) < 1e-3
