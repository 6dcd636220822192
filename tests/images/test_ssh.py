"""SSH as people meet it: their key opens it and nothing else does; a session is as `docker exec`.

The client is OpenSSH's, in the same container or in another one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import testinfra
from docker.models.containers import Container
from testinfra.host import Host

START_S = 60
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43 + " someone"
CLIENT = (
    "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/tmp/known -o BatchMode=yes -o LogLevel=ERROR "
    "-o IdentitiesOnly=yes -i /tmp/mine"
)


def inside(container: Container) -> Host:
    return testinfra.get_host(f"docker://{container.id}")


def listens(container: Container, user: str = "") -> bool:
    """Whether sshd does; its check looks for a socket of the user who asks."""
    return bool(container.exec_run(["/etc/services.d/ssh/check"], user=user).exit_code == 0)


@pytest.fixture(scope="session")
def client(host: Host) -> tuple[Host, str]:
    """A host with OpenSSH's client, and the public key of its pair."""
    host.check_output("test -f /tmp/mine || ssh-keygen -q -t ed25519 -N '' -C someone@laptop -f /tmp/mine")
    return host, host.check_output("cat /tmp/mine.pub")


@pytest.fixture(scope="session")
def server(start: Callable[..., Container], until: Callable[..., None], client: tuple[Host, str]) -> Container:
    container = start(
        environment={"SSH_PUBLIC_KEY": client[1], "JUPYTER_TOKEN": "chosen-by-me", "GIVEN": "a 'b' $c \\ d"}
    )
    until(lambda: listens(container), seconds=START_S, what="sshd")
    container.reload()
    return container


def address(container: Container) -> str:
    return str(container.attrs["NetworkSettings"]["Networks"]["bridge"]["IPAddress"])


def over_ssh(client: tuple[Host, str], server: Container, command: str, user: str = "user", options: str = "") -> Any:
    return client[0].run(f"ssh {CLIENT} {options} {user}@{address(server)} %s", command)


def test_a_key_opens_it(client: tuple[Host, str], server: Container) -> None:
    done = over_ssh(client, server, "id -un; pwd; python -c 'print(6 * 7)'")
    assert done.stdout.split() == ["user", "/home/user", "42"], done.stderr


def test_becomes_healthy_and_says_how_to_come_in(server: Container, until: Callable[..., None]) -> None:
    def healthy() -> bool:
        server.reload()
        return str(server.attrs["State"]["Health"]["Status"]) == "healthy"

    until(healthy, seconds=START_S, what="the health check")
    log = server.logs().decode()
    assert re.search(
        r"SSH \(with -p 2222:22\): ssh -p 2222 user@127\.0\.0\.1   host key SHA256:[A-Za-z0-9+/]{43}", log
    ), log


@pytest.mark.parametrize("shell", ["", "bash -lc ", "bash -ic ", "sh -lc "])
def test_a_session_sees_what_docker_exec_sees(client: tuple[Host, str], server: Container, shell: str) -> None:
    code = "'command -v python nvcc; printenv PATH LANG NVIDIA_VISIBLE_DEVICES CUDA_HOME GIVEN PIP_CONSTRAINT'"
    wanted = inside(server).run(f"bash -c {code}").stdout
    assert wanted.startswith("/opt/venv/bin/python\n")
    assert "a 'b' $c \\ d" in wanted
    got = over_ssh(client, server, f"{shell or 'bash -c '}{code}").stdout
    assert got == wanted


def test_the_token_of_jupyter_is_not_in_a_session(client: tuple[Host, str], server: Container) -> None:
    told = over_ssh(client, server, "env").stdout
    assert "PIP_CONSTRAINT" in told
    assert "chosen-by-me" not in told


def test_files_are_copied(client: tuple[Host, str], server: Container) -> None:
    host = client[0]
    host.check_output("head -c 300000 /dev/urandom >/tmp/sent")
    assert host.run(f"scp {CLIENT} /tmp/sent user@{address(server)}:/workspace/got").rc == 0
    assert inside(server).file("/workspace/got").sha256sum == host.file("/tmp/sent").sha256sum


def test_a_terminal_is_given(client: tuple[Host, str], server: Container) -> None:
    assert "/dev/pts/" in over_ssh(client, server, "tty", options="-tt").stdout


@pytest.mark.parametrize("user", ["root", "nobody", "sshd"])
def test_nobody_else_comes_in(client: tuple[Host, str], server: Container, user: str) -> None:
    done = over_ssh(client, server, "id", user=user)
    assert done.rc == 255
    assert "Permission denied (publickey)" in done.stderr


def test_another_key_does_not_open_it(client: tuple[Host, str], server: Container) -> None:
    client[0].check_output("test -f /tmp/other || ssh-keygen -q -t ed25519 -N '' -f /tmp/other")
    done = client[0].run(f"ssh {CLIENT.replace('/tmp/mine', '/tmp/other')} user@{address(server)} id")
    assert done.rc == 255
    assert "Permission denied (publickey)" in done.stderr


def test_listens_on_its_ports_only(server: Container, subject: Any) -> None:
    rows = [line.split() for line in inside(server).check_output("cat /proc/net/tcp /proc/net/tcp6").splitlines()]
    # In hex: 0A is the state LISTEN, 0100007F the address 127.0.0.1, where kernels and TensorBoard may listen.
    listening = [row[1].split(":") for row in rows if row[3] == "0A"]
    allowed = {22, 8888} if "jupyter" in subject.data["components"] else {22}
    assert {int(port, 16) for address, port in listening if address != "0100007F"} | {8888} == allowed | {8888}


