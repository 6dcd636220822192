"""The Compose file: each option's effect, and what is always in it. It is started for real in tests/integration."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

from builder import deploy_compose
from builder.deploy_compose import Folder
from builder.errors import UsageError
from tests.unit.deployed import HOSTILE, interpolated, subject, wish

VARIANTS = ["", "jupyter", "ssh", "full"]


@cache
def schema() -> Any:
    """That of the Compose specification, as check-jsonschema carries it."""
    file = resources.files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    return jsonschema.validators.validator_for(content)(content)


def test_the_schema_refuses_what_compose_would() -> None:
    """Else the other tests would pass with anything."""
    for wrong in ({"services": {"a": {"imagee": "x"}}}, {"services": {"a": {"image": 1}}}):
        with pytest.raises(jsonschema.ValidationError):
            schema().validate(wrong)


def compose(variant: str = "", folder: Folder | None = None, *, cpu: bool = False, **wanted: Any) -> dict[str, Any]:
    """The one service, after the whole file passed the schema of the Compose specification."""
    text = deploy_compose.render(subject(variant, cpu=cpu), wish(**wanted), folder)
    data = yaml.safe_load(text)
    schema().validate(data)
    assert list(data) == ["name", "services", "volumes"]
    ((name, service),) = data["services"].items()
    assert data["name"] == name
    named = {one["source"] for one in service["volumes"] if one["type"] == "volume"}
    assert set(data["volumes"]) == named
    assert isinstance(service, dict)
    return service


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("command", [(), ("python", "train.py")])
def test_what_no_variant_and_no_command_changes(variant: str, command: tuple[str, ...]) -> None:
    service = compose(variant, command=command)
    assert service["image"] == "registry.example.test/org/pt-cuda:2.9"
    assert service["user"] == "1000:0"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["tmpfs"] == ["/tmp:exec,mode=1777"]
    assert service["shm_size"] == 8_000_000_000
    assert not {"privileged", "cap_add", "network_mode", "pid", "ipc", "devices"} & set(service)
    assert {"/workspace", "/home/user"} <= {one["target"] for one in service["volumes"]}


@pytest.mark.parametrize("variant", ["jupyter", "ssh", "full"])
def test_services_are_reached_from_this_machine_alone_and_watched(variant: str) -> None:
    service = compose(variant)
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert service["healthcheck"]["test"] == ["CMD", "/usr/local/bin/check-services"]
    assert service["restart"] == "unless-stopped"
    assert "command" not in service


def test_ports() -> None:
    assert compose("full")["ports"] == ["127.0.0.1:8888:8888", "127.0.0.1:2222:2222"]


def test_logins_come_from_the_environment_or_are_random() -> None:
    assert compose("full")["environment"] == {
        "GPU_REQUIRED": "1",
        "JUPYTER_TOKEN": None,
        "SSH_PUBLIC_KEY": None,
        "SSH_PORT": "2222",
    }
    # Without a key there would be no service at all.
    assert compose("ssh")["environment"]["SSH_PUBLIC_KEY"].startswith("${SSH_PUBLIC_KEY:?")


def test_the_host_key_of_ssh_outlives_the_container() -> None:
    assert "/var/lib/workstation" in [one["target"] for one in compose("ssh")["volumes"]]
    assert "/var/lib/workstation" not in [one["target"] for one in compose("jupyter")["volumes"]]


def test_a_plain_image_has_a_shell() -> None:
    service = compose()
    assert (service["command"], service["tty"], service["stdin_open"]) == (["bash"], True, True)
    assert not {"ports", "healthcheck"} & set(service)


@pytest.mark.parametrize("variant", ["", "full"])
def test_a_command_instead_of_services(variant: str) -> None:
    service = compose(variant, command=("train.py", "--lr", "1e-3"), gpus=2)
    assert service["command"] == ["torchrun", "--standalone", "--nproc-per-node=2", "train.py", "--lr", "1e-3"]
    assert service["environment"] == {"GPU_REQUIRED": "1"}
    assert service["restart"] == "no"
    assert "ports" not in service
    assert service.get("healthcheck") == ({"disable": True} if variant else None)


def test_gpus() -> None:
    device = {"driver": "nvidia", "count": 3, "capabilities": ["gpu"]}
    assert compose(gpus=3)["deploy"] == {"resources": {"reservations": {"devices": [device]}}}
    for service in (compose(gpus=0), compose(cpu=True, gpus=0)):
        assert not {"deploy", "environment"} & set(service)


def test_limits() -> None:
    service = compose(gpus=0, cpus=4, memory=64 * 10**9, shm=2 * 10**9)
    assert service["deploy"]["resources"] == {"limits": {"cpus": "4", "memory": "64000000000"}}
    assert service["shm_size"] == 2 * 10**9


@pytest.mark.parametrize(("owner", "user"), [(0, "1000:0"), (1000, "1000:0"), (4321, "4321:0")])
def test_a_folder_and_its_owner(owner: int, user: str) -> None:
    service = compose(folder=Folder(path="/srv/data", owner=owner))
    assert service["volumes"][0] == {
        "type": "bind",
        "source": "/srv/data",
        "target": "/workspace",
        "bind": {"create_host_path": False},
    }
    assert service["user"] == user


def test_ssh_in_a_folder_of_somebody_else_is_refused() -> None:
    with pytest.raises(UsageError, match="runs as user 1000, and /srv/data belongs to 4321") as caught:
        compose("full", folder=Folder(path="/srv/data", owner=4321))
    assert "chown" in caught.value.hint
    compose("full", folder=Folder(path="/srv/data", owner=1000))
    compose("full", folder=Folder(path="/srv/data", owner=4321), command=("bash",))


@pytest.mark.parametrize("text", HOSTILE)
def test_a_word_of_the_command_arrives_as_it_is(text: str) -> None:
    command = compose(command=("echo", text))["command"]
    assert [interpolated(word) for word in command] == ["echo", text]


@pytest.mark.parametrize("text", [text for text in HOSTILE if text and "\n" not in text])
def test_a_path_arrives_as_it_is(text: str) -> None:
    source = compose(folder=Folder(path=f"/srv/{text}"))["volumes"][0]["source"]
    assert interpolated(source) == f"/srv/{text}"


@pytest.mark.parametrize("path", ["/srv/a\nb", "/srv/\x1b", "/srv/\u202e"])
def test_paths_that_are_refused(path: str) -> None:
    with pytest.raises(UsageError, match="--workspace"):
        compose(folder=Folder(path=path))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_comment_says_how_to_start_it(variant: str) -> None:
    told = deploy_compose.render(subject(variant), wish()).split("name:")[0]
    assert all(line.startswith("#") for line in told.splitlines())
    assert ("docker compose up -d" in told) == bool(variant)
    assert ("docker compose run --rm train" in told) == (not variant)
    assert ("JUPYTER_TOKEN" in told) == (variant in ("jupyter", "full"))
    assert ("SSH_PUBLIC_KEY" in told) == (variant in ("ssh", "full"))
