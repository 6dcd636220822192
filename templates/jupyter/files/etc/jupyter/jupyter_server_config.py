"""Configuration of the Jupyter server: all interfaces, always a token, files in /workspace."""

import json
import logging
import os
import re
import sys
import warnings
from pathlib import Path

from jupyter_server.utils import JupyterServerAuthWarning


class _WithoutTokens(logging.LogRecord):
    """A log record without tokens. Tornado logs the complete address of a failed request.

    Jupyter prints the address with a token that it generated at the level CRITICAL, so that its user can log in.
    """

    def getMessage(self) -> str:
        message = super().getMessage()
        is_address = self.levelno == logging.CRITICAL
        return message if is_address else re.sub(r"(token=)[^&\s'\"]+", r"\1[secret]", message)


environ = os.environ
c = get_config()  # type: ignore[name-defined]  # noqa: F821

c.ServerApp.ip = ""  # all addresses of the container, IPv6 too; only `docker run -p` makes it reachable
c.ServerApp.port = int(environ.get("JUPYTER_PORT") or "8888")
c.ServerApp.port_retries = 0  # another port would not be published
c.ServerApp.base_url = environ.get("JUPYTER_BASE_URL") or environ.get("NB_PREFIX") or "/"
c.ServerApp.open_browser = False
c.ServerApp.root_dir = "/workspace"
c.ServerApp.terminado_settings = {"shell_command": ["/bin/bash"]}
c.ServerApp.allow_root = os.getuid() == 0  # the launcher starts services as root only with NB_UID=0
c.ServerApp.allow_unauthenticated_access = False  # also for extensions, unless a handler explicitly allows it
warnings.filterwarnings("ignore", category=JupyterServerAuthWarning)  # lists the handlers that now need a login
c.Application.log_level = "WARN"  # the launcher prints the address
# For each kernel, Tornado warns about the time limit of pings: jupyter_server sets it in milliseconds, for itself.
logging.getLogger("tornado.general").addFilter(lambda record: "websocket_ping_timeout" not in record.getMessage())
# Only `docker run -p` makes the port reachable.
for name in ("Server", "ServerApp"):  # the service, and `jupyter lab`
    logging.getLogger(name).addFilter(lambda record: "not using encryption" not in record.getMessage())
# No language servers are installed: do not log that at every start.
c.LanguageServerManager.autodetect = False
if environ.get("JUPYTER_CERT"):
    c.ServerApp.certfile, c.ServerApp.keyfile = environ["JUPYTER_CERT"], environ["JUPYTER_KEY"]

# Users can install another JupyterLab, which has its own files.
assets = Path(sys.prefix, "share/jupyter/lab")
c.LabApp.app_dir = str(assets if assets.exists() else "/opt/venv/share/jupyter/lab")

# Without the service (`jupyter lab` as command), Jupyter uses JUPYTER_TOKEN, or generates and prints a token.
token, file = None, Path(environ.get("STATE_DIR", "/nowhere"), "jupyter-token")
if not file.exists() and not environ.get("JUPYTER_TOKEN"):
    file = Path(environ.get("JUPYTER_TOKEN_FILE") or file)
if file.is_file():
    try:
        token = c.IdentityProvider.token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"error: user {os.getuid()} cannot read {file} ({error}): make it a readable text file")
logging.setLogRecordFactory(_WithoutTokens)

# A web page can point its own name at this server (DNS rebinding) and then read everything that needs no login. With a
# login, any Host header is allowed.
hosts = [name.lower() for name in environ.get("JUPYTER_ALLOWED_HOSTS", "").split(",") if name]
c.ServerApp.allow_remote_access = token != "" and not hosts
c.ServerApp.local_hostnames = ["localhost", *hosts]

# Web pages of other components, behind the login of this server, on Unix sockets of its user.
c.ServerProxy.servers = {
    file.stem: json.loads(file.read_text()) for file in sorted(Path("/etc/jupyter/proxied.d").glob("*.json"))
}
c.ServerProxy.host_allowlist = []  # no proxy to other machines
