#!/usr/bin/env python3
"""TensorFlow on several machines (MultiWorkerMirroredStrategy), each with all its GPUs or its CPU.

    python train_multiworker.py --local-workers 2       two workers on this machine, for a test

On several machines, start it on each with TF_CONFIG, which differs only in the index (index 0 is the chief):

    export TF_CONFIG='{"cluster": {"worker": ["10.0.0.5:12345", "10.0.0.6:12345"]},
                       "task": {"type": "worker", "index": 0}}'
    python train_multiworker.py

All workers must be able to read the checkpoint folder. After an interruption, the same command continues after the last
complete epoch. The chief writes checkpoints, logs for TensorBoard ($TENSORBOARD_LOGDIR or ./runs) and the SavedModel,
which is loaded and compared.

It has its own training loop (strategy.run), because Keras 3 has no model.fit for this strategy. It works with
TensorFlow 2.9 (Keras 2) and 2.20 (Keras 3). Data, model and export are those of train_mirrored.py.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
import tensorflow as tf
from train_mirrored import build_model, data, export, precision


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local-workers", type=int, metavar="N", help="start N workers on this machine")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="for each GPU, or for each worker without a GPU")
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--precision", choices=["auto", "float32", "mixed_float16", "mixed_bfloat16"], default="auto")
    parser.add_argument(
        "--checkpoints", type=Path, default=Path("checkpoints/train_multiworker"), help="folder of the checkpoints"
    )
    parser.add_argument("--output", type=Path, default=Path("exported/multiworker"), help="folder of the SavedModel")
    parser.add_argument("--stop-after", type=int, metavar="EPOCH", help="end after this epoch, like an interruption")
    return parser.parse_args(arguments)


def start_local(workers: int, arguments: list[str]) -> int:
    """Runs this program as N workers, each with its TF_CONFIG and GPUs. Ends all workers if one fails."""
    reserved = [socket.create_server(("127.0.0.1", 0)) for _ in range(workers)]
    addresses = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in reserved]
    gpus = [str(at) for at in range(len(tf.config.list_physical_devices("GPU")))]
    for listener in reserved:
        listener.close()
    processes: list[subprocess.Popen[bytes]] = []
    for index in range(workers):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[index::workers])} if gpus else {}
        # With TF_CONFIG, the program ignores --local-workers.
        environment = {**os.environ, "TF_CONFIG": json.dumps(task), **devices}
        processes.append(subprocess.Popen([sys.executable, __file__, *arguments], env=environment))

    def end_all(*_: Any) -> None:
        for process in processes:
            process.terminate()

    signal.signal(signal.SIGTERM, end_all)
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            time.sleep(2)  # for the messages of the others
            end_all()
            break
        time.sleep(0.1)
    return max(abs(process.wait()) for process in processes)


class Optimizer:
    """Adam, with the loss scaling that float16 needs, for the APIs of Keras 2 and 3."""

    def __init__(self) -> None:
        inner = tf.keras.optimizers.Adam(1e-3)
        self.scales = tf.keras.mixed_precision.global_policy().name == "mixed_float16"
        self.keras = tf.keras.mixed_precision.LossScaleOptimizer(inner) if self.scales else inner

    def step(self, tape: Any, loss: Any, variables: Any) -> None:
        if not self.scales:
            self.keras.apply_gradients(zip(tape.gradient(loss, variables), variables))  # noqa: B905  (Python 3.9)
            return
        keras2 = hasattr(self.keras, "get_scaled_loss")
        with tape:
            scaled = self.keras.get_scaled_loss(loss) if keras2 else self.keras.scale_loss(loss)
        gradients = tape.gradient(scaled, variables)
        if keras2:
            gradients = self.keras.get_unscaled_gradients(gradients)
        self.keras.apply_gradients(zip(gradients, variables))  # noqa: B905  (Python 3.9)


class Training:
    """Model, optimizer and epoch, which a checkpoint contains, and the compiled functions."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.model = build_model()
            self.optimizer = Optimizer()
            # Before a checkpoint is restored: Keras 3 creates the variables here.
            build = getattr(self.optimizer.keras, "build", None) or self.optimizer.keras._create_all_weights
            build(self.model.trainable_variables)
        self.epoch = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.train_step = tf.function(self._train_step)
        self.correct = tf.function(self._correct)

    def _train_step(self, features: Any, labels: Any) -> Any:
        """The mean loss over all replicas of all workers."""
        replicas = self.strategy.num_replicas_in_sync

        def on_replica(features: Any, labels: Any) -> Any:
            variables = self.model.trainable_variables
            with tf.GradientTape(persistent=True) as tape:
                scores = self.model(features, training=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)
                # Gradients are summed over the replicas, so each replica contributes its part of the mean.
                loss = tf.reduce_mean(losses) / replicas
            self.optimizer.step(tape, loss, variables)
            return loss

        losses = self.strategy.run(on_replica, args=(features, labels))
        return self.strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    def _correct(self, features: Any, labels: Any) -> Any:
        """The number of correct predictions."""
        return tf.reduce_sum(tf.cast(tf.argmax(self.model(features, training=False), 1) == labels, tf.int64))


