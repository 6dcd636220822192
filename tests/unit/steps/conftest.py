"""No login, proxy or network of this machine counts in these tests."""

from tests.unit.build.fixtures import bench, benches
from tests.unit.registry.fixtures import docker_config, lay, programs

__all__ = ["bench", "benches", "docker_config", "lay", "programs"]
