"""JupyterLab: the logged URL works, nothing works without the token, kernels and notebooks run."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest
import requests
import testinfra
import websocket
from docker.models.containers import Container
from testinfra.host import Host
from urllib3.exceptions import InsecureRequestWarning

from tests.images.containers import run_in, wait_for_program
from tests.kernel import run_code

START_S = 90


@dataclass(frozen=True)
class Server:
    """A running server. `port` is the published port on this machine."""

    container: Container
    port: int
    token: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(self, method: str, path: str, **options: Any) -> requests.Response:
        headers = {"Authorization": f"token {self.token}"}
        return requests.request(method, self.url + path, headers=headers, timeout=30, **options)


@pytest.fixture(scope="session")
def server(keep: Callable[..., Container], until: Callable[..., None]) -> Server:
    container = keep(ports=[8888], shm_size="64m")  # as Docker does; Podman's API does not
    tokens: list[str] = []

    def ready() -> bool:
        container.reload()
        assert container.status == "running", container.logs().decode()
        log = container.logs().decode()
        match = re.search(r"http://127\.0\.0\.1:8888/lab\?token=([0-9a-f]{48})", log)
        if match:
            tokens.append(match[1])
        # On a busy machine, the line follows seconds after the URL.
        return bool(match) and "ready after" in log

    until(ready, seconds=START_S, what="a URL with a token and `ready after` in the log")
    port = int(container.attrs["NetworkSettings"]["Ports"]["8888/tcp"][0]["HostPort"])
    return Server(container=container, port=port, token=tokens[0])


def inside(server: Server) -> Host:
    return testinfra.get_host(f"docker://{server.container.id}")


def test_the_logged_url_works(server: Server) -> None:
    log = server.container.logs().decode()
    assert re.search(
        r"^JupyterLab \(with -p 8888:8888\): http://127\.0\.0\.1:8888/lab\?token=[0-9a-f]{48}$", log, re.M
    ), log
    assert re.search(r"^ready after [0-9.]+ s$", log, re.MULTILINE), log
    assert re.search("^warning: /dev/shm has 64 MB: .* --shm-size=8g", log, re.MULTILINE), log
    answer = requests.get(f"{server.url}/lab?token={server.token}", timeout=30)
    assert answer.status_code == 200
    assert "JupyterLab" in answer.text


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/contents"),
        ("POST", "/api/kernels"),
        ("GET", "/api/terminals"),
    ],
)
def test_nothing_works_without_the_token(server: Server, method: str, path: str) -> None:
    assert requests.request(method, server.url + path, timeout=30).status_code == 403
    wrong = {"Authorization": "token 0000"}
    assert requests.request(method, server.url + path, headers=wrong, timeout=30).status_code == 403
    assert server.request(method, path).status_code in (200, 201)


def test_only_the_version_and_the_login_page_are_open(server: Server) -> None:
    for path in ("/lab", "/tree", "/tensorboard/", "/proxy/6006/", "/files/x", "/static/../api/contents"):
        answer = requests.get(server.url + path, timeout=30, allow_redirects=False)
        assert answer.status_code in (302, 403, 404), path
        assert answer.status_code != 302 or answer.headers["Location"].startswith("/login"), path


def test_no_proxy_to_other_machines(server: Server) -> None:
    assert server.request("GET", "/proxy/example.org:80/").status_code == 403


@pytest.mark.parametrize("path", ["/proxy/absolute/8888/", "/proxy/absolute/08888/x", "/proxy/8888/proxy/8888/api"])
def test_a_request_that_leads_back_to_the_server_is_refused(server: Server, path: str) -> None:
    """Two requests wrote 4 GB into the log: the server was its own client, without end."""
    before = len(server.container.logs())
    answer = server.request("GET", path)
    assert answer.status_code == 403
    assert "leads back to this server" in answer.text
    assert len(server.container.logs()) - before < 5_000


def test_proxied_addresses_without_a_login_log_no_traceback(server: Server, until: Callable[..., None]) -> None:
    before = len(server.container.logs())
    for path in ("/tensorboard/", "/proxy/6006/", "/proxy/absolute/6006/"):
        assert requests.get(server.url + path, timeout=30, allow_redirects=False).status_code == 302
        upgrade = {"Upgrade": "websocket", "Connection": "Upgrade"}
        assert requests.get(server.url + path, headers=upgrade, timeout=30, allow_redirects=False).status_code == 403
        assert requests.post(server.url + path, timeout=30).status_code == 403
    last = "/proxy/last.example:80/"
    assert server.request("GET", last).status_code == 403
    until(lambda: last.encode() in server.container.logs()[before:], seconds=30, what="the last request in the log")
    assert b"Traceback" not in server.container.logs()[before:]


def test_foreign_origin_is_refused(server: Server) -> None:
    """A page of another site, in the browser of a logged-in user: the request has the cookie and the foreign origin."""
    with requests.Session() as browser:
        assert browser.get(f"{server.url}/lab?token={server.token}", timeout=30).status_code == 200
        headers = {"X-XSRFToken": browser.cookies["_xsrf"]}
        same = browser.post(f"{server.url}/api/kernels", headers={**headers, "Origin": server.url}, timeout=30)
        assert same.status_code == 201
        foreign = {**headers, "Origin": "http://evil.example"}
        answer = browser.post(f"{server.url}/api/kernels", headers=foreign, timeout=30)
        assert answer.status_code in (403, 404)
        assert "Access-Control-Allow-Origin" not in answer.headers


def test_token_is_in_no_process_list(server: Server) -> None:
    commands = inside(server).check_output("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert "jupyter" in commands
    assert server.token not in commands


LISTENING = "cat /proc/net/tcp /proc/net/tcp6 | awk '$4 == \"0A\" {print $2}'"  # the state LISTEN; addresses in hex


def ports(addresses: str) -> set[int]:
    """The ports in the output of LISTENING."""
    return {int(address.rpartition(":")[2], 16) for address in addresses.split()}


def test_listens_on_its_port_only(server: Server) -> None:
    with new_kernel(server) as kernel:
        assert execute_in(server, kernel, "print(6 * 7)") == ("42\n", "")
        assert ports(inside(server).check_output(LISTENING)) == {8888}
    families = inside(server).check_output("grep -l ' 0*:22B8 ' /proc/net/tcp*").split()  # 22B8 is 8888
    assert families == inside(server).check_output("ls /proc/net/tcp*").split()  # IPv4 and, if the kernel has it, IPv6
    exposed = server.container.image.attrs["Config"]["ExposedPorts"] if server.container.image else {}
    assert "8888/tcp" in exposed


SUBSCRIBE = """
import sys, zmq
cells = zmq.Context().socket(zmq.SUB)
cells.subscribe(b"")
for port in sys.argv[1:]:
    cells.connect(f"tcp://127.0.0.1:{port}")
