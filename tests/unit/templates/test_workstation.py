"""The pure parts of the launcher of the images; the rest is tested in every image."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from builder.plan import settings
from templates.base.files.usr.local.lib.workstation import (
    foreign,
    gpus,
    health,
    launch,
    person,
    services,
    state,
    variables,
)
from templates.base.files.usr.local.lib.workstation.gpus import Driver, Gpu
from templates.base.files.usr.local.lib.workstation.refusal import BUSY, CONFIG, UNAVAILABLE, Refusal
from templates.base.files.usr.local.lib.workstation.variables import Variable
from tests.paths import ROOT

A, B = Gpu("NVIDIA A", "GPU-aaaa-1", 80 * 2**30), Gpu("NVIDIA B", "GPU-aabb-2", 0)
CUDA = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_REQUIRE_CUDA": "driver>=525.60.13"}


def every_variable() -> list[Variable]:
    files = sorted(ROOT.glob("templates/*/files/etc/variables.d/*.json"))
    return [Variable(**entry) for file in files for entry in json.loads(file.read_text())]


# ---- variables


def test_every_variable_has_a_known_kind_and_is_declared_once() -> None:
    declared = every_variable()
    assert len({variable.name for variable in declared}) == len(declared) >= 10
    for variable in declared:
        variables._error(variable.kind, "1")


def test_documents_name_every_variable() -> None:
    """`--help` has the rest."""
    section = (ROOT / "docs/workstation.md").read_text().split("\n## Variables\n")[1].split("\n## ")[0]
    assert {*re.findall(r"`([A-Z_]+)(?:=1)?`", section)} == {variable.name for variable in every_variable()}


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("flag", ["0", "1", "yes", "no", "true", "False", "YES"], ["y", "on", "2", "1\n", " yes", ""]),
        ("port", ["1", "8888", "65535"], ["0", "65536", "-1", "8e3", " 80", "80\n", "\u0661"]),
        ("id", ["0", "1000", "4294967294"], ["-1", "4294967295", "user", "", "1.0"]),
        (
            "url-path",
            ["/", "/team/gpu", "/user/~me/", "/v1.2/..a/"],
            ["team", "", "/a b", "/a?b", "/a\n", "//", "//x/", "/x//y", "/..", "/../x", "/x/../y", "/x/..", "/./x"],
        ),
        ("hosts", ["gpu1", "gpu1.example.org,GPU-2"], ["", "10.0.0.7", "::1", "a,,b", "a b", "http://a/", "a\n"]),
        ("busy", ["refuse", "wait"], ["", "1", "Wait", "refuse\n", "no"]),
        ("size", ["8GB", "512 MiB", "1.5GiB"], ["8", "GB", "0GB", "8gb", "-1GB", "8GB\n"]),
        ("path", ["/workspace/runs"], ["runs", ""]),
        ("file", [str(ROOT / "Makefile")], [str(ROOT), "/nowhere/at/all", "Makefile"]),
    ],
)
def test_values_are_checked(kind: str, good: list[str], bad: list[str]) -> None:
    assert [value for value in good if variables._error(kind, value)] == []
    assert [value for value in bad if not variables._error(kind, value)] == []


def test_all_invalid_values_are_reported_at_once_without_secrets() -> None:
    known = [Variable(f"A_{kind.upper()}", kind, "", "") for kind in ("port", "flag", "secret")]
    with pytest.raises(Refusal) as refused:
        variables.check({"A_PORT": "x", "A_FLAG": "y", "A_SECRET": "hidden"}, known)
    assert refused.value.status == CONFIG
    assert "A_PORT='x'" in str(refused.value)
    assert "A_FLAG='y'" in str(refused.value)
    assert "hidden" not in str(refused.value)


def test_programs_see_flags_as_1_or_0() -> None:
    """Docker Stacks and Compose files write `yes` and `true`."""
    environ = {"A": "yes", "B": "True", "C": "no", "D": "false", "E": "1", "G": "yes"}
    variables.check(environ, [Variable(name, "flag", "", "") for name in "ABCDE"])
    assert environ == {"A": "1", "B": "1", "C": "0", "D": "0", "E": "1", "G": "yes"}


def test_empty_variables_are_unset_ones() -> None:
    """As Compose's `${X:-}` gives them. Without an empty token, a server would make one, or ask for no login."""
    secrets = {variable.name: "" for variable in every_variable() if variable.kind == "secret"}
    assert "JUPYTER_TOKEN" in secrets
    environ = {variable.name: "" for variable in every_variable()} | {"GRANT_SUDO": "", "JUPYTER_PASSWORD": ""}
    assert variables.check(environ, every_variable()) == []
    assert environ == secrets | {"GRANT_SUDO": "", "JUPYTER_PASSWORD": ""}
    assert foreign.variables(environ, secrets.keys()) == []


