"""The programs of the images that start inference engines, with stand-ins for the engines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT

# As SGLang 0.5.23: it logs its arguments when it starts.
ENGINE = """
import logging, sys

def main():
    logging.basicConfig(level=logging.INFO)
    logging.info(f"server_args={dict(api_key=sys.argv[-1], host=sys.argv[-3])}")
"""


def test_the_log_of_sglang_has_no_key(tmp_path: Path) -> None:
    (tmp_path / "sglang/cli").mkdir(parents=True)
    (tmp_path / "sglang/cli/main.py").write_text(ENGINE)
    command = [sys.executable, str(ROOT / "templates/sglang/files/usr/local/lib/sglang-serve"), "model"]
    environ = {"PYTHONPATH": str(tmp_path), "SGLANG_API_KEY": "it's mine"}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert result.stderr == "INFO:root:server_args={'api_key': '***', 'host': '0.0.0.0'}\n"
