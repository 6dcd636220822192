"""The Jupyter server of this image: every interface, a token always, files in /workspace."""

import json
import os
import warnings
from pathlib import Path

from jupyter_server.utils import JupyterServerAuthWarning

c = get_config()  # type: ignore[name-defined]  # noqa: F821

c.ServerApp.ip = "0.0.0.0"  # inside the container; what is reachable is what `docker run -p` publishes
c.ServerApp.port = int(os.environ.get("JUPYTER_PORT", "8888"))
c.ServerApp.port_retries = 0  # another port would not be the published one
c.ServerApp.open_browser = False
c.ServerApp.root_dir = "/workspace"
c.ServerApp.terminado_settings = {"shell_command": ["/bin/bash"]}
c.ServerApp.allow_remote_access = True  # the token guards it; the Host header is whatever the user typed
c.ServerApp.allow_unauthenticated_access = False  # of extensions too, unless they say that they mean it
warnings.filterwarnings("ignore", category=JupyterServerAuthWarning)  # lists those that have now to be logged in for
c.Application.log_level = "WARN"  # the launcher says where it is
# No language servers are installed: do not list them at every start.
c.LanguageServerManager.autodetect = False
if "JUPYTER_CERT" in os.environ:
    c.ServerApp.certfile, c.ServerApp.keyfile = os.environ["JUPYTER_CERT"], os.environ["JUPYTER_KEY"]

# Whoever runs Jupyter by hand, without the launcher, has Jupyter's own random token.
if "STATE_DIR" in os.environ:
    c.IdentityProvider.token = (Path(os.environ["STATE_DIR"]) / "jupyter-token").read_text()

# Web pages of other components, behind the login of this server and listening on the loopback alone.
c.ServerProxy.servers = {
    file.stem: json.loads(file.read_text()) for file in sorted(Path("/etc/jupyter/proxied.d").glob("*.json"))
}
c.ServerProxy.host_allowlist = []  # no proxy to other machines
