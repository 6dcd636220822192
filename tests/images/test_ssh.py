"""SSH: only the user's key can log in, and a session has the environment of `docker exec`.

The client is OpenSSH, in the same container or in another one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import testinfra
from docker.models.containers import Container
from testinfra.host import Host

from tests.images.containers import run_in, runs

START_S = 60
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43 + " someone"
CLIENT = (
    "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/tmp/known -o BatchMode=yes -o LogLevel=ERROR "
    "-o IdentitiesOnly=yes -i /tmp/mine"
)


def inside(container: Container) -> Host:
    return testinfra.get_host(f"docker://{container.id}")


def listens(container: Container, user: str = "") -> bool:
    """Whether sshd answers."""
    return bool(container.exec_run(["/etc/services.d/ssh/check"], user=user).exit_code == 0)


@pytest.fixture(scope="session")
def client(host: Host) -> tuple[Host, str]:
    """A host with OpenSSH's client, and the public key of its pair."""
    host.check_output("test -f /tmp/mine || ssh-keygen -q -t ed25519 -N '' -C someone@laptop -f /tmp/mine")
    return host, host.check_output("cat /tmp/mine.pub")


@pytest.fixture(scope="session")
def server(keep: Callable[..., Container], until: Callable[..., None], client: tuple[Host, str]) -> Container:
    container = keep(
        environment={"SSH_PUBLIC_KEY": client[1], "JUPYTER_TOKEN": "chosen-by-me", "GIVEN": "a 'b' $c \\ d"},
        healthcheck=None,
    )
    until(lambda: listens(container), seconds=START_S, what="sshd")
    container.reload()
    return container


def address(container: Container) -> str:
    (network,) = container.attrs["NetworkSettings"]["Networks"].values()  # Docker's is `bridge`, Podman's `podman`
    return str(network["IPAddress"])


def over_ssh(client: tuple[Host, str], server: Container, command: str, user: str = "user", options: str = "") -> Any:
    return client[0].run(f"ssh {CLIENT} {options} {user}@{address(server)} %s", command)


def test_the_key_logs_in(client: tuple[Host, str], server: Container) -> None:
    result = over_ssh(client, server, "id -un; pwd; python -c 'print(6 * 7)'")
    assert result.stdout.split() == ["user", "/workspace", "42"], result.stderr


def test_becomes_healthy_and_logs_the_address(server: Container, until: Callable[..., None]) -> None:
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
    expected = inside(server).run(f"bash -c {code}").stdout
    assert expected.startswith("/opt/venv/bin/python\n")
    assert "a 'b' $c \\ d" in expected
    output = over_ssh(client, server, f"{shell or 'bash -c '}{code}").stdout
    assert output == expected


def test_the_token_of_jupyter_is_not_in_a_session(client: tuple[Host, str], server: Container) -> None:
    environment = over_ssh(client, server, "env").stdout
    assert "PIP_CONSTRAINT" in environment
    assert "chosen-by-me" not in environment


def test_files_are_copied(client: tuple[Host, str], server: Container) -> None:
    host = client[0]
    host.check_output("head -c 300000 /dev/urandom >/tmp/sent")
    assert host.run(f"scp {CLIENT} /tmp/sent user@{address(server)}:/workspace/received").rc == 0
    assert inside(server).file("/workspace/received").sha256sum == host.file("/tmp/sent").sha256sum


def test_users_of_group_0_can_share_files(
    start: Callable[..., Container], until: Callable[..., None], client: tuple[Host, str]
) -> None:
    """As without SSH; scp and sftp ask for the mode of the file that they send."""
    container = start(user="root", environment={"SSH_PUBLIC_KEY": client[1], "NB_UID": "4242"})
    until(lambda: listens(container, "4242"), seconds=START_S, what="sshd")
    container.reload()
    for shell in ("", "bash -lc ", "bash -ic ", "sh -lc "):
        assert over_ssh(client, container, f"{shell}umask").stdout == "0002\n", shell
    client[0].check_output("touch /tmp/shared && chmod 666 /tmp/shared")
    assert client[0].run(f"scp {CLIENT} /tmp/shared user@{address(container)}:/tmp/shared").rc == 0
    assert inside(container).file("/tmp/shared").mode == 0o664


def test_a_session_can_have_a_terminal(client: tuple[Host, str], server: Container) -> None:
    assert "/dev/pts/" in over_ssh(client, server, "tty", options="-tt").stdout


@pytest.mark.parametrize("user", ["root", "nobody", "sshd"])
def test_no_other_user_logs_in(client: tuple[Host, str], server: Container, user: str) -> None:
    result = over_ssh(client, server, "id", user=user)
    assert result.rc == 255
    assert "Permission denied (publickey)" in result.stderr


