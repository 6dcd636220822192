"""The login of Jupyter servers: each checks its own before it listens, whatever configured it.

The service and a JupyterHub run `Server`. Its check is not in the configuration in /etc/jupyter, which arguments,
variables and files of the user can replace. For all other servers (`jupyter lab` in a terminal, `jupyter server` as the
command of a container), that configuration loads this module as an extension.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import quote

# jsonschema uses rfc3987_syntax, if it can be imported, to check IRIs, which Jupyter's schemas do not have. Its import
# compiles a grammar, which takes longer than the rest of the start.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]  # its import fails

from jupyter_core.application import JupyterApp  # noqa: E402
from jupyter_server.base.handlers import JupyterHandler  # noqa: E402
from jupyter_server.serverapp import ServerApp  # noqa: E402
from tornado.httpserver import HTTPServer  # noqa: E402
from tornado.iostream import IOStream  # noqa: E402
from tornado.netutil import bind_sockets  # noqa: E402
from tornado.web import HTTPError  # noqa: E402

try:
    from jupyter_server_proxy.handlers import ProxyHandler
except ImportError:  # an environment of the user's own, whose Jupyter reads /etc/jupyter too
    ProxyHandler = None

CONFIG = 78  # EX_CONFIG of sysexits.h
LIMIT_S = 60
OK = 200
REFUSED = {302, 401, 403}  # 302: to the login page
SERVER = uuid.uuid4().hex  # of this process, in the requests that it proxies
HOPS = "CDN-Loop"  # RFC 8586: a proxy adds its name and refuses requests that have it


class Server(ServerApp):  # type: ignore[misc]  # Jupyter has no types here
    """A Jupyter server that listens only if it has a login, or if the user asked for none."""

    _has_login = False
    _takes_launcher_token = False

    def load_config_file(self, suppress_errors: bool = True) -> None:
        """Reads the usual files, then that of `--config`. Jupyter reads only the latter: without /etc/jupyter."""
        named = re.sub(r"\.(py|json)$", "", os.path.abspath(os.path.expanduser(self.config_file or "")))
        if self.config_file and not any(os.path.exists(named + suffix) for suffix in (".py", ".json")):
            _refuse(self, f"--config={self.config_file}: no such file")
        for file in dict.fromkeys(("jupyter_config", "jupyter_server_config", self.config_file_name)):
            super(JupyterApp, self).load_config_file(file, path=self.config_file_paths)
        if self.config_file:
            # traitlets removes a suffix, whatever it is (`my.conf` became `my`), then reads NAME.py and NAME.json.
            super(JupyterApp, self).load_config_file(f"{named}.py")

    def init_httpserver(self) -> None:
        """The last step before the server listens: all files, arguments and extensions have had their effect."""
        require_port(self)
        self._has_login = require_login(self)
        token = launcher_token(os.environ)
        self._takes_launcher_token = bool(token) and _status(self, f"?token={quote(token or '')}") == OK
        super().init_httpserver()

    def server_info(self) -> dict[str, Any]:
        """The contents of the file that `check` and `ready` of the service read."""
        ours = {"login": self._has_login, "takes_launcher_token": self._takes_launcher_token}
        return {**super().server_info(), **ours}


def _load_jupyter_server_extension(server: Any) -> None:
    """Jupyter calls this for every server: /etc/jupyter/jupyter_server_config.d enables it. No loop runs yet."""
    # Kernels inherit this: `%tensorboard` then shows TensorBoard through this server.
    if ProxyHandler:
        os.environ.setdefault("TENSORBOARD_PROXY_URL", f"{server.base_url}proxy/%PORT%/")
    if not isinstance(server, Server):
        try:
            require_login(server)
        except Exception as error:  # Jupyter would log it, and start without this extension
            _refuse(server, f"cannot check the login: {error!r}")


def require_port(server: Any) -> None:
    """Ends a server whose port is taken, once: the service would start again and again."""
    if server.sock or server.port_retries:
        return
    try:
        sockets = bind_sockets(server.port, server.ip)
    except OSError as error:
        _refuse(
            server,
            f"cannot listen on port {server.port} of {server.ip or 'all addresses'}: {error.strerror}: "
            "set JUPYTER_PORT to another port, or correct the setting of `ServerApp.port` or `ServerApp.ip`",
        )
    for listening in sockets:
        listening.close()


def require_login(server: Any) -> bool:
    """Whether the server has a login. Ends one without, unless JUPYTER_ALLOW_NO_LOGIN=1 and JUPYTER_TOKEN is empty.

    Asks the server itself, so it does not matter which of the many settings took the login away.
    """
    settings = server.web_app.settings
    settings["allow_unauthenticated_access"] = False  # what extensions serve, unless a handler explicitly allows it
    status = _status(server)
    if status in REFUSED:
        return True
    if status != OK:
        _refuse(
            server,
            f"cannot check the login: the server answers {status} to GET /api/me without a login, instead of 403. "
            "Remove the setting or the extension that changes this answer",
        )
    if not login_is_off(os.environ):
        _refuse(
            server,
            "the server answers without a login, so anyone could use it. Remove the setting that turns the login off "
            "(such as an empty `token`, or `identity_provider_class`) from its arguments and configuration files, or "
            "set JUPYTER_ALLOW_NO_LOGIN=1 and an empty JUPYTER_TOKEN if only you can reach the port",
        )
    # Web pages that someone visits may reach this server, even under a name of their own (DNS rebinding): so it answers
    # to localhost and JUPYTER_ALLOWED_HOSTS only, and only to its own pages.
    settings.update(
        allow_remote_access=False, local_hostnames=hosts(os.environ), allow_origin="", allow_origin_pat="",
        disable_check_xsrf=False,
    )  # fmt: skip
    return False


def login_is_off(environ: Any) -> bool:
    """Whether the user asked for no login, with both variables."""
    if environ.get("JUPYTER_ALLOW_NO_LOGIN") != "1":
        return False
    token = launcher_token(environ)
    return (environ.get("JUPYTER_TOKEN") if token is None else token) == ""


def launcher_token(environ: Any) -> str | None:
    """The token that `prepare` of the service wrote, that of JUPYTER_TOKEN or a random one; else None."""
    file = Path(environ.get("STATE_DIR", "/nowhere"), "jupyter-token")
    return file.read_text() if file.exists() else None


def hosts(environ: Any) -> list[str]:
    """The host names that a server without a login answers to."""
    names = ["localhost", *(name.lower() for name in environ.get("JUPYTER_ALLOWED_HOSTS", "").split(",") if name)]
    # Kubeflow, whose NB_PREFIX is /notebook/NAMESPACE/NAME, asks the notebook's Service whether it is idle.
    parts = environ.get("NB_PREFIX", "").strip("/").split("/")
    return [*names, f"{parts[2]}.{parts[1]}.svc.cluster.local"] if parts[0] == "notebook" and len(parts) == 3 else names


def _status(server: Any, query: str = "") -> int:
    """The status of the answer to a request without credentials, other than those in `query`.

    Of /api/me, which needs a login and nothing else: other paths may be refused by an `authorizer_class` too.
    """
    path = f"{server.base_url}api/me{query}"
    status: int = server.io_loop.run_sync(lambda: _status_of(server, path), timeout=LIMIT_S)
    return status


async def _status_of(server: Any, path: str) -> int:
    """The status of the answer of the server, over a pair of sockets: no one else can ask."""
    ours, theirs = (IOStream(end) for end in socket.socketpair())
    logging.disable(logging.CRITICAL)  # a refusal would be in the log at each start
    try:
        HTTPServer(server.web_app).handle_stream(theirs, ("127.0.0.1", 0))
        # Jupyter's check of the host, which would hide that of the login, admits all addresses of the loopback.
        await ours.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        return int((await ours.read_until(b"\r\n")).split()[1])
    finally:
        logging.disable(logging.NOTSET)
        ours.close()


def _refuse(server: Any, message: str) -> None:
    server.log.critical(f"error: {message}")
    sys.exit(CONFIG)


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


if ProxyHandler:
    ProxyHandler.prepare = _prepare_proxied