print("ready", flush=True)
while cells.poll(5000):
    print(cells.recv_multipart(), flush=True)
"""


def test_other_containers_in_the_network_cannot_read_cells(
    server: Server, shell: Callable[..., Any], until: Callable[..., None]
) -> None:
    """Another user in another container, with `--network container:C` or in the same pod."""
    neighbour = shell(user="4242:4242", network_mode=f"container:{server.container.id}")
    with new_kernel(server) as kernel:
        execute_in(server, kernel, "import time")
        open_ports = ports(neighbour.run(LISTENING))
        others = [str(port) for port in open_ports if port != 8888]
        subscribe = ["sh", "-c", 'python -c "$0" "$@" >/tmp/seen', SUBSCRIBE, *others]
        neighbour.container.exec_run(subscribe, detach=True)
        until(lambda: "ready" in neighbour.run("cat /tmp/seen || true"), seconds=30, what="the subscriber")
        for _ in range(5):
            execute_in(server, kernel, "password = 'hunter2'; time.sleep(0.2)")
        assert "hunter2" not in neighbour.run("cat /tmp/seen")
    assert open_ports == {8888}
    # Sockets without a file have no permissions, and belong to the network.
    assert " @" not in neighbour.run("cat /proc/net/unix")


FORK = """
import multiprocessing, time
child = multiprocessing.get_context("fork").Process(target=print, args=["from the child"])
child.start()
child.join()
time.sleep(1)  # the output arrives in another thread
"""


def test_a_notebook_shows_what_forked_processes_print(server: Server) -> None:
    """As workers of a DataLoader; a Unix socket replaces ipykernel's port for it."""
    with new_kernel(server) as kernel:
        assert execute_in(server, kernel, FORK) == ("from the child\n", "")


def test_kernels_log_no_warnings(server: Server) -> None:
    assert execute(server, "print(6 * 7)") == ("42\n", "")
    log = server.container.logs().decode()
    assert not re.search("without encryption|not using encryption|websocket_ping_timeout", log), log


@contextlib.contextmanager
def new_kernel(server: Server) -> Iterator[str]:
    kernel = str(server.request("POST", "/api/kernels").json()["id"])
    try:
        yield kernel
    finally:
        server.request("DELETE", f"/api/kernels/{kernel}")


def execute(server: Server, code: str) -> tuple[str, str]:
    """Runs code in a new kernel; returns its output and its error."""
    with new_kernel(server) as kernel:
        return execute_in(server, kernel, code)


def execute_in(server: Server, kernel: str, code: str) -> tuple[str, str]:
    """Runs code in a kernel; returns its output and its error."""
    address = f"ws://127.0.0.1:{server.port}/api/kernels/{kernel}/channels?token={server.token}"
    return run_code(websocket.create_connection(address, timeout=60), code)


def test_a_kernel_runs_code_over_the_api(server: Server, subject: Any) -> None:
    printed, failure = execute(server, "import sys; print(sys.prefix, sum(range(101)))")
    assert (printed, failure) == ("/opt/venv 5050\n", "")
    assert execute(server, "1 / 0")[1] == "ZeroDivisionError"


def test_a_notebook_trains_and_logs_to_tensorboard(server: Server) -> None:
    cells = [
        "from tensorboard.compat.proto.summary_pb2 import Summary\n"
        "from tensorboard.compat.proto.event_pb2 import Event\n"
        "from tensorboard.summary.writer.event_file_writer import EventFileWriter",
        "w, writer = 0.0, EventFileWriter('/workspace/runs')\n"
        "for step in range(20):\n    loss, w = (w - 3) ** 2, w - 0.1 * 2 * (w - 3)\n"
        "    value = Summary.Value(tag='loss', simple_value=loss)\n"
        "    writer.add_event(Event(step=step, summary=Summary(value=[value])))\n"
        "writer.close()",
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "events = EventAccumulator('/workspace/runs')\nevents.Reload()\n"
        "losses = [e.value for e in events.Scalars('loss')]\n"
        "assert len(losses) == 20 and losses[-1] < losses[0] / 100, losses\nprint('learned')",
    ]
    outputs = run_notebook(server, "train", *cells)
    assert [output.get("text") for output in outputs] == ["learned\n"]


