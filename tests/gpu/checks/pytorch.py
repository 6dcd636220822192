"""GPU checks of PyTorch 2.x. They share a process: `begin` restores the settings that a check changes."""

from __future__ import annotations

import importlib
import json
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from . import common, nvml
from .common import Checks, Failed, Figure, NotApplicable, Setup, at_least, at_most, between, equal, note

CHECKS = Checks()
SIZE = 4096  # rows and columns of the large matrices: 137 GFLOP, and sums of 4096 products
RANK_TIMEOUT_S = 120
SEED = 20


def begin(system: nvml.System) -> Setup:
    """PyTorch with a GPU; raises Failed if there is none."""
    torch = common.load("torch")
    cuda = torch.version.cuda or ""
    if not torch.cuda.is_available():
        raise common.no_gpu(f"PyTorch {torch.__version__}", cuda, system)
    torch.manual_seed(SEED)
    # After `tf32`: with that precision, PyTorch 2.9 raises an error where it reads the older setting, as inductor does.
    _matmul_precision(torch, "ieee")
    return Setup(torch, torch.device("cuda", 0), torch.__version__, cuda)


@CHECKS.add("devices", uses_all=True)
def devices(torch: Any, device: Any) -> list[Figure]:
    """PyTorch and NVML have the same GPUs: number, name, compute capability, memory."""
    del device
    gpus = []
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        gpus.append({"name": gpu.name, "capability": f"{gpu.major}.{gpu.minor}", "memory": gpu.total_memory})
    return common.same_devices(gpus, nvml.read())


@CHECKS.add("matmul")
def matmul(torch: Any, device: Any) -> list[Figure]:
    """A large matrix product in float32 agrees with float64 on the CPU."""
    _matmul_precision(torch, "ieee")
    # Sums of 4096 products in float32 differ by 4e-7 to 1e-6 of the norm, TF32 by 3e-4, bf16 by 2e-3.
    return [at_most("relative error", _product_error(torch, device, torch.float32), 1e-5), note("size", SIZE)]


@CHECKS.add("tf32")
def tf32(torch: Any, device: Any) -> list[Figure]:
    """A product in TF32 has the precision of TF32, so the tensor cores computed it."""
    _require_capability(torch, device, 8, "TF32")
    _matmul_precision(torch, "tf32")
    # 10 bits of mantissa give 3e-4. Less than 5e-5 means float32 instead of TF32.
    return [between("relative error", _product_error(torch, device, torch.float32), 5e-5, 2e-3)]


@CHECKS.add("bf16")
def bf16(torch: Any, device: Any) -> list[Figure]:
    """A product in bfloat16 has the precision of bfloat16."""
    _require_capability(torch, device, 8, "bfloat16 in hardware")
    # 7 bits of mantissa: 2.3e-3 from the inputs, 1.7e-3 from the result, and more if partial sums are in bf16.
    return [between("relative error", _product_error(torch, device, torch.bfloat16), 5e-4, 1e-2)]


@CHECKS.add("convolution")
def convolution(torch: Any, device: Any) -> list[Figure]:
    """A convolution and its gradients use cuDNN and agree with float64 on the CPU."""
    _convolution_precision(torch)
    image, kernel = torch.randn(8, 64, 56, 56), torch.randn(64, 64, 3, 3)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        results = _convolve(torch, image.to(device), kernel.to(device))
    expected = _convolve(torch, image.double(), kernel.double())
    operators = {event.key for event in profile.key_averages()}
    figures = [
        # Sums of 576 (result) to 25088 (gradient) products: 1e-7 to 1e-6, some 1e-6 with Winograd's algorithm, 3e-4
        # with TF32.
        at_most(
            f"relative error of the {name}", common.relative_error(results[name].cpu().double(), expected[name]), 5e-5
        )
        for name in expected
    ]
    cudnn = sum("cudnn_convolution" in operator for operator in operators)
    return [*figures, at_least("operators of cuDNN", cudnn, 1), note("cuDNN", torch.backends.cudnn.version())]


