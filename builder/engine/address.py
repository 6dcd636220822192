"""The address of the engine that the `docker` command would use.

docker-py follows contexts too, but uses the local socket in place of a missing context, and finds no context
without a config.json. See https://docs.docker.com/engine/manage-resources/contexts/.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from builder.common.errors import EngineError

SOCKET = "unix:///var/run/docker.sock"


@dataclass(frozen=True, kw_only=True)
class EngineAddress:
    """The address of an engine. `variables` select it for docker-py, `docker` and its plugins, over any that are set.

    `selected_by` is for messages: `DOCKER_HOST`, `the Docker context podman`; empty for the local socket.
    """

    host: str = SOCKET
    variables: Mapping[str, str] = field(default_factory=dict)
    selected_by: str = ""


def engine_address(environ: Mapping[str, str]) -> EngineAddress:
    """The engine of DOCKER_HOST, or of the context DOCKER_CONTEXT, or of the current context, or of the local socket.

    Raises EngineError for a context that does not exist or cannot be read.
    """
    if host := environ.get("DOCKER_HOST"):
        return EngineAddress(
            host=host, variables={"DOCKER_HOST": host, "DOCKER_CONTEXT": ""}, selected_by="DOCKER_HOST"
        )
    folder = Path(environ.get("DOCKER_CONFIG") or Path(environ.get("HOME") or Path.home()) / ".docker")
    name = environ.get("DOCKER_CONTEXT", "")
    if not name:
        with suppress(OSError, ValueError, AttributeError):  # the docker command uses the local socket then
            name = json.loads((folder / "config.json").read_bytes()).get("currentContext") or ""
    if name in ("", "default"):
        return EngineAddress(variables={"DOCKER_HOST": SOCKET, "DOCKER_CONTEXT": ""})

    # Contexts are in folders that are named after the SHA-256 of their names.
    key = hashlib.sha256(name.encode()).hexdigest()
    path = folder / "contexts" / "meta" / key / "meta.json"
    try:
        endpoint: dict[str, Any] = json.loads(path.read_bytes())["Endpoints"]["docker"]
        host = str(endpoint["Host"]) or SOCKET
    except (OSError, ValueError, LookupError, TypeError) as error:
        fault = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {path}"
        is_set = environ.get("DOCKER_CONTEXT")
        select = "Set DOCKER_CONTEXT to one of them." if is_set else "Select one: docker context use"
        hint = f"`docker context ls` lists the contexts. {select}"
        raise EngineError(f"the Docker context {name!r} {fault}", hint=hint) from error
    certificates = folder / "contexts" / "tls" / key / "docker"
    has_tls = certificates.is_dir()
    missing = [file for file in ("ca.pem", "cert.pem", "key.pem") if not (certificates / file).exists()]
    if has_tls and missing:
        raise EngineError(
            f"the Docker context {name!r} has no {', '.join(missing)}",
            hint="Create the context again with ca, cert and key: docker context create --help",
        )
    is_verified = has_tls and not endpoint.get("SkipTLSVerify")
    variables = {
        "DOCKER_HOST": host,
        "DOCKER_CONTEXT": "",
        "DOCKER_CERT_PATH": str(certificates) if has_tls else "",
        "DOCKER_TLS": "1" if has_tls and not is_verified else "",
        "DOCKER_TLS_VERIFY": "1" if is_verified else "",
    }
    return EngineAddress(host=host, variables=variables, selected_by=f"the Docker context {name}")