@pytest.mark.parametrize("value", ["tcp://10.96.0.7:8888", "udp://[fd00::7]:53"])
def test_a_port_that_kubernetes_sets_for_a_service_has_no_effect(value: str) -> None:
    """With a Service named jupyter in the namespace, no container with Jupyter started."""
    known = [Variable("JUPYTER_PORT", "port", "8888", ""), Variable("SSH_PORT", "port", "22", "")]
    environ = {"JUPYTER_PORT": value, "SSH_PORT": "2222"}
    [line] = variables.check(environ, known)
    assert line.startswith(f"JUPYTER_PORT={value} has no effect: Kubernetes sets it for a Service named jupyter. ")
    assert environ == {"SSH_PORT": "2222"}
    with pytest.raises(Refusal, match="JUPYTER_PORT='x': expected a port"):
        variables.check({"JUPYTER_PORT": "x"}, known)


def test_secrets_are_without_the_newline_of_echo() -> None:
    known = [Variable("A", "secret", "", ""), Variable("B", "secret", "", ""), Variable("C", "text", "", "")]
    environ = {"A": "token\n", "B": " \n", "C": "x\n"}
    variables.check(environ, known)
    assert environ == {"A": "token", "B": "", "C": "x\n"}


def test_a_similar_name_is_suggested() -> None:
    known = [Variable("JUPYTER_TOKEN", "secret", "", "")]
    assert variables.check({"JUPYTER_TOKN": "x"}, known) == [
        "JUPYTER_TOKN is not a variable of this image; did you mean JUPYTER_TOKEN?"
    ]
    assert variables.check({"JUPYTER_CONFIG_DIR": "x", "OTHER_TOKEN": "y"}, known) == []


@pytest.mark.parametrize(("text", "expected"), [("8GB", 8 * 10**9), ("512MiB", 2**29), ("1.5 GiB", 3 * 2**29)])
def test_sizes(text: str, expected: int) -> None:
    assert variables.size(text) == expected


# ---- the user


@pytest.mark.parametrize(
    ("environ", "uid", "runs_server", "owner", "expected"),
    [
        ({}, 1000, True, 1000, None),
        ({}, 123456, False, 1000, None),
        ({}, 0, False, 4242, None),
        ({}, 0, True, 4242, (4242, 0)),
        ({}, 0, True, 0, (1000, 0)),
        ({"NB_UID": "7"}, 0, False, 4242, (7, 0)),
        ({"NB_UID": "7", "NB_GID": "8"}, 0, True, 4242, (7, 8)),
        ({"NB_GID": "8"}, 0, False, 4242, (4242, 8)),
        ({"NB_UID": "7"}, 1000, True, 4242, None),
        ({"NB_UID": "0"}, 0, True, 4242, None),
    ],
)
def test_the_user_to_become(
    environ: dict[str, str], uid: int, runs_server: bool, owner: int, expected: tuple[int, int] | None
) -> None:
    assert person.target(environ, uid=uid, runs_server=runs_server, owner=owner) == expected


