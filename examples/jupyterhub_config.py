# A JupyterHub that starts a container for each user, with Docker on this machine (DockerSpawner).
#
# Edit:    `image`, `hub_ip`, who may log in, and the GPUs.
# Install: pip install jupyterhub dockerspawner; npm install -g configurable-http-proxy
# Start:   jupyterhub -f jupyterhub_config.py
# Reach:   http://127.0.0.1:8000; for other machines, see "Security settings" in JupyterHub's documentation

import docker.types

c = get_config()  # noqa: F821  JupyterHub defines it

# Users of this machine, with its passwords (PAM). Other logins: `authenticator_class`.
c.Authenticator.allowed_users = {"ada", "grace"}
c.JupyterHub.bind_url = "http://127.0.0.1:8000"

# Containers reach the hub at the address that this machine has in Docker's network `bridge`:
#   docker network inspect bridge --format '{{(index .IPAM.Config 0).Gateway}}'
# With iptables rules that drop connections from containers, allow the port 8081.
c.JupyterHub.hub_ip = "172.17.0.1"
c.DockerSpawner.network_name = "bridge"
c.DockerSpawner.use_internal_ip = True

c.JupyterHub.spawner_class = "dockerspawner.DockerSpawner"
# The image needs no `cmd`: the hub's variables make it start the hub's server. This tag moves to each new release. A
# stamped tag (2.9.1-cu128-py313-jupyter-20261122) never moves. With `allowed_images`, users choose an image.
c.DockerSpawner.image = "registry.example.com/org/pt-cuda:2.9-jupyter"
c.Spawner.start_timeout = c.Spawner.http_timeout = 120  # seconds; pull the image before

# The container is removed at the end; these volumes stay. `pip install` in a container is lost with it.
c.DockerSpawner.remove = True
c.DockerSpawner.volumes = {"jupyterhub-{username}": "/workspace", "jupyterhub-home-{username}": "/home/user"}

# All users share all GPUs. `device_ids=["0"]` instead of `count` gives one; a hook (`pre_spawn_hook`) can choose it.
c.DockerSpawner.environment = {"GPU_REQUIRED": "1", "GPU_MEMORY_LIMIT": "20GB"}
c.DockerSpawner.extra_host_config = {
    "device_requests": [docker.types.DeviceRequest(count=-1, capabilities=[["gpu"]])],
    "shm_size": "8g",  # DataLoader workers and NCCL fill the 64 MB that containers get by default
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges"],
}
c.DockerSpawner.mem_limit = "64G"
