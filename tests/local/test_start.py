"""The program as it starts: what it loads, and Ctrl-C at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.integration.checkout import BUILDER, ROOT

# What takes long to import, and no command may load unless it needs it.
SLOW = {"docker", "jinja2", "pydantic", "pynvml", "pypi_simple", "remotezip", "requests", "rich", "urllib3", "yaml"}
TEST_RUNNER = ["pytest", "_pytest", "testinfra", "websocket", "xdist"]
LOADED = """\
import atexit, sys
from builder import start
atexit.register(lambda: print("loaded:", *sys.modules, file=sys.stderr))
start.main()
"""


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["--help"], set()),
        (["plan"], {"pydantic", "rich", "yaml"}),
        (["lock", "--check"], SLOW - {"docker", "jinja2", "pynvml", "pypi_simple", "remotezip"}),
        (["render", "--check"], {"jinja2", "pydantic", "rich", "yaml"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_loads_only_what_it_needs(arguments: list[str], needed: set[str]) -> None:
    """Every command loaded everything, which took 0.5 s."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    *_, loaded = done.stderr.splitlines()
    assert loaded.startswith("loaded: "), done.stderr
    assert SLOW & set(loaded.split()) <= needed


@pytest.mark.parametrize("command", [[], ["images"], ["verify"], ["release"], ["status"]], ids=" ".join)
def test_a_command_starts_without_the_packages_of_image_tests(command: list[str]) -> None:
    """They are an extra: whoever checks an image installs no test runner."""
    code = f"import sys; sys.modules.update(dict.fromkeys({TEST_RUNNER})); from builder import start; start.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: " in done.stdout


@pytest.mark.parametrize("after", [0.05, 0.1, 0.15, 0.2, 0.3, 0.5])
def test_ctrl_c_at_once(after: float) -> None:
    """In the first 0.3 s it gave a traceback."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    for attempt in range(10):
        process = subprocess.Popen(
            [str(BUILDER), "plan", "all"], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        time.sleep(after * (1 + attempt / 2))
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=30)[0].decode()
        # On a busy machine, Python or the module that installs the handler had not been loaded yet: try again, later.
        too_early = ("Fatal Python error: init", "from builder.start import main")
        is_before_handler = "sys.exit(main())" in output and output.count('  File "') <= 2
        if not is_before_handler and not any(text in output for text in too_early):
            break
    assert "Traceback" not in output
    # Python itself needs some 0.03 s before the first line of builder; the shell then sees the signal.
    assert process.returncode in (130, -signal.SIGINT, 0), output
    if process.returncode == 130:
        assert "interrupted" in output
