"""CUDA 11 for frameworks that load its libraries from the system folder, with every shell and without one."""

from __future__ import annotations

import pytest
from testinfra.host import Host

SONAMES = (
    "libcudart.so.11.0", "libcublas.so.11", "libcublasLt.so.11", "libcufft.so.10", "libcurand.so.10",
    "libcusolver.so.11", "libcusparse.so.11", "libcudnn.so.8",
)  # fmt: skip
SHELLS = [
    "sh -c",
    "bash -c",
    "sh -lc",
    "bash -lc",
    "bash -ic",
    "env -i sh -c",
    "env -i sh -lc",
    "env -i HOME=/ bash -lc",
]
OPEN = "import ctypes, sys; [ctypes.CDLL(name) for name in sys.argv[1:]]"


def test_libraries_are_found_without_any_variable(host: Host) -> None:
    result = host.run("env -i /opt/venv/bin/python -c %s " + " ".join(SONAMES), OPEN)
    assert result.rc == 0, result.stderr


@pytest.mark.parametrize("shell", SHELLS)
def test_libraries_are_found_in_every_shell(host: Host, shell: str) -> None:
    result = host.run(f"{shell} %s", f"/opt/venv/bin/python -c '{OPEN}' {' '.join(SONAMES)}")
    assert result.rc == 0, result.stderr


def test_the_libraries_that_cudnn_opens_are_found(host: Host) -> None:
    for part in ("ops_infer", "ops_train", "cnn_infer", "cnn_train", "adv_infer", "adv_train"):
        code = f"import ctypes; ctypes.CDLL('libcudnn_{part}.so.8')"
        result = host.run("python -c %s", code)
        assert result.rc == 0, result.stderr


def test_links_point_to_opt_nvidia(host: Host) -> None:
    links = host.check_output("find /usr/lib/x86_64-linux-gnu -lname '/opt/venv/*'").split()
    assert len(links) >= len(SONAMES)
    broken = host.check_output("find /usr/lib/x86_64-linux-gnu -xtype l -lname '/opt/venv/*'")
    assert broken == ""
