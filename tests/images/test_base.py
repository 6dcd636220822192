"""Every image: user, process 1, shells, labels, the launcher, and files that must not exist."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Callable
from typing import Any

import pytest
from docker.models.containers import Container
from testinfra.host import Host

from tests.images.containers import run_in, wait_for_program

SHELLS = ["sh -c", "bash -c", "sh -lc", "bash -lc", "bash -ic", "env -i sh -lc", "env -i HOME=/tmp bash -lc"]


def test_runs_as_a_normal_user_with_a_home(host: Host) -> None:
    assert host.check_output("id -un") == "user"
    assert host.check_output("id -u") == "1000"
    assert host.check_output("echo $HOME") == "/home/user"
    for folder in ("/home/user", "/workspace"):
        assert host.run("touch %s/.written && rm %s/.written", folder, folder).rc == 0, folder


def test_starts_in_workspace(host: Host) -> None:
    assert host.check_output("pwd") == "/workspace"


def test_only_folders_of_the_environment_are_writable(once: Callable[..., tuple[int, str, str]]) -> None:
    """Group 0 writes to the folders of the environment, and so replaces files there, and to no others."""
    # In a container of its own: in that of other tests, importing TensorFlow's tests writes bytecode.
    kinds = "\\( -type d -printf 'folder %p\\n' -o -printf 'file %p\\n' \\)"
    writable = once(["sh", "-c", f"find /opt /usr /etc -xdev -writable -not -type l {kinds} 2>/dev/null"])[
        1
    ].splitlines()
    assert "folder /opt/venv/lib/python/site-packages" in writable
    assert [line for line in writable if not f"{line}/".startswith("folder /opt/venv/")] == []


def test_process_1_is_tini(host: Host) -> None:
    assert host.check_output("cat /proc/1/comm") == "tini"


@pytest.mark.thorough
def test_orphans_are_reaped(host: Host, until: Callable[..., None]) -> None:
    host.check_output("sh -c 'for i in $(seq 500); do (sleep 0.2 &) ; done'")
    zombies = "grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l"
    sleeping = "grep -lx sleep /proc/[0-9]*/comm 2>/dev/null | wc -l"
    # One `sleep 3600` is the container's own command.
    until(lambda: host.check_output(sleeping) == "1", seconds=10, what="the orphans to end")
    until(lambda: host.check_output(zombies) == "0", seconds=5, what="zombies to be gone")


def test_sigterm_ends_the_container_at_once(start: Callable[..., Container]) -> None:
    running = start(["sleep", "3600"])
    # Until tini has installed its handlers, process 1 ignores signals.
    wait_for_program(running, "sleep")
    running.stop(timeout=10)
    assert running.wait()["StatusCode"] == 143  # 128 + SIGTERM; 137 would be the kill after ten seconds


@pytest.mark.parametrize("shell", SHELLS)
def test_the_environment_comes_first_in_every_shell(host: Host, shell: str) -> None:
    assert host.check_output(f"{shell} 'command -v python 2>/dev/null'") == "/opt/venv/bin/python"


@pytest.mark.parametrize("shell", ["sh -lc", "bash -lc", "bash -ic"])
def test_shells_have_the_path_of_the_image_and_programs_in_the_home(
    host: Host, attributes: dict[str, Any], shell: str
) -> None:
    (path,) = [line.removeprefix("PATH=") for line in attributes["Config"]["Env"] if line.startswith("PATH=")]
    assert host.check_output(f"{shell} 'echo $PATH'") == path
    # Login shells have another PATH at first, that of Debian.
    other = f"{path}:/data/.local/bin" if shell == "bash -ic" else path.replace("/home/user/", "/data/")
    assert host.check_output(f"HOME=/data {shell} 'echo $PATH'") == other


def test_labels_describe_the_plan(subject: Any, attributes: dict[str, Any]) -> None:
    labels = attributes["Config"]["Labels"]
    expected = {
        "io.github.gpu-images.cell": subject.data["id"],
        "io.github.gpu-images.plan": subject.data["plan"],
        "io.github.gpu-images.framework": subject.cell["framework"],
        "io.github.gpu-images.framework.version": subject.cell["release"],
        "io.github.gpu-images.cuda": subject.cell["cuda"],
        "io.github.gpu-images.python": subject.cell["python"],
        "io.github.gpu-images.variant": subject.cell["variant"],
        "io.github.gpu-images.components": " ".join(subject.data["components"]),
        "org.opencontainers.image.title": subject.data["id"],
        "org.opencontainers.image.version": subject.cell["release"],
    }
    assert {name: labels.get(name) for name in expected} == expected
    licenses = labels["org.opencontainers.image.licenses"].split(" AND ")
    assert licenses[-1] == "LicenseRef-Packages"
    assert ("LicenseRef-NVIDIA-CUDA" in licenses) == (subject.cell["cuda"] != "cpu")


def test_dev_containers_use_the_user_of_the_image(attributes: dict[str, Any], host: Host) -> None:
    """By its name: they give it the uid of the user on the host, so that /workspace is writable."""
    [metadata] = json.loads(attributes["Config"]["Labels"]["devcontainer.metadata"])
    assert metadata == {"remoteUser": host.check_output("id -un")}


def test_no_label_names_a_registry_or_a_namespace(subject: Any, attributes: dict[str, Any]) -> None:
    """A fork, and a push to another registry, give the same image."""
    labels = attributes["Config"]["Labels"]
    repository = subject.data["references"][0].rpartition(":")[0]
    assert "org.opencontainers.image.ref.name" not in labels
    assert not [name for name, value in labels.items() if repository in value]


def test_no_file_is_setuid_or_setgid(host: Host) -> None:
    assert host.check_output("find / -xdev -type f -perm /6000 2>/dev/null || true") == ""


def test_no_folder_is_writable_by_everyone_without_sticky_bit(once: Callable[..., tuple[int, str, str]]) -> None:
    # In a container of its own: TensorBoard in that of other tests makes /tmp/.tensorboard-info with mode 0777.
    find = "find / -xdev -type d -perm -0002 -not -perm -1000 2>/dev/null || true"
    assert once(["sh", "-c", find], user="0")[:2] == (0, "")


def certificates(text: str) -> set[str]:
    return {
        "".join(block.split()) for block in re.findall(r"-----BEGIN CERTIFICATE-----(.*?)-----END", text, re.DOTALL)
    }


def test_nothing_of_the_build_host_is_left(
    host: Host, attributes: dict[str, Any], container: Container, subject: Any
) -> None:
    assert host.check_output("ls -A /mnt") == ""
    assert host.run("find / -xdev -name ca.crt -path '*host*' 2>/dev/null").stdout == ""
    assert not host.file("/etc/pip.conf").exists
    assert not host.file("/etc/uv/uv.toml").exists
    # The image trusts only certificates of Debian's package.
    trusted = certificates(host.check_output("cat /etc/ssl/certs/ca-certificates.crt"))
    packaged = certificates(host.check_output("cat /usr/share/ca-certificates/mozilla/*.crt"))
    assert trusted
    assert trusted <= packaged
    assert container.image is not None
    text = f"{attributes['Config']}{container.image.history()}"
    hosts = [rf"(?<![\w.-]){re.escape(name)}(?![\w-])" for name in subject.data["private_hosts"]]
    assert [host for host in hosts if re.search(host, text, re.IGNORECASE)] == []
    assert re.findall(r"://[^/\s@]*@", text) == [], "a login"


def test_no_key_or_secret_is_in_the_image(host: Host) -> None:
    patterns = ("authorized_keys", "id_rsa*", "id_ed25519*", "id_ecdsa*", "ssh_host_*", ".netrc", ".pypirc", ".npmrc")
    names = " -o ".join(f"-name '{pattern}'" for pattern in patterns)
    assert host.run(f"find / -xdev \\( {names} \\) -type f 2>/dev/null").stdout == ""


def test_a_container_without_services_listens_on_no_port(host: Host) -> None:
    listening = "cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | awk '$4 == \"0A\"' | wc -l"
    assert host.check_output(listening) == "0"


# ---- the launcher


def test_a_command_runs_unchanged(once: Callable[..., Any], mode: dict[str, Any]) -> None:
    code = "import os, tempfile; print(6 * 7); open(os.environ['HOME'] + '/written', 'w'); tempfile.TemporaryFile()"
    status, out, err = once(["python", "-c", code], **mode)
    assert (status, out) == (0, "42\n"), err


def test_the_status_of_a_command_is_that_of_the_container(once: Callable[..., Any]) -> None:
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


INVALID = [
    ("NB_UID", "me", "expected a number"),
    ("NB_UID", "-1", "expected a number"),
    ("GPU_REQUIRED", "maybe", "expected 1, yes or true"),
    ("GPU_BUSY", "yes", "expected start, refuse or wait"),
    ("GPU_MEMORY_LIMIT", "half", "expected a size"),
]


@pytest.mark.thorough
def test_an_invalid_variable_is_refused(once: Callable[..., Any], shell: Callable[..., Any]) -> None:
    """By the launcher as process 1, and in a container that runs: that takes a quarter of the time of a start."""
    assert once(["true"], environment={"NB_UID": "me"})[0] == 78
    container = shell()
    for name, value, message in INVALID:
        status, output = container.result(["env", f"{name}={value}", "start", "true"])
        assert status == 78
        assert f"error: {name}='{value}': {message}" in output


@pytest.mark.thorough
def test_a_misspelt_variable_is_a_warning(once: Callable[..., Any]) -> None:
    assert (
        "GPU_REQUIERD is not a variable of this image; did you mean GPU_REQUIRED?"
        in once(["true"], environment={"GPU_REQUIERD": "1"})[2]
    )


# How a user becomes the owner of a volume, and the owners: the user of the image, one of Debian's, and any other.
OWNERS = [("owner", 1000), ("owner", 33), ("owner", 1234), ("NB_UID", 33), ("NB_UID", 1234), ("--user", 1234)]


@pytest.fixture(scope="module")
def volumes(once: Callable[..., Any], new_volume: Callable[[], str]) -> dict[tuple[str, int], str]:
    """A volume of the engine for each way to become its owner and each owner, with a file of that owner."""
    names = {(how, owner): new_volume() for how, owner in OWNERS}
    mounted = {name: {"bind": f"/mnt/{name}", "mode": "rw"} for name in names.values()}
    # Not empty: Docker would otherwise fill it from the image again, and change its owner.
    make = "while [ $# != 0 ]; do touch /mnt/$1/old; chmod 755 /mnt/$1; chown -R $2:$2 /mnt/$1; shift 2; done"
    arguments = [word for (_, owner), name in names.items() for word in (name, str(owner))]
    assert once(["sh", "-ec", make, "sh", *arguments], user="root", volumes=mounted)[0] == 0
    return names


@pytest.mark.thorough
@pytest.mark.parametrize(("how", "owner"), OWNERS)
def test_a_volume_is_writable_whoever_owns_it(
    once: Callable[..., Any], volumes: dict[tuple[str, int], str], how: str, owner: int
) -> None:
    if how == "--user":
        options: dict[str, Any] = {"user": f"{owner}:0"}
    elif how == "NB_UID":
        options = {"user": "root", "environment": {"NB_UID": str(owner), "NB_GID": str(owner)}}
    else:
        options = {"user": "root", "environment": {"NB_GID": "0"}}
    mounted = {volumes[how, owner]: {"bind": "/workspace", "mode": "rw"}}
    code = "touch /workspace/new ~/new; stat -c %u /workspace/new; id -u; python -c 'import pwd'"
    status, out, err = once(["bash", "-ec", code], volumes=mounted, **options)
    assert (status, out.split()) == (0, [str(owner), str(owner)]), err


@pytest.mark.thorough
def test_an_unwritable_workspace_is_a_warning(once: Callable[..., Any]) -> None:
    _, _, err = once(["true"], user="123456:123456")
    assert "user 123456 cannot write to /workspace, which belongs to 1000:0: start with `--user 1000:0`" in err


@pytest.mark.thorough
def test_nb_uid_without_root_is_a_warning(once: Callable[..., Any]) -> None:
    status, out, err = once(["id", "-u"], environment={"NB_UID": "4242"})
    assert (status, out) == (0, "1000\n")
    assert "this stays user 1000: add `--user root`" in err


def test_root_is_dropped_with_all_capabilities(once: Callable[..., Any]) -> None:
    code = "id -un; id -u; grep -E 'Cap(Prm|Eff)|^Groups' /proc/self/status"
    status, out, err = once(["sh", "-c", code], user="root", environment={"NB_UID": "4242"})
    assert status == 0, err
    assert out.split() == ["user", "4242", "Groups:", "0", "CapPrm:", "0" * 16, "CapEff:", "0" * 16]


@pytest.mark.thorough
def test_the_capabilities_that_the_launcher_names_are_enough(
    once: Callable[..., Any], start: Callable[..., Container], until: Callable[..., None]
) -> None:
    """For the health check and for `docker stop` too."""
    options: dict[str, Any] = {"user": "root", "environment": {"NB_UID": "4242"}, "cap_drop": ["ALL"]}
    status, _, err = once(["true"], **options)
    assert status == 78
    container = start(["sleep", "3600"], cap_add=re.findall(r"--cap-add (\w+)", err), **options)
    until(lambda: container.exec_run(["check-services"]).exit_code == 0, seconds=30, what="the health check")
    container.stop(timeout=10)
    assert container.wait()["StatusCode"] == 143


def test_root_stays_root_for_a_command_without_nb_uid(once: Callable[..., Any]) -> None:
    """`docker run --user root IMAGE apt-get install ...`, and every RUN after `USER root` in a derived image."""
    assert once(["sh", "-c", "id -u; echo $HOME"], user="root")[1].split() == ["0", "/root"]


@pytest.mark.thorough
def test_hooks_run_in_order_and_can_export(start: Callable[..., Container]) -> None:
    hooks = {
        # A background process does not block the start, and after an early exit the exports are kept.
        "10-one.sh": "export FROM_HOOK=one; SILENT=x; umask 002; echo printed; sleep 300 & exit 0",
        "20-two": "#!/bin/sh\necho $FROM_HOOK >/tmp/seen\n",
        "README": "not a program",
    }
    container = start(["sh", "-c", "sleep 2; exec sh -c 'cat /tmp/seen; umask; echo $FROM_HOOK $SILENT'"])
    container.stop(timeout=1)
    put(container, "/etc/start.d", hooks)
    container.start()
    assert container.wait(timeout=60)["StatusCode"] == 0
    assert container.logs(stdout=True, stderr=False).decode().split()[-3:] == ["one", "0002", "one"]
    assert "printed" in container.logs(stdout=False, stderr=True).decode()


@pytest.mark.thorough
def test_a_hook_that_fails_ends_the_container(start: Callable[..., Container]) -> None:
    container = start(["echo", "reached"])
    container.wait(timeout=60)
    put(container, "/etc/start.d", {"50-bad.sh": "false"})
    container.start()
    assert container.wait(timeout=60)["StatusCode"] == 1
    assert "/etc/start.d/50-bad.sh ended with status 1" in container.logs().decode()
    assert container.logs(stdout=True, stderr=False).decode().count("reached") == 1


def put(container: Container, folder: str, files: dict[str, str], mode: int = 0o755) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(f"{folder.strip('/')}/{name}")
            info.size, info.mode = len(text.encode()), 0o644 if name == "README" else mode
            tar.addfile(info, io.BytesIO(text.encode()))
    assert container.put_archive("/", buffer.getvalue())


def test_without_a_gpu_there_is_one_warning_or_an_error(once: Callable[..., Any], subject: Any) -> None:
    err = once(["true"])[2]
    assert err.count("no GPU") == err.count("\n") == (0 if subject.cell["cuda"] == "cpu" else 1)
    for value in ("1", "true"):
        status, _, err = once(["true"], environment={"GPU_REQUIRED": value})
        assert status == 69
        assert err.startswith("error: GPU_REQUIRED=1, but ")


@pytest.mark.thorough
def test_a_shell_without_input_is_an_error(once: Callable[..., Any], start: Callable[..., Container]) -> None:
    """`docker run -d IMAGE` ended at once with status 0, and without a line."""
    message = "error: a shell would get no input and end: add a command"
    status, _, err = once(["bash"])
    assert (status, message in err) == (78, True)
    container = start(["bash"], tty=True)
    wait_for_program(container, "bash")
    for command in (["/bin/bash", "-l"], ["sh"]):
        ended = run_in(container, ["start", *command])
        assert (ended.status, message in ended.err) == (78, True)


def test_start_quiet_prints_nothing(once: Callable[..., Any]) -> None:
    assert once(["true"], environment={"START_QUIET": "1"}) == (0, "", "")


# ---- compatibility with other images


def test_only_variants_have_tools_and_services(host: Host, subject: Any) -> None:
    """By design, each image contains only the components in its name."""
    commands = {"tools": ["git", "curl", "rsync", "tmux"], "jupyter": ["jupyter"], "ssh": ["sshd"], "devel": ["cmake"]}
    missing = [name for part, names in commands.items() if part not in subject.data["components"] for name in names]
    present = [name for name in missing if host.run("command -v %s || test -e /usr/sbin/%s", name, name).rc == 0]
    assert present == []


def thorough(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.thorough)


USERS = ["1234:0", thorough("1000:0"), thorough("123456:0"), thorough("1234:1234")]


@pytest.mark.parametrize("user", USERS)
def test_docker_exec_has_a_home_and_a_name(shell: Callable[..., Any], subject: Any, user: str) -> None:
    session = shell(user=user)
    code = "python -c 'import getpass; print(getpass.getuser())'; echo $HOME; touch ~/mine && stat -c %u ~/mine; id -u"
    name, home, owner, uid = session.run(code).split()
    assert (name, home, owner) == ("user", "/home/user", uid)
    number = uid if subject.data["engine"] == "Podman" else f"user{uid}"  # Podman itself adds the user to /etc/passwd
    assert session.run("id -un") == ("user" if uid == "1000" else number)
    assert f"{session.run('id -un')}@" in session.run(["bash", "-ic", 'echo "${PS1@P}"'])


@pytest.mark.thorough
def test_shells_have_the_home_of_the_launcher(shell: Callable[..., Any], new_volume: Callable[[], str]) -> None:
    """`docker exec` has the home of the image, to which this user cannot write."""
    container = shell(user="4242:4242", volumes={new_volume(): {"bind": "/home/user", "mode": "ro"}})
    for command in (["bash", "-lc", "echo $HOME"], ["bash", "-ic", "echo $HOME"], ["sh", "-lc", "echo $HOME"]):
        assert "/run/workstation/of-4242/home" in container.run(command)
    assert container.run(["bash", "-lc", "echo $HOME $USER $LOGNAME"], user="root") == "/root root root"


@pytest.mark.thorough
@pytest.mark.parametrize(("user", "umask"), [("4242:0", "0002"), ("4242:4242", "0022"), ("root", "0022")])
def test_users_of_group_0_can_share_files(
    once: Callable[..., Any], shell: Callable[..., Any], user: str, umask: str
) -> None:
    """A volume for downloads, which users with different ids fill."""
    assert once(["sh", "-c", "umask"], user=user)[1] == f"{umask}\n"
    assert shell(user=user).run(["bash", "-lc", "umask"]) == umask


@pytest.mark.thorough
def test_another_user_of_group_0_cannot_write_the_name_of_the_user(shell: Callable[..., Any], subject: Any) -> None:
    """It has the home and the shell of SSH sessions."""
    container = shell(user="4242:0")
    files = "" if subject.data["engine"] == "Podman" else "passwd"  # Podman itself adds the user to /etc/passwd
    assert container.run("ls /var/lib/extrausers") == files
    assert container.run("find /var/lib/extrausers -type f -perm /022") == ""


@pytest.mark.thorough
def test_a_user_outside_of_group_0_is_one_warning(once: Callable[..., Any]) -> None:
    """What many desktops give: `--user $(id -u):$(id -g)`."""
    err = once(["true"], user="1000:1000")[2]
    [line] = [line for line in err.splitlines() if "group" in line]
    assert line.startswith("warning: user 1000 is not in group 0, so uv cannot install into /opt/venv")
    assert line.endswith("use `--user 1000:0`")


# A package whose script gives a folder to a user of the system.
PACKAGE = r"""
mkdir -p /tmp/package/DEBIAN /tmp/package/var/lib/database
cd /tmp/package/DEBIAN
printf '%s
' 'Package: database' 'Version: 1' 'Architecture: all' 'Maintainer: x <x@y>' 'Description: x' >control
printf '#!/bin/sh
set -e
%s
' 'getent passwd database || useradd --system database'     'chown database:database /var/lib/database' "$1" >postinst
chmod 755 postinst
dpkg-deb --build /tmp/package /tmp/package.deb
"""


@pytest.mark.thorough
@pytest.mark.parametrize("end", ["true", "false", "kill -KILL $PPID"])
def test_packages_find_no_names_of_the_user(shell: Callable[..., Any], end: str) -> None:
    """Each user can write /var/lib/extrausers, where SSH needs the launcher's line: while dpkg runs, and after it."""
    container = shell()
    for line in ("user4242:x:4242:65534::/home/user:/bin/bash", "database:x:4242:0::/:/bin/sh"):
        container.run(f"echo {line} >>/var/lib/extrausers/passwd")
    container.run("echo database:x:4242: >/var/lib/extrausers/group")
    container.run(["bash", "-ec", PACKAGE, "bash", f"getent passwd user4242; {end}"])
    status, text = container.result(["apt-get", "install", "-y", "/tmp/package.deb"], user="root")
    assert (status == 0) == (end == "true"), text
    assert "user4242:x:4242:" in text
    assert int(container.run(["stat", "-c", "%u", "/var/lib/database"])) in range(100, 1000)
    container.fails("echo >>/var/lib/extrausers/passwd")
    container.container.restart(timeout=5)
    assert container.run("id -un 4242") == "user4242"
    if "KILL" not in end:
        assert container.run("ls -A /var/lib/extrausers") == "passwd", "the launcher can add the group of a later user"


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "status"), [("user5000", 0), ("database", 2)])
def test_names_that_root_cannot_replace(
    once: Callable[..., Any], shell: Callable[..., Any], new_volume: Callable[[], str], name: str, status: int
) -> None:
    volume = new_volume()
    write = f"echo {name}:x:5000:0::/home/user:/bin/bash >/var/lib/extrausers/passwd"
    assert once(["sh", "-c", write], volumes={volume: {"bind": "/var/lib/extrausers", "mode": "rw"}})[0] == 0
    container = shell(volumes={volume: {"bind": "/var/lib/extrausers", "mode": "ro"}})
    container.run(["bash", "-ec", PACKAGE, "bash", "true"])
    got, text = container.result(["dpkg", "-i", "/tmp/package.deb"], user="root")
    assert (got, "root cannot replace it" in text) == (status, status != 0), text


