"""The programs of the images that start inference engines, with stand-ins for the engines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

# As SGLang 0.5.23: it logs its arguments when it starts; so may the processes that it starts.
ENGINE = """
import logging, multiprocessing, sys

def log(arguments):
    logging.basicConfig(level=logging.INFO)
    logging.info(f"server_args={arguments}")

def main():
    arguments = dict(api_key=sys.argv[-1], host=sys.argv[-3])
    log(arguments)
    child = multiprocessing.get_context("spawn").Process(target=log, args=[arguments])
    child.start()
    child.join()
"""
# As the programs `serve` of vLLM and SGLang, for options that end it before it looks for a GPU.
SERVE = "import serving; serving.prepare('vLLM', 'VLLM', ('--api-key', '--grpc', '--grpc-port'))"


def test_the_log_of_sglang_has_no_key(tmp_path: Path) -> None:
    (tmp_path / "sglang/cli").mkdir(parents=True)
    (tmp_path / "sglang/cli/main.py").write_text(ENGINE)
    command = [sys.executable, str(ROOT / "templates/sglang/files/usr/local/lib/sglang-serve"), "model"]
    environ = {"PYTHONPATH": str(tmp_path), "SGLANG_API_KEY": "it's mine"}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert result.stderr == 2 * "INFO:root:server_args={'api_key': '***', 'host': '0.0.0.0'}\n"


@pytest.mark.parametrize(
    ("arguments", "file"),
    [
        (["--api_key=shown"], ""),
        (["--grpc-p", "1"], ""),
        (["--config", "FILE"], "port: 1\napi_key: shown\n"),
        (["--config=FILE"], '{"port": 1, "grpc" : true}'),
    ],
    ids=str,
)
def test_an_option_that_opens_a_port_or_shows_the_key_is_refused(
    tmp_path: Path, arguments: list[str], file: str
) -> None:
    assert serve(tmp_path, [*arguments, "--served-model-name", "api"], file)[0] == 78
    assert "not with `serve`" in serve(tmp_path, arguments, file)[1]


def test_any_other_option_of_a_file_is_taken(tmp_path: Path) -> None:
    arguments = ["--config", "FILE", "--gpu-memory-utilization", "0.9", "--api-server-count", "2"]
    status, err = serve(tmp_path, arguments, "port: 1  # not api-key: 1\nserved-model-name: grpc\n")
    assert (status, "needs a GPU" in err) == (69, True)
    assert serve(tmp_path, ["--config", "absent"], "")[0] == 69


def serve(folder: Path, arguments: list[str], file: str) -> tuple[int, str]:
    """The exit status of `serve` with these arguments, in which FILE is a file, and its messages."""
    (folder / "FILE").write_text(file)
    libraries = (ROOT / f"templates/{component}/files/usr/local/lib" for component in ("serving", "base"))
    result = subprocess.run(
        [sys.executable, "-c", SERVE, *arguments],
        cwd=folder, env={"PYTHONPATH": ":".join(map(str, libraries))}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "shown" not in result.stderr
    assert len(result.stderr.splitlines()) == 1
    return result.returncode, result.stderr
