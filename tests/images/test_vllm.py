"""vLLM: its compiled modules, its API key, and that it leaves PyTorch and CUDA as they are. Without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from testinfra.host import Host

from tests.images.engines import check_modules


def test_compiled_modules_lack_only_the_driver(python: Callable[[str], Any]) -> None:
    check_modules(python, ["vllm"], least=12)


def test_imports_beside_the_pytorch_of_the_tag(subject: Any, python: Callable[[str], Any]) -> None:
    code = """
import json, torch, vllm, flashinfer, xgrammar
print(json.dumps([vllm.__version__, torch.__version__.split("+")[0], torch.version.cuda]))
"""
    cell = subject.cell
    assert python(code) == [subject.wheels["vllm"], cell["release"], cell["cuda"]]


def test_the_help_needs_no_gpu(host: Host) -> None:
    """Neither `serve` nor vLLM's own command, which is the same."""
    for command in ("serve --help", "vllm serve --help"):
        assert "--max-model-len" in host.check_output(f"{command}=all"), command


def test_every_path_needs_the_key(python: Callable[[str], Any]) -> None:
    """But for those of probes. The key of vLLM itself leaves out /invocations, /tokenize, /pause and others.

    vLLM's own function adds the class that `serve` names to an application.
    """
    code = """
import json, os, sys
from argparse import Namespace
os.environ["VLLM_API_KEY"] = "key"
sys.path.append("/usr/local/lib/vllm-api-key")
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware
app = FastAPI()
app.get("/{path:path}")(lambda path: "ok")
arguments = Namespace(
    allowed_origins=[], allow_credentials=False, allowed_methods=[], allowed_headers=[], api_key=None,
    enable_request_id_headers=False, middleware=["vllm_api_key.ApiKey"],
)
init_entrypoints_middleware(arguments, app, ())
client, answers = TestClient(app), dict()
for path in "/v1/models", "/invocations", "/tokenize", "/metrics", "/health":
    given = [dict(), dict(Authorization="Bearer other"), dict(Authorization="Bearer key")]
    answers[path] = [client.get(path, headers=headers).status_code for headers in given]
print(json.dumps(answers))
"""
    refused = {path: [401, 401, 200] for path in ("/v1/models", "/invocations", "/tokenize", "/metrics")}
    assert python(code) == {**refused, "/health": [200, 200, 200]}