@pytest.mark.thorough
def test_another_user_cannot_replace_the_state_of_services(shell: Callable[..., Any]) -> None:
    """Not even another member of group 0."""
    container = shell()
    container.run("mkdir -m 700 /var/lib/workstation/of-1000")
    for path in ("/run/workstation/of-1000", "/var/lib/workstation/of-1000"):
        for command in (["rm", "-rf", path], ["mv", path, f"{path}.away"]):
            container.fails(command, user="1234:0")


# What the image itself runs as root reads none of these files of a user.
EVIL = r"""
for folder in /opt/venv/lib/python/site-packages ~/.local/lib/$(basename /opt/venv/lib/python3*)/site-packages; do
    mkdir -p $folder
    for file in evil.pth sitecustomize.py usercustomize.py ctypes.py workstation.py; do
        echo 'import os; os.system("echo evil >&2")' >$folder/$file
    done
done
mkdir -p ~/.local/bin ~/.config/pip
for folder in ~/.local/bin /opt/venv/bin; do
    for name in python python3 git ip lsof start check-services apt-get dpkg sh env id; do
        rm -f $folder/$name && printf '#!/bin/sh\necho evil\n' >$folder/$name && chmod +x $folder/$name
    done
done
printf '[alias]\n st = !echo evil\n[core]\n fsmonitor = "echo evil >&2; false"\n' >~/.gitconfig
echo 'echo evil' | tee -a ~/.bashrc ~/.profile ~/.bash_profile >/dev/null
/opt/venv/bin/python
"""
# Without a list of packages, so that it needs no network. The hook runs as those of packages do.
APT = (
    "apt-get update -o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts=/dev/null "
    "-o 'APT::Update::Pre-Invoke::=python3 -c print; git st; sh -c true; echo $HOME'"
)
AS_ROOT = [["check-services"], ["start", "--help"], ["/bin/bash", "-c", APT], ["apt-get", "-s", "install", "tini"]]


