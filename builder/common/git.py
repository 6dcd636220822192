"""The git repository of a checkout."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

from builder.common.errors import UsageError


def run_git(root: Path, *arguments: str, default: str | None = None) -> str:
    """The output of git. If git fails, returns `default` if it is given, or else raises UsageError."""
    try:
        process = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"},
        )
    except FileNotFoundError:
        error = UsageError("git is not installed", hint="Install it: apt-get install git")
    else:
        if process.returncode == 0:
            return process.stdout
        error = UsageError(f"git {arguments[0]}: {process.stderr.strip()[:500]}")
    if default is None:
        raise error
    return default


def commit(root: Path, revision: str) -> str:
    """The commit id of a revision; empty if there is no such revision."""
    if not revision or revision.startswith("-"):
        return ""
    return run_git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", default="").strip()


def export(root: Path, revision: str, folder: Path) -> None:
    """Writes the files of the checkout as they are in a revision. Raises UsageError."""
    commit_id = commit(root, revision)
    if not commit_id:
        raise UsageError(f"no git revision {revision[:100]!r}", hint="`git log --oneline` lists revisions.")
    archive = folder / "revision.tar"
    run_git(root, "archive", "--format=tar", f"--output={archive}", commit_id, "--", ".")
    with tarfile.open(archive) as tar:
        # As extractall(filter="tar"), which Debian 12's Python 3.11.2 lacks. Components have absolute links, which the
        # filter "data" refuses. Source: library/tarfile, "Supporting older Python versions".
        tar.extraction_filter = getattr(tarfile, "tar_filter", None)
        tar.extractall(folder)  # noqa: S202  git wrote the archive
    archive.unlink()


def state(root: Path) -> str:
    """The commit of the checkout, with `+changes` if its files differ from it; empty outside a repository."""
    head = commit(root, "HEAD")
    changes = (
        run_git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", default="").strip() if head else ""
    )
    return f"{head}+changes" if changes else head
