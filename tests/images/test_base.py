"""Every image: user, process 1, shells, labels, and what must not be there."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from docker.models.containers import Container
from testinfra.host import Host

from builder import host as machine

# What Debian's own packages bring; anything else is a surprise to look at.
SETUID = {
    "/usr/bin/chage", "/usr/bin/chfn", "/usr/bin/chsh", "/usr/bin/expiry", "/usr/bin/gpasswd", "/usr/bin/mount",
    "/usr/bin/newgrp", "/usr/bin/passwd", "/usr/bin/su", "/usr/bin/umount", "/usr/sbin/unix_chkpwd",
}  # fmt: skip
SHELLS = ["sh -c", "bash -c", "sh -lc", "bash -lc", "bash -ic", "env -i sh -lc", "env -i HOME=/tmp bash -lc"]


def test_runs_as_a_normal_user_with_a_home(host: Host) -> None:
    assert host.check_output("id -un") == "user"
    assert host.check_output("id -u") == "1000"
    assert host.check_output("echo $HOME") == "/home/user"
    for folder in ("/home/user", "/workspace"):
        assert host.run("touch %s/.written && rm %s/.written", folder, folder).rc == 0, folder


def test_starts_in_workspace(host: Host) -> None:
    assert host.check_output("pwd") == "/workspace"


def test_cannot_write_to_the_installation(host: Host) -> None:
    assert host.check_output("find /opt /usr /etc -xdev -writable -not -type l 2>/dev/null || true") == ""


def test_process_1_is_tini(host: Host) -> None:
    assert host.check_output("cat /proc/1/comm") == "tini"


def test_orphans_are_reaped(host: Host, until: Callable[..., None]) -> None:
    host.check_output("sh -c 'for i in $(seq 100); do (sleep 0.2 &) ; done'")
    zombies = "grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l"
    sleeping = "grep -lx sleep /proc/[0-9]*/comm 2>/dev/null | wc -l"
    # One `sleep infinity` is the container's own command.
    until(lambda: host.check_output(sleeping) == "1", seconds=10, what="the orphans to end")
    until(lambda: host.check_output(zombies) == "0", seconds=5, what="zombies to be gone")


def test_sigterm_ends_it_at_once(start: Callable[..., Container]) -> None:
    running = start(["sleep", "infinity"])
    running.stop(timeout=10)
    assert running.wait()["StatusCode"] == 143  # 128 + SIGTERM; 137 would be the kill after ten seconds


@pytest.mark.parametrize("shell", SHELLS)
def test_the_environment_comes_first_in_every_shell(host: Host, shell: str) -> None:
    assert host.check_output(f"{shell} 'command -v python 2>/dev/null'") == "/opt/venv/bin/python"


def test_labels_tell_the_plan(subject: Any, attributes: dict[str, Any]) -> None:
    labels = attributes["Config"]["Labels"]
    expected = {
        "gpu-images.cell": subject.data["id"],
        "gpu-images.plan": subject.data["plan"],
        "gpu-images.lock": subject.data["lock"],
        "gpu-images.framework": subject.cell["framework"],
        "gpu-images.framework.version": subject.cell["release"],
        "gpu-images.cuda": subject.cell["cuda"],
        "gpu-images.python": subject.cell["python"],
        "gpu-images.variant": subject.cell["variant"],
        "gpu-images.components": " ".join(subject.data["components"]),
        "org.opencontainers.image.title": subject.data["id"],
        "org.opencontainers.image.version": subject.cell["release"],
        "org.opencontainers.image.ref.name": subject.data["references"][0],
    }
    assert {name: labels.get(name) for name in expected} == expected


def test_setuid_files_are_known(host: Host) -> None:
    found = host.check_output("find / -xdev -type f -perm /6000 2>/dev/null || true").split()
    # Where /bin is no link to /usr/bin yet, as on bullseye.
    assert {path if path.startswith("/usr/") else f"/usr{path}" for path in found} <= SETUID


def test_no_folder_is_open_to_everyone(host: Host) -> None:
    assert host.check_output("find / -xdev -type d -perm -0002 -not -perm -1000 2>/dev/null || true") == ""


def certificates(text: str) -> set[str]:
    return {
        "".join(block.split()) for block in re.findall(r"-----BEGIN CERTIFICATE-----(.*?)-----END", text, re.DOTALL)
    }


def test_nothing_of_the_building_machine_is_left(host: Host, attributes: dict[str, Any], container: Container) -> None:
    lent = machine.read()
    assert host.check_output("ls -A /mnt") == ""
    assert host.run("find / -xdev -name ca.crt -path '*host*' 2>/dev/null").stdout == ""
    assert not host.file("/etc/pip.conf").exists
    assert not host.file("/etc/uv/uv.toml").exists
    # Every certificate that the image trusts comes from Debian's package.
    trusted = certificates(host.check_output("cat /etc/ssl/certs/ca-certificates.crt"))
    packaged = certificates(host.check_output("cat /usr/share/ca-certificates/mozilla/*.crt"))
    assert trusted
    assert trusted <= packaged
    assert container.image is not None
    told = f"{attributes['Config']}{container.image.history()}"
    assert lent.hide(told) == told, "the image's configuration or history names a mirror"


def test_no_key_or_secret_is_there(host: Host) -> None:
    patterns = ("authorized_keys", "id_rsa*", "id_ed25519*", "id_ecdsa*", "ssh_host_*", ".netrc", ".pypirc")
    names = " -o ".join(f"-name '{pattern}'" for pattern in patterns)
    assert host.run(f"find / -xdev \\( {names} \\) -type f 2>/dev/null").stdout == ""


def test_a_waiting_container_listens_on_nothing(host: Host) -> None:
    listening = "cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | awk '$4 == \"0A\"' | wc -l"
    assert host.check_output(listening) == "0"
