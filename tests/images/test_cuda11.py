"""CUDA 11 for frameworks that look for it where the system has its libraries: found in every shell, and without."""

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
    done = host.run("env -i /opt/venv/bin/python -c %s " + " ".join(SONAMES), OPEN)
    assert done.rc == 0, done.stderr


@pytest.mark.parametrize("shell", SHELLS)
def test_libraries_are_found_in_every_shell(host: Host, shell: str) -> None:
    done = host.run(f"{shell} %s", f"/opt/venv/bin/python -c '{OPEN}' {' '.join(SONAMES)}")
    assert done.rc == 0, done.stderr


def test_what_cudnn_opens_by_itself_is_found(host: Host) -> None:
    for part in ("ops_infer", "ops_train", "cnn_infer", "cnn_train", "adv_infer", "adv_train"):
        code = f"import ctypes; ctypes.CDLL('libcudnn_{part}.so.8')"
        done = host.run("python -c %s", code)
        assert done.rc == 0, done.stderr


def test_links_lead_to_the_one_place(host: Host) -> None:
    links = host.check_output("find /usr/lib/x86_64-linux-gnu -lname '/opt/nvidia/*'").split()
    assert len(links) >= len(SONAMES)
    broken = host.check_output("find /usr/lib/x86_64-linux-gnu -xtype l -lname '/opt/nvidia/*'")
    assert broken == ""