def test_another_user_needs_root() -> None:
    """Compose files for Docker Stacks set both variables, whoever the container runs as."""
    assert "add `--user root`" in person.ids_warning({"NB_UID": "7"}, uid=1000, gid=0)
    assert "add `--user root`" in person.ids_warning({"NB_UID": "1000", "NB_GID": "100"}, uid=1000, gid=0)
    for uid, environ in ((1000, {"NB_UID": "1000", "NB_GID": "0"}), (1000, {}), (0, {"NB_UID": "7"})):
        assert person.ids_warning(environ, uid=uid, gid=0) == ""


def test_the_image_user_has_the_new_ids_and_is_first(tmp_path: Path) -> None:
    file = tmp_path / "passwd"
    file.write_text("root:x:0:0::/root:/bin/bash\nother:x:33:33::/:/bin/sh\nuser:x:1000:0::/home/user:/bin/bash\n")
    person._set_entry(file, "user", {2: "33", 3: "8"})
    assert file.read_text() == (
        "user:x:33:8::/home/user:/bin/bash\nroot:x:0:0::/root:/bin/bash\nother:x:33:33::/:/bin/sh\n"
    )
    groups = tmp_path / "group"
    groups.write_text("root:x:0:\n")
    person._set_entry(groups, "user", {2: "8"}, new="user:x:8:")
    assert groups.read_text() == "user:x:8:\nroot:x:0:\n"


# ---- GPUs


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (None, (A, B)),
        ("0", (A,)),
        ("1,0", (B, A)),
        ("GPU-aaaa", (A,)),
        ("GPU-aa", ()),
        ("1,7,0", (B,)),
        ("-1", ()),
        ("", ()),
        ("0,0", ()),
        ("\u00b2", ()),
        ("MIG-1234", (Gpu("a slice of a GPU", "MIG-1234", 0),)),
    ],
)
def test_cuda_visible_devices_is_respected(devices: str | None, expected: tuple[Gpu, ...]) -> None:
    environ = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    assert gpus.visible((A, B), environ) == expected


@pytest.mark.parametrize(
    ("driver", "environ", "message"),
    [
        (Driver(), {}, "docker run --gpus all"),
        (Driver(), {}, "--device nvidia.com/gpu=all"),
        (Driver(), {}, "in Kubernetes, set the limit nvidia.com/gpu"),
        (Driver(error="Driver Not Loaded"), {}, "NVML failed: Driver Not Loaded"),
        (Driver("570.1", "12.8"), {}, "Driver 570.1 has no GPU"),
        (Driver("570.1", "12.8", (A,)), {"CUDA_VISIBLE_DEVICES": "3"}, "CUDA_VISIBLE_DEVICES='3' hides all GPUs (1)"),
        (
            Driver("525.60.12", "12.0", (A,)),
            {},
            "driver 525.60.12 is too old for the CUDA of this image, which needs 525.60.13",
        ),
        (Driver("525.60.12", "12.0", (A,)), {}, "with a data-center GPU, add NVIDIA's package cuda-compat"),
    ],
)
def test_a_missing_gpu_is_one_warning_or_a_refusal(driver: Driver, environ: dict[str, str], message: str) -> None:
    _, [warning] = gpus.describe(driver, {**CUDA, **environ})
    assert message in warning
    with pytest.raises(Refusal) as refused:
        gpus.describe(driver, {**CUDA, **environ, "GPU_REQUIRED": "1"})
    assert refused.value.status == UNAVAILABLE
    assert message in str(refused.value)


def test_drivers_are_compared_as_versions() -> None:
    assert gpus.describe(Driver("1000.1", "99.0", (A,)), CUDA)[1] == []


def test_gpus_that_are_hidden_are_counted() -> None:
    lines, _ = gpus.describe(Driver("570.86.10", "12.8", (A, B)), {**CUDA, "CUDA_VISIBLE_DEVICES": "1"})
    assert lines == ["GPU 0: NVIDIA B, driver 570.86.10, CUDA up to 12.8", "CUDA_VISIBLE_DEVICES hides 1 more"]


