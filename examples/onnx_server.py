# Answers HTTP requests with an ONNX model: onnxruntime on the CPU. compose-onnx.yaml starts it.
#
# Edit:       `predictions`, if the model has several inputs or outputs, or needs e.g. tokens instead of text.
# Run:        python onnx_server.py model.onnx
#
# Request and answer are those of TensorFlow Serving. There is no login: put a proxy in front of it.

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import onnxruntime

MODEL, PORT = "/v1/models/example", 8000
LARGEST = 32 * 2**20  # bytes of a request
TYPES = {"tensor(float)": "float32", "tensor(double)": "float64", "tensor(int64)": "int64"}
# Several requests may use a session at the same time.
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
(features,) = session.get_inputs()


def predictions(instances: list) -> list:
    """The first output of the model for a batch, which is its only input."""
    batch = np.asarray(instances, TYPES[features.type])
    return session.run(None, {features.name: batch})[0].tolist()


class Handler(BaseHTTPRequestHandler):
    timeout = 30  # seconds that a client may keep a thread waiting

    def do_GET(self) -> None:
        self.answer(200 if self.path == MODEL else 404, {})

    def do_POST(self) -> None:
        size = self.headers.get("Content-Length", "")
        if self.path != f"{MODEL}:predict":
            self.answer(404, {"error": f"the only path is {MODEL}:predict"})
        elif not size.isdecimal() or not 0 < int(size) <= LARGEST:
            self.answer(413, {"error": f"send a body of at most {LARGEST} bytes, with its Content-Length"})
        else:
            try:
                self.answer(200, {"predictions": predictions(json.loads(self.rfile.read(int(size)))["instances"])})
            except Exception as error:  # noqa: BLE001  (onnxruntime's errors have no common class)
                self.answer(400, {"error": f"{type(error).__name__}: {error}"})

    def answer(self, status: int, content: dict) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    ThreadingHTTPServer(("", PORT), Handler).serve_forever()
