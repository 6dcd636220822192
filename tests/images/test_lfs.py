"""Git LFS, for models and data sets in git repositories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_large_files_are_pointers_in_the_repository(shell: Callable[..., Any]) -> None:
    container = shell()
    container.run("git init -q /tmp/own && cd /tmp/own && git lfs track '*.bin' && head -c 100000 /dev/zero >model.bin")
    container.run("cd /tmp/own && git add . && git -c user.name=me -c user.email=me@example.test commit -qm first")
    assert "git-lfs.github.com/spec/v1" in container.run("cd /tmp/own && git show HEAD:model.bin")


def test_the_settings_are_in_one_order(shell: Callable[..., Any]) -> None:
    """git-lfs writes them in the order of a Go map: two builds of one lock gave two operating systems."""
    section, *settings = shell().run("cat /etc/gitconfig").splitlines()
    assert section == '[filter "lfs"]'
    assert settings == sorted(settings)
    assert len(settings) == 4
