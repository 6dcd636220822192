"""All-reduce with torch.distributed: gloo, or NCCL on GPUs."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from . import LIBRARIES


def connect(order: Mapping[str, Any]) -> Group:
    gpu = order["library"] == "gpu"
    if gpu and not torch.cuda.is_available():
        raise RuntimeError("torch.cuda.is_available() is False, but a GPU is visible: check its driver")
    host, _, port = order["addresses"][0].rpartition(":")
    timeout = datetime.timedelta(seconds=order["timeout"])
    device = torch.device("cuda", order["device"]) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    # A separate store: with torchrun, init_method would use the store of torchrun.
    store = dist.TCPStore(host.strip("[]"), int(port), order["world"], order["rank"] == 0, timeout)
    dist.init_process_group(
        LIBRARIES[order["library"]], store=store, rank=order["rank"], world_size=order["world"], timeout=timeout
    )
    dist.barrier(device_ids=[order["device"]] if gpu else None)
    return Group(device)


class Group:
    types = ("float32", "float64", "float16", "bfloat16", "int32", "int64")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.device = f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu"

    def put(self, numbers: npt.NDArray[Any], dtype: str) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers)).to(device=self._device, dtype=getattr(torch, dtype))

    def add(self, values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values)
        return values

    def wait(self, values: torch.Tensor) -> None:
        if values.is_cuda:
            torch.cuda.synchronize(self._device)

    def get(self, values: torch.Tensor) -> npt.NDArray[Any]:
        return np.asarray(values.to("cpu", torch.float64).numpy())