def batches_of(strategy: Any, options: argparse.Namespace, epoch: int) -> Any:
    """The share of each worker. The order depends only on the epoch, so it is the same after an interruption."""
    features, labels = data(options.samples, seed=1)
    size = options.batch_size * strategy.num_replicas_in_sync

    def share_of(context: Any) -> Any:
        # The same number of complete batches on every worker: if one had fewer, the others would wait forever.
        share = tf.data.Dataset.from_tensor_slices((features, labels)).shuffle(options.samples, seed=epoch)
        share = share.take(options.samples // size * size)
        share = share.shard(context.num_input_pipelines, context.input_pipeline_id)
        return share.batch(context.get_per_replica_batch_size(size), drop_remainder=True).prefetch(tf.data.AUTOTUNE)

    return strategy.distribute_datasets_from_function(share_of)


def train(strategy: Any, options: argparse.Namespace) -> int:
    resolver = strategy.cluster_resolver
    index = resolver.task_id if resolver and resolver.task_type else 0
    is_chief = index == 0
    replicas = strategy.num_replicas_in_sync
    policy = tf.keras.mixed_precision.global_policy().name
    if is_chief:
        print(
            f"workers: {len(resolver.cluster_spec().as_dict().get('worker', [1]))}, replicas: {replicas}, {policy}",
            flush=True,
        )
    state = Training(strategy)
    checkpoint = tf.train.Checkpoint(model=state.model, optimizer=state.optimizer.keras, epoch=state.epoch)
    # All workers must save, but only the chief's files are used.
    folder = options.checkpoints if is_chief else options.checkpoints / f"of-worker-{index}"
    manager = tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=2)
    latest = tf.train.latest_checkpoint(str(options.checkpoints))
    if latest:
        checkpoint.restore(latest).expect_partial()
        if is_chief:
            print(f"resuming from {latest}: after epoch {int(state.epoch)}", flush=True)
    logs = Path(os.environ.get("TENSORBOARD_LOGDIR") or "runs") / "train_multiworker"
    writer = tf.summary.create_file_writer(str(logs)) if is_chief else tf.summary.create_noop_writer()
    held_out = data(2000, seed=2)
    while int(state.epoch) < options.epochs:
        losses = [state.train_step(*batch) for batch in batches_of(strategy, options, int(state.epoch))]
        loss = float(tf.reduce_mean(losses))
        state.epoch.assign_add(1)
        # Every worker has the same model and evaluates all data; only the chief prints the result.
        accuracy = int(state.correct(*map(tf.constant, held_out))) / len(held_out[1])
        if is_chief:
            print(f"epoch {int(state.epoch)}: loss {loss:.4f} accuracy {accuracy:.4f}", flush=True)
        with writer.as_default():
            tf.summary.scalar("loss", loss, step=int(state.epoch))
            tf.summary.scalar("accuracy", accuracy, step=int(state.epoch))
        writer.flush()
        manager.save()
        if not is_chief:
            tf.io.gfile.rmtree(str(folder))
        if int(state.epoch) == options.stop_after:
            end_together(strategy)
            return 0
    weights = state.model.get_weights()
    total = float(sum(tf.reduce_sum(tf.abs(tf.cast(weight, tf.float64))) for weight in weights))
    print(f"worker {index}: weights {total:.9f}", flush=True)  # the same on all workers, and after an interruption
    agrees = not is_chief or export(state.model, options.output, held_out[0])
    end_together(strategy)
    return 0 if agrees else 1


def end_together(strategy: Any) -> None:
    """Waits until no worker needs another one: for the others, a worker that ends too early is an error."""
    ones = strategy.run(tf.function(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0))))
    strategy.experimental_local_results(ones)[0].numpy()
    # A worker can finish all_reduce while the chief still reads from it. The chief sends the value of a new variable
    # to the others, and it does so only after it has finished all_reduce itself.
    with strategy.scope():
        tf.Variable(0.0)
    resolver = strategy.cluster_resolver
    if resolver and resolver.task_type and resolver.task_id == 0:
        wait_for_exit(resolver.cluster_spec().as_dict()["worker"][1:])
    else:
        time.sleep(1)  # to finish sending: in a large cluster, workers pass the value on


def wait_for_exit(addresses: list[str]) -> None:
    """Returns when these workers have ended, or after 30 seconds. The chief must end last."""
    latest = time.monotonic() + 30
    for address in addresses:
        host, port = address.rsplit(":", 1)
        while time.monotonic() < latest:
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            except OSError:
                break
            time.sleep(0.1)


def main(arguments: list[str]) -> int:
    options = options_of(arguments)
    if options.local_workers and "TF_CONFIG" not in os.environ:
        return start_local(options.local_workers, arguments)
    # Connections between workers must not use a proxy for downloads.
    os.environ.setdefault("no_grpc_proxy", "*")
    # Before all other calls of TensorFlow: it starts the server that the other workers connect to.
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    tf.keras.utils.set_random_seed(0)
    tf.keras.mixed_precision.set_global_policy(precision(options.precision))
    return train(strategy, options)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    # The server for the other workers cannot be stopped, and TensorFlow 2.9 sometimes aborts when Python ends with its
    # threads running. All files are written by now, so skip the cleanup.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
