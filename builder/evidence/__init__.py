"""Test results by digest, the test files that they depend on, signatures, SBOM and provenance."""
