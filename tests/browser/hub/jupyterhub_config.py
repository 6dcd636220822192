"""examples/jupyterhub_config.py, for the test that starts it, test_jupyterhub.py: it sets the variables."""

import json
from os import environ

c = get_config()  # type: ignore[name-defined]  # noqa: F821
load_subconfig(environ["TEST_EXAMPLE"])  # type: ignore[name-defined]  # noqa: F821

c.JupyterHub.authenticator_class = "dummy"  # any name, with this password
c.DummyAuthenticator.password = environ["TEST_PASSWORD"]
c.JupyterHub.bind_url = f"http://127.0.0.1:{environ['TEST_PORT']}"
c.JupyterHub.hub_ip = environ["TEST_HUB_IP"]
c.JupyterHub.hub_port = int(environ["TEST_HUB_PORT"])
c.ConfigurableHTTPProxy.api_url = f"http://127.0.0.1:{environ['TEST_API_PORT']}"
c.DockerSpawner.image = environ["TEST_IMAGE"]
if environ["TEST_COMMAND"]:  # else the command of the image
    c.DockerSpawner.cmd = environ["TEST_COMMAND"].split()
c.DockerSpawner.prefix = environ["TEST_PREFIX"]
c.DockerSpawner.volumes = {environ["TEST_PREFIX"] + name: path for name, path in c.DockerSpawner.volumes.items()}
c.DockerSpawner.environment = json.loads(environ["TEST_VARIABLES"])
# This machine may have no GPU, and less memory.
del c.DockerSpawner.extra_host_config["device_requests"]
c.DockerSpawner.mem_limit = "4G"
