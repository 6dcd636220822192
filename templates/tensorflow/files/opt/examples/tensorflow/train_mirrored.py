#!/usr/bin/env python3
"""TensorFlow on all GPUs of one machine (MirroredStrategy), or on the CPU.

    python train_mirrored.py

After an interruption, the same command continues after the last complete epoch (BackupAndRestore). Logs for TensorBoard
go to $TENSORBOARD_LOGDIR or ./runs. The trained model is exported as a SavedModel, loaded and compared. The data are
generated from a seed, without a download. Replace `data` and `build_model` by your own. Works with TensorFlow 2.9 (with
Keras 2) and 2.20 (with Keras 3).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
import numpy as np
import tensorflow as tf

FEATURES, CLASSES = 32, 10


def data(samples: int, seed: int) -> Any:
    """Random points around a centre for each class."""
    random = np.random.default_rng(seed)
    labels = random.integers(CLASSES, size=samples)
    centres = np.random.default_rng(0).normal(size=(CLASSES, FEATURES))
    return (centres[labels] + 2 * random.normal(size=(samples, FEATURES))).astype("float32"), labels


def build_model() -> Any:
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input((FEATURES,)),
            layers.Dense(128, activation="relu"),
            layers.Dense(128, activation="relu"),
            # float32 with every policy: the loss of float16 scores would overflow.
            layers.Dense(CLASSES, dtype="float32"),
        ]
    )


def precision(policy: str) -> str:
    """For "auto", float16 on GPUs with tensor cores (Volta, 7.0, and newer), else float32."""
    if policy != "auto":
        return policy
    gpus = tf.config.list_physical_devices("GPU")
    have_tensor_cores = [
        tf.config.experimental.get_device_details(gpu).get("compute_capability", (0, 0)) >= (7, 0) for gpu in gpus
    ]
    return "mixed_float16" if gpus and all(have_tensor_cores) else "float32"


def export(model: Any, folder: Path, inputs: Any) -> bool:
    """Exports a SavedModel for batches of any size. True if the loaded model gives the same results."""

    def serve(features: Any) -> Any:
        return {"scores": model(features, training=False)}

    any_batch = tf.TensorSpec((None, FEATURES), tf.float32, name="features")
    tf.saved_model.save(model, str(folder), signatures=tf.function(serve, input_signature=[any_batch]))
    loaded = tf.saved_model.load(str(folder)).signatures["serving_default"]
    difference = 0.0
    for batch in (1, 7):
        result = loaded(features=tf.constant(inputs[:batch]))["scores"].numpy()
        expected = model(inputs[:batch], training=False).numpy()
        difference = max(difference, float(np.abs(result - expected).max()))
    agrees = difference < 1e-2
    print(f"{folder}: {'agrees' if agrees else 'DIFFERS'} (largest difference {difference:.1e})", flush=True)
    return agrees


def close_pools(strategy: Any) -> None:
    """Closes thread pools, which otherwise print a meaningless error at the end with TensorFlow 2.9."""
    for name in ("_collective_ops", "_cross_device_ops", "_host_cross_device_ops"):
        pool = getattr(getattr(strategy.extended, name, None), "_pool", None)
        if pool:
            pool.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="for each GPU")
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--precision", choices=["auto", "float32", "mixed_float16", "mixed_bfloat16"], default="auto")
    parser.add_argument("--backup", type=Path, default=Path("checkpoints/train_mirrored"), help="folder of the backup")
    parser.add_argument("--output", type=Path, default=Path("exported/mirrored"), help="folder of the SavedModel")
    parser.add_argument("--stop-after", type=int, metavar="EPOCH", help="end after this epoch, like an interruption")
    options = parser.parse_args()

    tf.keras.utils.set_random_seed(0)
    tf.keras.mixed_precision.set_global_policy(precision(options.precision))
    strategy = tf.distribute.MirroredStrategy()
    replicas = strategy.num_replicas_in_sync
    print(f"replicas: {replicas}, {tf.keras.mixed_precision.global_policy().name}", flush=True)
    with strategy.scope():
        model = build_model()
        # compile() adds the loss scaling that float16 needs.
        model.compile(
            optimizer=tf.keras.optimizers.Adam(1e-3),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    features, labels = data(options.samples, seed=1)
    batches = tf.data.Dataset.from_tensor_slices((features, labels)).shuffle(options.samples, seed=0)
    batches = batches.batch(options.batch_size * replicas, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
    held_out = data(2000, seed=2)
    logs = Path(os.environ.get("TENSORBOARD_LOGDIR") or "runs") / "train_mirrored"
    options.backup.mkdir(parents=True, exist_ok=True)
    callbacks = [
        tf.keras.callbacks.BackupAndRestore(str(options.backup)),
        tf.keras.callbacks.TensorBoard(str(logs)),
    ]

    def interrupt(epoch: int, _logs: Any) -> None:
        if epoch + 1 == options.stop_after:
            print(f"stopping after epoch {epoch + 1}: run the command without --stop-after to continue", flush=True)
            close_pools(strategy)
            raise SystemExit(0)

    callbacks.append(tf.keras.callbacks.LambdaCallback(on_epoch_end=interrupt))
    model.fit(
        batches,
        epochs=options.epochs,
        validation_data=tf.data.Dataset.from_tensor_slices(held_out).batch(500),
        callbacks=callbacks,
        verbose=2,
    )
    loss, accuracy = model.evaluate(*held_out, verbose=0, batch_size=500)
    print(f"loss {loss:.4f} accuracy {accuracy:.4f}", flush=True)
    agrees = export(model, options.output, held_out[0])
    close_pools(strategy)
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
