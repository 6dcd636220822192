"""Test results by digest, what they depend on, signatures, SBOM and provenance."""
