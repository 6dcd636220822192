"""Why a container does not start: one message for people, and an exit status."""

from __future__ import annotations

CONFIG = 78  # EX_CONFIG of sysexits.h: a variable or a mount is wrong
UNAVAILABLE = 69  # EX_UNAVAILABLE: the GPU that was required is not there


class Refusal(Exception):
    """The container must not start."""

    def __init__(self, told: str, status: int = CONFIG) -> None:
        super().__init__(told)
        self.status = status
