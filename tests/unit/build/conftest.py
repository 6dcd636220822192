from tests.unit.build.fixtures import bench, benches

__all__ = ["bench", "benches"]
