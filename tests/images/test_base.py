"""Every image: user, process 1, shells, labels, and what must not be there."""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from docker.models.containers import Container
from packaging.requirements import Requirement
from testinfra.host import Host

from builder import host as machine

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
    found = host.check_output("find /opt /usr /etc -xdev -writable -not -type l 2>/dev/null || true").splitlines()
    # Where pip installs for the container's user.
    assert [path for path in found if path != "/opt/venv/user" and not path.startswith("/opt/venv/user/")] == []


def test_process_1_is_tini(host: Host) -> None:
    assert host.check_output("cat /proc/1/comm") == "tini"


def test_orphans_are_reaped(host: Host, until: Callable[..., None]) -> None:
    host.check_output("sh -c 'for i in $(seq 500); do (sleep 0.2 &) ; done'")
    zombies = "grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l"
    sleeping = "grep -lx sleep /proc/[0-9]*/comm 2>/dev/null | wc -l"
    # One `sleep infinity` is the container's own command.
    until(lambda: host.check_output(sleeping) == "1", seconds=10, what="the orphans to end")
    until(lambda: host.check_output(zombies) == "0", seconds=5, what="zombies to be gone")


def test_sigterm_ends_it_at_once(start: Callable[..., Container], until: Callable[..., None]) -> None:
    running = start(["sleep", "infinity"])
    # Before tini has set itself up, the kernel keeps signals from process 1.
    runs = ["sh", "-c", "grep -qx sleep /proc/[0-9]*/comm"]
    until(lambda: running.exec_run(runs).exit_code == 0, seconds=30, what="the command")
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


def test_no_file_runs_with_the_rights_of_another(host: Host) -> None:
    assert host.check_output("find / -xdev -type f -perm /6000 2>/dev/null || true") == ""


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
    patterns = ("authorized_keys", "id_rsa*", "id_ed25519*", "id_ecdsa*", "ssh_host_*", ".netrc", ".pypirc", ".npmrc")
    names = " -o ".join(f"-name '{pattern}'" for pattern in patterns)
    assert host.run(f"find / -xdev \\( {names} \\) -type f 2>/dev/null").stdout == ""


def test_a_waiting_container_listens_on_nothing(host: Host) -> None:
    listening = "cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | awk '$4 == \"0A\"' | wc -l"
    assert host.check_output(listening) == "0"


# ---- the launcher


def test_a_command_runs_as_it_is(once: Callable[..., Any], mode: dict[str, Any]) -> None:
    code = "import os, tempfile; print(6 * 7); open(os.environ['HOME'] + '/written', 'w'); tempfile.TemporaryFile()"
    status, out, err = once(["python", "-c", code], **mode)
    assert (status, out) == (0, "42\n"), err


def test_a_commands_status_is_the_containers(once: Callable[..., Any]) -> None:
    assert once(["sh", "-c", "exit 7"])[0] == 7
    status, _, err = once(["no-such-program"])
    assert status == 127
    assert "no-such-program: no such command" in err


def test_help_names_every_variable(once: Callable[..., Any], host: Host) -> None:
    status, out, _ = once(["--help"])
    names = re.findall(r'"name": "(\w+)"', host.check_output("cat /etc/variables.d/*.json"))
    assert status == 0
    assert len(names) >= 5
    assert [name for name in names if f"  {name} " not in out] == []


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("NB_UID", "me", "expected a number"),
        ("NB_UID", "0", "expected a number"),
        ("GPU_REQUIRED", "yes", "expected 1"),
        ("GPU_MEMORY_LIMIT", "half", "expected a size"),
    ],
)
def test_a_wrong_variable_is_refused(once: Callable[..., Any], name: str, value: str, told: str) -> None:
    status, _, err = once(["true"], environment={name: value})
    assert status == 78
    assert f"error: {name}='{value}': {told}" in err


def test_a_misspelt_variable_is_noticed(once: Callable[..., Any]) -> None:
    assert (
        "GPU_REQUIERD is not a variable of this image; did you mean GPU_REQUIRED?"
        in once(["true"], environment={"GPU_REQUIERD": "1"})[2]
    )