def test_a_cpu_image_has_no_warning() -> None:
    assert gpus.describe(Driver(), {}) == (["no GPU: this image is for CPUs only"], [])
    with pytest.raises(Refusal, match="for CPUs only"):
        gpus.describe(Driver(), {"GPU_REQUIRED": "1"})


FREE = Gpu("NVIDIA A", "GPU-aaaa-1", 80 * 2**30, used=10**7)
USED = Gpu("NVIDIA A", "GPU-aaaa-1", 80 * 2**30, used=41_200_000_000, processes=2)
FOREIGN = Gpu("NVIDIA B", "GPU-bbbb-2", 80 * 2**30, used=600_000_000)


def wait(policy: str, *states: tuple[Gpu, ...], **environ: str) -> tuple[list[str], list[float]]:
    """What the launcher says, and how long it sleeps, while the GPUs change from one state to the next."""
    said: list[str] = []
    slept: list[float] = []
    drivers = iter([Driver("570.86.10", "12.8", gpus) for gpus in states])
    environ = {**CUDA, "GPU_BUSY": policy, **environ}
    gpus.wait_until_free(next(drivers), environ, said.append, read=lambda: next(drivers), sleep=slept.append)
    assert list(drivers) == [], "ended before the last state"
    return said, slept


def test_a_gpu_that_others_use_is_refused() -> None:
    """By its memory, or by a process with little memory."""
    with pytest.raises(Refusal) as refused:
        wait("refuse", (FREE, USED, FOREIGN, replace(FREE, processes=1)))
    assert refused.value.status == BUSY
    assert str(refused.value).splitlines()[1:4] == [
        "GPU 1 (NVIDIA A): 41200 MB used, 2 visible processes",
        "GPU 2 (NVIDIA B): 600 MB used, no visible processes",
        "GPU 3 (NVIDIA A): 10 MB used, 1 visible process",
    ]


@pytest.mark.parametrize(
    ("policy", "cards", "environ"),
    [
        ("refuse", (FREE,), {}),
        ("wait", (FREE,), {}),
        ("", (USED,), {}),
        ("start", (USED,), {}),
        ("refuse", (USED, FREE), {"CUDA_VISIBLE_DEVICES": "1"}),
        ("refuse", (), {}),
    ],
)
def test_a_free_or_hidden_gpu_is_no_reason_to_wait(
    policy: str, cards: tuple[Gpu, ...], environ: dict[str, str]
) -> None:
    assert wait(policy, cards, **environ) == ([], [])


def test_gpus_that_nvml_cannot_read_are_not_taken_for_free() -> None:
    drivers = iter([Driver(error="Unknown Error"), Driver("570.86.10", "12.8", (FREE,))])
    said: list[str] = []
    with pytest.raises(Refusal, match="NVML failed: Unknown Error"):
        gpus.wait_until_free(Driver(error="Unknown Error"), {"GPU_BUSY": "refuse"}, said.append)
    gpus.wait_until_free(
        next(drivers), {"GPU_BUSY": "wait"}, said.append, read=lambda: next(drivers), sleep=lambda _: None
    )
    assert said == ["GPU_BUSY=wait: waiting for GPUs that are unknown, since NVML failed: Unknown Error"]
    assert list(drivers) == []


def test_a_container_that_waits_says_so_once_a_minute() -> None:
    said, slept = wait("wait", *[(USED,)] * 13, (FREE,))
    assert said == ["GPU_BUSY=wait: waiting for GPU 0 (NVIDIA A): 41200 MB used, 2 visible processes"] * 2
    assert sum(slept) == 65


# ---- the rest


