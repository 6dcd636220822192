"""An extension of the Jupyter server: checks that need the server's complete configuration."""

from __future__ import annotations

import os
import sys
from typing import Any

CONFIG = 78  # EX_CONFIG of sysexits.h


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": "workstation_jupyter"}]


def _load_jupyter_server_extension(server: Any) -> None:
    """Ends a server without a login, unless JUPYTER_ALLOW_NO_LOGIN is set."""
    # Kernels inherit this: `%tensorboard` then shows TensorBoard through this server.
    os.environ.setdefault("TENSORBOARD_PROXY_URL", f"{server.base_url}proxy/%PORT%/")
    if server.identity_provider.auth_enabled:
        return
    if os.environ.get("JUPYTER_ALLOW_NO_LOGIN") != "1":
        server.log.critical(
            "The configuration sets no token and no password, so anyone could log in. Remove `token` from it, or set "
            "JUPYTER_ALLOW_NO_LOGIN=1 and an empty JUPYTER_TOKEN if only you can reach the port."
        )
        sys.exit(CONFIG)
    server.web_app.settings["allow_remote_access"] = False  # only localhost and JUPYTER_ALLOWED_HOSTS
