"""GPU checks of PyTorch 2.x. Each runs in a process of its own, so settings need not be put back."""

from __future__ import annotations

import importlib
import json
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from . import common, nvml
from .common import Begun, Checks, Failed, Figure, NotApplicable, at_least, at_most, between, equal, note

CHECKS = Checks()
SIZE = 4096  # a side of the large matrices: 137 GFLOP, and sums of 4096 products
RANK_TIMEOUT_S = 120
SEED = 20


def begin(system: nvml.System) -> Begun:
    """PyTorch with a GPU, or a Failed that says why there is none."""
    torch = common.load("torch")
    cuda = torch.version.cuda or ""
    if not torch.cuda.is_available():
        raise common.no_gpu(f"PyTorch {torch.__version__}", cuda, system)
    torch.manual_seed(SEED)
    return Begun(torch, torch.device("cuda", 0), torch.__version__, cuda)


@CHECKS.add("devices", uses_all=True)
def devices(torch: Any, device: Any) -> list[Figure]:
    """The GPUs that PyTorch sees are those that NVML has: number, name, compute capability, memory."""
    del device
    seen = []
    for number in range(torch.cuda.device_count()):
        told = torch.cuda.get_device_properties(number)
        capability = f"{told.major}.{told.minor}"
        seen.append({"name": told.name, "capability": capability, "memory": told.total_memory})
    return common.same_devices(seen, nvml.read())


@CHECKS.add("matmul")
def matmul(torch: Any, device: Any) -> list[Figure]:
    """A large matrix product in float32 agrees with float64 on the CPU."""
    _matmul_precision(torch, "ieee")
    # Sums of 4096 products in float32 are off by 4e-7 to 1e-6 of the norm, TF32 by 3e-4, bf16 by 2e-3.
    return [at_most("relative error", _product_error(torch, device, torch.float32), 1e-5), note("size", SIZE)]


@CHECKS.add("tf32")
def tf32(torch: Any, device: Any) -> list[Figure]:
    """A product in TF32 is as exact as TF32 is, and no more: the tensor cores did it."""
    _need_capability(torch, device, 8, "TF32")
    _matmul_precision(torch, "tf32")
    # 10 bits of mantissa give 3e-4. Less than 5e-5 would be float32, which means that TF32 was not used.
    return [between("relative error", _product_error(torch, device, torch.float32), 5e-5, 2e-3)]


@CHECKS.add("bf16")
def bf16(torch: Any, device: Any) -> list[Figure]:
    """A product in bfloat16 is as exact as bfloat16 is."""
    _need_capability(torch, device, 8, "bfloat16 in hardware")
    # 7 bits of mantissa: 2.3e-3 from the inputs, 1.7e-3 from the result, and some more where parts are summed in bf16.
    return [between("relative error", _product_error(torch, device, torch.bfloat16), 5e-4, 1e-2)]


@CHECKS.add("convolution")
def convolution(torch: Any, device: Any) -> list[Figure]:
    """A convolution and its gradients go through cuDNN and agree with float64 on the CPU."""
    _convolution_precision(torch)
    image, kernel = torch.randn(8, 64, 56, 56), torch.randn(64, 64, 3, 3)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        found = _convolve(torch, image.to(device), kernel.to(device))
    expected = _convolve(torch, image.double(), kernel.double())
    operators = {event.key for event in profile.key_averages()}
    figures = [
        # Sums of 576 (result) to 25088 (gradient) products: 1e-7 to 1e-6, some 1e-6 if cuDNN takes Winograd's
        # algorithm, 3e-4 if it took TF32.
        at_most(
            f"relative error of the {name}", common.relative_error(found[name].cpu().double(), expected[name]), 5e-5
        )
        for name in expected
    ]
    through = sum("cudnn_convolution" in operator for operator in operators)
    return [*figures, at_least("operators of cuDNN", through, 1), note("cuDNN", torch.backends.cudnn.version())]