@CHECKS.add("amp")
def amp(torch: Any, device: Any) -> list[Figure]:
    """Mixed precision: it uses float16, the loss falls, and it skips a step if a gradient overflows."""
    inputs = torch.randn(1024, 64, device=device)
    targets = inputs @ torch.randn(64, 1, device=device)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1)).to(device)
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.float16):
            output = layers(inputs)
        loss = torch.nn.functional.mse_loss(output.float(), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    before, scale = [weight.detach().clone() for weight in layers.parameters()], scaler.get_scale()
    optimizer.zero_grad()
    scaler.scale((layers(inputs) * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    after = list(layers.parameters())
    changed = sum(not torch.equal(weight, after[number]) for number, weight in enumerate(before))
    return [
        equal("uses float16", int(output.dtype == torch.float16), 1),
        at_most("final loss / initial loss", losses[-1] / losses[0], 0.5),  # 0.02 in float32
        equal("weights changed by a step with an overflow", changed, 0),
        at_most("scale after the overflow / scale before", scaler.get_scale() / scale, 0.5),
    ]


@CHECKS.add("graph")
def graph(torch: Any, device: Any) -> list[Figure]:
    """A replayed CUDA graph gives the same results as the calls without it, for new inputs."""
    layers = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256)).to(device)
    inputs, count = torch.zeros(64, 256, device=device), torch.zeros((), device=device)
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        # The manual says to run the calls before a capture, on another stream, so that libraries initialize.
        with torch.cuda.stream(side):
            for _ in range(3):
                layers(inputs)
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            result = layers(inputs)
            count += 1
        errors = []
        for _ in range(5):
            inputs.copy_(torch.randn(64, 256, device=device))
            captured.replay()
            errors.append(common.relative_error(result.cpu().double(), layers(inputs).cpu().double()))
    # The same kernels with the same numbers; another algorithm of cuBLAS differs by 1e-6.
    return [at_most("largest relative error", max(errors), 1e-5), equal("replays counted on the GPU", int(count), 5)]


@CHECKS.add("compile")
def compiled(torch: Any, device: Any) -> list[Figure]:
    """Kernels of torch.compile agree with eager calls, and a separate Triton kernel gives the right result."""
    left, right = torch.randn(2, 1_000_003, device=device)  # a prime, so that the last block of a kernel is incomplete
    torch.compiler.reset()

    def smooth(first: Any, second: Any) -> Any:
        return torch.nn.functional.gelu(first * 2 + second).sum(dim=-1, keepdim=True) + torch.sin(second)

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
    # The error is that of a sum over a million elements in float32: at most 1e-6.
    return [at_most("relative error of torch.compile", error, 1e-4), equal("wrong sums of the Triton kernel", wrong, 0)]


@CHECKS.add("memory")
def memory(torch: Any, device: Any) -> list[Figure]:
    """A tensor allocates memory of the GPU, and releases it."""
    torch.zeros(1, device=device)  # creates the context first, which stays until the process ends
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info(device)[0]
    size = min(1 << 30, free // 4)
    if size < 64 << 20:
        raise Failed(f"only {free >> 20} MiB of the GPU are free")
    allocated, remaining = 0.0, 0.0
    # Other processes may use the same GPU meanwhile, so it tries up to three times.
    for _ in range(3):
        torch.cuda.empty_cache()
        start, reserved_before = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device)
        block = torch.ones(size, dtype=torch.uint8, device=device)
        torch.cuda.synchronize()
        allocated = (start - torch.cuda.mem_get_info(device)[0]) / size
        del block
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        remaining = (start - torch.cuda.mem_get_info(device)[0]) / size
        reserved = torch.cuda.memory_reserved(device) - reserved_before
        if allocated >= 0.9 and abs(remaining) <= 0.1 and reserved == 0:
            break
        time.sleep(1)
    return [
        at_least("allocated / requested bytes", allocated, 0.9),
        at_most("not released / requested bytes", remaining, 0.1),
        equal("bytes that PyTorch still reserves", reserved, 0),
        note("requested MiB", size >> 20),
    ]


@CHECKS.add("all-reduce", uses_all=True)
def all_reduce(torch: Any, device: Any) -> list[Figure]:
    """NCCL adds up a tensor over all GPUs, one process each; with one GPU, there is one rank."""
    del device
    return _over_ranks(torch, "all-reduce", "nccl", torch.cuda.device_count())


@CHECKS.add("ddp", uses_all=True)
def ddp(torch: Any, device: Any) -> list[Figure]:
    """Training with DistributedDataParallel: gradients agree with float64 on the CPU, weights are equal on all GPUs."""
    del device
    return _over_ranks(torch, "ddp", "nccl", torch.cuda.device_count())


def _matmul_precision(torch: Any, precision: str) -> None:
    """`ieee` or `tf32`. Since 2.9 each operator has its own setting, which cannot be mixed with the older ones."""
    setting = torch.backends.cuda.matmul
    if hasattr(setting, "fp32_precision"):
        setting.fp32_precision = precision
    else:
        setting.allow_tf32 = precision == "tf32"


def _convolution_precision(torch: Any) -> None:
    """Turns off TF32, which is cuDNN's default in PyTorch."""
    setting = getattr(torch.backends.cudnn, "conv", None)
    if setting is not None and hasattr(setting, "fp32_precision"):
        setting.fp32_precision = "ieee"
    else:
        torch.backends.cudnn.allow_tf32 = False


def _require_capability(torch: Any, device: Any, major: int, what: str) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability[0] < major:
        raise NotApplicable(f"{what} needs compute capability {major}.0, this GPU has {capability[0]}.{capability[1]}")


def _product_error(torch: Any, device: Any, dtype: Any) -> float:
    left, right = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    product = left.to(device, dtype) @ right.to(device, dtype)
    if product.device.type != device.type or product.dtype != dtype:
        raise Failed(f"the product is {product.dtype} on {product.device}")
    return common.relative_error(product.cpu().double(), left.double() @ right.double())


def _convolve(torch: Any, image: Any, kernel: Any) -> dict[str, Any]:
    """Result and gradients of a convolution. The incoming gradient is large, so that no gradient is zero."""
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
        ranks = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("rank*.json"))]
    figures = [Figure(**figure) for figure in ranks[0]] if ranks else []
    return [*figures, equal("finished ranks", len(ranks), world)]


