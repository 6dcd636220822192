"""Fetches of git from a real repository."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from builder.common import git
from builder.common.errors import UsageError
from tests.integration.checkout import committed


@pytest.mark.parametrize("most_bytes", [2_000_000, 900_000])
def test_a_fetch_of_git_ends_at_its_limit(tmp_path: Path, most_bytes: int) -> None:
    """A repository of others may have more than the disk."""
    megabyte = secrets.token_hex(1_000_000)  # 1 MB after compression
    commit, repository = committed(tmp_path / "origin", {"data": megabyte}), tmp_path / "fetched"
    repository.mkdir()
    git.run_git(repository, "init", "-q", "--bare")
    fetch = ("fetch", "-q", f"file://{tmp_path}/origin", commit)
    git.run_git(repository, "config", "transfer.unpackLimit", "100")  # as a user may have it
    if most_bytes > 1_000_000:
        git.run_git(repository, *fetch, most_bytes=most_bytes)
        assert git.commit(repository, commit) == commit
    else:
        with pytest.raises(UsageError, match="index-pack failed, probably at the limit of 900,000 bytes"):
            git.run_git(repository, *fetch, most_bytes=most_bytes)