def test_another_key_does_not_log_in(client: tuple[Host, str], server: Container) -> None:
    client[0].check_output("test -f /tmp/other || ssh-keygen -q -t ed25519 -N '' -f /tmp/other")
    result = client[0].run(f"ssh {CLIENT.replace('/tmp/mine', '/tmp/other')} user@{address(server)} id")
    assert result.rc == 255
    assert "Permission denied (publickey)" in result.stderr


def test_listens_on_its_ports_only(server: Container, subject: Any) -> None:
    # In hex: 0A is the state LISTEN.
    listening = inside(server).check_output("cat /proc/net/tcp /proc/net/tcp6 | awk '$4 == \"0A\" {print $2}'").split()
    allowed = {22, 8888} if "jupyter" in subject.data["components"] else {22}
    assert {int(address.rpartition(":")[2], 16) for address in listening} | {8888} == allowed | {8888}


def test_settings_are_strict(server: Container) -> None:
    settings = (
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
    assert strict - set(settings) == set()


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (f'command="rm -rf /" {KEY}', "without options"),
        (f"{KEY}\n{KEY}", "one key on one line"),
        ("ssh-ed25519 AAAA", "the key is incomplete"),
        ("ssh-rsa " + KEY.split()[1], "the key is incomplete"),
        ("ssh-dss " + KEY.split()[1], "expected `ssh-ed25519"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----", "this is a private key"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n-----END OPENSSH PRIVATE KEY-----\n", "this is a private key"),
    ],
)
def test_an_invalid_key_is_refused(once: Callable[..., Any], key: str, message: str) -> None:
    status, _, err = once(None, environment={"SSH_PUBLIC_KEY": key})
    assert status == 78
    assert message in err


def test_without_a_key_there_is_no_sshd(
    start: Callable[..., Container], until: Callable[..., None], container: Container
) -> None:
    """An image without another service has nothing to run then: its container ends, with the reason."""
    without_key = start()
    if inside(container).check_output("ls /etc/services.d").split() == ["ssh"]:
        assert without_key.wait(timeout=START_S)["StatusCode"] != 0
        assert b"no service to run" in without_key.logs()
    else:
        until(lambda: b"ready after" in without_key.logs(), seconds=START_S, what="the other services")
        assert not runs(without_key, "sshd")
    assert b"SSH is off" in without_key.logs()