@pytest.mark.parametrize("owner", [1000, 4242, 33])
@pytest.mark.parametrize("how", ["NB_UID", "owner", "--user"])
def test_a_volume_is_writable_whoever_owns_it(once: Callable[..., Any], tmp_path: Path, owner: int, how: str) -> None:
    """On a volume of the engine, which is on the engine's machine, owned by someone."""
    if how == "--user":
        options: dict[str, Any] = {"user": f"{owner}:0"}
    elif how == "NB_UID":
        options = {"user": "root", "environment": {"NB_UID": str(owner), "NB_GID": str(owner)}}
    else:
        options = {"user": "root", "environment": {"NB_GID": "0"}}
    volume = f"image-test-{os.getpid()}-{owner}-{how.strip('-').lower()}"
    mounted = {volume: {"bind": "/workspace", "mode": "rw"}}
    try:
        # Not empty, or Docker fills it from the image again, and nobody else's.
        make = f"touch /workspace/old; chmod 755 /workspace; chown -R {owner}:{owner} /workspace"
        assert once(["sh", "-c", make], user="root", volumes=mounted)[0] == 0
        code = "touch /workspace/new ~/new; stat -c %u /workspace/new; id -u; python -c 'import pwd'"
        status, out, err = once(["bash", "-ec", code], volumes=mounted, **options)
        assert (status, out.split()) == (0, [str(owner), str(owner)]), err
    finally:
        once_removed(volume)


def once_removed(volume: str) -> None:
    import docker  # noqa: PLC0415

    docker.from_env().volumes.get(volume).remove(force=True)


def test_a_workspace_that_cannot_be_written_is_told(once: Callable[..., Any]) -> None:
    _, _, err = once(["true"], user="123456:123456")
    assert "/workspace belongs to 1000:0 and cannot be written by user 123456: start with `--user 1000:0`" in err


def test_numbers_without_root_are_refused(once: Callable[..., Any]) -> None:
    status, _, err = once(["true"], environment={"NB_UID": "4242"})
    assert status == 78
    assert "add `--user root`" in err


def test_root_is_given_up_for_good(once: Callable[..., Any]) -> None:
    code = "id -un; id -u; grep -E 'Cap(Prm|Eff)|^Groups' /proc/self/status"
    status, out, err = once(["sh", "-c", code], user="root", environment={"NB_UID": "4242"})
    assert status == 0, err
    assert out.split() == ["user", "4242", "Groups:", "0", "CapPrm:", "0" * 16, "CapEff:", "0" * 16]


def test_root_stays_root_for_a_command_that_asks_nothing(once: Callable[..., Any]) -> None:
    """`docker run --user root IMAGE apt-get install ...`, and every RUN of a derived image that starts it so."""
    assert once(["sh", "-c", "id -u; echo $HOME"], user="root")[1].split() == ["0", "/root"]


def test_hooks_run_in_order_and_can_export(start: Callable[..., Container], until: Callable[..., None]) -> None:
    hooks = {
        # What it leaves running holds nothing up, and an early end loses nothing.
        "10-one.sh": "export FROM_HOOK=one; SILENT=x; echo told; sleep 300 & exit 0",
        "20-two": "#!/bin/sh\necho $FROM_HOOK >/tmp/seen\n",
        "README": "not a program",
    }
    container = start(["sh", "-c", "sleep 2; exec sh -c 'cat /tmp/seen; echo $FROM_HOOK $SILENT'"])
    container.stop(timeout=1)
    put(container, "/etc/start.d", hooks)
    container.start()
    assert container.wait(timeout=60)["StatusCode"] == 0
    assert container.logs(stdout=True, stderr=False).decode().split()[-2:] == ["one", "one"]
    assert "told" in container.logs(stdout=False, stderr=True).decode()


def test_a_hook_that_fails_ends_the_start(start: Callable[..., Container]) -> None:
    container = start(["echo", "reached"])
    container.wait(timeout=60)
    put(container, "/etc/start.d", {"50-bad.sh": "false"})
    container.start()
    assert container.wait(timeout=60)["StatusCode"] == 1
    assert "/etc/start.d/50-bad.sh ended with status 1" in container.logs().decode()
    assert container.logs(stdout=True, stderr=False).decode().count("reached") == 1


