"""No login, proxy or network of this machine counts in these tests."""

from tests.unit.registry.fixtures import docker_config, lay, programs

__all__ = ["docker_config", "lay", "programs"]