def test_the_image_runs_nothing_as_root_that_the_user_can_write(shell: Callable[..., Any]) -> None:
    """At the start, for the health check, and in apt. `docker exec -u root C python` is the user's environment."""
    container = shell(user="root", environment={"NB_UID": "1234"})
    put(container.container, "/etc/start.d", {"hook.sh": "export SET=1"})
    assert "evil" in container.run(EVIL, user="1234:0"), "the user's own Python is replaced"
    outputs = [container.result(command, user="root") for command in AS_ROOT]
    assert "evil" not in str(outputs), outputs
    assert "NAME=VALUE" in outputs[1][1]
    assert "/root\n" in outputs[2][1]
    container.container.restart(timeout=5)
    logs = container.container.logs().decode()
    assert "evil" not in logs, logs


# Prints what happens in the folders that the user can write, until /tmp/done exists. If root reads such a folder, and
# then deletes or runs what it read there, a user can exchange it with a link to another folder in between.
WATCH = """
import ctypes, os, time
IN_OPEN, IN_MODIFY, IN_DELETE, IN_CREATE, IN_NONBLOCK = 0x20, 0x2, 0x200, 0x100, 0o4000
libc = ctypes.CDLL(None)
watching = libc.inotify_init1(IN_NONBLOCK)
for folder in ("/opt/venv/lib/python/site-packages", "/opt/venv/bin", "/home/user"):
    assert libc.inotify_add_watch(watching, folder.encode(), IN_OPEN | IN_MODIFY | IN_DELETE | IN_CREATE) >= 0
open("/tmp/watching", "w").close()
while not os.path.exists("/tmp/done"):
    time.sleep(0.1)
try:
    print(os.read(watching, 100_000))
except BlockingIOError:
    print("nothing happened")
"""