def put(container: Container, folder: str, files: dict[str, str]) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(f"{folder.lstrip('/')}/{name}")
            info.size, info.mode = len(text.encode()), 0o644 if name == "README" else 0o755
            tar.addfile(info, io.BytesIO(text.encode()))
    assert container.put_archive("/", buffer.getvalue())


def test_without_a_gpu_there_is_one_warning_or_an_end(once: Callable[..., Any], subject: Any) -> None:
    err = once(["true"], shm_size="1g")[2]
    assert err.count("no GPU") == err.count("\n") == (0 if subject.cell["cuda"] == "cpu" else 1)
    status, _, err = once(["true"], environment={"GPU_REQUIRED": "1"})
    assert status == 69
    assert err.startswith("error: GPU_REQUIRED=1, but ")


def test_small_shared_memory_is_told_with_the_flag(once: Callable[..., Any]) -> None:
    assert "/dev/shm has 64 MB" in once(["true"])[2]
    assert "--shm-size=8g" in once(["true"])[2]
    assert "/dev/shm" not in once(["true"], shm_size="1g")[2]


def test_quiet_is_quiet(once: Callable[..., Any]) -> None:
    assert once(["true"], environment={"START_QUIET": "1"}) == (0, "", "")


# ---- pip in a running container


def test_pip_installs_for_the_user_but_replaces_nothing(host: Host, subject: Any) -> None:
    """Wheels made here: image tests ask no index."""
    make = """
import base64, hashlib, os, sys, zipfile
name, version = sys.argv[1:]
files = {f"{name}.py": f"version = {version!r}", f"{name}-{version}.dist-info/METADATA":
         f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n",
         f"{name}-{version}.dist-info/WHEEL":
         "Wheel-Version: 1.0\\nGenerator: t\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
         f"{name}-{version}.dist-info/RECORD": ""}
os.makedirs("/tmp/wheels", exist_ok=True)
with zipfile.ZipFile(f"/tmp/wheels/{name}-{version}-py3-none-any.whl", "w") as wheel:
    for path, text in files.items():
        wheel.writestr(path, text)
"""
    framework = Requirement(subject.data["requirements"][subject.cell["framework"]][0]).name
    for name, version in (("harmless", "1.0"), (framework.replace("-", "_"), "999.0")):
        assert host.run("python -c %s %s %s", make, name, version).rc == 0
    pip = "python -m pip install --no-index --disable-pip-version-check --find-links /tmp/wheels"
    assert host.run(f"{pip} harmless").rc == 0
    assert host.check_output("python -c 'import harmless; print(harmless.version, harmless.__file__)'").startswith(
        "1.0 /opt/venv/user/"
    )
    refused = host.run(f"{pip} --upgrade {framework}==999.0")
    assert refused.rc != 0
    assert "constraint" in refused.stdout + refused.stderr
    # In an environment of one's own, where nothing but the constraints could refuse.
    assert host.run("python -m venv --without-pip /tmp/own").rc == 0
    own = host.run(f"{pip.replace('python -m pip', 'python -m pip --python /tmp/own/bin/python')} {framework}==999.0")
    assert own.rc != 0
    assert "constraint" in own.stdout + own.stderr
    assert host.run("python -c %s harmless 2.0", make).rc == 0
    assert host.run(f"{pip} --upgrade harmless").rc == 0
    assert host.check_output("python -c 'import importlib.metadata as m; print(m.version(\"harmless\"))'") == "2.0"
    assert host.run("python -m pip uninstall -y harmless").rc == 0
    assert host.run("python -c 'import harmless'").rc == 1


def test_pip_has_a_place_where_the_root_is_read_only(once: Callable[..., Any]) -> None:
    code = (
        "import os, site; os.makedirs(site.getuserbase(), exist_ok=True); print(os.access(site.getuserbase(), os.W_OK))"
    )
    status, out, err = once(["python", "-c", code], read_only=True, tmpfs={"/tmp": "", "/run": ""})
    assert (status, out) == (0, "True\n"), err
