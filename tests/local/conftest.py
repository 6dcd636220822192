"""Tests that run programs and servers of this machine, and need no Docker Engine."""

from __future__ import annotations

import signal

# A shell starts background jobs with SIGINT ignored; programs that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
