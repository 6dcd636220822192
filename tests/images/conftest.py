"""Fixtures of the image tests. `builder test` runs them; variables name the image under test and the report.

A test file is named after the component that it tests; an image runs the files of all its components.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest
import testinfra
from docker.errors import NotFound
from docker.models.containers import Container
from docker.models.volumes import Volume
from testinfra.host import Host

from tests.images.containers import run_in, wait_for_program, wait_until
from tests.images.packages import Session

# Modules with assertions that are not test files.
pytest.register_assert_rewrite("tests.images.dist_check", "tests.images.examples", "tests.images.framework_packages")

CALL_S = 120  # an answer of the engine
SECONDS: dict[str, float] = {}  # of each test, with its set-up


@dataclass(frozen=True)
class Subject:
    """The image under test, as `builder.build.pytest_run.describe` describes it."""

    data: dict[str, Any]

    @property
    def image_id(self) -> str:
        return str(self.data["image_id"])

    @property
    def cell(self) -> dict[str, str]:
        return dict(self.data["cell"])

    @property
    def wheels(self) -> dict[str, str]:
        """Locked distributions: name -> version."""
        return dict(self.data["wheels"])


def pytest_configure() -> None:
    """Ends this process with its parent, even if that is killed: otherwise it would start more containers."""
    pr_set_pdeathsig = 1  # linux/prctl.h
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the thorough tests that another image runs for this one."""
    if "IMAGE_TEST_SUBJECT" not in os.environ:  # pytest --collect-only
        return
    data = json.loads(Path(os.environ["IMAGE_TEST_SUBJECT"]).read_text(encoding="utf-8"))
    left_out = [
        item
        for item in items
        if item.get_closest_marker("thorough") and item.path.stem.removeprefix("test_") not in data["thorough"]
    ]
    for item in left_out:
        items.remove(item)
    config.hook.pytest_deselected(items=left_out)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not os.environ.get("PYTEST_XDIST_WORKER"):  # the main process gets the reports of its workers
        write_report(report, report.outcome)


def write_report(report: pytest.TestReport, outcome: str) -> None:
    """Writes a line for the call of each test, and for a set-up or tear-down that did not pass."""
    SECONDS[report.nodeid] = SECONDS.get(report.nodeid, 0.0) + report.duration
    if report.when == "call" or report.outcome != "passed":
        entry = {
            "test": report.nodeid,
            "outcome": outcome,
            "seconds": round(SECONDS[report.nodeid], 1),
            "reason": reason_of(report),
        }
        write_entry(entry)


def write_entry(entry: Mapping[str, object]) -> None:
    with Path(os.environ.get("IMAGE_TEST_REPORT", os.devnull)).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(entry) + "\n")


def reason_of(report: pytest.TestReport) -> str:
    """The first line of what failed, for the terminal; empty for a pass."""
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):  # of a skipped test: a path on this machine, a line, and the reason
        return report.longrepr[2][:300]
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(getattr(crash, "message", report.longrepr)).partition("\n")[0][:300]


@pytest.fixture(scope="session")
def subject() -> Subject:
    return Subject(json.loads(Path(os.environ["IMAGE_TEST_SUBJECT"]).read_text(encoding="utf-8")))


@pytest.fixture(scope="session")
def docker_client() -> docker.DockerClient:
    return docker.from_env(timeout=CALL_S, use_ssh_client=True)


Start = Callable[..., Container]


@contextlib.contextmanager
def starting(docker_client: docker.DockerClient, subject: Subject) -> Iterator[Start]:
    """A function that starts containers of the image, or of `image`; all are removed at the end.

    It takes the options of docker-py. `ports` is a list, each of them published on a free port of the loopback. The
    engine does not run the health check, which took a tenth of the processor time, unless `healthcheck` is None.
    """
    containers: list[Container] = []

    def run(
        command: list[str] | None = None, *, image: str = subject.image_id, ports: Sequence[int] = (), **options: Any
    ) -> Container:
        options.setdefault("healthcheck", {"test": ["NONE"]})
        published = {f"{port}/tcp": ("127.0.0.1", None) for port in ports}
        runs: Any = docker_client.containers
        containers.append(
            runs.run(image, command, detach=True, labels=subject.data["labels"], ports=published, **options)
        )
        return containers[-1]

    yield run
    for container in reversed(containers):  # the first may be the network of the others
        with contextlib.suppress(NotFound):
            container.remove(force=True, v=True)


@pytest.fixture(scope="session")
def keep(docker_client: docker.DockerClient, subject: Subject) -> Iterator[Start]:
    """A function that starts containers for several tests."""
    with starting(docker_client, subject) as run:
        yield run


@pytest.fixture
def start(docker_client: docker.DockerClient, subject: Subject) -> Iterator[Start]:
    """A function that starts containers for one test: their programs would slow down the next tests."""
    with starting(docker_client, subject) as run:
        yield run


@pytest.fixture(scope="session")
def new_volume(docker_client: docker.DockerClient, subject: Subject) -> Iterator[Callable[[], str]]:
    """A function that creates an empty volume of the engine and returns its name; all are removed at the end."""
    volumes: list[Volume] = []

    def create() -> str:
        name = f"image-test-{uuid.uuid4().hex}"
        volumes.append(docker_client.volumes.create(name=name, labels=subject.data["labels"]))
        return name

    yield create
    for volume in volumes:
        with contextlib.suppress(NotFound):
            volume.remove(force=True)


@pytest.fixture(scope="session")
def container(keep: Start) -> Container:
    """A container that only sleeps, for tests of the contents of the image."""
    return keep(["sleep", "3600"])