def test_each_container_has_its_own_host_key_and_keeps_it_but_an_image_of_it_does_not(
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
    image = other.commit(pause=False)
    third = start(image=image.id, environment={"SSH_PUBLIC_KEY": client[1]})
    until(lambda: listens(third), seconds=START_S, what="sshd")
    assert fingerprint(third) != before
    third.remove(force=True)
    by_root = start(image=image.id, user="root", environment={"SSH_PUBLIC_KEY": client[1], "NB_UID": "4242"})
    until(lambda: listens(by_root, "4242"), seconds=START_S, what="sshd")
    until(lambda: run_in(by_root, ["check-services"]).status == 0, seconds=START_S, what="the health check")
    assert run_in(by_root, ["ls", "/run/workstation", "/var/lib/workstation"]).out.count("of-1000") == 0
    by_root.remove(force=True)
    image.remove()


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


def test_nothing_that_users_can_write_runs_as_root(
    start: Callable[..., Container], until: Callable[..., None], client: tuple[Host, str]
) -> None:
    """With NB_UID=0, the service belongs to root, whose PATH has a folder that group 0 can write."""
    container = start(user="root", environment={"SSH_PUBLIC_KEY": client[1], "NB_UID": "0"})

    def has_address(times: int) -> bool:
        return container.logs().count(b"host key SHA256:") == times

    until(lambda: has_address(1), seconds=START_S, what="the address in the log")
    plant = (
        r"printf '#!/bin/sh\necho evil >&2\n' | tee grep cut id ssh ssh-keygen && chmod 755 grep cut id ssh ssh-keygen"
    )
    assert container.exec_run(["/bin/bash", "-c", plant], user="1234:0", workdir="/opt/venv/bin").exit_code == 0
    container.restart(timeout=5)
    until(lambda: has_address(2), seconds=START_S, what="the address in the log")
    assert b"evil" not in container.logs()


def test_without_any_capability(
    start: Callable[..., Container], until: Callable[..., None], client: tuple[Host, str]
) -> None:
    container = start(
        environment={"SSH_PUBLIC_KEY": client[1]}, cap_drop=["ALL"], security_opt=["no-new-privileges"], read_only=True,
        tmpfs={"/tmp": "exec", "/run": ""},
    )  # fmt: skip
    until(lambda: listens(container), seconds=START_S, what="sshd")
    container.reload()
    assert over_ssh(client, container, "echo in").stdout == "in\n"
    assert "the host key changes at every start" in container.logs().decode()


@pytest.mark.parametrize("user", ["123456:0", "1234:1234"])
def test_a_user_with_any_id_has_a_name(
    start: Callable[..., Container], until: Callable[..., None], client: tuple[Host, str], user: str
) -> None:
    container = start(user=user, environment={"SSH_PUBLIC_KEY": client[1]})
    until(lambda: listens(container), seconds=START_S, what="sshd")
    container.reload()
    uid = user.split(":", maxsplit=1)[0]
    line = f"ssh -p 2222 user{uid}@127.0.0.1"
    until(lambda: line in container.logs().decode(), seconds=START_S, what="the name in the log")
    assert over_ssh(client, container, "id -u; pwd", user=f"user{uid}").stdout.split() == [uid, "/workspace"]


def test_a_user_without_a_name_is_an_error(
    once: Callable[..., Any], start: Callable[..., Container], until: Callable[..., None], client: tuple[Host, str]
) -> None:
    options: dict[str, Any] = {"user": "123456:0", "read_only": True, "tmpfs": {"/tmp": "exec", "/run": ""}}
    status, _, err = once(None, environment={"SSH_PUBLIC_KEY": client[1]}, **options)
    assert status == 78
    assert "SSH needs a user with a name" in err
    assert "add --tmpfs /var/lib/extrausers" in err
    options["tmpfs"] = {"/tmp": "exec", "/run": "", "/var/lib/extrausers": ""}
    container = start(environment={"SSH_PUBLIC_KEY": client[1]}, **options)
    until(lambda: "SSH (with -p 2222:22)" in container.logs().decode(), seconds=START_S, what="the address")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        ("cp /tmp/mine /tmp/keys", "contains a private key"),
        ("iconv -t UTF-16 /tmp/mine.pub >/tmp/keys", "is UTF-16, as PowerShell writes it"),
        ("cp /tmp/mine.pub /tmp/keys; chmod 000 /tmp/keys", "user 1000 cannot read it"),
        ("head -c 99 /dev/urandom >/tmp/keys", "is not UTF-8 text"),
    ],
)
def test_an_invalid_file_of_keys_is_refused(once: Callable[..., Any], make: str, message: str) -> None:
    keys = "ssh-keygen -q -t ed25519 -N '' -f /tmp/mine"
    code = f"{keys}; {make}; SSH_PUBLIC_KEYS_FILE=/tmp/keys exec start services"
    status, _, err = once(["sh", "-c", code])
    assert status == 78
    assert message in err


def test_a_key_with_the_line_ending_of_windows(
    start: Callable[..., Container], until: Callable[..., None], client: tuple[Host, str]
) -> None:
    container = start(environment={"SSH_PUBLIC_KEY": f"{client[1]}\r\n"})
    until(lambda: listens(container), seconds=START_S, what="sshd")
    container.reload()
    assert over_ssh(client, container, "echo in").stdout == "in\n"


def test_a_stopped_sshd_is_unhealthy(start: Callable[..., Container], until: Callable[..., None], client: Any) -> None:
    """It still listens, but the check fails, within the engine's time limit."""
    container = start(environment={"SSH_PUBLIC_KEY": client[1]})
    until(lambda: listens(container), seconds=START_S, what="sshd")
    assert container.exec_run(["sh", "-c", "kill -STOP $(pgrep -o sshd)"]).exit_code == 0
    assert container.exec_run(["timeout", "9", "check-services"]).exit_code == 1
    assert container.exec_run(["sh", "-c", "kill -CONT $(pgrep -o sshd)"]).exit_code == 0
    until(lambda: listens(container), seconds=10, what="sshd again")


def test_the_log_has_logins_and_no_health_checks(
    server: Container, until: Callable[..., None], client: tuple[Host, str]
) -> None:
    for _ in range(3):
        assert listens(server)
    before = len(server.logs().splitlines())
    assert over_ssh(client, server, "tty", options="-tt").rc == 0
    until(lambda: run_in(server, ["pgrep", "-c", "sshd"]).out == "1\n", seconds=10, what="the end of the session")
    assert over_ssh(client, server, "true").rc == 0
    until(lambda: len(server.logs().splitlines()) >= before + 2, seconds=10, what="the logins in the log")
    assert [line.split()[:2] for line in server.logs().splitlines()[before:]] == [[b"Accepted", b"publickey"]] * 2