INVALID: list[tuple[dict[str, str], str]] = [
    ({"JUPYTER_TOKEN": ""}, "JUPYTER_TOKEN is empty"),
    ({"JUPYTER_TOKEN": " \n"}, "JUPYTER_TOKEN is empty"),
    ({"JUPYTER_TOKEN": "x", "JUPYTER_TOKEN_FILE": "/etc/hostname"}, "are both set"),
    ({"JUPYTER_TOKEN_FILE": "/etc/shadow"}, "user 1000 cannot read JUPYTER_TOKEN_FILE=/etc/shadow"),
    ({"JUPYTER_PORT": "0"}, "expected a port"),
    ({"JUPYTER_BASE_URL": "//x/"}, "expected a path"),
    ({"NB_PREFIX": "notebook"}, "expected a path"),
    ({"JUPYTER_BASE_URL": "/x/../"}, "expected a path"),
    ({"JUPYTER_CERT": "/nowhere.pem", "JUPYTER_KEY": "/nowhere.pem"}, "no such file"),
    ({"JUPYTER_CERT": "/etc/passwd"}, "set both for https, or neither"),
]


@pytest.mark.thorough
def test_invalid_settings_are_refused(once: Callable[..., Any], shell: Callable[..., Any]) -> None:
    """By the launcher as process 1, and in a container that runs: that takes a quarter of the time of a start."""
    assert once(None, environment={"JUPYTER_TOKEN": ""})[0] == 78
    container = shell()
    for environment, message in INVALID:
        variables = [f"{name}={value}" for name, value in environment.items()]
        status, output = container.result(["env", *variables, "start", "services"])
        assert (status, message in output) == (78, True), output
        assert "Traceback" not in output


def published(container: Container) -> int:
    container.reload()
    return int(container.attrs["NetworkSettings"]["Ports"]["8888/tcp"][0]["HostPort"])


def answers(address: str, status: int, **options: Any) -> bool:
    try:
        return requests.get(address, timeout=5, **options).status_code == status
    except requests.RequestException:
        return False


def health(container: Container) -> str:
    container.reload()
    return str(container.attrs["State"]["Health"]["Status"])


def test_is_healthy_in_every_mode(
    start: Callable[..., Container], until: Callable[..., None], mode: dict[str, Any]
) -> None:
    container = start(**mode)
    until(lambda: ready(container), seconds=START_S, what="the server")
    assert run_in(container, ["check-services"]).status == 0
    container.stop(timeout=10)
    assert container.wait()["StatusCode"] == 143


@pytest.mark.thorough
def test_https_with_a_certificate(start: Callable[..., Container], until: Callable[..., None]) -> None:
    make = (
        "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=gpu.example.org -keyout /workspace/k -out /workspace/c "
        "-days 2 2>/dev/null && exec start services"
    )
    environment = {"JUPYTER_TOKEN": "chosen-by-me"}
    container = start(
        ["sh", "-c", f"{make.replace('exec start', 'JUPYTER_CERT=/workspace/c JUPYTER_KEY=/workspace/k exec start')}"],
        ports=[8888],
        environment=environment,
    )
    address = f"https://127.0.0.1:{published(container)}/api/contents"
    headers = {"Authorization": "token chosen-by-me"}
    warnings.simplefilter("ignore", InsecureRequestWarning)
    until(lambda: answers(address, 200, headers=headers, verify=False), seconds=START_S, what="https")
    until(lambda: answers(address, 403, verify=False), seconds=START_S, what="a refusal without the token")
    line = "https://127.0.0.1:8888/lab   (log in with JUPYTER_TOKEN)"
    until(lambda: line in container.logs().decode(), seconds=START_S, what="the address in the log")
    assert "chosen-by-me" not in container.logs().decode()


@pytest.mark.thorough
def test_a_restart_keeps_the_token_and_an_image_of_the_container_has_none(
    start: Callable[..., Container], until: Callable[..., None]
) -> None:
    container = start(hostname="gpu1")
    pattern = r"token=([0-9a-f]{48})"
    until(lambda: len(re.findall(pattern, container.logs().decode())) == 1, seconds=START_S, what="the first start")
    container.restart(timeout=10)
    until(lambda: len(re.findall(pattern, container.logs().decode())) == 2, seconds=START_S, what="the second start")
    [token] = set(re.findall(pattern, container.logs().decode()))
    # A health check that begins during the pause never ends, and then neither does the commit.
    image = container.commit(pause=False)
    other = start(image=image.id, hostname="gpu1")
    until(lambda: re.search(pattern, other.logs().decode()), seconds=START_S, what="the start of the image")
    assert token not in other.logs().decode()
    assert other.exec_run(["grep", "-r", token, "/run/workstation/of-1000"]).exit_code == 1
    other.remove(force=True)
    image.remove()


def test_a_server_that_dies_is_restarted(start: Callable[..., Container], until: Callable[..., None]) -> None:
    container = start(ports=[8888], environment={"JUPYTER_TOKEN": "chosen-by-me"})
    port = published(container)
    address = f"http://127.0.0.1:{port}/api/contents"
    until(lambda: "ready after" in container.logs().decode(), seconds=START_S, what="the server")
    kill = "kill -KILL $(cat /proc/[0-9]*/stat 2>/dev/null | awk '$2 == \"(jupyter-lab)\" {print $1}')"
    assert container.exec_run(["sh", "-c", kill]).exit_code == 0
    until(
        lambda: "jupyter was killed by signal 9: restart in" in container.logs().decode(),
        seconds=START_S,
        what="a line",
    )
    assert container.exec_run(["check-services"]).exit_code == 1
    until(lambda: answers(address, 403), seconds=START_S, what="the server again")
    until(lambda: "jupyter answers again" in container.logs().decode(), seconds=START_S, what="a line")


def test_tensorboard_is_behind_the_login(server: Server, until: Callable[..., None]) -> None:
    assert requests.get(f"{server.url}/tensorboard/", timeout=30, allow_redirects=False).status_code == 302
    until(
        lambda: server.request("GET", "/tensorboard/data/environment").status_code == 200,
        seconds=START_S,
        what="TensorBoard through Jupyter",
    )
    assert "<title>TensorBoard</title>" in server.request("GET", "/tensorboard/").text
    fonts = set(re.findall(r"url\((\S*\.woff2)\)", server.request("GET", "/tensorboard/").text))
    assert fonts
    assert all(font.startswith("font-roboto/") for font in fonts), "outside of its path"
    assert server.request("GET", f"/tensorboard/{min(fonts)}").status_code == 200
    shown = server.request("GET", "/server-proxy/servers-info").json()["server_processes"]
    assert [(process["name"], process["launcher_entry"]["title"]) for process in shown] == [
        ("tensorboard", "TensorBoard")
    ]