@pytest.mark.thorough
def test_the_image_opens_no_folder_as_root_that_users_can_write(shell: Callable[..., Any]) -> None:
    """The health check deleted stale records when it ended: users chose what it deleted."""
    container = shell(user="root", environment={"NB_UID": "1234"})
    watch = ["sh", "-c", 'python -c "$0" >/tmp/events; touch /tmp/ended', WATCH]
    container.container.exec_run(watch, user="1234:0", detach=True)
    container.run(["/bin/sh", "-c", "until [ -e /tmp/watching ]; do sleep 0.1; done"], user="1234:0")
    for command in AS_ROOT:
        container.result(command, user="root")
    container.run(["/bin/sh", "-c", "touch /tmp/done; until [ -e /tmp/ended ]; do sleep 0.1; done"], user="1234:0")
    assert container.run(["cat", "/tmp/events"]) == "nothing happened"


# Exchanges a folder with a link to /usr/bin without end. The folder has files with the names of those there.
EXCHANGE = """
import ctypes, os
libc = ctypes.CDLL(None)
os.umask(0)
os.chdir("/home/user")
os.mkdir("trap")
for name in os.listdir("/usr/bin"):
    open(f"trap/{name}", "w").close()
os.symlink("/usr/bin", "link")
open("/tmp/exchanging", "w").close()
AT_FDCWD, RENAME_EXCHANGE = -100, 2
while True:
    libc.renameat2(AT_FDCWD, b"trap", AT_FDCWD, b"link", RENAME_EXCHANGE)
"""


