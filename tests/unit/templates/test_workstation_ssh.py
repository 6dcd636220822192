"""The keys that the SSH server of the images accepts, and the environment of a session."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from templates.ssh.files.usr.local.lib.workstation_ssh import setup


def blob(kind: str, size: int = 32) -> str:
    return base64.b64encode(len(kind).to_bytes(4, "big") + kind.encode() + b"\0\0\0 " + b"k" * size).decode()


KEY = f"ssh-ed25519 {blob('ssh-ed25519')}"


@pytest.mark.parametrize("comment", ["", " me@laptop", ' from="*",command="x"', " two words"])
def test_a_key_without_its_comment(comment: str) -> None:
    assert setup.public_key(KEY + comment) == KEY


@pytest.mark.parametrize("kind", setup.TYPES)
def test_every_type_of_key(kind: str) -> None:
    assert setup.public_key(f"{kind} {blob(kind, 300)} c").startswith(kind)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f'command="x" {KEY}', "without options"),
        (f"no-pty,{KEY}", "without options"),
        (f"{KEY}\nssh-rsa AAAA", "one key on one line"),
        (f"{KEY} \u202e", "one key on one line"),
        ("", "without options"),
        ("ssh-ed25519", "the key is incomplete"),
        ("ssh-ed25519 %%%", "the key is incomplete"),
        (f"ssh-rsa {blob('ssh-ed25519')}", "the key is incomplete"),
        (f"ssh-ed25519 {blob('ssh-ed25519', 3)}", "the key is incomplete"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----", "private key"),
    ],
)
def test_anything_else_is_refused(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        setup.public_key(line)


def test_an_invalid_key_of_a_file_is_named_by_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# the team\n{KEY} one\n\n{KEY} two\n")
    assert setup.keys({"SSH_PUBLIC_KEYS_FILE": str(file), "SSH_PUBLIC_KEY": KEY + "\n"}) == [KEY] * 3
    file.write_text(f"{KEY}\nnonsense\n")
    with pytest.raises(ValueError, match=f"{file}:2: expected"):
        setup.keys({"SSH_PUBLIC_KEYS_FILE": str(file)})


def test_a_session_has_the_environment_without_the_token() -> None:
    environ = {
        "B": 'a "b" \\ $c',
        "A": "1",
        "C": "\\",
        "HOME": "/root",
        "JUPYTER_TOKEN": "t",
        "LINES_": "a\nb",
        "bad-name": "x",
    }
    new, old = setup.set_env(environ, escapes=True), setup.set_env(environ, escapes=False)
    assert new == 'SetEnv "A=1" "B=a \\"b\\" \\\\ $c" "C=\\\\"'
    assert old == 'SetEnv "A=1" "C=\\"'
    assert setup.set_env({}, escapes=True) == ""


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("OpenSSH_8.4p1 Debian-5+deb11u7, OpenSSL 1.1.1w", False),
        ("OpenSSH_8.7p1", True),
        ("OpenSSH_10.0p2 Debian-7", True),
        ("dropbear", False),
    ],
)
def test_only_new_servers_accept_escapes(version: str, expected: bool) -> None:
    assert setup.accepts_escapes(version) is expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"{KEY}\n".encode("utf-16"), "is UTF-16, as PowerShell writes it: save it as UTF-8 or ASCII"),
        (b"\x80\x81", "is not UTF-8 text"),
        (b"-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n", "contains a private key: create a new pair"),
    ],
)
def test_a_file_without_keys(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        setup.keys({"SSH_PUBLIC_KEYS_FILE": str(file)})


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read it"):
        setup.keys({"SSH_PUBLIC_KEYS_FILE": str(tmp_path / "nowhere")})


def test_a_file_written_on_windows(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(f"\ufeff{KEY} me\r\n".encode())
    assert setup.keys({"SSH_PUBLIC_KEYS_FILE": str(file), "SSH_PUBLIC_KEY": f"{KEY}\r\n"}) == [KEY, KEY]
