"""PyTorch: the version and CUDA that the tag says, libraries from the one place, and it learns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from docker.models.containers import Container
from testinfra.host import Host


def test_version_and_cuda_are_those_of_the_cell(
    subject: Any, python: Callable[[str], Any], attributes: dict[str, Any]
) -> None:
    code = "import torch, json; print(json.dumps([torch.__version__.split('+')[0], torch.version.cuda]))"
    assert python(code) == [subject.cell["release"], subject.cell["cuda"]]
    assert attributes["Config"]["Labels"]["gpu-images.framework.cuda"] == subject.cell["cuda"]


def test_cudnn_and_nccl_are_the_locked_ones(subject: Any, python: Callable[[str], Any]) -> None:
    code = """
import torch, json
from torch.cuda import nccl
print(json.dumps([torch.backends.cudnn.version(), list(nccl.version())]))
"""
    cudnn, nccl = python(code)
    locked = {
        name.rsplit("-cu", 1)[0]: version for name, version in subject.wheels.items() if name.startswith("nvidia-")
    }
    major, minor, patch = (int(part) for part in locked["nvidia-cudnn"].split(".")[:3])
    assert cudnn == major * 10000 + minor * 100 + patch
    assert ".".join(map(str, nccl[:3])) == locked["nvidia-nccl"]


def test_cuda_libraries_come_from_opt_nvidia(python: Callable[[str], Any]) -> None:
    code = """
import torch, json, re
paths = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
cuda = re.compile(r"lib(cu[a-z]+|nccl|nvrtc|nvJitLink|nvshmem)[A-Za-z_-]*[.]so")
print(json.dumps([path for path in paths if cuda.match(path.rsplit("/", 1)[1])]))
"""
    found = python(code)
    assert len(found) >= 10
    assert [path for path in found if not path.startswith("/opt/nvidia/nvidia/")] == []


def test_works_without_a_gpu(python: Callable[[str], Any]) -> None:
    code = """
import torch, json
print(json.dumps([torch.cuda.is_available(), torch.cuda.is_available() and torch.cuda.device_count() or 0,
                  float(torch.ones(3, device="cuda" if torch.cuda.is_available() else "cpu").sum())]))
"""
    assert python(code) == [False, 0, 3.0]  # this container was started without --gpus


def test_a_model_learns_on_the_cpu(python: Callable[[str], Any]) -> None:
    code = """
import torch, json
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
print(json.dumps([losses[0], losses[-1], right]))
"""
    first, last, right = python(code)
    assert last < 0.3 * first
    assert right > 0.95


def test_torchvision_fits_this_torch(python: Callable[[str], Any]) -> None:
    """Its compiled operators load and compute: a build for another torch fails here, not at import."""
    code = """
import torch, torchvision, json
boxes = torch.tensor([[0.0, 0.0, 10.0, 10.0], [0.0, 0.0, 9.0, 9.0], [20.0, 20.0, 30.0, 30.0]])
print(json.dumps(torchvision.ops.nms(boxes, torch.tensor([0.9, 0.8, 0.7]), 0.5).tolist()))
"""
    assert python(code) == [0, 2]


def test_torchaudio_fits_this_torch(subject: Any, python: Callable[[str], Any]) -> None:
    """Where it is: 2.9.1 was its last release with compiled operators."""
    code = """
import json
try:
    import torchaudio
except ModuleNotFoundError:
    print(json.dumps(None))
else:
    import torch
    wave = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    filtered = torchaudio.functional.lfilter(wave, torch.tensor([1.0, -0.5]), torch.tensor([1.0, 0.0]))
    print(json.dumps(filtered.tolist()))