@pytest.fixture(scope="session")
def host(container: Container) -> Host:
    return testinfra.get_host(f"docker://{container.id}")


@pytest.fixture(scope="session")
def python(host: Host) -> Callable[[str], Any]:
    """A function that runs Python code in the image, as its user; returns the JSON in the last line of the output."""

    def run(code: str) -> Any:
        result = host.run("python -W ignore -c %s", code)
        assert result.rc == 0, result.stderr[-3000:]
        return json.loads(result.stdout.strip().splitlines()[-1])

    return run


TOGETHER = """
import json, traceback
results = dict()
for name, code in {questions!r}.items():
    names = dict()
    try:
        exec(code, names)
        results[name] = dict(answer=names["answer"])
    except Exception:
        results[name] = dict(error=traceback.format_exc())
print(json.dumps(results))
"""


@pytest.fixture(scope="session")
def ask(python: Callable[[str], Any]) -> Callable[[Mapping[str, str]], Callable[[str], Any]]:
    """A function that runs pieces of code, each of which sets `answer`, in one process of the image; returns a function
    for the answers. To import a framework takes seconds, so most tests of one share a process.
    """

    def run(questions: Mapping[str, str]) -> Callable[[str], Any]:
        results = python(TOGETHER.format(questions=dict(questions)))

        def answer(name: str) -> Any:
            assert "error" not in results[name], results[name]["error"]
            return results[name]["answer"]

        return answer

    return run


@pytest.fixture(scope="session")
def no_network(keep: Start) -> dict[str, str]:
    """The option of docker-py for a network with a loopback only, which containers share.

    A container in a network of its own, even in none, takes 0.08 s of the processor longer to start, of 0.3 s.
    """
    sleeping = keep(["infinity"], entrypoint=["sleep"], network_mode="none")
    return {"network_mode": f"container:{sleeping.id}"}


@pytest.fixture(scope="session")
def once(keep: Start, no_network: dict[str, str]) -> Callable[..., tuple[int, str, str]]:
    """A function that runs a command in a new container; returns its status, stdout, and stderr with the launcher's."""

    def run(command: list[str] | None, **options: Any) -> tuple[int, str, str]:
        container = keep(command, **no_network | options)
        status = int(container.wait(timeout=120)["StatusCode"])
        out, err = (container.logs(stdout=out, stderr=not out).decode() for out in (True, False))
        container.remove(v=True)
        return status, out, err

    return run


class Shell:
    """Runs commands in a container, as `docker exec` does."""

    def __init__(self, container: Container) -> None:
        self.container = container

    def result(self, command: str | list[str], user: str = "") -> tuple[int, str]:
        """Status and output (stdout, then stderr) of a command; bash runs a command that is one string."""
        words = ["bash", "-ec", command] if isinstance(command, str) else command
        ended = run_in(self.container, words, user)
        return ended.status, ended.out + ended.err

    def run(self, command: str | list[str], user: str = "") -> str:
        """The output of a command that must succeed."""
        status, text = self.result(command, user)
        assert status == 0, text
        return text.strip()

    def fails(self, command: str | list[str], user: str = "") -> str:
        """The output of a command that must fail."""
        status, text = self.result(command, user)
        assert status != 0, text
        return text


@pytest.fixture
def shell(start: Start, no_network: dict[str, str]) -> Callable[..., Shell]:
    """A function that starts a container that sleeps, and waits until its launcher is done."""

    def start_shell(**options: Any) -> Shell:
        container = start(["sleep", "3600"], **no_network | options)
        wait_for_program(container, "sleep")
        return Shell(container)

    return start_shell


@pytest.fixture
def session(shell: Callable[..., Any], subject: Any) -> Session:
    """As another user of group 0: the image's own user has more permissions."""
    return Session(shell(user="1234:0"), subject)


@pytest.fixture
def workspace(once: Callable[..., Any], new_volume: Callable[[], str], owner: int) -> dict[str, Any]:
    """A volume that only its owner can write, like a folder of the host; returns how to mount it."""
    mounted = {new_volume(): {"bind": "/workspace", "mode": "rw"}}
    prepare = "echo harmless==1.0 >/workspace/requirements.txt; chmod 755 /workspace; chown -R $0:$0 /workspace"
    assert once(["sh", "-c", prepare, str(owner)], user="root", volumes=mounted)[0] == 0
    return mounted


@pytest.fixture(scope="session")
def attributes(container: Container) -> dict[str, Any]:
    """`docker inspect` of the image."""
    assert container.image is not None
    return dict(container.image.attrs)


MODES: dict[str, dict[str, Any]] = {
    "another user and group": {"user": "123456:123456"},
    "another user of group 0, restricted as in OpenShift": {
        "user": "123456:0", "cap_drop": ["ALL"], "security_opt": ["no-new-privileges"],
    },
    "read-only, another user of group 0": {
        "read_only": True, "tmpfs": {"/tmp": "exec", "/run": ""}, "user": "123456:0",
    },
    "read-only, without capabilities": {
        "read_only": True, "tmpfs": {"/tmp": "exec", "/run": "", "/home/user": "exec,mode=1777"},
        "cap_drop": ["ALL"], "security_opt": ["no-new-privileges"],
    },
    "root that becomes a user": {"user": "root", "environment": {"NB_UID": "4242", "NB_GID": "4343"}},
    "root with the capabilities that it needs": {
        "user": "root",
        "environment": {"NB_UID": "4242"},
        "cap_drop": ["ALL"],
        "cap_add": ["SETUID", "SETGID", "KILL"],
    },
}  # fmt: skip


@pytest.fixture(params=list(MODES))
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of docker-py with which every image must work."""
    return MODES[request.param]


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    return wait_until