def test_only_copies_of_the_state_are_forgotten(tmp_path: Path) -> None:
    """`docker commit` copied the token, the host key and the secret of Jupyter's cookies."""
    first, copy = tmp_path / "first", tmp_path / "copy"
    (first / "jupyter").mkdir(parents=True)
    state.forget_copies(first)
    (first / "jupyter-token").write_text("x")
    state.forget_copies(first)
    assert (first / "jupyter-token").exists()
    shutil.copytree(first, copy)  # with the times that a program can set
    (copy / "jupyter").mkdir()
    state.forget_copies(copy)
    assert {path.name for path in copy.iterdir()} == {"made", "made-at"}


def test_the_state_of_a_launcher_that_runs_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of all modes in a container made its state look like a copy."""
    monkeypatch.setattr(state, "TOP", tmp_path)
    token = state.make() / "token"
    token.touch()
    token.with_name("made").chmod(0o640)
    state.make()
    assert token.exists()
    launcher = token.with_name(state.LAUNCHER)
    launcher.write_text(launcher.read_text().replace(" ", " 1"))  # a process of an earlier start
    state.make()
    assert not token.exists()


# ---- commands and variables of Docker Stacks


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], []),
        (["python", "train.py"], ["python", "train.py"]),
        (["start.sh"], []),
        (["start.sh", "jupyter", "server"], ["jupyter", "server"]),
        (["/usr/local/bin/start.sh", "jupyter", "lab", "--a=b"], ["/usr/local/lib/jupyter-lab", "--a=b"]),
        (["/workspace/start.sh", "--a=b"], ["/workspace/start.sh", "--a=b"]),
        (["./start-notebook.sh"], ["./start-notebook.sh"]),
        (["start-notebook.py"], ["services"]),
        (["start-notebook.sh", "--a=b c", "--d"], ["services"]),
        (["/usr/local/bin/start-notebook.py", "--a=b"], ["services"]),
    ],
)
def test_start_scripts_of_docker_stacks(arguments: list[str], expected: list[str]) -> None:
    environ: dict[str, str] = {}
    words, notes = foreign.command(arguments, environ, ["jupyter"])
    assert words == expected
    assert len(notes) == (bool(arguments) and arguments[0].startswith(("start", "/usr/local/bin/")))
    passed_on = arguments[1:] if "notebook" in "".join(notes) else []
    assert environ.get("JUPYTER_ARGUMENTS", "").split("\n") == (passed_on or [""])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--IdentityProvider.token=hunter2"],
        ["--x", "--ServerApp.token", "hunter2"],
        ["--NotebookApp.token=hunter2", "--y"],
        ["--PasswordIdentityProvider.token=hunter2"],
        ["-IdentityProvider.token=hunter2"],
        ["--ServerApp.IdentityProvider.token=hunter2"],
    ],
)
def test_a_token_in_the_arguments_is_refused(arguments: list[str]) -> None:
    with pytest.raises(Refusal, match=r"value of -[\w.-]+\.token: set JUPYTER_TOKEN") as refused:
        foreign.command(["start-notebook.py", *arguments], {}, ["jupyter"])
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("argument", ["--IdentityProvider.token=", "--IdentityProvider.token_x=y", "--x=--A.token=y"])
def test_other_arguments_than_tokens_are_passed_on(argument: str) -> None:
    environ: dict[str, str] = {}
    assert foreign.command(["start-notebook.py", argument, "--z"], environ, ["jupyter"])[0] == ["services"]
    assert environ["JUPYTER_ARGUMENTS"] == f"{argument}\n--z"


@pytest.mark.parametrize("program", [["jupyter", "lab"], ["jupyter-lab"], ["/opt/venv/bin/jupyter", "lab"]])
def test_jupyter_lab_as_command_is_the_program_that_checks_its_login(program: list[str]) -> None:
    """A setting can switch off the extension that checks the login of Jupyter's own program, which root may run."""
    replaced, _ = foreign.command([*program, "--x"], {}, ["jupyter"])
    assert replaced == [foreign.JUPYTER_LAB, "--x"]
    assert replaced[0] in foreign.SERVERS
    assert foreign.command([*program, "--x"], {}, ["ssh"]) == ([*program, "--x"], [])


