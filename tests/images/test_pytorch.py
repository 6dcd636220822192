"""PyTorch: the version and CUDA of the tag, its libraries, training, examples and compilation."""

from __future__ import annotations

import re
import shlex
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


@pytest.fixture(scope="module")
def trained(host: Host) -> tuple[str, str]:
    """A folder with the checkpoint of an uninterrupted training with two processes, and its output."""
    folder = examples.run(host, "mktemp -d").strip()
    program = f"torchrun --nproc-per-node=2 /opt/examples/pytorch/train_ddp.py --checkpoint {folder}/whole.pt"
    return folder, examples.run(host, f"cd {folder} && {program} --epochs 2")


def test_data_parallel_training_of_two_processes_learns(host: Host, subject: Any, trained: tuple[str, str]) -> None:
    """In images with TensorBoard, it also writes logs for it."""
    folder, text = trained
    logs = examples.run(host, f"find {folder}/runs -name 'events.*' 2>/dev/null || true")
    assert bool(logs) is ("tensorboard" in subject.wheels)
    epochs = examples.epochs(text)
    assert "ranks: 2, on cpu" in text
    assert list(epochs) == [1, 2]  # only rank 0 prints
    assert epochs[2][0] < 0.6 * epochs[1][0]
    assert epochs[2][1] > 0.75


@pytest.mark.thorough
def test_interrupted_training_ends_with_the_same_weights(host: Host, trained: tuple[str, str]) -> None:
    folder, text = trained
    program = f"cd {folder} && torchrun --nproc-per-node=2 /opt/examples/pytorch/train_ddp.py --epochs 2"
    stopped = examples.run(host, f"{program} --checkpoint {folder}/parts.pt --stop-after 1")
    resumed = examples.run(host, f"{program} --checkpoint {folder}/parts.pt --resume")
    assert "resuming from" in resumed
    assert list(examples.epochs(stopped)) == [1]
    assert examples.epochs(resumed) == {2: examples.epochs(text)[2]}
    weights = [examples.weights(output) for output in (text, stopped, resumed)]
    assert weights[2] == weights[0] != weights[1]
    assert len(weights[0]) == 1


@pytest.mark.thorough
def test_the_gradients_of_small_batches_are_those_of_a_large_one(host: Host) -> None:
    """On two ranks, which exchange gradients only once for each update. The last update has fewer samples."""
    code = """
import contextlib, os, runpy, sys
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
torch.save((torch.stack(updates), without_exchange), f"of-rank-{os.environ['RANK']}.pt")
"""
    compare = """
import torch
(large, never), (small, often), (other, _) = [torch.load(f"{name}.pt") for name in
    ("large/of-rank-0", "small/of-rank-0", "small/of-rank-1")]
torch.testing.assert_close(small, large, rtol=1e-4, atol=1e-6)
print(len(small), bool(torch.equal(small, other)), never, often)
"""
    folder = examples.run(host, "mktemp -d").strip()
    for name, options in ("large", "--batch-size 64"), ("small", "--batch-size 16 --accumulate 4"):
        launched = f"torchrun --nproc-per-node=2 --no-python python -c {shlex.quote(code)}"
        examples.run(
            host, f"mkdir {folder}/{name} && cd {folder}/{name} && {launched} --epochs 1 --samples 436 {options}"
        )
    assert examples.run(host, f"cd {folder} && python -c {shlex.quote(compare)}") == "4 True 0 10\n"


@pytest.mark.thorough
def test_sigterm_saves_and_ends_without_error(host: Host, trained: tuple[str, str]) -> None:
    """The checkpoint has the epoch and step of the message, and is only for batches of the same size.

    The step is where an update begins, here of every second one.
    """
    folder, _ = trained
    batches = "--batch-size 4 --accumulate 4"
    training = f"python -u /opt/examples/pytorch/train_ddp.py --epochs 1000 --checkpoint {folder}/stopped.pt"
    program = f"{training} {batches}"
    script = f"""
cd {folder}
{program} >stopped.log 2>&1 &
for _ in $(seq 600); do grep -q '^epoch 1:' stopped.log && break; sleep 0.1; done
kill -TERM $!
wait $!
"""
    result = host.run("bash -c %s", script)
    log = examples.run(host, f"cat {folder}/stopped.log")
    assert result.rc == 0, log
    assert "stopping: saved" in log
    position = re.search(r"at epoch (\d+), step (\d+)", log)
    assert position is not None
    load = f"import torch; s = torch.load('{folder}/stopped.pt', weights_only=True); print(s['epoch'], s['step'])"
    assert examples.run(host, f'python -c "{load}"').split() == list(position.groups())
    assert int(position[2]) % 8 == 0
    refused = host.run(f"cd {folder} && {training} --resume")
    assert refused.rc == 1
    assert f"is of a run with {batches}: use these" in refused.stderr


@pytest.mark.thorough
def test_exported_models_agree_with_the_model(host: Host, trained: tuple[str, str]) -> None:
    """A program of torch.export, and ONNX in onnxruntime, for batches of 1 and 7."""
    folder, _ = trained
    program = f"cd {folder} && python /opt/examples/pytorch/export_onnx.py --checkpoint whole.pt"
    lines = [line for line in examples.run(host, program).splitlines() if line.startswith("exported/")]
    assert sorted(line.split(" (")[0] for line in lines) == [
        "exported/model.onnx, batch of 1: agrees",
        "exported/model.onnx, batch of 7: agrees",
        "exported/model.pt2, batch of 1: agrees",
        "exported/model.pt2, batch of 7: agrees",
    ]


@pytest.mark.thorough
def test_the_exporter_detects_different_results(host: Host) -> None:
    """Its comparison can fail: this test shifts the results of onnxruntime."""
    code = """
import runpy, sys
import onnxruntime
original = onnxruntime.InferenceSession.run
onnxruntime.InferenceSession.run = lambda self, *inputs: [array + 0.01 for array in original(self, *inputs)]
sys.argv = ["export_onnx.py", "--output", sys.argv[1]]
sys.path.insert(0, "/opt/examples/pytorch")
runpy.run_path("/opt/examples/pytorch/export_onnx.py", run_name="__main__")
"""
    result = host.run("python -c %s $(mktemp -d)", code)
    assert result.rc == 1, result.stderr[-3000:]
    assert "model.onnx, batch of 7: DIFFERS" in result.stdout
    assert "model.pt2, batch of 7: agrees" in result.stdout


# ---- dist-check


@pytest.fixture(scope="module")
def library() -> str:
    """The library of this framework for the CPU."""
    return "gloo"


# ---- torch.compile and extensions


@pytest.mark.thorough
def test_a_cpp_extension_is_compiled(python: Callable[[str], Any]) -> None:
    """torch.utils.cpp_extension needs ninja, a compiler and Python's headers."""
    code = """
import json, torch
from torch.utils import cpp_extension
source = "torch::Tensor twice(torch::Tensor x) { return x * 2; }"
own = cpp_extension.load_inline(name="own", cpp_sources=[source], functions=["twice"])
print(json.dumps(own.twice(torch.ones(2)).tolist()))
"""
    assert python(code) == [2.0, 2.0]


@pytest.mark.thorough
def test_a_compiled_function_agrees_with_eager_in_docker_exec(shell: Callable[..., Any]) -> None:
    """As a user without an entry in /etc/passwd, with only the documented folders writable.

    torch.compile generates C++, which needs a compiler, Python's headers and setuptools.
    """
    code = """
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