def test_shows_gpus_and_widgets(server: Server) -> None:
    extensions = server.request("GET", "/lab/api/extensions").json()
    enabled = {extension["name"] for extension in extensions if extension["enabled"]}
    assert {
        "jupyterlab-nvdashboard",
        "jupyter-widgets-jupyterlab-manager",
        "jupyterhub-jupyter-server-proxy",
    } <= enabled


def test_the_page_asks_for_no_build_which_needs_node(server: Server) -> None:
    """The server logged: Could not determine jupyterlab build status without nodejs."""
    page = server.request("GET", "/lab").text
    assert '"buildCheck": false' in page
    assert '"buildAvailable": false' in page


def test_gpu_figures_are_behind_the_login(server: Server) -> None:
    address = f"ws://127.0.0.1:{server.port}/nvdashboard/cpu_resource"
    with pytest.raises(websocket.WebSocketException, match="/login"):
        websocket.create_connection(address, timeout=30)
    websocket.create_connection(f"{address}?token={server.token}", timeout=30).close()


@pytest.mark.thorough
@pytest.mark.parametrize("command", [None, ["jupyter", "lab"]])
@pytest.mark.parametrize(
    "environment",
    [{"JUPYTER_TOKEN": "chosen-by-me\n"}, {"JUPYTER_TOKEN_FILE": "/etc/hostname", "JUPYTER_TOKEN": ""}],
    ids=["variable", "file"],
)
def test_the_token_of_a_variable_is_used(
    start: Callable[..., Container],
    until: Callable[..., None],
    environment: dict[str, str],
    command: list[str] | None,
) -> None:
    """With the newline that `echo` adds, which locked everyone out; with an empty one, as Compose's `${X:-}` gives."""
    container = start(command, ports=[8888], environment=environment, hostname="chosen-by-me")
    address = f"http://127.0.0.1:{published(container)}/api/contents"
    until(lambda: answers(address, 403), seconds=START_S, what="the server")
    assert requests.get(address, headers={"Authorization": "token chosen-by-me"}, timeout=30).status_code == 200
    if not command:
        until(
            lambda: f"(log in with {next(iter(environment))})" in container.logs().decode(),
            seconds=START_S,
            what="how to log in",
        )
    assert "chosen-by-me" not in container.logs().decode().replace("http://chosen-by-me:", "")


def test_a_command_is_healthy_without_services(container: Container, until: Callable[..., None]) -> None:
    until(lambda: container.exec_run(["check-services"]).exit_code == 0, seconds=START_S, what="the launcher")


def test_the_health_check_of_root_runs_nothing_of_the_user_as_root(
    start: Callable[..., Container], until: Callable[..., None]
) -> None:
    """The engine runs it as root if the container was started as root; it reads files that the user can write."""
    container = start(user="root", environment={"NB_UID": "4242"})
    until(lambda: ready(container), seconds=START_S, what="the server")
    plant = (
        "mkdir -p /tmp/x /opt/venv/bin; echo /tmp/x >>/run/workstation/of-4242/services; "
        "for name in /tmp/x/check /opt/venv/bin/check-services /opt/venv/bin/start; do "
        "printf '#!/bin/sh\\nid -u >>/tmp/ran\\n' >$name; chmod 755 $name; done"
    )
    assert container.exec_run(["sh", "-c", plant], user="4242:0").exit_code == 0
    assert container.exec_run(["check-services"], user="root").exit_code == 0
    container.restart(timeout=10)
    until(lambda: container.logs().count(b"ready after") == 2, seconds=START_S, what="the server again")
    assert container.exec_run(["check-services"]).exit_code == 0
    assert container.exec_run(["cat", "/tmp/ran"]).exit_code == 1


# ---- addresses, hosts and the log


def ready(container: Container) -> bool:
    container.reload()
    assert container.status == "running", container.logs().decode()
    return b"ready after" in container.logs()


CONFIGURED = "mkdir -p ~/.jupyter && echo 'c.ServerApp.base_url = \"/team/gpu\"' >~/.jupyter/jupyter_server_config.py"


def check_path(container: Container, path: str) -> None:
    """A server below this path is healthy, and has a page at the address in its log."""
    assert container.exec_run(["check-services"]).exit_code == 0
    log = container.logs().decode()
    address = re.search(rf"http://127\.0\.0\.1:8888({path}/lab\?token=[0-9a-f]{{48}})", log)
    assert address, log
    assert requests.get(f"http://127.0.0.1:{published(container)}{address[1]}", timeout=60).status_code == 200


@pytest.mark.thorough
@pytest.mark.parametrize(
    "command",
    [
        ["sh", "-c", f"{CONFIGURED} && exec start services"],
        ["start-notebook.py", "--ServerApp.base_url=/team/gpu"],
    ],
    ids=["configuration", "argument"],
)
def test_a_server_below_a_path_is_healthy(
    start: Callable[..., Container], until: Callable[..., None], command: list[str]
) -> None:
    container = start(command, ports=[8888])
    until(lambda: ready(container), seconds=START_S, what="the server")
    check_path(container, "/team/gpu")


