"""The error that keeps a container from starting: a message and an exit status."""

from __future__ import annotations

CONFIG = 78  # EX_CONFIG of sysexits.h: a variable or a mount is wrong
BUSY = 75  # EX_TEMPFAIL: others use a GPU, and GPU_BUSY=refuse
UNAVAILABLE = 69  # EX_UNAVAILABLE: no usable GPU, and GPU_REQUIRED=1


class Refusal(Exception):
    """The container must not start."""

    def __init__(self, message: str, status: int = CONFIG) -> None:
        super().__init__(message)
        self.status = status
