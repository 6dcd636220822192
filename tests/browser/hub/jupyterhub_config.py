"""Configuration of the JupyterHub that test_jupyterhub.py starts. The test sets the variables."""

from os import environ

c = get_config()  # type: ignore[name-defined]  # noqa: F821

c.JupyterHub.authenticator_class = "dummy"  # any name, with this password
c.Authenticator.allow_all = True
c.DummyAuthenticator.password = environ["TEST_PASSWORD"]
c.JupyterHub.bind_url = f"http://127.0.0.1:{environ['TEST_PORT']}"
c.JupyterHub.hub_ip = environ["TEST_HUB_IP"]  # containers of the bridge reach this machine at it
c.JupyterHub.hub_port = int(environ["TEST_HUB_PORT"])
c.ConfigurableHTTPProxy.api_url = f"http://127.0.0.1:{environ['TEST_API_PORT']}"
c.JupyterHub.spawner_class = "dockerspawner.DockerSpawner"
c.DockerSpawner.image = environ["TEST_IMAGE"]
if environ["TEST_COMMAND"]:  # else the command of the image
    c.DockerSpawner.cmd = environ["TEST_COMMAND"].split()
c.DockerSpawner.use_internal_ip = True
c.DockerSpawner.network_name = "bridge"
c.DockerSpawner.prefix = environ["TEST_PREFIX"]
c.DockerSpawner.remove = True
c.Spawner.start_timeout = c.Spawner.http_timeout = 120
