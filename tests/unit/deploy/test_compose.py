"""The Compose file: the effect of each option, and what every file contains. tests/integration starts it."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

from builder.common.errors import UsageError
from builder.deploy import examples
from builder.deploy.examples import Folder
from tests.fakes.deployed import HOSTILE, image_of, interpolated, request_of

VARIANTS = ["", "jupyter", "ssh", "full"]


@cache
def schema() -> Any:
    """The schema of the Compose specification, as shipped with check-jsonschema."""
    file = resources.files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    return jsonschema.validators.validator_for(content)(content)


def test_the_schema_rejects_invalid_files() -> None:
    """Otherwise the other tests would pass with anything."""
    for invalid in ({"services": {"a": {"imagee": "x"}}}, {"services": {"a": {"image": 1}}}):
        with pytest.raises(jsonschema.ValidationError):
            schema().validate(invalid)


def compose(variant: str = "", folder: Folder | None = None, *, cpu: bool = False, **changes: Any) -> dict[str, Any]:
    """The only service, after the schema of the Compose specification accepted the file."""
    data = yaml.safe_load(examples.compose(image_of(variant, cpu=cpu), request_of(**changes), folder))
    schema().validate(data)
    assert list(data) == ["name", "services", "volumes"]
    ((name, service),) = data["services"].items()
    assert data["name"] == name
    assert set(data["volumes"]) == {mount["source"] for mount in service["volumes"] if mount["type"] == "volume"}
    assert isinstance(service, dict)
    return service


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("command", [(), ("python", "train.py")])
def test_what_every_service_has(variant: str, command: tuple[str, ...]) -> None:
    service = compose(variant, command=command)
    assert service["image"] == "registry.example.test/org/pt-cuda:2.9"
    assert service["user"] == "1000:0"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["tmpfs"] == ["/tmp:exec,mode=1777", "/var/lib/extrausers:mode=1777"]
    assert service["shm_size"] == 8_000_000_000
    assert not {"privileged", "cap_add", "network_mode", "pid", "ipc", "devices"} & set(service)
    assert {"/workspace", "/home/user"} <= {mount["target"] for mount in service["volumes"]}


@pytest.mark.parametrize(("variant", "ports"), [("jupyter", [8888]), ("ssh", [2222]), ("full", [8888, 2222])])
def test_services_listen_on_this_machine_only_and_have_a_health_check(variant: str, ports: list[int]) -> None:
    service = compose(variant)
    assert service["ports"] == [f"127.0.0.1:{port}:{port}" for port in ports]
    assert service["healthcheck"] == {
        "test": ["CMD", "/usr/local/bin/check-services"],
        "interval": "10s",
        "timeout": "10s",
        "start_period": "60s",
        "retries": 3,
    }
    assert service["restart"] == "unless-stopped"
    assert "command" not in service


def test_logins_are_passed_through_from_the_environment() -> None:
    assert compose("full")["environment"] == {
        "GPU_REQUIRED": "1",
        "JUPYTER_TOKEN": None,
        "SSH_PUBLIC_KEY": None,
        "SSH_PORT": "2222",
    }
    # Without a key, an image with SSH only would have no service.
    assert compose("ssh")["environment"]["SSH_PUBLIC_KEY"].startswith("${SSH_PUBLIC_KEY:?")


def test_the_host_key_of_ssh_outlives_the_container() -> None:
    assert "/var/lib/workstation" in [mount["target"] for mount in compose("ssh")["volumes"]]
    assert "/var/lib/workstation" not in [mount["target"] for mount in compose("jupyter")["volumes"]]


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


def test_ssh_with_the_folder_of_another_user_is_refused() -> None:
    with pytest.raises(UsageError, match="runs as user 1000, but /srv/data belongs to user 4321") as caught:
        compose("full", folder=Folder(path="/srv/data", owner=4321))
    assert "chown" in caught.value.hint
    compose("full", folder=Folder(path="/srv/data", owner=1000))
    compose("full", folder=Folder(path="/srv/data", owner=4321), command=("bash",))


@pytest.mark.parametrize("text", HOSTILE)
def test_a_word_of_the_command_is_unchanged(text: str) -> None:
    command = compose(command=("echo", text))["command"]
    assert [interpolated(word) for word in command] == ["echo", text]


@pytest.mark.parametrize("text", [text for text in HOSTILE if text and "\n" not in text])
def test_a_path_is_unchanged(text: str) -> None:
    source = compose(folder=Folder(path=f"/srv/{text}"))["volumes"][0]["source"]
    assert interpolated(source) == f"/srv/{text}"


@pytest.mark.parametrize("name", ["on", "null", "y", "false"])
def test_a_name_is_text_in_yaml(name: str) -> None:
    data = yaml.safe_load(examples.compose(image_of(), request_of(name=name)))
    assert (data["name"], list(data["services"])) == (name, [name])


@pytest.mark.parametrize("path", ["/srv/a\nb", "/srv/\x1b", "/srv/\u202e"])
def test_invalid_paths(path: str) -> None:
    with pytest.raises(UsageError, match="--workspace"):
        compose(folder=Folder(path=path))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_comment_shows_how_to_start_it(variant: str) -> None:
    comment = examples.compose(image_of(variant), request_of()).split("name:")[0]
    assert all(line.startswith("#") for line in comment.splitlines())
    assert ("docker compose up -d" in comment) == bool(variant)
    assert ("docker compose run --rm train" in comment) == (not variant)
    assert ("JUPYTER_TOKEN" in comment) == (variant in ("jupyter", "full"))
    assert ("SSH_PUBLIC_KEY" in comment) == (variant in ("ssh", "full"))