@pytest.mark.thorough
def test_root_changes_no_owner_outside_of_the_home(shell: Callable[..., Any]) -> None:
    """Another container of the user can exchange folders of a shared home for links while root changes owners there."""
    container = shell()
    container.container.exec_run(["python", "-c", EXCHANGE], detach=True)
    container.run("until [ -e /tmp/exchanging ]; do sleep 0.1; done")
    # chgrp fails for a folder that is exchanged while it reads it, in 4 of 250 runs.
    changes = "for i in $(seq 8); do NB_UID=1000 NB_GID=101 start true; chgrp -Rh 0 /home/user || true; done"
    container.run(["/bin/sh", "-ec", changes], user="root")
    assert container.run(["find", "/usr/bin", "-uid", "1000"]) == ""


@pytest.mark.thorough
def test_a_home_may_be_deeper_than_pythons_recursion(shell: Callable[..., Any]) -> None:
    container = shell()
    code = "import os; os.chdir('/home/user'); [os.mkdir('d') or os.chdir('d') for _ in range(1200)]"
    container.run(["python", "-c", code])
    container.run(["/bin/sh", "-c", "NB_GID=101 start true"], user="root")


@pytest.mark.thorough
def test_scripts_keep_the_variables_and_the_path_that_they_are_given(shell: Callable[..., Any]) -> None:
    container = shell(environment={"folder": "/data", "PATH": "/my/tools:/usr/bin:/bin"})
    for user in ("1000:0", "root"):
        output = container.run(["bash", "-c", "echo $folder $PATH"], user=user)
        assert output == "/data /my/tools:/usr/bin:/bin"


