"""A real JupyterHub with DockerSpawner: login, a cell of a notebook, TensorBoard, and the end of the server.

JupyterHub is installed from hub/requirements.txt, and its proxy from hub/package.json.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import docker
import pytest
import requests
import websocket
from docker.models.containers import Container

from tests.browser.conftest import START_S, newest_image, wait
from tests.integration.programs import install as install_program
from tests.kernel import run_code
from tests.paths import ROOT

FILES = ROOT / "tests/browser/hub"
USER = "ada"
# Of the container. Without a hub, the first two turn off the login.
VARIABLES = {"JUPYTER_ALLOW_NO_LOGIN": "1", "JUPYTER_TOKEN": "", "JUPYTER_PORT": "9999", "JUPYTER_BASE_URL": "/mine/"}
LIMIT_S = 60
SPAWN_S = 240  # on a busy machine


@dataclass
class Hub:
    """A running JupyterHub, and a browser's session with it."""

    url: str
    password: str
    prefix: str
    session: requests.Session = field(default_factory=requests.Session)

    def container(self) -> Container | None:
        found = docker.from_env().containers.list(all=True, filters={"name": f"^/{self.prefix}-{USER}"})
        return found[0] if found else None

    def get(self, path: str, **options: object) -> requests.Response:
        return self.session.get(self.url + path, timeout=LIMIT_S, **options)  # type: ignore[arg-type]

    def send(self, method: str, path: str) -> requests.Response:
        """A request of the page at the same path: the cookie with the longest path is its own."""
        cookies = [cookie for cookie in self.session.cookies if cookie.name == "_xsrf" and path.startswith(cookie.path)]
        token = max(cookies, key=lambda cookie: len(cookie.path)).value or ""
        headers = {"X-XSRFToken": token, "Referer": self.url + path}
        return self.session.request(method, self.url + path, headers=headers, timeout=LIMIT_S)

    def log_in(self) -> None:
        page = self.get("/hub/login")
        [token] = set(re.findall(r'name="_xsrf" value="([^"]+)"', page.text))
        form = {"username": USER, "password": self.password, "_xsrf": token}
        answer = self.session.post(f"{self.url}/hub/login?next=/hub/home", data=form, timeout=LIMIT_S)
        assert answer.url.endswith("/hub/home"), answer.text[:500]


def free_ports(count: int) -> list[str]:
    with ExitStack() as stack:
        ends = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
        for end in ends:
            end.bind(("127.0.0.1", 0))
        return [str(end.getsockname()[1]) for end in ends]


@pytest.fixture(scope="module")
def programs() -> Path:
    """The folder of an environment with JupyterHub, and beside it the proxy; made again if their locks change."""
    folder = ROOT / ".builder/test-cache/jupyterhub"
    locks = [FILES / "requirements.txt", FILES / "package.json"]
    wanted = "".join(path.read_text(encoding="utf-8") for path in locks)
    done = folder / "locks"
    if not done.exists() or done.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        install_program("npm")
        uv = str(Path(sys.executable).with_name("uv"))
        subprocess.run([uv, "venv", "-q", "--python", sys.executable, str(folder)], check=True)
        install = [uv, "pip", "install", "-q", "--python", str(folder), "--require-hashes", "--only-binary", ":all:"]
        subprocess.run([*install, "-r", str(locks[0])], check=True)
        shutil.copy2(locks[1], folder)
        subprocess.run(["npm", "install", "--silent", "--no-package-lock", "--ignore-scripts"], cwd=folder, check=True)
        done.write_text(wanted, encoding="utf-8")
    return folder