def test_a_stopped_server_is_unhealthy(start: Callable[..., Container], until: Callable[..., None]) -> None:
    """It still listens, but the check fails, within the engine's time limit.

    Before, `docker exec CONTAINER start COMMAND` emptied the list of services, and the check passed.
    """
    container = start()
    until(lambda: ready(container), seconds=START_S, what="the server")
    assert container.exec_run(["start", "true"]).exit_code == 0
    signal = "kill -{} $(cat /proc/[0-9]*/stat 2>/dev/null | awk '$2 == \"(jupyter-lab)\" {{print $1}}')"
    assert container.exec_run(["sh", "-c", signal.format("STOP")]).exit_code == 0
    assert container.exec_run(["timeout", "9", "check-services"]).exit_code == 1
    assert container.exec_run(["sh", "-c", signal.format("CONT")]).exit_code == 0
    until(lambda: container.exec_run(["check-services"]).exit_code == 0, seconds=START_S, what="the server again")


@pytest.mark.thorough
def test_without_a_login_other_hosts_are_refused(start: Callable[..., Container], until: Callable[..., None]) -> None:
    """With both variables there is no login, which the log says.

    DNS rebinding: the name of evil.example points at this server, so a page of it has the origin of the server.
    """
    open_to_all = {"JUPYTER_TOKEN": "", "JUPYTER_ALLOW_NO_LOGIN": "1", "JUPYTER_ALLOWED_HOSTS": "GPU1,gpu1.example.org"}
    arguments = ["--ServerApp.allow_remote_access=True", "--ServerApp.allow_origin=*"]  # change nothing
    container = start(["start-notebook.py", *arguments], ports=[8888], environment=open_to_all)
    until(lambda: ready(container), seconds=START_S, what="the server")
    assert "http://127.0.0.1:8888/lab   (no login)\n" in container.logs().decode()
    address = f"http://127.0.0.1:{published(container)}/api/kernels"

    def status(host: str) -> int:
        headers = {"Host": host, "Origin": f"http://{host}"}
        return requests.get(address, headers=headers, timeout=30).status_code

    assert {host: status(host) for host in ("evil.example", "evil.example:8888", "10.0.0.7")} == {
        "evil.example": 403,
        "evil.example:8888": 403,
        "10.0.0.7": 403,
    }
    assert {status(host) for host in ("localhost", "127.0.0.1:8888", "gpu1:8888", "gpu1.example.org")} == {200}
    answer = requests.get(address, headers={"Host": "localhost", "Origin": "http://evil.example"}, timeout=30)
    assert "Access-Control-Allow-Origin" not in answer.headers


@pytest.mark.thorough
def test_kubeflow_gets_in_without_a_login_only_if_asked_for(
    start: Callable[..., Container], until: Callable[..., None]
) -> None:
    """The path comes from its controller; its gateway passes the Host header on, and its culler uses the Service."""
    environment = {"NB_PREFIX": "/notebook/team/ada"}
    path = "/notebook/team/ada/api/kernels"
    closed = start(ports=[8888], environment=environment)
    until(lambda: ready(closed), seconds=START_S, what="the server")
    assert "warning: NB_PREFIX is of Kubeflow" in closed.logs().decode()
    check_path(closed, "/notebook/team/ada")
    assert requests.get(f"http://127.0.0.1:{published(closed)}{path}", timeout=30).status_code == 403

    asked = {"JUPYTER_TOKEN": "", "JUPYTER_ALLOW_NO_LOGIN": "1", "JUPYTER_ALLOWED_HOSTS": "kubeflow.example.org"}
    opened = start(ports=[8888], environment=environment | asked)
    until(lambda: ready(opened), seconds=START_S, what="the server")
    assert "warning: NB_PREFIX" not in opened.logs().decode()
    url = f"http://127.0.0.1:{published(opened)}{path}"
    statuses = {
        host: requests.get(url, headers={"Host": host}, timeout=30).status_code
        for host in ("kubeflow.example.org", "ada.team.svc.cluster.local", "evil.example")
    }
    assert statuses == {"kubeflow.example.org": 200, "ada.team.svc.cluster.local": 200, "evil.example": 403}


@pytest.mark.thorough
@pytest.mark.parametrize(("port", "command"), [(8888, None), (9000, ["start-notebook.py", "--ServerApp.port=9000"])])
def test_a_port_that_is_in_use_is_named_once(
    start: Callable[..., Container],
    once: Callable[..., Any],
    until: Callable[..., None],
    port: int,
    command: list[str] | None,
) -> None:
    """It was an error of the service's preparation, which knew no arguments: with one, Jupyter started five times."""
    listen = (
        f"import socket, time; s = socket.create_server(('', {port})); print('listens', flush=True); time.sleep(300)"
    )
    other = start(["python", "-c", listen])
    until(lambda: b"listens" in other.logs(), seconds=START_S, what="the other program")
    status, _, err = once(command, network_mode=f"container:{other.id}")
    assert status == 78
    message = f"error: cannot listen on port {port} of all addresses: Address already in use: set JUPYTER_PORT"
    assert err.count(message) == 1, err
    assert "restart" not in err


def test_a_volume_at_the_home_of_other_images_is_reported(once: Callable[..., Any]) -> None:
    _, _, err = once(["true"], tmpfs={"/home/jovyan": ""})
    assert "warning: /home/jovyan is not in the home here: mount it at /home/user or /workspace" in err


@pytest.mark.thorough
def test_a_token_is_in_no_log(start: Callable[..., Container], until: Callable[..., None]) -> None:
    """Nor in the traceback of a proxied port that is closed."""
    container = start(ports=[8888], environment={"JUPYTER_TOKEN": "chosen-by-me"})
    until(lambda: ready(container), seconds=START_S, what="the server")
    address = f"http://127.0.0.1:{published(container)}"
    assert requests.get(f"{address}/proxy/9999/?token=chosen-by-me", timeout=30).status_code == 500
    until(lambda: b"token=[secret]" in container.logs(), seconds=START_S, what="the failed request in the log")
    assert "chosen-by-me" not in container.logs().decode()


