#!/usr/bin/env python3
"""PyTorch data parallel training (DDP) that continues after an interruption.

    python train_ddp.py                                      one process: a GPU, or the CPU
    torchrun --nproc-per-node=gpu train_ddp.py               all GPUs of this machine (a number for the CPU)
    torchrun --nnodes=2 --nproc-per-node=gpu --rdzv-backend=c10d --rdzv-endpoint=FIRST:29400 train_ddp.py
                                                             the same on each of two machines

If a large batch does not fit into the GPU's memory, `--batch-size 16 --accumulate 4` gives the gradients of 64 samples.
Add --resume to continue from the checkpoint. SIGTERM (docker stop, Slurm, Kubernetes) saves a checkpoint and ends
the process with exit code 0; torchrun then ends with 1.
The data are generated from a seed, without a download. Replace `data` and `build_model` by your own.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

FEATURES, CLASSES = 32, 10
# Ranks agree on whether to stop only this often, because they wait for the GPU each time.
STEPS_BETWEEN_STOP_CHECKS = 10


def data(samples: int, seed: int) -> Dataset[tuple[torch.Tensor, ...]]:
    """Random points around a centre for each class; the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    return TensorDataset(centres[labels] + 2 * torch.randn(samples, FEATURES, generator=generator), labels)


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES)
    )


class Job:
    """The position of this process among the ranks."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        local = int(os.environ.get("LOCAL_RANK", "0"))
        self.launched = "RANK" in os.environ  # by torchrun; otherwise this is the only process
        self.device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
        is_gpu = self.device.type == "cuda"
        if is_gpu:
            torch.cuda.set_device(self.device)
        if self.launched:
            # With `device_id`, barrier() need not guess this process's GPU, and warn about it. A CPU has none.
            dist.init_process_group("nccl" if is_gpu else "gloo", device_id=self.device if is_gpu else None)

    def log(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def sum(self, *values: float) -> list[float]:
        """The sums over all ranks."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.launched:
            dist.all_reduce(total)
        return [float(value) for value in total]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in order."""
        if not self.launched:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values


def precision(amp: str, device: torch.device) -> torch.dtype | None:
    """bfloat16 on GPUs that have it (Ampere and newer), else float16; on the CPU only by option."""
    if amp == "auto":
        if device.type == "cpu":
            return None
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    return {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}[amp]


class Training:
    """All state that a checkpoint contains."""

    def __init__(self, job: Job, options: argparse.Namespace, steps_per_epoch: int) -> None:
        torch.manual_seed(options.seed)  # the same initial weights on all ranks
        self.model = build_model().to(job.device)
        self.dtype = precision(options.amp, job.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, options.epochs * steps_per_epoch)
        # Only float16 needs scaling: many gradients are below its smallest number.
        self.scaler = torch.amp.GradScaler(job.device.type, enabled=self.dtype is torch.float16)
        self.epoch = self.step = 0  # where to continue; `step` counts the epoch's batches
        self.batches = [options.batch_size, options.accumulate]  # the scheduler counts the updates that they give
        torch.manual_seed(options.seed + 1000 * (job.rank + 1))  # dropout differs between ranks

    def save(self, path: Path, job: Job) -> None:
        """Rank 0 writes the checkpoint to a temporary file first: a crash leaves the old checkpoint intact."""
        random = torch.get_rng_state(), torch.cuda.get_rng_state() if job.device.type == "cuda" else None
        all_random = job.gather(random)
        if job.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            state = {
                "model": self.model.state_dict(),  # without DDP's prefix "module.", so it also loads without DDP
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "scaler": self.scaler.state_dict(),
                "epoch": self.epoch,
                "step": self.step,
                "batches": self.batches,
                "random": all_random,
            }
            partial = path.with_name(path.name + ".partial")
            with partial.open("wb") as stream:
                torch.save(state, stream)
                stream.flush()
                os.fsync(stream.fileno())
            partial.replace(path)
        if job.launched:
            dist.barrier()

    def load(self, path: Path, job: Job) -> None:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["batches"] != self.batches:
            size, accumulate = state["batches"]
            raise SystemExit(f"{path} is of a run with --batch-size {size} --accumulate {accumulate}: use these")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])
        self.epoch, self.step = state["epoch"], state["step"]
        if len(state["random"]) != job.world:
            before = len(state["random"])
            job.log(f"checkpoint of {before} ranks, now {job.world} ranks: restarting epoch {self.epoch}")
            self.step = 0
            return
        cpu, cuda = state["random"][job.rank]
        torch.set_rng_state(cpu)
        if cuda is not None and job.device.type == "cuda":
            torch.cuda.set_rng_state(cuda)


def evaluate(model: nn.Module, held_out: Dataset[tuple[torch.Tensor, ...]], job: Job) -> float:
    """The accuracy. Each rank takes its share, without repeats (a DistributedSampler would repeat some samples)."""
    model.eval()
    share = Subset(held_out, range(job.rank, len(held_out), job.world))
    correct = 0
    with torch.inference_mode():
        for inputs, labels in DataLoader(share, batch_size=512, generator=torch.Generator()):
            correct += int((model(inputs.to(job.device)).argmax(1).cpu() == labels).sum())
    model.train()
    total_correct, total = job.sum(correct, len(share))
    return total_correct / total


def board(job: Job) -> Any:
    """TensorBoard's writer on rank 0, if TensorBoard is installed."""
    if job.rank != 0:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (not in every image)
    except ImportError:
        print("no TensorBoard logs: to get them, python -m pip install tensorboard", flush=True)
        return None
    return SummaryWriter(Path(os.environ.get("TENSORBOARD_LOGDIR") or "runs") / "train_ddp")