@pytest.fixture(params=["", "start-singleuser.py --debug"], ids=["command of the image", "command of the hub"])
def hub(request: pytest.FixtureRequest, programs: Path, tmp_path: Path) -> Iterator[Hub]:
    client = docker.from_env()
    [bridge] = client.networks.get("bridge").attrs["IPAM"]["Config"]
    port, hub_port, api_port = free_ports(3)
    it = Hub(f"http://127.0.0.1:{port}", secrets.token_hex(24), f"t{secrets.token_hex(4)}")
    environ = {
        **os.environ,
        "PATH": f"{programs}/bin:{programs}/node_modules/.bin:{os.environ['PATH']}",
        "TEST_API_PORT": api_port, "TEST_COMMAND": request.param,
        "TEST_EXAMPLE": str(ROOT / "examples/jupyterhub_config.py"), "TEST_HUB_IP": bridge["Gateway"],
        "TEST_HUB_PORT": hub_port, "TEST_IMAGE": newest_image(), "TEST_PASSWORD": it.password, "TEST_PORT": port,
        "TEST_PREFIX": it.prefix, "TEST_VARIABLES": json.dumps(VARIABLES),
    }  # fmt: skip
    log = tmp_path / "hub.log"
    with log.open("w") as output:
        command = ["jupyterhub", "--config", str(FILES / "jupyterhub_config.py")]
        process = subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=output, stderr=output)
    try:
        wait(lambda: "is now running at" in log.read_text() or process.poll() is not None, "JupyterHub")
        assert process.poll() is None, log.read_text()
        yield it
    finally:
        process.terminate()
        process.wait(30)
        if container := it.container():
            container.remove(force=True, v=True)
        for volume in client.volumes.list(filters={"name": it.prefix}):
            volume.remove()
        sys.stderr.write(log.read_text())  # pytest shows it if the test fails


def execute(hub: Hub, kernel: str, code: str) -> tuple[str, str]:
    """What code prints in a kernel, and its error, over the websocket of a browser."""
    cookies = "; ".join(f"{cookie.name}={cookie.value}" for cookie in hub.session.cookies if USER in cookie.path)
    address = f"{hub.url.replace('http', 'ws', 1)}/user/{USER}/api/kernels/{kernel}/channels"
    channel = websocket.create_connection(address, cookie=cookies, origin=hub.url, timeout=LIMIT_S)
    return run_code(channel, code)


def test_a_user_of_a_hub_works_in_the_image(hub: Hub) -> None:
    hub.log_in()
    assert hub.get("/hub/spawn").status_code == 200  # starts the server
    home = f"/user/{USER}"
    wait(lambda: hub.get(f"{home}/lab").url.startswith(f"{hub.url}{home}/lab"), "JupyterLab of the user", SPAWN_S)
    assert '"hubUser": "ada"' in hub.get(f"{home}/lab").text

    # Nobody else gets in, and the container's own variables do not open it.
    assert requests.get(f"{hub.url}{home}/api/contents", timeout=LIMIT_S).status_code == 403
    login = requests.get(f"{hub.url}{home}/tensorboard/", timeout=LIMIT_S, allow_redirects=False)
    assert (login.status_code, "/hub/api/oauth2/authorize" in login.headers["Location"]) == (302, True)

    kernel = hub.send("POST", f"{home}/api/kernels").json()["id"]
    assert execute(hub, kernel, "import os; print(6 * 7, os.getcwd())") == ("42 /workspace\n", "")
    seen, _ = execute(hub, kernel, f"import json; print(json.dumps([os.environ.get(name) for name in {[*VARIABLES]}]))")
    assert json.loads(seen) == [*VARIABLES.values()]
    page = f"{home}/tensorboard/"
    wait(lambda: "<title>TensorBoard</title>" in hub.get(page).text, "TensorBoard of the user", START_S)

    container = hub.container()
    assert container is not None
    # As without a hub: kernels and TensorBoard use Unix sockets.
    listening = "cat /proc/net/tcp /proc/net/tcp6 | awk '$4 == \"0A\" {print $2}'"
    output = container.exec_run(["sh", "-c", listening]).output
    assert isinstance(output, bytes)
    assert {address.rpartition(b":")[2] for address in output.split()} == {b"%04X" % 8888}
    assert container.exec_run(["check-services"]).exit_code == 0

    assert hub.get("/hub/home").status_code == 200
    assert hub.send("DELETE", f"/hub/api/users/{USER}/server").status_code in (202, 204)
    wait(lambda: hub.container() is None, "the end of the container")