def test_settings_are_strict(server: Container) -> None:
    told = (
        inside(server)
        .check_output("/usr/sbin/sshd -T -f /run/workstation/of-1000/ssh/sshd_config")
        .lower()
        .splitlines()
    )
    strict = {
        "passwordauthentication no", "kbdinteractiveauthentication no", "permitemptypasswords no", "permitrootlogin no",
        "hostbasedauthentication no", "pubkeyauthentication yes", "authenticationmethods publickey",
        "permituserenvironment no", "x11forwarding no", "usepam no",
    }  # fmt: skip
    assert strict - set(told) == set()


@pytest.mark.parametrize(
    ("key", "told"),
    [
        (f'command="rm -rf /" {KEY}', "without options"),
        (f"{KEY}\n{KEY}", "one key on one line"),
        ("ssh-ed25519 AAAA", "not whole"),
        ("ssh-rsa " + KEY.split()[1], "not whole"),
        ("ssh-dss " + KEY.split()[1], "expected `ssh-ed25519"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----", "that is a private key"),
    ],
)
def test_what_is_no_plain_key_is_refused(once: Callable[..., Any], key: str, told: str) -> None:
    status, _, err = once(None, environment={"SSH_PUBLIC_KEY": key})
    assert status == 78
    assert told in err


def test_without_a_key_there_is_no_sshd(start: Callable[..., Container], until: Callable[..., None]) -> None:
    container = start()
    until(lambda: b"SSH is off" in container.logs(), seconds=START_S, what="a line")
    assert b"sshd" not in ((container.top().get("Processes") and str(container.top()["Processes"]).encode()) or b"")


def test_host_keys_are_the_containers_own_and_kept(
    start: Callable[..., Container], until: Callable[..., None], server: Container, client: tuple[Host, str]
) -> None:
    def fingerprint(container: Container) -> str:
        return str(inside(container).check_output("cat /run/workstation/of-1000/ssh/host_key.pub"))

    other = start(environment={"SSH_PUBLIC_KEY": client[1]})
    until(lambda: listens(other), seconds=START_S, what="sshd")
    before = fingerprint(other)
    assert before != fingerprint(server)
    other.restart(timeout=10)
    until(lambda: listens(other), seconds=START_S, what="sshd")
    assert fingerprint(other) == before


def test_several_keys_from_a_file(
    start: Callable[..., Container], until: Callable[..., None], client: tuple[Host, str]
) -> None:
    lines = f"# the team\\n{KEY}\\n\\n{client[1]}\\n"
    code = f"printf '{lines}' >/tmp/keys; SSH_PUBLIC_KEYS_FILE=/tmp/keys exec start services"
    container = start(["sh", "-c", code])
    until(lambda: listens(container), seconds=START_S, what="sshd")
    container.reload()
    assert over_ssh(client, container, "echo in").stdout == "in\n"


def test_as_another_user_by_root(
    start: Callable[..., Container], until: Callable[..., None], client: tuple[Host, str]
) -> None:
    container = start(user="root", environment={"SSH_PUBLIC_KEY": client[1], "NB_UID": "4242"})
    until(lambda: listens(container, "4242"), seconds=START_S, what="sshd")
    container.reload()
    assert over_ssh(client, container, "id -u; touch /home/user/x && echo written").stdout.split() == [
        "4242",
        "written",
    ]
    assert inside(container).run("ps -o user= -C sshd").stdout.split().count("root") == 0


def test_without_any_capability(
    start: Callable[..., Container], until: Callable[..., None], client: tuple[Host, str]
) -> None:
    container = start(
        environment={"SSH_PUBLIC_KEY": client[1]}, cap_drop=["ALL"], security_opt=["no-new-privileges"], read_only=True,
        tmpfs={"/tmp": "", "/run": ""},
    )  # fmt: skip
    until(lambda: listens(container), seconds=START_S, what="sshd")
    container.reload()
    assert over_ssh(client, container, "echo in").stdout == "in\n"
    assert "the host key is new at every start here" in container.logs().decode()


def test_a_user_without_a_name_is_told(once: Callable[..., Any], client: tuple[Host, str]) -> None:
    status, _, err = once(None, user="123456:0", environment={"SSH_PUBLIC_KEY": client[1]})
    assert status == 78
    assert "SSH needs a user with a name" in err


def test_sshd_that_dies_is_started_again(
    start: Callable[..., Container], until: Callable[..., None], client: tuple[Host, str]
) -> None:
    container = start(environment={"SSH_PUBLIC_KEY": client[1]})
    until(lambda: listens(container), seconds=START_S, what="sshd")
    assert container.exec_run(["sh", "-c", "kill -KILL $(pgrep -o sshd)"]).exit_code == 0
    until(lambda: b"it is started again" in container.logs(), seconds=10, what="a line")
    until(lambda: listens(container), seconds=START_S, what="sshd again")


def test_sigterm_ends_it_with_a_session_open(server: Container, client: tuple[Host, str]) -> None:
    client[0].run(f"ssh {CLIENT} -f user@{address(server)} sleep 300 >/dev/null 2>&1")
    server.stop(timeout=10)
    assert server.wait()["StatusCode"] == 143