def digest(model: nn.Module) -> str:
    sha256 = hashlib.sha256()
    for value in model.state_dict().values():
        sha256.update(value.cpu().numpy().tobytes())
    return sha256.hexdigest()[:16]


def train(job: Job, options: argparse.Namespace) -> None:
    training_data, held_out = data(options.samples, seed=1), data(2000, seed=2)
    sampler = DistributedSampler(training_data, job.world, job.rank, shuffle=True, seed=options.seed)
    # A separate generator: each start of the loader draws a number, which must not change the numbers for dropout.
    seeds = torch.Generator()
    loader = DataLoader(
        training_data,
        batch_size=options.batch_size,
        sampler=sampler,
        generator=seeds,
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
        pin_memory=job.device.type == "cuda",
    )
    state = Training(job, options, -(-len(loader) // options.accumulate))
    if options.resume and options.checkpoint.exists():
        state.load(options.checkpoint, job)
        job.log(f"resuming from {options.checkpoint}: epoch {state.epoch}, step {state.step}")
    elif options.resume:
        job.log(f"no checkpoint at {options.checkpoint}: starting from the beginning")
    device_ids = [job.device] if job.device.type == "cuda" else None
    model = DistributedDataParallel(state.model, device_ids=device_ids) if job.launched else state.model
    writer = board(job)
    # Only where an update begins: a checkpoint has no gradients.
    steps_between_stop_checks = max(1, STEPS_BETWEEN_STOP_CHECKS // options.accumulate) * options.accumulate
    stop_signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stop_signals.append(number))
    job.log(f"ranks: {job.world}, on {job.device.type}, {state.dtype or 'float32'}, {len(loader)} steps per epoch")

    while state.epoch < options.epochs:
        sampler.set_epoch(state.epoch)  # otherwise every epoch has the same order
        seeds.manual_seed(options.seed + state.epoch)
        total = steps = 0.0
        for step, batch in enumerate(loader):
            if step < state.step:
                continue  # done before the interruption; the epoch seeds the order, so it is the same
            first = step - step % options.accumulate  # of the batches whose gradients are added up
            if step % steps_between_stop_checks == 0 and job.sum(len(stop_signals))[0]:
                state.step = step
                state.save(options.checkpoint, job)
                job.log(
                    f"stopping: saved {options.checkpoint} at epoch {state.epoch}, step {step}; continue with --resume"
                )
                return
            inputs, labels = (tensor.to(job.device, non_blocking=True) for tensor in batch)
            is_last = step + 1 in (first + options.accumulate, len(loader))
            samples = min(options.accumulate * options.batch_size, len(sampler) - first * options.batch_size)
            # DDP averages the gradients of all ranks in backward(): once is enough, with those of all these batches.
            with model.no_sync() if job.launched and not is_last else contextlib.nullcontext():
                with torch.autocast(job.device.type, state.dtype, enabled=state.dtype is not None):
                    loss = F.cross_entropy(model(inputs), labels)
                state.scaler.scale(loss * (len(labels) / samples)).backward()
            if is_last:
                state.scaler.step(state.optimizer)
                state.scaler.update()
                state.scheduler.step()
                state.optimizer.zero_grad(set_to_none=True)
            total, steps = total + loss.detach(), steps + 1
        mean = job.sum(float(total) / max(steps, 1))[0] / job.world
        accuracy = evaluate(state.model, held_out, job)
        state.epoch, state.step = state.epoch + 1, 0
        job.log(f"epoch {state.epoch}: loss {mean:.4f} accuracy {accuracy:.4f}")
        if writer:
            writer.add_scalar("loss", mean, state.epoch)
            writer.add_scalar("accuracy", accuracy, state.epoch)
            writer.flush()
        state.save(options.checkpoint, job)
        if state.epoch == options.stop_after:
            break
    job.log(f"weights {digest(state.model)}")  # the same with and without an interruption
    if writer:
        writer.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="for each rank")
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="update the weights after N batches")
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--workers", type=int, default=0, help="data loader processes of each rank")
    parser.add_argument("--amp", choices=["auto", "off", "bf16", "fp16"], default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/train_ddp.pt"))
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    parser.add_argument("--stop-after", type=int, metavar="EPOCH", help="end after this epoch, like an interruption")
    options = parser.parse_args()
    if options.accumulate < 1:
        parser.error("--accumulate must be 1 or more")
    job = Job()
    try:
        train(job, options)
    finally:
        with contextlib.suppress(Exception):  # must not hide the original error
            if job.launched:
                dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
