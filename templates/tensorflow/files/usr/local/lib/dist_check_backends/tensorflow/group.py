"""All-reduce with the collectives of MultiWorkerMirroredStrategy: a ring over gRPC, or NCCL on GPUs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

import tensorflow as tf


def connect(order: Mapping[str, Any]) -> Group:
    gpu = order["library"] == "gpu"
    gpus = tf.config.list_physical_devices("GPU")
    if gpu and not gpus:
        raise RuntimeError("TensorFlow finds no GPU, but one is visible: its log names the missing library or driver")
    tf.config.set_visible_devices([gpus[order["device"]]] if gpu else [], "GPU")
    task = {"type": "worker", "index": order["rank"]}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": order["addresses"]}, "task": task})
    kinds = tf.distribute.experimental.CommunicationImplementation
    options = tf.distribute.experimental.CommunicationOptions(implementation=kinds.NCCL if gpu else kinds.RING)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    group = Group(strategy, options, gpus[order["device"]] if gpu else None)
    group.wait(group.add(group.put(np.zeros(1), "float32")))
    return group


class Group:
    def __init__(self, strategy: Any, options: Any, gpu: Any) -> None:
        # TensorFlow keeps 32-bit integers in host memory, which NCCL cannot reduce.
        self.types = ("float32", "float64", "float16", "int64") + (() if gpu else ("int32",))
        self.device = tf.config.experimental.get_device_details(gpu).get("device_name", "gpu") if gpu else "cpu"
        self._device = strategy.extended.worker_devices[0]

        def sum_over_ranks(values: Any) -> Any:
            context = tf.distribute.get_replica_context()
            # identity: all_reduce needs a value on the replica's device.
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(values), options)

        self._add = tf.function(lambda values: strategy.run(sum_over_ranks, args=(values,)))

    def put(self, numbers: npt.NDArray[Any], dtype: str) -> Any:
        with tf.device(self._device):
            return tf.cast(tf.constant(numbers), dtype)

    def add(self, values: Any) -> Any:
        return self._add(values)

    def wait(self, values: Any) -> None:
        values[:1].numpy()

    def get(self, values: Any) -> npt.NDArray[Any]:
        return np.asarray(values.numpy(), np.float64)