@CHECKS.add("amp")
def amp(torch: Any, device: Any) -> list[Figure]:
    """Mixed precision: float16 inside, a loss that falls, and a step that is left out when a gradient overflows."""
    inputs = torch.randn(1024, 64, device=device)
    wanted = inputs @ torch.randn(64, 1, device=device)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1)).to(device)
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.float16):
            output = layers(inputs)
        loss = torch.nn.functional.mse_loss(output.float(), wanted)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    before, scale = [one.detach().clone() for one in layers.parameters()], scaler.get_scale()
    optimizer.zero_grad()
    scaler.scale((layers(inputs) * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    after = list(layers.parameters())
    moved = sum(not torch.equal(one, after[number]) for number, one in enumerate(before))
    return [
        equal("float16 inside", int(output.dtype == torch.float16), 1),
        at_most("loss at the end by that at the start", losses[-1] / losses[0], 0.5),  # 0.02 in float32
        equal("weights moved by a step that overflowed", moved, 0),
        at_most("scale after it by that before", scaler.get_scale() / scale, 0.5),
    ]


@CHECKS.add("graph")
def graph(torch: Any, device: Any) -> list[Figure]:
    """A captured CUDA graph gives on replay what the same calls give without it, for inputs that it has not seen."""
    layers = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256)).to(device)
    held, count = torch.zeros(64, 256, device=device), torch.zeros((), device=device)
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(
            side
        ):  # libraries set themselves up before a capture, on another stream, as the manual has it
            for _ in range(3):
                layers(held)
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            result = layers(held)
            count += 1
        errors = []
        for _ in range(5):
            held.copy_(torch.randn(64, 256, device=device))
            captured.replay()
            errors.append(common.relative_error(result.cpu().double(), layers(held).cpu().double()))
    # The same kernels on the same numbers; another algorithm of cuBLAS would be 1e-6 off.
    return [at_most("largest relative error", max(errors), 1e-5), equal("replays that the GPU counted", int(count), 5)]


@CHECKS.add("compile")
def compiled(torch: Any, device: Any) -> list[Figure]:
    """torch.compile makes Triton kernels that agree with eager calls, and so does a Triton kernel of our own."""
    left, right = torch.randn(2, 1_000_003, device=device)  # a prime: no block of a kernel divides it
    torch.compiler.reset()

    def smooth(one: Any, other: Any) -> Any:
        return torch.nn.functional.gelu(one * 2 + other).sum(dim=-1, keepdim=True) + torch.sin(other)

    with torch.no_grad():
        error = common.relative_error(
            torch.compile(smooth, fullgraph=True, backend="inductor")(left, right).cpu().double(),
            smooth(left.cpu().double(), right.cpu().double()),
        )
    try:
        kernels: Any = importlib.import_module(f"{__package__}.triton_add")
    except ImportError as failure:
        raise Failed(f"Triton cannot be imported: {failure}") from failure
    total = torch.empty_like(left)
    kernels.add(left, right, total)
    wrong = int((total != left + right).sum())
    # A sum over a million elements in float32 is the inexact part: 1e-6 and less.
    return [at_most("relative error of torch.compile", error, 1e-4), equal("wrong sums of our own kernel", wrong, 0)]


@CHECKS.add("memory")
def memory(torch: Any, device: Any) -> list[Figure]:
    """Memory of a tensor is taken from the GPU, and returns to it after release."""
    torch.zeros(1, device=device)  # the context stays until the process ends, so it is there before we count
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info(device)[0]
    size = min(1 << 30, free // 4)
    if size < 64 << 20:
        raise Failed(f"only {free >> 20} MiB of the GPU are free")
    took, kept = 0.0, 0.0
    # Others may use the same GPU in between; three times in a row is no accident.
    for _ in range(3):
        torch.cuda.empty_cache()
        start, held = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device)
        block = torch.ones(size, dtype=torch.uint8, device=device)
        torch.cuda.synchronize()
        took = (start - torch.cuda.mem_get_info(device)[0]) / size
        del block
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        kept = (start - torch.cuda.mem_get_info(device)[0]) / size
        reserved = torch.cuda.memory_reserved(device) - held
        if took >= 0.9 and abs(kept) <= 0.1 and reserved == 0:
            break
        time.sleep(1)
    return [
        at_least("taken from the GPU, of what was asked", took, 0.9),
        at_most("not returned to the GPU, of what was asked", kept, 0.1),
        equal("bytes that PyTorch keeps", reserved, 0),
        note("MiB asked", size >> 20),
    ]


@CHECKS.add("all-reduce", uses_all=True)
def all_reduce(torch: Any, device: Any) -> list[Figure]:
    """NCCL adds up a tensor over all GPUs, one process each; with one GPU it is a world of one."""
    del device
    return _over_ranks(torch, "all-reduce", "nccl", torch.cuda.device_count())


@CHECKS.add("ddp", uses_all=True)
def ddp(torch: Any, device: Any) -> list[Figure]:
    """Training under DistributedDataParallel: gradients as on one CPU in float64, weights equal on all GPUs."""
    del device
    return _over_ranks(torch, "ddp", "nccl", torch.cuda.device_count())


def _matmul_precision(torch: Any, precision: str) -> None:
    """`ieee` or `tf32`. Since 2.9 there is a setting by operator, and PyTorch refuses a mixture with the older ones."""
    setting = torch.backends.cuda.matmul
    if hasattr(setting, "fp32_precision"):
        setting.fp32_precision = precision
    else:
        setting.allow_tf32 = precision == "tf32"


def _convolution_precision(torch: Any) -> None:
    """No TF32, which is cuDNN's default in PyTorch."""
    setting = getattr(torch.backends.cudnn, "conv", None)
    if setting is not None and hasattr(setting, "fp32_precision"):
        setting.fp32_precision = "ieee"
    else:
        torch.backends.cudnn.allow_tf32 = False