# ---- the login, which only JUPYTER_ALLOW_NO_LOGIN=1 with an empty JUPYTER_TOKEN turns off

OPENED = "c.IdentityProvider.token = ''"
PROVIDER = """
from jupyter_server.auth import Authorizer
from jupyter_server.auth.identity import IdentityProvider, User
class Open(IdentityProvider):
    def get_user(self, handler):
        return User("anyone")
class Closed(IdentityProvider):
    def get_user(self, handler):
        return None
class Broken(IdentityProvider):
    def get_user(self, handler):
        raise RuntimeError
class Nothing(Authorizer):
    def is_authorized(self, handler, user, action, resource):
        return False
"""
LAB = "/usr/local/lib/jupyter-lab"


@pytest.fixture(scope="module")
def with_settings(keep: Callable[..., Container]) -> Container:
    """A container that sleeps, with a configuration and a provider that turn off the login, which nothing reads yet."""
    container = keep(["sleep", "3600"])
    files = f'mkdir -p /tmp/login; echo "{OPENED}" | tee /tmp/login/mine.py >/tmp/login/jupyter_server_config.py; '
    assert run_in(container, ["bash", "-ec", f"{files} echo '{PROVIDER}' >/tmp/login/provider.py"]).status == 0
    return container


# Tests of a class may run in another process than those of the module, whose containers they do not use: together, they
# took longer than all others of an image.
class TestLogin:
    @pytest.mark.thorough
    @pytest.mark.parametrize(
        "command",
        [
            ["start-notebook.py", "--ServerApp.token="],
            ["sh", "-c", f'echo "{OPENED}" >/tmp/mine.py && exec start start-notebook.py --config=/tmp/mine.py'],
            ["jupyter", "server", "--IdentityProvider.token="],
            ["sh", "-c", "jupyter lab --ServerApp.token=''"],
            # As the command of a container, the image's own program checks, even without the extension.
            ["jupyter", "lab", "--ServerApp.jpserver_extensions={'workstation_jupyter': False}", "--ServerApp.token="],
            ["python", "-m", "jupyterlab", "--IdentityProvider.token="],
        ],
    )
    def test_a_server_without_a_login_does_not_start(self, once: Callable[..., Any], command: list[str]) -> None:
        status, _, err = once(command)
        assert status == 78
        assert err.count("the server answers without a login") == 1, err

    @pytest.mark.thorough
    @pytest.mark.parametrize(
        "command",
        [
            "{lab} --PasswordIdentityProvider.token=",
            "{lab} --ServerApp.token= --ServerApp.password=",
            "{lab} --config /tmp/login/mine.py",
            "{lab} --ServerApp.config_file=/tmp/login/mine.py",
            "{lab} --ServerApp.jpserver_extensions='{{}}' --IdentityProvider.token=",
            "PYTHONPATH=/tmp/login {lab} --ServerApp.identity_provider_class=provider.Open",
            "PYTHONPATH=/tmp/login {lab} --ServerApp.authorizer_class=provider.Nothing --IdentityProvider.token=",
            "JUPYTER_CONFIG_DIR=/tmp/login {lab}",
            "JUPYTER_CONFIG_PATH=/tmp/login {lab}",
            "JUPYTER_NO_CONFIG=1 {lab} --IdentityProvider.token=",
            "JUPYTER_TOKEN= JUPYTER_TOKEN_FILE=/dev/null {lab}",
            "JUPYTER_TOKEN=x JUPYTER_ALLOW_NO_LOGIN=1 {lab} --IdentityProvider.token=",
        ],
    )
    def test_no_setting_turns_off_the_login(self, with_settings: Container, command: str) -> None:
        ended = run_in(with_settings, ["bash", "-ec", command.format(lab=f"timeout 60 {LAB}")])
        text = ended.out + ended.err
        assert ended.status == 78, text
        assert "the server answers without a login" in text

    @pytest.mark.thorough
    def test_an_unexpected_answer_is_no_login(self, with_settings: Container) -> None:
        command = f"PYTHONPATH=/tmp/login timeout 60 {LAB} --ServerApp.identity_provider_class=provider.Broken"
        ended = run_in(with_settings, ["bash", "-ec", command])
        text = ended.out + ended.err
        assert ended.status == 78, text
        assert "cannot check the login: the server answers 500 to GET /api/me" in text

    @pytest.mark.thorough
    def test_other_servers_need_a_login_without_the_proxy(self, shell: Callable[..., Any]) -> None:
        """As in an environment of the user's own, with another Jupyter."""
        files = "mkdir -p /tmp/own; echo 'raise ImportError' >/tmp/own/jupyter_server_proxy.py; "
        command = "PYTHONPATH=/tmp/own timeout 60 jupyter server --IdentityProvider.token="
        status, text = shell().result(files + command)
        assert status == 78, text
        assert "the server answers without a login" in text

    @pytest.mark.thorough
    def test_other_servers_without_a_login_need_both_variables(
        self, start: Callable[..., Container], until: Callable[..., None]
    ) -> None:
        environment = {"JUPYTER_TOKEN": "", "JUPYTER_ALLOW_NO_LOGIN": "1"}
        command = ["jupyter", "server", "--IdentityProvider.token="]  # Jupyter itself ignores an empty JUPYTER_TOKEN
        container = start(command, ports=[8888], environment=environment)
        address = f"http://127.0.0.1:{published(container)}/api/contents"
        until(lambda: answers(address, 200), seconds=START_S, what="the server")
        assert requests.get(address, headers={"Host": "evil.example"}, timeout=30).status_code == 403

    @pytest.mark.thorough
    def test_settings_of_extensions_need_a_login(
        self, start: Callable[..., Container], until: Callable[..., None]
    ) -> None:
        container = start(["start-notebook.py", "--ServerApp.allow_unauthenticated_access=True"], ports=[8888])
        until(lambda: ready(container), seconds=START_S, what="the server")
        address = f"ws://127.0.0.1:{published(container)}/nvdashboard/cpu_resource"
        with pytest.raises(websocket.WebSocketException, match="/login"):
            websocket.create_connection(address, timeout=30)

    @pytest.mark.thorough
    @pytest.mark.parametrize(
        ("file", "text"),
        [
            ("~/my.conf.py", "c.ServerApp.quit_button = False"),
            ("/tmp/my.conf.json", '{"ServerApp": {"quit_button": false}}'),
        ],
    )
    def test_a_configuration_file_adds_to_the_settings_of_the_image(
        self, start: Callable[..., Container], until: Callable[..., None], file: str, text: str
    ) -> None:
        """Jupyter itself then reads no other file: the server had another address and token than the log said.

        traitlets removes a suffix itself: `my.conf.py` was ignored.
        """
        command = f"echo '{text}' >{file} && exec start start-notebook.py --config={file}"
        environment = {"JUPYTER_BASE_URL": "/team/gpu", "JUPYTER_TOKEN": "chosen-by-me"}
        container = start(["sh", "-c", command], ports=[8888], environment=environment)
        until(lambda: ready(container), seconds=START_S, what="the server")
        assert container.exec_run(["check-services"]).exit_code == 0
        assert "http://127.0.0.1:8888/team/gpu/lab   (log in with JUPYTER_TOKEN)" in container.logs().decode()
        address = f"http://127.0.0.1:{published(container)}/team/gpu"
        assert requests.get(f"{address}/api/contents", timeout=30).status_code == 403
        page = requests.get(f"{address}/lab?token=chosen-by-me", timeout=30).text
        assert '"quitButton": false' in page

    @pytest.mark.thorough
    def test_a_configuration_file_that_does_not_exist_is_an_error(self, once: Callable[..., Any]) -> None:
        status, _, err = once(["start-notebook.py", "--config=/nowhere.py"])
        assert status == 78
        assert "error: --config=/nowhere.py: no such file" in err

    @pytest.mark.thorough
    @pytest.mark.parametrize(
        "setting",
        ["c.IdentityProvider.token = 'of-mine'", f"{PROVIDER}\nc.ServerApp.identity_provider_class = Closed"],
        ids=["another token", "another provider"],
    )
    def test_the_log_says_how_to_log_in(
        self, start: Callable[..., Container], until: Callable[..., None], setting: str
    ) -> None:
        command = 'echo "$0" >/tmp/x.py && exec start start-notebook.py --config=/tmp/x.py'
        container = start(["sh", "-c", command, setting])
        until(lambda: ready(container), seconds=START_S, what="the server")
        log = container.logs().decode()
        assert "http://127.0.0.1:8888/lab   (log in as your configuration sets)\n" in log
        assert "of-mine" not in log

    @pytest.mark.thorough
    @pytest.mark.parametrize(
        "command",
        [
            ["jupyter", "lab"],
            ["start.sh", "jupyter-lab"],
            ["sh", "-c", "jupyter server"],
            ["python", "-m", "jupyterlab"],
        ],
    )
    def test_other_servers_start_with_a_login_and_refuse_proxies_to_themselves(
        self, start: Callable[..., Container], until: Callable[..., None], command: list[str]
    ) -> None:
        container = start(command, ports=[8888])
        pattern = rb"http://127\.0\.0\.1:8888/\w*\?token=([0-9a-f]{48})"
        until(lambda: re.search(pattern, container.logs()), seconds=START_S, what="the address in Jupyter's log")
        [token] = re.findall(pattern, container.logs())
        address, query = f"http://127.0.0.1:{published(container)}", f"?token={token.decode()}"
        until(lambda: answers(f"{address}/api/contents{query}", 200), seconds=START_S, what="an answer with the token")
        assert requests.get(f"{address}/api/contents", timeout=30).status_code == 403
        assert "leads back to this server" in requests.get(f"{address}/proxy/absolute/8888/{query}", timeout=30).text
        before = container.logs().count(token)
        assert requests.get(f"{address}/proxy/9999/{query}", timeout=30).status_code == 500
        until(
            lambda: b"/proxy/9999/?token=[secret]" in container.logs(), seconds=30, what="the failed request in the log"
        )
        assert container.logs().count(token) == before