def test_what_only_prints_is_no_service() -> None:
    environ: dict[str, str] = {}
    words, _ = foreign.command(["start-notebook.py", "--a=b", "--help-all"], environ, ["jupyter"])
    assert words == ["/usr/local/lib/jupyter-lab", "--a=b", "--help-all"]
    assert environ == {}


def test_start_scripts_that_cannot_work_are_refused() -> None:
    with pytest.raises(Refusal, match="use the variant jupyter or full"):
        foreign.command(["start-notebook.py"], {}, ["ssh"])
    with pytest.raises(Refusal, match=r"needs the variables of the JupyterHub .* \(JUPYTERHUB_API_TOKEN, "):
        foreign.command(["jupyterhub-singleuser"], {"JUPYTERHUB_API_TOKEN": "x"}, ["jupyter"])
    with pytest.raises(Refusal, match="use the variant jupyter or full"):
        foreign.command(["jupyterhub-singleuser"], HUB, ["ssh"])


HUB = {"JUPYTERHUB_API_TOKEN": "x", "JUPYTERHUB_SERVICE_URL": "http://0.0.0.0:8888/user/ada/"}


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["services", "--debug"],
        ["start-notebook.py", "--debug"],
        ["start-singleuser.sh", "--debug"],
        ["jupyterhub-singleuser", "--debug"],
        ["start.sh", "jupyter-labhub", "--debug"],
        ["jupyter", "lab", "--debug"],
        ["jupyter", "labhub", "--debug"],
        ["jupyter-lab", "--debug"],
        ["/opt/venv/bin/jupyter", "labhub", "--debug"],
        ["/opt/conda/bin/jupyterhub-singleuser", "--debug"],
        ["/usr/local/bin/start-notebook.py", "--debug"],
        ["/usr/local/bin/start.sh", "/usr/local/bin/start-singleuser.py", "--debug"],
    ],
)
def test_a_hub_starts_the_single_user_server_whatever_the_command(arguments: list[str]) -> None:
    words, _ = foreign.command(arguments, dict(HUB), ["jupyter", "ssh"])
    assert words == ["/usr/local/bin/jupyterhub-singleuser", *arguments[-1:]]


@pytest.mark.parametrize(
    "arguments",
    [
        ["bash", "-c", "exec jupyterhub-singleuser"],
        ["--help"],
        ["jupyter", "--version"],
        ["/workspace/.venv/bin/jupyterhub-singleuser"],
    ],
)
def test_other_commands_of_a_hub_run_as_they_are(arguments: list[str]) -> None:
    assert foreign.command(arguments, dict(HUB), ["jupyter"]) == (arguments, [])


def test_variables_of_other_images_are_reported() -> None:
    assert foreign.variables({"NB_UID": "1", "HOME": "/x"}, []) == []
    [line] = foreign.variables({"GRANT_SUDO": "yes"}, [])
    assert line.startswith("GRANT_SUDO has no effect here: ")
    assert not {*foreign.VARIABLES, *foreign.PLATFORMS} & {variable.name for variable in every_variable()}


@pytest.mark.parametrize(
    ("environ", "ours"),
    [
        ({"JUPYTER_PASSWORD": "hunter2"}, ["JUPYTER_TOKEN"]),
        ({"OPEN_BUTTON_TOKEN": "hunter2"}, ["JUPYTER_TOKEN"]),
        ({"PUBLIC_KEY": "ssh-rsa", "RUNPOD_POD_ID": "x"}, ["SSH_PUBLIC_KEY", "SSH_PUBLIC_KEYS_FILE"]),
    ],
)
def test_a_variable_of_a_platform_is_reported_until_its_replacement_is_set(
    environ: dict[str, str], ours: list[str]
) -> None:
    """The platform sets its own variable whatever the user does."""
    known = {variable.name for variable in every_variable()}
    assert {*ours} <= known
    name = next(iter(environ))
    [line] = foreign.variables(environ, known)
    assert line.startswith(f"{name} has no effect here: it is of ")
    assert line.endswith(f": set {ours[0]}")
    assert "hunter2" not in line
    assert [foreign.variables({**environ, each: "x"}, known) for each in ours] == [[]] * len(ours)
    assert foreign.variables(environ, known - {*ours}) == [], "the image has nothing that the variable is for"


