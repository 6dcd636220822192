"""SGLang: its compiled modules, its API key, and that it leaves PyTorch and CUDA as they are. Without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from testinfra.host import Host

from tests.images.engines import check_modules


def test_compiled_modules_lack_only_the_driver(python: Callable[[str], Any]) -> None:
    check_modules(python, ["sglang", "sgl_kernel", "deep_gemm", "flash_mla"], least=5)


def test_imports_beside_the_pytorch_of_the_tag(subject: Any, python: Callable[[str], Any]) -> None:
    code = """
import json, torch, sglang, flashinfer, xgrammar
print(json.dumps([sglang.__version__, torch.__version__.split("+")[0], torch.version.cuda]))
"""
    cell = subject.cell
    assert python(code) == [subject.wheels["sglang"], cell["release"], cell["cuda"]]


def test_the_help_needs_no_gpu(host: Host) -> None:
    for command in ("serve --help", "sglang serve --help"):
        assert "--context-length" in host.check_output(command), command