def test_tensorboard_listens_on_no_port(server: Server, until: Callable[..., None]) -> None:
    """Everyone in the network could reach a port without the login."""
    address = "/tensorboard/data/environment"
    until(lambda: server.request("GET", address).status_code == 200, seconds=START_S, what="TensorBoard")
    assert inside(server).run("pgrep -f start-tensorboard").rc == 0
    assert ports(inside(server).check_output(LISTENING)) == {8888}


def test_tensorboard_in_a_notebook_uses_the_proxy_of_the_server(server: Server, until: Callable[..., None]) -> None:
    code = "%load_ext tensorboard\n%tensorboard --logdir /workspace/runs --port 6123"
    kernel_env = "import os; print(os.environ['TENSORBOARD_PROXY_URL'])"
    assert execute(server, kernel_env) == ("/proxy/%PORT%/\n", "")
    with new_kernel(server) as kernel:
        assert execute_in(server, kernel, code)[1] == ""
        page = "<title>TensorBoard</title>"
        until(lambda: page in server.request("GET", "/proxy/6123/").text, seconds=START_S, what="TensorBoard")


def test_runs_as_root_with_nb_uid_0(start: Callable[..., Container], until: Callable[..., None]) -> None:
    """Rootless Docker: root in the container is the user of the host."""
    container = start(user="root", environment={"NB_UID": "0"})
    until(lambda: ready(container), seconds=START_S, what="the server")
    assert container.exec_run(["check-services"]).exit_code == 0