@pytest.mark.thorough
def test_commands_that_cannot_work_say_what_to_do(shell: Callable[..., Any]) -> None:
    container = shell()
    assert "CONTAINER /bin/sh -c 'apt-get update && apt-get install -y ffmpeg'" in container.fails(
        ["apt-get", "install", "-y", "ffmpeg"]
    )
    assert "docker exec -u root -w / CONTAINER COMMAND" in container.fails(["sudo", "ls"])
    assert "docker run --gpus all IMAGE" in container.fails(["nvidia-smi"])
    for command in (
        ["apt-get", "--version"],
        ["apt", "list", "--installed", "tini"],
        ["apt-get", "-s", "install", "tini"],
    ):
        assert "tini" in container.run(command) or "apt" in container.run(command), "what needs no root runs"
    assert container.run(["apt-get", "install", "-s", "-q", "tini"], user="root")


@pytest.mark.thorough
def test_the_fixes_for_a_workspace_of_root_work(once: Callable[..., Any], new_volume: Callable[[], str]) -> None:
    """Follows both fixes in the warning."""
    mounted = {new_volume(): {"bind": "/workspace", "mode": "rw"}}
    make = "chmod 755 /workspace; chown -R 0:0 /workspace; touch /workspace/old"
    assert once(["sh", "-c", make], user="root", volumes=mounted)[0] == 0
    _, _, err = once(["true"], volumes=mounted)
    assert "chown 1000 /workspace" in err
    assert "--user root -e NB_UID=0" in err
    code = ["sh", "-c", "touch /workspace/$(id -u) && id -u"]
    root = {"user": "root", "environment": {"NB_UID": "0"}}
    status, out, err = once(code, volumes=mounted, **root)
    assert (status, out) == (0, "0\n"), err
    assert "cannot write" not in err
    assert once(["chown", "1000", "/workspace"], user="root", volumes=mounted)[0] == 0
    status, out, err = once(code, volumes=mounted)
    assert (status, out) == (0, "1000\n"), err
    assert "cannot write" not in err