def test_a_public_key_may_be_for_something_else() -> None:
    assert foreign.variables({"PUBLIC_KEY": "x"}, {"SSH_PUBLIC_KEY"}) == []


@pytest.mark.parametrize("folder", ["/home/jovyan", "/home/jovyan/work", "/home/sagemaker-user"])
def test_a_volume_in_the_home_of_other_images_is_reported(folder: str) -> None:
    mounts = "22 1 0:20 / / rw - overlay overlay rw\n31 22 8:1 /data {} rw,relatime - ext4 /dev/sda1 rw\n"
    [line] = foreign.homes(mounts.format(folder))
    assert line.startswith(f"{folder} is not in the home here: ")
    assert foreign.homes(mounts.format("/home/user")) == foreign.homes(mounts.format("/home/jovyans")) == []


# ---- names, homes, workspaces


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of passwd and group; the user of this process has no name."""
    monkeypatch.setattr(person, "NAMES", tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    monkeypatch.setattr(os, "getgid", lambda: 0)
    return tmp_path


def test_a_user_without_a_name_is_named(names: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    environ = {"HOME": str(home), "USER": "user", "LOGNAME": "user", "PATH": "/bin"}
    monkeypatch.setattr(person, "HOME", home)
    assert person.set_up(environ, tmp_path) == []
    assert (names / "passwd").read_text() == f"user54321:x:54321:65534::{home}:/bin/bash\n"
    assert not (names / "group").exists(), "group 0 has a name"
    assert environ["USER"] == environ["LOGNAME"] == "user54321"
    assert environ["PATH"] == f"/bin:{home}/.local/bin", "where Python's own rule installs programs"


def test_a_given_name_stays(names: Path, tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "USER": "me", "LOGNAME": "user"}
    person.set_up(environ, tmp_path)
    assert (environ["USER"], environ["LOGNAME"]) == ("me", "user54321")


def test_the_name_if_passwd_cannot_be_written(names: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(person, "NAMES", tmp_path / "nowhere")
    environ = {"HOME": str(tmp_path)}
    assert person.set_up(environ, tmp_path) == []
    assert environ["USER"] == "user54321"


@pytest.mark.parametrize(
    ("owner", "mode", "message"),
    [
        (4242, 0o755, "start with `--user 4242:0`, or with `--user root -e NB_UID=4242 -e NB_GID=7`"),
        (4242, 0o555, "its mode is 555, run `chmod u+w` on it"),
        (54321, 0o755, "with SELinux, add :z to -v"),
        (0, 0o755, "IMAGE chown 54321 FOLDER`, or start with `--user root -e NB_UID=0` in rootless Docker"),
    ],
)
def test_a_workspace_that_cannot_be_written(
    names: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, mode: int, message: str
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.setattr(os, "access", lambda *_: False)
    status = folder.stat()
    fields = [0o40000 | mode, *status[1:4], owner, 7, *status[6:]]
    monkeypatch.setattr(Path, "stat", lambda *_, **__: os.stat_result(fields))
    line = person.workspace_warning(folder)
    assert line.startswith(f"user 54321 cannot write to {folder}, which belongs to {owner}:7: ")
    assert message.replace("FOLDER", str(folder)) in line


# ---- services


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM])
def test_a_service_is_retried_if_fork_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Out of PIDs or memory."""
    service = services.Service(tmp_path)

    def no_process(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(subprocess, "Popen", no_process)
    services._start(service, {})
    assert service.process is None
    assert service.next_start > service.started_at
    assert service.failures == 0
    for name in ("check", "ready"):
        (tmp_path / name).write_text("#!/bin/sh\n")
    assert services.check(tmp_path, {}) == 1
    services._ready(service, {}, lambda _: None)
    assert not service.is_ready, "its message would be lost"


def test_root_looks_for_services_as_their_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--cap-drop ALL`, root cannot read folders of others."""
    owner = os.getuid()
    home = tmp_path / f"of-{owner}"
    home.mkdir(mode=0o700)
    (home / state.SERVICES).touch()
    (home / state.LAUNCHER).write_text(state.process(os.getpid()))
    users = [0]

    def is_file(_: Path) -> bool:
        users.append(-1)
        return True

    monkeypatch.setattr(state, "TOP", tmp_path)
    for name in ("getuid", "geteuid"):
        monkeypatch.setattr(os, name, lambda: 0)
    monkeypatch.setattr(os, "seteuid", users.append)
    monkeypatch.setattr(Path, "is_file", is_file)
    assert state.find(state.SERVICES) == home
    assert users == [0, owner, -1, 0], "-1 is the look into the folder"
    (home / state.LAUNCHER).write_text("")
    assert state.find(state.SERVICES) is None, "of another container"


def test_checks_end_before_the_timeout_of_the_engine() -> None:
    """Two services are checked one after the other."""
    assert settings.Health(command=("check-services",)).timeout > 2 * services.CHECK_S
    for name in ("jupyter", "ssh"):
        check = ROOT / f"templates/{name}/files/etc/services.d/{name}/check"
        [limit] = [line for line in check.read_text().splitlines() if line.startswith("LIMIT_S = ")]
        assert int(limit.split()[2]) < services.CHECK_S


def test_a_service_with_an_invalid_configuration_is_not_retried(tmp_path: Path) -> None:
    ended: Any = SimpleNamespace(returncode=78)
    service = services.Service(tmp_path / "jupyter", process=ended)
    messages: list[str] = []
    assert services._ended(service, messages.append) == 78
    assert messages == ["error: jupyter ended with status 78: its configuration is wrong"]


@pytest.mark.parametrize(
    ("arguments", "group", "expected"),
    [
        (settings.ENTRYPOINT, "0::/", True),
        (("/sbin/docker-init", "--", *settings.ENTRYPOINT, "python", "train.py"), "0::/", True),
        (("/bin/sh", "-c", "echo Container started; exec /usr/local/bin/start"), "0::/", False),
        (settings.ENTRYPOINT, "0::/../other", False),  # of another container, with --pid=host
    ],
)
def test_the_launcher_is_found_among_the_processes(
    tmp_path: Path, arguments: tuple[str, ...], group: str, expected: bool
) -> None:
    for number, words in {"1": ("/sbin/init",), "self": ("check",), "4321": arguments}.items():
        (tmp_path / number).mkdir()
        (tmp_path / number / "cmdline").write_bytes("".join(f"{word}\0" for word in words).encode())
        (tmp_path / number / "cgroup").write_text(group if number == "4321" else "0::/")
    (tmp_path / "99").mkdir()  # a process that has just ended
    assert health.has_launcher(tmp_path) is expected


def test_missing_locales_are_replaced_with_one_warning() -> None:
    given = {"LANG": "de_DE.UTF-8", "LC_TIME": "de_DE.UTF-8", "LC_CTYPE": "C", "LC_ALL": "", "LC_TERMINAL": "iTerm2"}
    environ = dict(given)
    [warning] = launch.replace_locales(environ, is_known=lambda name: name == "C")
    assert warning.startswith("LANG=de_DE.UTF-8, LC_TIME=de_DE.UTF-8: not in this image")
    assert environ == given | {"LANG": "C.UTF-8", "LC_TIME": "C.UTF-8"}
    assert launch.replace_locales(environ, is_known=lambda name: name.startswith("C")) == []