"""
    expected = [[1.0, 0.5, 0.25, 0.125]] if "torchaudio" in subject.wheels else None
    assert python(code) == expected


def test_architectures_are_those_of_the_label(python: Callable[[str], Any], attributes: dict[str, Any]) -> None:
    code = "import torch, json; print(json.dumps(torch._C._cuda_getArchFlags().split()))"
    labels = attributes["Config"]["Labels"]
    assert python(code) == labels["gpu-images.gpu.architectures"].split()


# ---- the examples


def _run(host: Host, command: str) -> str:
    done = host.run(command)
    assert done.rc == 0, done.stdout + done.stderr[-3000:]
    return str(done.stdout)


def _epochs(text: str) -> dict[int, tuple[float, float]]:
    """Loss and accuracy by epoch, as the examples print them."""
    found = re.findall(r"^epoch (\d+): loss ([\d.]+) accuracy ([\d.]+)$", text, re.MULTILINE)
    return {int(epoch): (float(loss), float(accuracy)) for epoch, loss, accuracy in found}


@pytest.fixture(scope="module")
def trained(host: Host) -> tuple[str, str]:
    """A folder with the checkpoint of two processes that were not interrupted, and what they printed."""
    folder = _run(host, "mktemp -d").strip()
    program = f"torchrun --nproc-per-node=2 /opt/examples/pytorch/train_ddp.py --checkpoint {folder}/whole.pt"
    return folder, _run(host, f"cd {folder} && {program} --epochs 2")


def test_data_parallel_training_of_two_processes_learns(trained: tuple[str, str]) -> None:
    _, text = trained
    epochs = _epochs(text)
    assert "ranks: 2, on cpu" in text
    assert list(epochs) == [1, 2]  # rank 0 alone tells
    assert epochs[2][0] < 0.6 * epochs[1][0]
    assert epochs[2][1] > 0.75


def test_interrupted_training_ends_with_the_same_weights(host: Host, trained: tuple[str, str]) -> None:
    folder, text = trained
    program = f"cd {folder} && torchrun --nproc-per-node=2 /opt/examples/pytorch/train_ddp.py --epochs 2"
    stopped = _run(host, f"{program} --checkpoint {folder}/parts.pt --stop-after 1")
    resumed = _run(host, f"{program} --checkpoint {folder}/parts.pt --resume")
    assert "goes on from" in resumed
    assert list(_epochs(stopped)) == [1]
    assert _epochs(resumed) == {2: _epochs(text)[2]}
    weights = [re.findall(r"^weights (\w+)$", one, re.MULTILINE) for one in (text, stopped, resumed)]
    assert weights[2] == weights[0] != weights[1]
    assert len(weights[0]) == 1


def test_sigterm_saves_and_ends_without_error(host: Host, trained: tuple[str, str]) -> None:
    """In the middle of an epoch, which is then finished."""
    folder, _ = trained
    program = f"python -u /opt/examples/pytorch/train_ddp.py --epochs 1000 --checkpoint {folder}/told.pt"
    script = f"""
cd {folder}
{program} >told.log 2>&1 &
for _ in $(seq 600); do grep -q '^epoch 1:' told.log && break; sleep 0.1; done
kill -TERM $!
wait $!
"""
    done = host.run("bash -c %s", script)
    log = _run(host, f"cat {folder}/told.log")
    assert done.rc == 0, log
    assert "told to stop: saved" in log
    where = re.search(r"at epoch (\d+), step (\d+)", log)
    assert where is not None
    load = f"import torch; s = torch.load('{folder}/told.pt', weights_only=True); print(s['epoch'], s['step'])"
    assert _run(host, f'python -c "{load}"').split() == list(where.groups())


def test_exported_model_agrees_with_the_model(host: Host, trained: tuple[str, str]) -> None:
    """As a program of torch.export and in onnxruntime, for batches of 1 and 7."""
    folder, _ = trained
    program = f"cd {folder} && python /opt/examples/pytorch/export_onnx.py --checkpoint whole.pt"
    lines = [line for line in _run(host, program).splitlines() if line.startswith("exported/")]
    assert sorted(line.split(" (")[0] for line in lines) == [
        "exported/model.onnx, batch of 1: agrees",
        "exported/model.onnx, batch of 7: agrees",
        "exported/model.pt2, batch of 1: agrees",
        "exported/model.pt2, batch of 7: agrees",
    ]


def test_exporter_says_when_a_result_differs(host: Host) -> None:
    """Its comparison can fail: here onnxruntime's results are shifted."""
    code = """
import runpy, sys
import onnxruntime
real = onnxruntime.InferenceSession.run
onnxruntime.InferenceSession.run = lambda self, *given: [one + 0.01 for one in real(self, *given)]
sys.argv = ["export_onnx.py", "--output", sys.argv[1]]
sys.path.insert(0, "/opt/examples/pytorch")
runpy.run_path("/opt/examples/pytorch/export_onnx.py", run_name="__main__")
"""
    done = host.run("python -c %s $(mktemp -d)", code)
    assert done.rc == 1, done.stderr[-3000:]
    assert "model.onnx, batch of 7: DIFFERS" in done.stdout
    assert "model.pt2, batch of 7: agrees" in done.stdout


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


def test_compiled_on_the_cpu_agrees_with_eager(python: Callable[[str], Any]) -> None:
    """It writes C++, for which it needs a compiler, the headers of Python, and setuptools."""
    code = """
import json, torch
def f(x):
    return torch.nn.functional.gelu(x @ x.T).sum(dim=1)
torch.manual_seed(0)
x = torch.randn(64, 64)
print(json.dumps((torch.compile(f)(x) - f(x)).abs().max().item()))
"""
    assert python(code) < 1e-3
