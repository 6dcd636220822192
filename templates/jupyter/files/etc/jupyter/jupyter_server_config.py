"""The Jupyter server of this image: every interface, a random token unless one is given, files in /workspace."""

import logging
import os
import re
import sys

c = get_config()  # type: ignore[name-defined]  # noqa: F821

c.ServerApp.ip = "0.0.0.0"  # inside the container; what is reachable is what `docker run -p` publishes
c.ServerApp.port = 8888
c.ServerApp.port_retries = 0  # another port would not be the published one
c.ServerApp.open_browser = False
c.ServerApp.root_dir = "/workspace"
c.ServerApp.terminado_settings = {"shell_command": ["/bin/bash"]}
c.ServerApp.allow_remote_access = True  # the token guards it; the Host header is whatever the user typed
# No language servers are installed: do not list them at every start.
c.LanguageServerManager.autodetect = False

# Jupyter takes JUPYTER_TOKEN from the environment; set but empty, it would mean "no login at all".
if os.environ.get("JUPYTER_TOKEN") == "" and os.environ.get("JUPYTER_ALLOW_NO_LOGIN") != "1":
    sys.exit(
        "JUPYTER_TOKEN is empty, which would let anyone in. Unset it for a random token, give one, "
        "or set JUPYTER_ALLOW_NO_LOGIN=1 if the port is reachable by you alone."
    )


class _OneUrl(logging.Filter):
    """Ends the start with the one address that works from the host; a file's or a container's name does not."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        url = re.search(r"http://127\.0\.0\.1:8888/\S*token=\S+", text)
        if url and record.levelno == logging.CRITICAL:
            record.msg, record.args = f"JupyterLab is ready (with `docker run -p 8888:8888`):\n\n    {url[0]}", ()
        return True


c.ServerApp.logging_config = {
    "filters": {"one_url": {"()": _OneUrl}},
    "handlers": {"console": {"filters": ["one_url"]}},
}
