"""Creates authorized keys, a host key and the configuration of sshd in the state folder.

sshd runs as the container's user, not as root: no other user can log in, and it needs no capability.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

SKIPPED = 77
LOWEST_UID = 500  # the lowest user id that libnss-extrausers accepts
TYPES = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "ssh-rsa",
    "sk-ssh-ed25519@openssh.com",
    "sk-ecdsa-sha2-nistp256@openssh.com",
)
# Variables that a session does not get from the container: sshd or the shell sets them, or they are of other services.
NOT_FOR_SESSIONS = {"HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "SHLVL", "_", "TERM", "MAIL", "JUPYTER_TOKEN"}
CONFIG = """\
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
# Keys only, and only the container's user.
AllowUsers {user}
AuthenticationMethods publickey
PubkeyAuthentication yes
PasswordAuthentication no
# Two names of the same option. Before OpenSSH 8.7, the second one overrides the first.
KbdInteractiveAuthentication no
ChallengeResponseAuthentication no
PermitEmptyPasswords no
PermitRootLogin {root}
HostbasedAuthentication no
GSSAPIAuthentication no
KerberosAuthentication no
UsePAM no
# StrictModes would refuse the folder of the keys, because others can write to the folder above it.
StrictModes no
PermitUserEnvironment no
PermitUserRC no
X11Forwarding no
PrintMotd no
LoginGraceTime 30
# Each key that an agent offers before the right one is a try; VS Code opens many sessions over one connection.
MaxAuthTries 20
MaxSessions 100
ClientAliveInterval 60
Subsystem sftp internal-sftp -d /workspace -u {umask:03o}
{environment}
"""


def public_key(line: str) -> str:
    """One public key as `type base64`, without its comment. Raises ValueError for anything else.

    The decoded key begins with the name of its type (RFC 4253, 6.6).
    """
    if "PRIVATE KEY" in line:
        raise ValueError("this is a private key: create a new pair, and use the key in its .pub file")
    if not line.isprintable():
        raise ValueError("expected one key on one line: put more keys into SSH_PUBLIC_KEYS_FILE")
    parts = line.split(" ", 2)
    if parts[0] not in TYPES:
        raise ValueError("expected `ssh-ed25519 AAAA... comment`, as in ~/.ssh/id_ed25519.pub, without options")
    try:
        blob = base64.b64decode(parts[1], validate=True)
    except (IndexError, binascii.Error) as error:
        raise ValueError("the key is incomplete: copy the line of the .pub file again") from error
    size = int.from_bytes(blob[:4], "big")
    if blob[4 : 4 + size] != parts[0].encode() or len(blob) < 4 + size + 32:
        raise ValueError("the key is incomplete: copy the line of the .pub file again")
    return f"{parts[0]} {parts[1]}"


def keys(environ: Mapping[str, str]) -> list[str]:
    """The public keys that may log in. The text of a ValueError begins with the variable, or the file and line."""
    accepted = []
    if text := environ.get("SSH_PUBLIC_KEY", ""):
        accepted.append(_public_key("SSH_PUBLIC_KEY", text.strip(" \r\n")))
    if file := environ.get("SSH_PUBLIC_KEYS_FILE", ""):
        text = _text(file)
        if "PRIVATE KEY" in text:
            raise ValueError(f"{file} contains a private key: create a new pair, and use its .pub file")
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip() and not line.startswith("#"):
                accepted.append(_public_key(f"{file}:{number}", line.strip()))
    return accepted


def _text(file: str) -> str:
    """The text of a file. Raises ValueError if it is not readable or not UTF-8."""
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise ValueError(
            f"{file}: user {os.getuid()} cannot read it ({error.strerror}): run `chmod a+r` on the file on the host"
        ) from error
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(f"{file} is UTF-16, as PowerShell writes it: save it as UTF-8 or ASCII")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: save it as UTF-8") from error


def _public_key(where: str, line: str) -> str:
    """Calls `public_key`; puts `where` before the text of its error."""
    try:
        return public_key(line)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def set_env(environ: Mapping[str, str], *, escapes: bool) -> str:
    """The SetEnv line of sshd_config(5), which gives a session the environment of `docker exec`.

    Omits values that such a line cannot contain, and the session's own variables. Without `escapes` (OpenSSH 8.7 and
    newer), it also omits values with a quotation mark.
    """
    words = []
    for name, value in sorted(environ.items()):
        if name in NOT_FOR_SESSIONS or not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) or not value.isprintable():
            continue
        if escapes:
            value = value.replace("\\", "\\\\").replace('"', '\\"')  # noqa: PLW2901
        elif '"' in value:
            continue
        words.append(f'"{name}={value}"')
    return f"SetEnv {' '.join(words)}" if words else ""


def accepts_escapes(version: str) -> bool:
    """Whether sshd accepts escapes in SetEnv, by the output of `ssh -V`: `OpenSSH_9.2p1 Debian-2+deb12u7, ...`."""
    match = re.match(r"OpenSSH_(\d+)\.(\d+)", version)
    return match is not None and (int(match[1]), int(match[2])) >= (8, 7)


def host_key(home: Path | None, folder: Path) -> Path:
    """The container's host key in `home`, or without a home in `folder`. Generates the key if it does not exist."""
    key = (home or folder) / "ssh_host_key"
    if not home:
        print("warning: the host key changes at every start: make /var/lib/workstation writable", flush=True)
    public, draft = Path(f"{key}.pub"), Path(f"{key}.new")
    if not key.exists():  # renamed last, so a key that exists is complete
        for old in (draft, Path(f"{draft}.pub")):
            old.unlink(missing_ok=True)
        command = ["/usr/bin/ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(draft)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        Path(f"{draft}.pub").rename(public)
        draft.rename(key)
    return key


def main(home: Path | None) -> int:
    """Prepares the service; returns the exit status. `home` is the folder of the host key, None if there is none."""
    environ = os.environ
    try:
        public_keys = keys(environ)
    except (OSError, ValueError) as error:
        print(f"error: {error}")
        return 1
    if not public_keys:
        print("SSH is off: set SSH_PUBLIC_KEY or SSH_PUBLIC_KEYS_FILE to turn it on")
        return SKIPPED
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        if os.getuid() < LOWEST_UID:
            why, fix = f"ids below {LOWEST_UID} get no name", "start with `--user root -e NB_UID=...`"
        else:
            why, fix = "/var/lib/extrausers is not writable", "add --tmpfs /var/lib/extrausers"
        print(f"error: SSH needs a user with a name, and user {os.getuid()} has none ({why}): {fix}")
        return 1
    folder = Path(environ["STATE_DIR"]) / "ssh"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    key = host_key(home, folder)
    for suffix in ("", ".pub"):
        (folder / f"host_key{suffix}").symlink_to(f"{key}{suffix}")
    (folder / "authorized_keys").write_text("".join(f"{line}\n" for line in public_keys))
    config = folder / "sshd_config"
    version = subprocess.run(["/usr/bin/ssh", "-V"], stderr=subprocess.PIPE, text=True, check=False).stderr
    umask = os.umask(0o077)
    os.umask(umask)
    session = {name: value for name, value in environ.items() if name != "STATE_DIR"}
    config.write_text(
        CONFIG.format(
            user=user,
            port=environ.get("SSH_PORT", "22"),
            folder=folder,
            umask=umask,
            root="no" if os.getuid() else "prohibit-password",  # root only with NB_UID=0
            environment=set_env(session, escapes=accepts_escapes(version)),
        )
    )
    if os.getuid() == 0:  # with NB_UID=0: sshd as root needs this folder, which Debian's own service creates
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    return subprocess.run(["/usr/sbin/sshd", "-t", "-f", str(config)], check=False).returncode