@pytest.mark.thorough
@pytest.mark.parametrize("chown_home", ["no", "yes"])
def test_owners_in_a_mounted_home_change_only_with_chown_home(
    once: Callable[..., Any], new_volume: Callable[[], str], chown_home: str
) -> None:
    mounted = {new_volume(): {"bind": "/home/user", "mode": "rw"}}
    environment = {"NB_UID": "4242", "CHOWN_HOME": chown_home}
    assert once(["touch", "/home/user/mine"], volumes=mounted)[0] == 0
    stat = ["stat", "-c", "%u", "/home/user/mine"]
    status, out, err = once(stat, user="root", environment=environment, volumes=mounted)
    assert (status, out) == (0, "4242\n" if chown_home == "yes" else "1000\n"), err


@pytest.mark.thorough
def test_a_noexec_tmp_is_a_warning(once: Callable[..., Any]) -> None:
    compile_there = "cp /bin/true /tmp/program && /tmp/program"
    # Docker's default, but not that of Podman's API.
    status, _, err = once(["sh", "-c", compile_there], read_only=True, tmpfs={"/tmp": "noexec", "/run": ""})
    assert status == 126
    assert "/tmp is mounted noexec" in err
    assert "--tmpfs /tmp:exec" in err
    status, _, err = once(["sh", "-c", compile_there], read_only=True, tmpfs={"/tmp": "exec", "/run": ""})
    assert status == 0
    assert "noexec" not in err


@pytest.mark.thorough
def test_a_hook_that_is_not_executable_is_a_warning(start: Callable[..., Container]) -> None:
    container = start(["true"])
    container.wait(timeout=60)
    put(container, "/etc/start.d", {"README": "read me"})
    put(container, "/etc/start.d/", {"30-forgotten": "echo never"}, mode=0o644)
    container.start()
    assert container.wait(timeout=60)["StatusCode"] == 0
    log = container.logs().decode()
    assert "/etc/start.d/30-forgotten was not run: make it executable" in log
    assert "README" not in log


@pytest.mark.thorough
def test_variables_of_docker_stacks_are_warnings(once: Callable[..., Any]) -> None:
    environment = {"NB_USER": "me", "GRANT_SUDO": "yes", "CHOWN_EXTRA": "/data"}
    _, _, err = once(["true"], environment=environment)
    assert [name for name in environment if err.count(f"{name} has no effect here: ") != 1] == []


@pytest.mark.thorough
def test_start_sh_of_docker_stacks_runs_the_command(once: Callable[..., Any]) -> None:
    status, out, err = once(["start.sh", "echo", "reached"])
    assert (status, out) == (0, "reached\n"), err
    assert "start.sh is not needed" in err


def test_start_notebook_without_jupyter_names_the_variant(once: Callable[..., Any], subject: Any) -> None:
    if "jupyter" not in subject.data["components"]:
        status, _, err = once(["start-notebook.py"])
        assert status == 78
        assert "use the variant jupyter or full" in err
    assert once(["start-singleuser.py"])[0] == 78


@pytest.mark.thorough
def test_users_see_what_root_removes_in_a_derived_image(shell: Callable[..., Any]) -> None:
    """`USER root` and `RUN pip uninstall`."""
    container = shell()
    version = "import importlib.metadata as m; print([d.version for d in m.distributions(name='nvidia-ml-py')])"
    assert container.run(["python", "-c", version]) != "[]"
    container.run(["pip", "uninstall", "--yes", "nvidia-ml-py"], user="root")
    assert container.run(["python", "-c", version]) == "[]"
    assert "nvidia-ml-py" not in container.run("pip list 2>/dev/null; uv pip list 2>/dev/null || true")