def test_the_right_key_may_be_the_fifth_of_an_agent(client: tuple[Host, str], server: Container) -> None:
    keys = [f"/tmp/wrong{number}" for number in range(4)]
    for key in keys:
        client[0].check_output("test -f %s || ssh-keygen -q -t ed25519 -N '' -f %s", key, key)
    options = CLIENT.replace("-i /tmp/mine", " ".join(f"-i {key}" for key in [*keys, "/tmp/mine"]))
    result = client[0].run(f"ssh {options} user@{address(server)} true")
    assert result.rc == 0, result.stderr


def test_a_connection_has_many_sessions(client: tuple[Host, str], server: Container) -> None:
    master = f"ssh {CLIENT} -S /tmp/master user@{address(server)}"
    code = f"""
{master} -M -f sleep 30
for number in $(seq 12); do {master} -o ProxyCommand=false 'echo in; sleep 5' & done | grep -c in  # no new connection
{master} -O exit
"""
    assert client[0].run(code).stdout.strip() == "12"


def test_an_unknown_terminal_is_replaced(client: tuple[Host, str], server: Container) -> None:
    for given, expected in (("xterm-kitty", "xterm-256color"), ("screen", "screen")):
        result = client[0].run(f"TERM={given} ssh {CLIENT} -tt user@{address(server)} 'clear >/dev/null; echo $TERM'")
        assert (result.rc, result.stdout.strip()) == (0, expected)


def test_a_volume_keeps_the_host_keys(
    start: Callable[..., Container], until: Callable[..., None], client: tuple[Host, str], new_volume: Callable[[], str]
) -> None:
    """As documented, for a container that replaces another."""
    mounted = {new_volume(): {"bind": "/var/lib/workstation", "mode": "rw"}}
    host_keys = []
    for _ in range(2):
        container = start(environment={"SSH_PUBLIC_KEY": client[1]}, volumes=mounted)
        until(lambda container=container: listens(container), seconds=START_S, what="sshd")
        host_keys.append(inside(container).check_output("cat /run/workstation/of-1000/ssh/host_key.pub"))
        container.remove(force=True)
    assert host_keys[0] == host_keys[1]


def test_sshd_that_dies_is_restarted(
    start: Callable[..., Container], until: Callable[..., None], client: tuple[Host, str]
) -> None:
    container = start(environment={"SSH_PUBLIC_KEY": client[1]})
    until(lambda: listens(container), seconds=START_S, what="sshd")
    assert container.exec_run(["sh", "-c", "kill -KILL $(pgrep -o sshd)"]).exit_code == 0
    until(lambda: b"was killed by signal 9: restart in" in container.logs(), seconds=10, what="the message")
    until(lambda: listens(container), seconds=START_S, what="sshd again")


def test_sigterm_ends_it_with_a_session_open(server: Container, client: tuple[Host, str]) -> None:
    client[0].run(f"ssh {CLIENT} -f user@{address(server)} sleep 300 >/dev/null 2>&1")
    server.stop(timeout=10)
    assert server.wait()["StatusCode"] == 143


LAUNCHER = "/usr/local/lib/workstation/"

# Starts processes up to the limit of the container, kills sshd, and ends the processes after some seconds.
FILL = """
import os, signal, subprocess, time
sshd = int(subprocess.check_output(["pgrep", "-o", "sshd"]))
children = []
try:
    while True:
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        children.append(child)
except BlockingIOError:
    os.kill(sshd, signal.SIGKILL)
time.sleep(6)
for child in children:
    os.kill(child, signal.SIGKILL)
print(len(children))
"""


def test_the_launcher_retries_at_the_process_limit(
    start: Callable[..., Container], until: Callable[..., None], client: Any
) -> None:
    """The launcher ended with a traceback if it could not start a check or a service."""
    environment = {"SSH_PUBLIC_KEY": client[1], "JUPYTER_TOKEN": "chosen-by-me"}
    container = start(environment=environment, pids_limit=100)
    until(lambda: b"ready after" in container.logs(), seconds=START_S, what="all services")
    filled = run_in(container, ["python", "-c", FILL])
    assert filled.status == 0, filled.err
    assert int(filled.out) > 0
    until(lambda: listens(container), seconds=START_S, what="sshd once more")
    container.reload()
    log = container.logs().decode()
    assert container.status == "running", log
    assert "ssh was killed by signal 9" in log
    assert LAUNCHER not in log  # its traceback; Jupyter may print one of its own when it cannot start a thread
