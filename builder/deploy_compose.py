"""A Compose file for an image. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from builder import deploy
from builder.deploy import JUPYTER, SSH, Subject, Wish
from builder.errors import UsageError
from builder.settings import Health


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder of the host, as an absolute path; `owner` is 0 where it is not known, or is root."""

    path: str
    owner: int = 0


def render(subject: Subject, wish: Wish, folder: Folder | None = None) -> str:
    """Without a folder the work is in a volume. Raises UsageError."""
    deploy.check(subject, wish)
    if folder:
        deploy.path(folder.path, "--workspace")
        if SSH in subject.services and not wish.command and folder.owner not in (0, deploy.USER):
            raise UsageError(
                f"the SSH server of the image runs as user {deploy.USER}, and {folder.path} belongs to {folder.owner}",
                hint=f"Give the folder to {deploy.USER} (chown), or leave out --workspace for a volume.",
            )
    service = _service(subject, wish, folder)
    volumes: dict[str, Any] = {one["source"]: {} for one in service["volumes"] if one["type"] == "volume"}
    data = {"name": wish.name, "services": {wish.name: service}, "volumes": volumes}
    return deploy.dump([data], _comment(subject, wish))


def _service(subject: Subject, wish: Wish, folder: Folder | None) -> dict[str, Any]:
    serves = bool(subject.services) and not wish.command
    service: dict[str, Any] = {"image": str(subject.reference)}
    if wish.command:
        service["command"] = [_literal(word) for word in deploy.training(subject, wish)]
    elif not serves:
        service |= {"command": ["bash"], "stdin_open": True, "tty": True}
    owner = folder.owner if folder and folder.owner else deploy.USER
    service["user"] = f"{owner}:{deploy.GROUP}"
    service["restart"] = "unless-stopped" if serves else "no"
    environment = _environment(subject, wish, serves=serves)
    if environment:
        service["environment"] = environment
    if serves:
        service["ports"] = [f"127.0.0.1:{port}:{port}" for port in subject.ports.values()]
        health = Health(command=deploy.CHECK)
        service["healthcheck"] = {
            "test": ["CMD", *health.command],
            "interval": f"{health.interval}s",
            "timeout": f"{health.timeout}s",
            "start_period": f"{health.start_period}s",
            "retries": health.retries,
        }
    elif subject.services:
        service["healthcheck"] = {"disable": True}  # the image's own asks for services
    service["volumes"] = _volumes(subject, folder, serves=serves)
    # torch.compile loads from /tmp what it compiled there.
    service["tmpfs"] = [f"{deploy.TMP}:exec,mode=1777"]
    service["shm_size"] = wish.shm
    service |= {"read_only": True, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"]}
    if resources := _resources(wish):
        service["deploy"] = {"resources": resources}
    return service


def _environment(subject: Subject, wish: Wish, *, serves: bool) -> dict[str, str | None]:
    """A variable without a value is handed on if it is set where Compose runs, and else is not set in the container."""
    found: dict[str, str | None] = {"GPU_REQUIRED": "1"} if wish.gpus else {}
    if serves and JUPYTER in subject.services:
        found["JUPYTER_TOKEN"] = None
    if serves and SSH in subject.services:
        only = len(subject.services) == 1
        found["SSH_PUBLIC_KEY"] = "${SSH_PUBLIC_KEY:?set it to the line of your .pub file}" if only else None
        found["SSH_PORT"] = str(deploy.SSH_PORT)
    return found


def _volumes(subject: Subject, folder: Folder | None, *, serves: bool) -> list[dict[str, Any]]:
    work: dict[str, Any] = {"type": "volume", "source": "workspace", "target": deploy.WORKSPACE}
    if folder:
        # A folder that Compose has to make would be root's.
        source = _literal(folder.path)
        work = {"type": "bind", "source": source, "target": deploy.WORKSPACE, "bind": {"create_host_path": False}}
    found = [work, {"type": "volume", "source": "home", "target": deploy.HOME}]
    if serves and SSH in subject.services:
        found.append({"type": "volume", "source": "host-keys", "target": deploy.HOST_KEYS})
    return found


def _resources(wish: Wish) -> dict[str, Any]:
    limits: dict[str, Any] = {"cpus": str(wish.cpus)} if wish.cpus else {}
    if wish.memory:
        limits["memory"] = str(wish.memory)
    found: dict[str, Any] = {"limits": limits} if limits else {}
    if wish.gpus:
        device = {"driver": "nvidia", "count": wish.gpus, "capabilities": ["gpu"]}
        found["reservations"] = {"devices": [device]}
    return found


def _literal(text: str) -> str:
    """Compose replaces $NAME and ${NAME} by variables; two dollars are one."""
    return text.replace("$", "$$")


def _comment(subject: Subject, wish: Wish) -> list[str]:
    lines = [f"{subject.reference}, written by `builder deploy compose`: an example to edit.", ""]
    if wish.command:
        lines.append("Run it:  docker compose up --exit-code-from " + wish.name)
    elif subject.services:
        lines.append("Start:   docker compose up -d && docker compose logs -f")
        lines.append("Stop:    docker compose down     (the volumes stay; --volumes deletes them, and your work)")
        if JUPYTER in subject.services:
            lines.append("Login:   the log has the address, token included; your own: JUPYTER_TOKEN=... before `up`.")
        if SSH in subject.services:
            lines.append('SSH:     SSH_PUBLIC_KEY="$(cat ~/.ssh/id_ed25519.pub)" before `up`;')
            lines.append(f"         ssh -p {deploy.SSH_PORT} user@127.0.0.1")
        lines.append("Ports are open on this machine alone; from elsewhere: ssh -L 8888:127.0.0.1:8888 MACHINE")
    else:
        lines.append(f"A shell: docker compose run --rm {wish.name}")
        lines.append(f"A command: docker compose run --rm {wish.name} python train.py")
    if wish.gpus:
        lines.append("GPUs need NVIDIA's container toolkit on the host.")
    return lines
