#!/usr/bin/env python3
"""JAX data parallel training that continues after an interruption.

    python train_data_parallel.py                 all GPUs of this machine, or the CPU
    python train_data_parallel.py --devices 2     the CPU as two devices, for a test

On several machines, start it on each with the address of the first machine and its own process number:

    python train_data_parallel.py --coordinator 10.0.0.5:1234 --processes 2 --process 0

Slurm provides these values: srun python train_data_parallel.py --slurm

The batch is split over all devices, and each device has all weights. XLA adds up the gradients, because the loss is a
mean over the whole batch. Add --resume to continue from the checkpoint, which all processes must be able to read. The
data are generated from a seed, without a download. Replace `data`, `first_weights` and `scores` by your own.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

FEATURES, CLASSES, HIDDEN = 32, 10, 128
WIDTHS = (FEATURES, HIDDEN, HIDDEN, CLASSES)
# Processes agree on whether to stop only this often.
STEPS_BETWEEN_STOP_CHECKS = 10
Tree = Any


def data(samples: int, seed: int) -> tuple[Any, Any]:
    """Random points around a centre for each class."""
    random = np.random.default_rng(seed)
    labels = random.integers(CLASSES, size=samples)
    centres = np.random.default_rng(0).normal(size=(CLASSES, FEATURES))
    return (centres[labels] + 2 * random.normal(size=(samples, FEATURES))).astype("float32"), labels.astype("int32")


def first_weights(seed: int) -> Tree:
    random = np.random.default_rng(seed)
    shapes = [(WIDTHS[at], WIDTHS[at + 1]) for at in range(len(WIDTHS) - 1)]
    return [
        {
            "w": (random.normal(size=shape) * np.sqrt(2 / shape[0])).astype("float32"),
            "b": np.zeros(shape[1], "float32"),
        }
        for shape in shapes
    ]


def scores(weights: Tree, features: Any, dtype: Any) -> Any:
    values = features.astype(dtype)
    for layer in weights[:-1]:
        values = jax.nn.relu(values @ layer["w"].astype(dtype) + layer["b"].astype(dtype))
    return values.astype(jnp.float32) @ weights[-1]["w"] + weights[-1]["b"]


def loss_of(weights: Tree, features: Any, labels: Any, dtype: Any) -> Any:
    logs = jax.nn.log_softmax(scores(weights, features, dtype))
    return -jnp.mean(jnp.take_along_axis(logs, labels[:, None], axis=1))


def adam(weights: Tree, gradients: Tree, state: Tree, rate: float) -> tuple[Tree, Tree]:
    """Kingma and Ba, 2015, algorithm 1. For more than this, see optax."""
    step = state["step"] + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], gradients)
    square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, state["square"], gradients)

    def update(weight: Any, m: Any, s: Any) -> Any:
        return weight - rate * (m / (1 - 0.9**step)) / (jnp.sqrt(s / (1 - 0.999**step)) + 1e-8)

    return jax.tree.map(update, weights, mean, square), {"step": step, "mean": mean, "square": square}


@partial(jax.jit, static_argnames=("rate", "dtype"), donate_argnums=(0, 1))
def train_step(weights: Tree, state: Tree, features: Any, labels: Any, rate: float, dtype: Any) -> Any:
    loss, gradients = jax.value_and_grad(loss_of)(weights, features, labels, dtype)
    weights, state = adam(weights, gradients, state, rate)
    return weights, state, loss


@partial(jax.jit, static_argnames="dtype")
def accuracy_of(weights: Tree, features: Any, labels: Any, dtype: Any) -> Any:
    return jnp.mean(jnp.argmax(scores(weights, features, dtype), axis=1) == labels)


def save(path: Path, tree: Tree, epoch: int, step: int) -> None:
    """The first process writes the checkpoint to a temporary file first: a crash leaves the old checkpoint intact."""
    if jax.process_index() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        leaves = {f"leaf{at}": np.asarray(leaf) for at, leaf in enumerate(jax.tree.leaves(tree))}
        partial_file = path.with_name(path.name + ".partial")
        with partial_file.open("wb") as stream:
            np.savez(stream, epoch=epoch, step=step, **leaves)
            stream.flush()
            os.fsync(stream.fileno())
        partial_file.replace(path)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("saved")


def load(path: Path, like: Tree) -> tuple[Tree, int, int]:
    with np.load(path, allow_pickle=False) as archive:
        leaves = [archive[f"leaf{at}"] for at in range(len(jax.tree.leaves(like)))]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), int(archive["epoch"]), int(archive["step"])


def any_process(flag: bool) -> bool:
    """Whether the flag is set in any process; the same result in all processes."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.array(flag))))