def test_is_healthy_soon_after_it_answers(
    start: Callable[..., Container], until: Callable[..., None], docker_client: docker.DockerClient
) -> None:
    """The first check was ten seconds after the start; with the start interval, checks are a second apart."""
    api = docker_client.version()["ApiVersion"]
    has_start_interval = tuple(map(int, api.split("."))) >= (1, 44)  # Docker Engine 25
    container = start(healthcheck=None)
    until(lambda: ready(container), seconds=START_S, what="the server")
    limit = 9 if has_start_interval else START_S
    until(lambda: health(container) == "healthy", seconds=limit, what="the health check")


@pytest.mark.thorough
def test_the_single_user_server_of_a_hub_is_the_one_that_enforces_a_login(host: Host) -> None:
    """tests/browser/test_jupyterhub.py starts it from a JupyterHub."""
    assert host.check_output("command -v jupyterhub-singleuser") == "/usr/local/bin/jupyterhub-singleuser"
    assert host.check_output("jupyterhub-singleuser --version") == host.check_output(
        "python -c 'import jupyterhub; print(jupyterhub.__version__)'"
    )


@pytest.mark.thorough
def test_the_servers_start_with_a_safe_path(host: Host) -> None:
    """Python then does not look beside a program for its modules."""
    for program in (LAB, "jupyterhub-singleuser"):
        assert re.fullmatch(r"[0-9.]+", host.check_output(f"PYTHONSAFEPATH=1 {program} --version"))


HUB = {
    "JUPYTERHUB_API_TOKEN": "x", "JUPYTERHUB_SERVICE_URL": "http://0.0.0.0:8888/user/ada/",
    # Nothing answers there. The server asks for minutes.
    "JUPYTERHUB_API_URL": "http://127.0.0.1:9/hub/api",
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("command", [None, ["start-singleuser.py"], ["/opt/venv/bin/jupyter", "lab"]])
def test_the_server_of_a_hub_does_not_run_as_root(start: Callable[..., Container], command: list[str] | None) -> None:
    container = start(command, user="root", environment=HUB)
    wait_for_program(container, "jupyterhub-sing")  # a name has 15 characters
    host = testinfra.get_host(f"docker://{container.id}")
    assert host.check_output("ps -o user= -C jupyterhub-sing").split() == ["user"]


@pytest.mark.thorough
def test_jupyter_lab_as_command_does_not_run_as_root(start: Callable[..., Container]) -> None:
    container = start(["jupyter", "lab"], user="root")
    wait_for_program(container, "jupyter-lab")
    host = testinfra.get_host(f"docker://{container.id}")
    assert host.check_output("ps -o user= -C jupyter-lab").split() == ["user"]


@pytest.mark.thorough
def test_what_only_prints_does_not_run_as_root(once: Callable[..., Any]) -> None:
    """The image allows root only for a server that runs as root."""
    status, out, err = once(["start-notebook.py", "--show-config"], user="root")
    assert status == 0, err
    assert ".allow_root = False" in out


@pytest.mark.thorough
def test_jupyter_notebook_names_jupyter_lab_until_it_is_installed(shell: Callable[..., Any]) -> None:
    session = shell()
    for command in ("jupyter notebook", "jupyter-notebook"):
        assert "use jupyter lab" in session.fails(command)
    session.run("ln -s /bin/true /opt/venv/bin/jupyter-notebook")
    for command in ("jupyter notebook", "jupyter-notebook"):
        session.run(command)


@pytest.mark.thorough
def test_the_help_is_printed_once(once: Callable[..., Any]) -> None:
    status, out, err = once(["start-notebook.py", "--help"])
    assert status == 0
    assert "--ServerApp" in out
    assert "restart" not in err


@pytest.mark.thorough
def test_the_server_does_not_compile_a_grammar(host: Host) -> None:
    """It took half of the time until Jupyter answered."""
    result = host.run("python -X importtime /usr/local/lib/jupyter-lab --version")
    assert result.rc == 0, result.stderr[-2000:]
    assert re.search(r"\| +jsonschema$", result.stderr, re.MULTILINE)
    assert "lark" not in result.stderr


# ---- notebooks


def cells_of(name: str) -> list[str]:
    """The cells of a file in notebooks/, which are separated by `# %%`."""
    return (Path(__file__).parent / f"notebooks/{name}.ipy").read_text(encoding="utf-8").split("# %%\n")


def run_notebook(server: Server, name: str, *cells: str) -> list[dict[str, Any]]:
    """Runs a notebook; returns the outputs of its last cell."""
    empty: dict[str, Any] = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    content = {
        "cells": [{**empty, "id": f"c{number}", "source": source} for number, source in enumerate(cells)],
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    name = f"{name}.ipynb"
    saved = server.request("PUT", f"/api/contents/{name}", json={"type": "notebook", "content": content})
    assert saved.status_code in (200, 201), saved.text
    result = inside(server).run("cd /workspace && jupyter execute --inplace %s", name)
    assert result.rc == 0, result.stderr[-2000:]
    outputs = server.request("GET", f"/api/contents/{name}").json()["content"]["cells"][-1]["outputs"]
    return [dict(output) for output in outputs]


def test_a_notebook_of_data_science(server: Server) -> None:
    outputs = run_notebook(server, "science", *cells_of("science"))
    pictures = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 1
    assert len(pictures[0]) > 2000


def test_a_notebook_of_the_framework(server: Server, subject: Any) -> None:
    """Trains a small network, as in a first tutorial of each framework."""
    outputs = run_notebook(server, "circle", *cells_of(subject.cell["framework"]))
    assert [output["text"] for output in outputs if output.get("name") == "stdout"] == ["learned\n"]


def test_sigterm_ends_the_service(server: Server) -> None:
    server.container.stop(timeout=20)
    assert server.container.wait()["StatusCode"] != 137
