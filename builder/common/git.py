"""The git repository of a checkout."""

from __future__ import annotations

import os
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from builder.common.errors import UsageError


def run_git(
    root: Path,
    *arguments: str,
    default: str | None = None,
    timeout_s: float | None = None,
    most_bytes: int | None = None,
) -> str:
    """The output of git. If git fails, returns `default` if it is given, or else raises UsageError.

    git fails if it runs for more than `timeout_s` seconds, or if it fetches more than `most_bytes`, compressed.
    """
    command = ["git", "-C", str(root), *arguments]
    if most_bytes is not None:
        # One file for all objects, whose size the kernel limits. The unit of `ulimit -f` is 512 bytes. Source: POSIX,
        # "ulimit". git 2.39 lets `transfer.unpackLimit` of the user override the other setting.
        one_file = ["-c", "fetch.unpackLimit=1", "-c", "transfer.unpackLimit=1"]
        limited = ["sh", "-c", f'ulimit -f {most_bytes // 512} && exec "$@"', "sh"]
        command = [*limited, "git", "-C", str(root), *one_file, *arguments]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, encoding="utf-8", check=False, stdin=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"}, timeout=timeout_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        error = UsageError(f"git {arguments[0]} did not end in {timeout_s:.0f} s")
    except FileNotFoundError:
        error = UsageError("git is not installed", hint="Install it: apt-get install git")
    else:
        if process.returncode == 0:
            return process.stdout
        error = UsageError(f"git {arguments[0]}: {process.stderr.strip()[:500]}")
        if most_bytes is not None and "invalid index-pack output" in process.stderr:  # the kernel ended that program
            limit = f"probably at the limit of {most_bytes:,} bytes"
            error = UsageError(f"git {arguments[0]}: its program index-pack failed, {limit}")
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


@contextmanager
def archive(root: Path, commit_id: str) -> Iterator[BinaryIO]:
    """A tar of a commit's files as git writes it. Raises UsageError if git fails after the block has read it.

    Without the settings of this machine: a repository of others can name the filters in them, such as that of git-lfs.
    """
    command = ["git", "-C", str(root), "archive", "--format=tar", commit_id]
    environ = {**os.environ, "LC_ALL": "C", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ) as process:
        try:
            assert process.stdout
            yield cast("BinaryIO", process.stdout)
            while process.stdout.read(1 << 20):  # padding at its end, which a reader of tar leaves
                pass
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise UsageError(f"git archive failed with status {process.returncode}")


def state(root: Path) -> str:
    """The commit of the checkout, with `+changes` if its files differ from it; empty outside a repository."""
    head = commit(root, "HEAD")
    changes = (
        run_git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", default="").strip() if head else ""
    )
    return f"{head}+changes" if changes else head
