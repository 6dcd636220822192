# TensorFlow with ParameterServerStrategy: tasks of type `ps` keep the weights, workers update them without waiting for
# each other, and the chief hands out the steps. It is for weights that do not fit into one machine, such as large
# embeddings. Otherwise, use train_multiworker.py of the images: its result does not depend on the order of updates.
#
# Edit:       `build_model` and `data`, here those of train_mirrored.py in the images.
# Run:        compose-parameter-server.yaml starts it. Elsewhere, run it in each task, with its TF_CONFIG.
#
# All tasks must be able to write the folder of the checkpoints. If a worker ends, the others do its steps. If the chief
# or a `ps` ends, start all again. Keras 3 has no model.fit for this strategy, and its `optimizer.iterations` misses
# steps of workers (1354 of 2000 were counted with two): a learning rate schedule needs `steps` instead.

from __future__ import annotations

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
os.environ.setdefault("no_grpc_proxy", "*")  # tasks must not connect through a proxy for downloads
sys.path.insert(0, "/opt/examples/tensorflow")
import tensorflow as tf
from train_mirrored import build_model, data

EPOCHS, SAMPLES, BATCH = 5, 8192, 64


def batches() -> tf.data.Dataset:
    """All data in another order on each worker, without an end: the chief counts the steps."""
    return tf.data.Dataset.from_tensor_slices(data(SAMPLES, seed=1)).shuffle(SAMPLES).repeat().batch(BATCH)


def train(resolver: tf.distribute.cluster_resolver.ClusterResolver) -> None:
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = build_model()
        optimizer = tf.keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)
        steps = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, steps=steps)
    manager = tf.train.CheckpointManager(checkpoint, "checkpoints/parameter_server", max_to_keep=2)
    if manager.restore_or_initialize():
        print(f"resuming from {manager.latest_checkpoint}: after {int(steps)} steps", flush=True)

    @tf.function
    def step(iterator: tf.data.Iterator) -> tf.Tensor:
        def on_replica(features: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                scores = model(features, training=True)
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        loss = strategy.run(on_replica, args=next(iterator))
        steps.assign_add(1)
        return strategy.reduce("MEAN", loss, axis=None)

    iterator = iter(coordinator.create_per_worker_dataset(batches))
    features, labels = data(2000, seed=2)
    for epoch in range(int(steps) * BATCH // SAMPLES, EPOCHS):
        losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(SAMPLES // BATCH)]
        coordinator.join()
        loss = sum(float(each.fetch()) for each in losses) / len(losses)
        accuracy = float(tf.reduce_mean(tf.cast(tf.argmax(model(features), 1) == labels, tf.float32)))
        print(f"epoch {epoch + 1}: loss {loss:.4f} accuracy {accuracy:.4f}, {int(steps)} steps", flush=True)
        manager.save()


if __name__ == "__main__":
    tasks = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if tasks.task_type == "chief":
        train(tasks)
    else:
        server = tf.distribute.Server(tasks.cluster_spec(), tasks.task_type, tasks.task_id, protocol="grpc")
        server.join()  # never returns
