#!/usr/bin/env python3
"""JAX data parallel training that can be interrupted and goes on where it was.

    python train_data_parallel.py                 all GPUs of this machine, or the CPU
    python train_data_parallel.py --devices 2     the CPU as two devices, to try it

On several machines, start it on each with the address of the first one, and a number of its own:

    python train_data_parallel.py --coordinator 10.0.0.5:1234 --processes 2 --process 0

Slurm tells all that by itself: srun python train_data_parallel.py --slurm

The batch is split over all devices, the weights are on each; XLA adds up the gradients, because the loss is a mean over
the whole batch. Add --resume to go on from the checkpoint, which all processes must see. The data are made from a seed:
nothing is downloaded. `data`, `first_weights` and `scores` are what to replace by your own.
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
# Processes ask one another whether to stop only this often.
STEPS_BETWEEN_QUESTIONS = 10
Tree = Any


def data(samples: int, seed: int) -> tuple[Any, Any]:
    """Points around a centre for each class."""
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

    def moved(weight: Any, m: Any, s: Any) -> Any:
        return weight - rate * (m / (1 - 0.9**step)) / (jnp.sqrt(s / (1 - 0.999**step)) + 1e-8)

    return jax.tree.map(moved, weights, mean, square), {"step": step, "mean": mean, "square": square}


@partial(jax.jit, static_argnames=("rate", "dtype"), donate_argnums=(0, 1))
def train_step(weights: Tree, state: Tree, features: Any, labels: Any, rate: float, dtype: Any) -> Any:
    loss, gradients = jax.value_and_grad(loss_of)(weights, features, labels, dtype)
    weights, state = adam(weights, gradients, state, rate)
    return weights, state, loss


@partial(jax.jit, static_argnames="dtype")
def right(weights: Tree, features: Any, labels: Any, dtype: Any) -> Any:
    return jnp.mean(jnp.argmax(scores(weights, features, dtype), axis=1) == labels)


def save(path: Path, tree: Tree, epoch: int, step: int) -> None:
    """By the first process, under another name first: a crash leaves the old checkpoint whole."""
    if jax.process_index() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        leaves = {f"leaf{at}": np.asarray(leaf) for at, leaf in enumerate(jax.tree.leaves(tree))}
        unfinished = path.with_name(path.name + ".partial")
        with unfinished.open("wb") as stream:
            np.savez(stream, epoch=epoch, step=step, **leaves)
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(path)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("saved")


def load(path: Path, like: Tree) -> tuple[Tree, int, int]:
    with np.load(path, allow_pickle=False) as kept:
        leaves = [kept[f"leaf{at}"] for at in range(len(jax.tree.leaves(like)))]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), int(kept["epoch"]), int(kept["step"])


def any_says(own: bool) -> bool:
    """Whether any process says so; every one gets the same answer."""
    if jax.process_count() == 1:
        return own
    return bool(np.any(multihost_utils.process_allgather(np.array(own))))


def set_up(options: argparse.Namespace) -> None:
    """Before anything is computed: devices and processes cannot change afterwards."""
    if options.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices)
        # XLA's CPU backend has a thread for each core, and a device that waits for the others keeps one: on a machine
        # with few cores they would all wait. This variable is what it takes for the number of cores.
        os.environ["NPROC"] = str(max(8 * options.devices, os.cpu_count() or 1))
    if options.slurm:
        jax.distributed.initialize()
    elif options.coordinator:
        jax.distributed.initialize(options.coordinator, options.processes, options.process)


def train(options: argparse.Namespace) -> None:
    def log(text: str) -> None:
        if jax.process_index() == 0:
            print(text, flush=True)

    asked_to_stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: asked_to_stop.append(number))
    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("batch",))
    split, everywhere = NamedSharding(mesh, PartitionSpec("batch")), NamedSharding(mesh, PartitionSpec())
    size = options.batch_size * len(devices)
    # bfloat16 needs no loss scaling, and every GPU since Ampere computes fast with it.
    able = devices[0].platform == "gpu" and float(getattr(devices[0], "compute_capability", "0")) >= 8
    dtype = jnp.bfloat16 if options.bf16 or able else jnp.float32

    weights = first_weights(options.seed)
    zeros = jax.tree.map(np.zeros_like, weights)
    state = {"step": np.int32(0), "mean": zeros, "square": zeros}
    epoch = step = 0
    if options.resume and options.checkpoint.exists():
        (weights, state), epoch, step = load(options.checkpoint, (weights, state))
        log(f"goes on from {options.checkpoint}: epoch {epoch}, step {step}")
    elif options.resume:
        log(f"no checkpoint at {options.checkpoint}: begins")
    weights, state = multihost_utils.host_local_array_to_global_array((weights, state), mesh, PartitionSpec())

    features, labels = data(options.samples, seed=1)
    held_out = multihost_utils.host_local_array_to_global_array(data(2000, seed=2), mesh, PartitionSpec())
    steps = options.samples // size
    log(f"{len(devices)} devices ({devices[0].platform}) of {jax.process_count()} processes, {jnp.dtype(dtype).name}")

    def on_devices(values: Any) -> Any:
        """Every process has all data, and gives its devices their part of the batch."""
        return jax.make_array_from_callback(values.shape, split, lambda part: values[part])

    while epoch < options.epochs:
        order = np.random.default_rng((options.seed, epoch)).permutation(options.samples)  # the same on every process
        losses = []
        while step < steps:
            if step % STEPS_BETWEEN_QUESTIONS == 0 and any_says(bool(asked_to_stop)):
                save(options.checkpoint, (weights, state), epoch, step)
                log(f"told to stop: saved {options.checkpoint} at epoch {epoch}, step {step}; go on with --resume")
                return
            chosen = order[step * size : (step + 1) * size]
            batch = on_devices(features[chosen]), on_devices(labels[chosen])
            weights, state, loss = train_step(weights, state, *batch, options.lr, dtype)
            losses.append(loss)
            step += 1
        epoch, step = epoch + 1, 0
        accuracy = float(right(weights, *held_out, dtype))
        log(f"epoch {epoch}: loss {np.mean([float(loss) for loss in losses]):.4f} accuracy {accuracy:.4f}")
        save(options.checkpoint, (weights, state), epoch, step)
        if epoch == options.stop_after:
            break
    assert all(leaf.sharding.is_equivalent_to(everywhere, leaf.ndim) for leaf in jax.tree.leaves(weights))
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(weights)))
    log(f"weights {digest.hexdigest()[:16]}")  # the same after an interruption as without


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, metavar="N", help="take the CPU of this process as N devices")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where the first process is, and a free port there")
    parser.add_argument("--processes", type=int, help="how many processes there are")
    parser.add_argument("--process", type=int, help="the number of this one, from 0")
    parser.add_argument("--slurm", action="store_true", help="take all that from Slurm")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="for each device")
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--bf16", action="store_true", help="bfloat16 also where it is not faster")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/train_data_parallel.npz"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint, if there is one")
    parser.add_argument("--stop-after", type=int, metavar="EPOCH", help="end early, as an interruption would")
    options = parser.parse_args()
    set_up(options)
    train(options)
    if jax.process_count() > 1:
        jax.distributed.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
