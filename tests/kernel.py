"""Runs code in a Jupyter kernel over its WebSocket, as a browser does."""

from __future__ import annotations

import json
import uuid

import websocket


def run_code(channel: websocket.WebSocket, code: str) -> tuple[str, str]:
    """What the code prints, and the name of its error, else empty. Closes the channel (/api/kernels/ID/channels)."""
    header = {"msg_id": uuid.uuid4().hex, "session": uuid.uuid4().hex, "username": "", "msg_type": "execute_request"}
    content = {"code": code, "silent": False, "store_history": False, "user_expressions": {}, "allow_stdin": False}
    message = {"header": {**header, "version": "5.3"}, "parent_header": {}, "metadata": {}, "content": content}
    printed, failure = "", ""
    try:
        channel.send(json.dumps({**message, "channel": "shell"}))
        while True:
            reply = json.loads(channel.recv())
            if reply["parent_header"].get("msg_id") != header["msg_id"]:
                continue
            if reply["msg_type"] == "stream":
                printed += reply["content"]["text"]
            elif reply["msg_type"] == "error":
                failure = reply["content"]["ename"]
            elif reply["msg_type"] == "status" and reply["content"]["execution_state"] == "idle":
                return printed, failure
    finally:
        channel.close()