def _rank(rank: int, world: int, folder: str, name: str, backend: str) -> None:
    """Runs one rank. The ranks connect with a file, so they need no port and no host name."""
    torch = common.load("torch")
    torch.manual_seed(SEED)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world,
        timeout=timedelta(seconds=RANK_TIMEOUT_S),
    )  # fmt: skip
    try:
        figures = {"all-reduce": _all_reduce_rank, "ddp": _ddp_rank}[name](torch, device, rank, world)
        if backend == "nccl":
            figures.append(note("NCCL", ".".join(map(str, torch.cuda.nccl.version()))))
        text = json.dumps([vars(figure) for figure in figures])
        Path(folder, f"rank{rank:03}.json").write_text(text, encoding="utf-8")
    finally:
        torch.distributed.destroy_process_group()


def _all_reduce_rank(torch: Any, device: Any, rank: int, world: int) -> list[Figure]:
    """16 MiB, so that NCCL splits them; neighbouring elements differ, so that a wrong order is detected."""
    count = 1 << 22
    values = torch.arange(count, device=device, dtype=torch.float32) % 1024  # small integers: sums are exact
    total = values * (rank + 1)
    torch.distributed.all_reduce(total)
    wrong = int((total != values * (world * (world + 1) // 2)).sum())
    all_wrong = torch.tensor([float(wrong)], device=device)
    torch.distributed.all_reduce(all_wrong)
    return [equal("wrong elements on all ranks", int(all_wrong), 0), note("ranks", world)]


def _ddp_rank(torch: Any, device: Any, rank: int, world: int) -> list[Figure]:
    def network() -> Any:
        torch.manual_seed(SEED)
        return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    each = 64
    inputs = torch.randn(world * each, 32)
    targets = torch.sin(inputs.sum(dim=1, keepdim=True))
    own = slice(rank * each, (rank + 1) * each)
    device_ids = [device.index] if device.type == "cuda" else None
    parallel = torch.nn.parallel.DistributedDataParallel(network().to(device), device_ids=device_ids)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    losses, gradients = [], []
    for step in range(20):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(parallel(inputs[own].to(device)), targets[own].to(device))
        loss.backward()
        if step == 0:
            gradients = [weight.grad.cpu().double() for weight in parallel.parameters()]
        optimizer.step()
        losses.append(float(loss.detach()))
    reference = network().double()
    torch.nn.functional.mse_loss(reference(inputs.double()), targets.double()).backward()
    errors = [
        common.relative_error(gradients[number], weight.grad) for number, weight in enumerate(reference.parameters())
    ]
    weights = torch.cat([weight.detach().flatten() for weight in parallel.parameters()])
    least, most = weights.clone(), weights.clone()
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN)
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    return [
        # float32 (without TF32, the default for products) over 64 to 512 samples: 1e-6; without one of the ranks: 0.1.
        at_most("largest relative error of a gradient", max(errors), 1e-4),
        equal("largest difference of a weight between ranks", float((most - least).max()), 0),
        at_most("final loss / initial loss", losses[-1] / losses[0], 0.95),
        note("ranks", world),
    ]
