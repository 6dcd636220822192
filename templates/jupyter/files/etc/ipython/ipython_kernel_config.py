"""Configuration of IPython's kernels: what their forked processes print goes through a Unix socket.

ipykernel uses a port of the loopback for this, whatever transport its other channels use (IOPubThread of
ipykernel.iostream), and everyone in the container's network can reach that port.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import zmq
from ipykernel.iostream import IOPubThread
from ipykernel.kernelapp import IPKernelApp
from zmq.eventloop.zmqstream import ZMQStream

_with_a_port = IOPubThread._setup_pipe_in, IOPubThread._setup_pipe_out


def _set_up_parent(thread: Any) -> None:
    """Receives messages of forked processes, which have the UUID from the memory of this one."""
    thread._pipe_uuid = os.urandom(16)
    pipe = thread.socket.context.socket(zmq.PULL)
    pipe.linger = 0
    try:
        pipe.bind(_address())
    except zmq.ZMQError:  # a path longer than 107 bytes (unix(7)), or a folder without sockets
        pipe.close()
        IOPubThread._setup_pipe_in, IOPubThread._setup_pipe_out = _with_a_port
        thread._setup_pipe_in()
        return
    thread._pipe_in = ZMQStream(pipe, thread.io_loop)
    thread._pipe_in.on_recv(thread._handle_pipe_msg)


def _set_up_child(_: Any) -> tuple[Any, Any]:
    context = zmq.Context()  # that of the parent does not work after a fork
    pipe = context.socket(zmq.PUSH)
    pipe.linger = 3000  # milliseconds, as in ipykernel
    pipe.connect(_address())
    return context, pipe


def _address() -> str:
    """Of a socket beside the connection file of the kernel."""
    return f"ipc://{Path(IPKernelApp.instance().abs_connection_file).with_suffix('')}-output"


IOPubThread._setup_pipe_in, IOPubThread._setup_pipe_out = _set_up_parent, _set_up_child
