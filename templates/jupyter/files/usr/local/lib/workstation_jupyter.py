"""An extension of the Jupyter server: checks that need the server's complete configuration, or a request."""

from __future__ import annotations

import os
import sys
import uuid
from typing import Any

from jupyter_server.base.handlers import JupyterHandler
from jupyter_server_proxy.handlers import ProxyHandler
from tornado.web import HTTPError

CONFIG = 78  # EX_CONFIG of sysexits.h
SERVER = uuid.uuid4().hex  # of this process, in the requests that it proxies
HOPS = "CDN-Loop"  # RFC 8586: a proxy adds its name and refuses requests that have it


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": "workstation_jupyter"}]


def _load_jupyter_server_extension(server: Any) -> None:
    """Ends a server without a login, unless JUPYTER_ALLOW_NO_LOGIN is set."""
    ProxyHandler.prepare = _prepare_proxied
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


async def _prepare_proxied(handler: Any, *_: Any, **__: Any) -> None:
    """Refuses what must not be proxied: requests without a login, and those that this server proxied before.

    Replaces jupyter-server-proxy's own check of the login, which follows the one of JupyterHandler and redirects a
    second time: each request without a login logged a traceback.
    """
    is_websocket = handler.request.headers.get("Upgrade", "").lower() == "websocket"
    await JupyterHandler.prepare(handler, _redirect_to_login=not is_websocket)
    if handler._finished:  # redirected to the login
        return
    if handler.current_user is None:
        raise HTTPError(403)
    # With `absolute` in its path, a request for the server's own port would come back to the same handler without end:
    # two of them wrote 4 GB into the log.
    if SERVER in handler.request.headers.get(HOPS, ""):
        raise HTTPError(403, "this address leads back to this server: use the port of another program")
    handler.request.headers.add(HOPS, SERVER)  # the proxy copies the headers
