"""The fixtures of tests/integration/releases."""

from tests.integration.releases.conftest import ours, proxy

__all__ = ["ours", "proxy"]