# ---- the health check, in containers without services


@pytest.mark.parametrize("user", ["", thorough("root"), thorough("1234:1234")])
def test_a_container_with_another_entrypoint_is_healthy(start: Callable[..., Container], user: str) -> None:
    """Dev containers override the entrypoint."""
    container = start(["infinity"], entrypoint=["sleep"], user=user)
    assert run_in(container, ["check-services"]) == (0, "", "")


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"init": True}, {"pid_mode": "host"}, {"user": "1234:1234"}], ids=str)
def test_a_container_that_lost_its_state_is_unhealthy(
    shell: Callable[..., Any], until: Callable[..., None], options: dict[str, Any]
) -> None:
    container = shell(**options)
    # With the processes of the host, `shell` may find the sleep of another container.
    until(lambda: container.result(["check-services"])[0] == 0, seconds=60, what="the launcher")
    container.run("rm -r /run/workstation/of-$(id -u)")
    for user in ("", "root"):
        assert "its state was deleted" in container.fails(["check-services"], user=user)


@pytest.mark.thorough
def test_a_container_is_unhealthy_until_its_hooks_have_run(
    start: Callable[..., Container], until: Callable[..., None]
) -> None:
    container = start(["tail", "-f", "/dev/null"])
    container.stop(timeout=1)
    put(container, "/etc/start.d", {"wait.sh": "until [ -e /tmp/go ]; do sleep 0.1; done"})
    container.start()
    wait_for_program(container, "sleep")  # of the hook
    result = run_in(container, ["check-services"])
    assert result.status == 1
    assert "has not started" in result.out + result.err
    assert container.exec_run(["touch", "/tmp/go"]).exit_code == 0
    until(lambda: container.exec_run(["check-services"]).exit_code == 0, seconds=60, what="the command")


# ---- the groups of the user


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("user", "gid", "group_0"),
    [
        ("", "0", True),
        ("user", "1000", True),
        ("1000", "1000", True),
        ("1234", "0", True),
        ("1000:1000", "1000", False),
    ],
)
def test_whoever_is_in_group_0_can_install(shell: Callable[..., Any], user: str, gid: str, group_0: bool) -> None:
    """Docker and Kubernetes take other groups from /etc/group only if they are given no group."""
    container = shell(user=user)
    assert container.run(["id", "-g"]) == gid
    assert ("0" in container.run(["id", "-G"]).split()) is group_0
    site = "$(python -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))')"
    assert (container.result(f"touch {site}/new")[0] == 0) is group_0


def test_the_primary_group_of_the_user_can_be_renumbered(host: Host) -> None:
    """Dev containers replace the number of this group by that of the user's group on the host."""
    assert host.user("user").gid == 1000
    assert host.check_output("id -gn user") == "user"
    assert host.check_output("id -Gn user") == "user root"
    assert host.group("root").gid == 0


# ---- other processes 1


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"init": True}, {"pid_mode": "host"}], ids=str)
def test_tini_is_silent_below_another_process_1(once: Callable[..., Any], options: dict[str, Any]) -> None:
    """It printed three lines of warnings that it cannot reap."""
    assert once(["true"], environment={"START_QUIET": "1"}, **options) == (0, "", "")


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"init": True}, {"pid_mode": "host"}], ids=str)
def test_orphans_become_children_of_tini(once: Callable[..., Any], options: dict[str, Any]) -> None:
    orphan = "sleep 0.5; cat /proc/$(cut -d ' ' -f 4 /proc/$$/stat)/comm"
    assert once(["sh", "-c", '(sh -c "$0" &); sleep 2', orphan], **options)[:2] == (0, "tini\n")


@pytest.mark.thorough
def test_a_locale_that_the_image_lacks_is_one_warning(once: Callable[..., Any]) -> None:
    """bash, perl and others printed warnings of their own, each time."""
    code = "import locale; locale.setlocale(locale.LC_ALL, ''); print(locale.getpreferredencoding())"
    environment = {"LANG": "de_DE.UTF-8", "LC_TIME": "de_DE.UTF-8"}
    status, out, err = once(
        ["bash", "-c", 'python -c "$0"; printf ä | wc -m; perl -e 1', code], environment=environment
    )
    assert (status, out) == (0, "UTF-8\n1\n")
    assert err.count("de_DE") == 2
    assert "LANG=de_DE.UTF-8, LC_TIME=de_DE.UTF-8: not in this image, C.UTF-8 is used" in err
    assert "locale" not in err.replace("locales-all", "")


@pytest.mark.thorough
def test_a_terminal_that_the_image_lacks_is_one_warning(once: Callable[..., Any]) -> None:
    code = "clear >/dev/null && echo $TERM"
    status, out, err = once(["sh", "-c", code], environment={"TERM": "xterm-ghostty"})
    assert (status, out, err.count("TERM")) == (0, "xterm-256color\n", 1)
    assert "TERM=xterm-ghostty: not in this image, xterm-256color is used" in err
    assert once(["sh", "-c", code], environment={"TERM": "screen", "START_QUIET": "1"}) == (0, "screen\n", "")