def _need_capability(torch: Any, device: Any, major: int, what: str) -> None:
    has = torch.cuda.get_device_capability(device)
    if has[0] < major:
        raise NotApplicable(f"{what} came with compute capability {major}.0, this GPU has {has[0]}.{has[1]}")


def _product_error(torch: Any, device: Any, dtype: Any) -> float:
    left, right = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    found = left.to(device, dtype) @ right.to(device, dtype)
    if found.device.type != device.type or found.dtype != dtype:
        raise Failed(f"the product is {found.dtype} on {found.device}")
    return common.relative_error(found.cpu().double(), left.double() @ right.double())


def _convolve(torch: Any, image: Any, kernel: Any) -> dict[str, Any]:
    """Result and gradients of a convolution. The gradient that comes in is large, so that none is zero."""
    image, kernel = image.detach().requires_grad_(), kernel.detach().requires_grad_()
    result = torch.nn.functional.conv2d(image, kernel, padding=1)
    (result * result.detach()).sum().backward()
    return {"result": result.detach(), "image's gradient": image.grad, "kernel's gradient": kernel.grad}


def _over_ranks(torch: Any, name: str, backend: str, world: int) -> list[Figure]:
    """Runs a rank in each of `world` processes; returns the figures of the first."""
    if backend not in ("gloo", "nccl") or not getattr(torch.distributed, f"is_{backend}_available")():
        raise Failed(f"PyTorch {torch.__version__} has no {backend}")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, args=(world, folder, name, backend), nprocs=world, join=True)
        told = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("rank*.json"))]
    figures = [Figure(**one) for one in told[0]] if told else []
    return [*figures, equal("ranks that finished", len(told), world)]


def _rank(rank: int, world: int, folder: str, name: str, backend: str) -> None:
    """One process of a world; they meet by a file, so that no port and no host name is needed."""
    torch = common.load("torch")
    torch.manual_seed(SEED)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        backend, init_method=f"file://{folder}/meet", rank=rank, world_size=world,
        timeout=timedelta(seconds=RANK_TIMEOUT_S),
    )  # fmt: skip
    try:
        figures = {"all-reduce": _all_reduce_rank, "ddp": _ddp_rank}[name](torch, device, rank, world)
        if backend == "nccl":
            figures.append(note("NCCL", ".".join(map(str, torch.cuda.nccl.version()))))
        told = json.dumps([vars(one) for one in figures])
        Path(folder, f"rank{rank:03}.json").write_text(told, encoding="utf-8")
    finally:
        torch.distributed.destroy_process_group()


def _all_reduce_rank(torch: Any, device: Any, rank: int, world: int) -> list[Figure]:
    """16 MiB, so that NCCL cuts them up; each element differs, so that none can stand at another's place."""
    count = 1 << 22
    place = torch.arange(count, device=device, dtype=torch.float32) % 1024  # small integers: sums are exact
    total = place * (rank + 1)
    torch.distributed.all_reduce(total)
    wrong = int((total != place * (world * (world + 1) // 2)).sum())
    everywhere = torch.tensor([float(wrong)], device=device)
    torch.distributed.all_reduce(everywhere)
    return [equal("wrong elements on all ranks", int(everywhere), 0), note("ranks", world)]


def _ddp_rank(torch: Any, device: Any, rank: int, world: int) -> list[Figure]:
    def network() -> Any:
        torch.manual_seed(SEED)
        return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    each = 64
    inputs = torch.randn(world * each, 32)
    wanted = torch.sin(inputs.sum(dim=1, keepdim=True))
    mine = slice(rank * each, (rank + 1) * each)
    device_ids = [device.index] if device.type == "cuda" else None
    parallel = torch.nn.parallel.DistributedDataParallel(network().to(device), device_ids=device_ids)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    losses, gradients = [], []
    for step in range(20):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(parallel(inputs[mine].to(device)), wanted[mine].to(device))
        loss.backward()
        if step == 0:
            gradients = [one.grad.cpu().double() for one in parallel.parameters()]
        optimizer.step()
        losses.append(float(loss.detach()))
    alone = network().double()
    torch.nn.functional.mse_loss(alone(inputs.double()), wanted.double()).backward()
    errors = [common.relative_error(gradients[number], one.grad) for number, one in enumerate(alone.parameters())]
    weights = torch.cat([one.detach().flatten() for one in parallel.parameters()])
    least, most = weights.clone(), weights.clone()
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN)
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    return [
        # float32 (TF32 is off by default for products) over 64 to 512 samples: 1e-6; a rank left out: 0.1 and more.
        at_most("largest relative error of a gradient", max(errors), 1e-4),
        equal("largest difference of a weight between ranks", float((most - least).max()), 0),
        at_most("loss at the end by that at the start", losses[-1] / losses[0], 0.95),
        note("ranks", world),
    ]