def set_up(options: argparse.Namespace) -> None:
    """Configures devices and processes, which JAX cannot change after the first computation."""
    if options.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices)
        # XLA's CPU backend has one thread for each core, and a waiting device occupies a thread: with few cores, all
        # devices would wait forever. XLA reads the number of cores from this variable.
        os.environ["NPROC"] = str(max(8 * options.devices, os.cpu_count() or 1))
    if options.slurm:
        jax.distributed.initialize()
    elif options.coordinator:
        jax.distributed.initialize(options.coordinator, options.processes, options.process)


def train(options: argparse.Namespace) -> None:
    def log(text: str) -> None:
        if jax.process_index() == 0:
            print(text, flush=True)

    stop_signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stop_signals.append(number))
    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("batch",))
    split, everywhere = NamedSharding(mesh, PartitionSpec("batch")), NamedSharding(mesh, PartitionSpec())
    size = options.batch_size * len(devices)
    # bfloat16 needs no loss scaling and is fast on every GPU since Ampere.
    has_fast_bf16 = devices[0].platform == "gpu" and float(getattr(devices[0], "compute_capability", "0")) >= 8
    dtype = jnp.bfloat16 if options.bf16 or has_fast_bf16 else jnp.float32

    weights = first_weights(options.seed)
    zeros = jax.tree.map(np.zeros_like, weights)
    state = {"step": np.int32(0), "mean": zeros, "square": zeros}
    epoch = step = 0
    if options.resume and options.checkpoint.exists():
        (weights, state), epoch, step = load(options.checkpoint, (weights, state))
        log(f"resuming from {options.checkpoint}: epoch {epoch}, step {step}")
    elif options.resume:
        log(f"no checkpoint at {options.checkpoint}: starting from the beginning")
    weights, state = multihost_utils.host_local_array_to_global_array((weights, state), mesh, PartitionSpec())

    features, labels = data(options.samples, seed=1)
    held_out = multihost_utils.host_local_array_to_global_array(data(2000, seed=2), mesh, PartitionSpec())
    steps = options.samples // size
    log(f"{len(devices)} devices ({devices[0].platform}) of {jax.process_count()} processes, {jnp.dtype(dtype).name}")

    def on_devices(values: Any) -> Any:
        """Every process has all data and copies its part of the batch to its devices."""
        return jax.make_array_from_callback(values.shape, split, lambda part: values[part])

    while epoch < options.epochs:
        order = np.random.default_rng((options.seed, epoch)).permutation(options.samples)  # the same on every process
        losses = []
        while step < steps:
            if step % STEPS_BETWEEN_STOP_CHECKS == 0 and any_process(bool(stop_signals)):
                save(options.checkpoint, (weights, state), epoch, step)
                log(f"stopping: saved {options.checkpoint} at epoch {epoch}, step {step}; continue with --resume")
                return
            indices = order[step * size : (step + 1) * size]
            batch = on_devices(features[indices]), on_devices(labels[indices])
            weights, state, loss = train_step(weights, state, *batch, options.lr, dtype)
            losses.append(loss)
            step += 1
        epoch, step = epoch + 1, 0
        accuracy = float(accuracy_of(weights, *held_out, dtype))
        log(f"epoch {epoch}: loss {np.mean([float(loss) for loss in losses]):.4f} accuracy {accuracy:.4f}")
        save(options.checkpoint, (weights, state), epoch, step)
        if epoch == options.stop_after:
            break
    assert all(leaf.sharding.is_equivalent_to(everywhere, leaf.ndim) for leaf in jax.tree.leaves(weights))
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(weights)))
    log(f"weights {digest.hexdigest()[:16]}")  # the same with and without an interruption


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, metavar="N", help="use the CPU of this process as N devices")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="address of the first process, with a free port")
    parser.add_argument("--processes", type=int, help="number of processes")
    parser.add_argument("--process", type=int, help="number of this process, from 0")
    parser.add_argument("--slurm", action="store_true", help="get these values from Slurm")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="for each device")
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--bf16", action="store_true", help="use bfloat16 even if it is not faster")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/train_data_parallel.npz"))
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    parser.add_argument("--stop-after", type=int, metavar="EPOCH", help="end after this epoch, like an interruption")
    options = parser.parse_args()
    set_up(options)
    train(options)
    if jax.process_count() > 1:
        jax.distributed.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
