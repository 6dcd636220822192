"""Where the tests find the checkout and their own files."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UNIT = ROOT / "tests/unit"
