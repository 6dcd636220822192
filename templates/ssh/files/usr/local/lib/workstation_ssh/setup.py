"""Makes what sshd needs in the state folder: authorized keys, a host key, a configuration.

sshd runs as the container's user, not as root: it can let nobody else in, and needs no capability.
"""

from __future__ import annotations

import base64
import binascii
import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

NOT_WANTED = 77
TYPES = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "ssh-rsa",
    "sk-ssh-ed25519@openssh.com",
    "sk-ecdsa-sha2-nistp256@openssh.com",
)
HOST_KEYS = Path("/var/lib/workstation")  # in the container's own layer: kept over a restart, no image has it
# What a session must not get from the container: its own, and what only the launcher's children should have.
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
# Two names of one thing: before OpenSSH 8.7 the second overrules the first.
KbdInteractiveAuthentication no
ChallengeResponseAuthentication no
PermitEmptyPasswords no
PermitRootLogin no
HostbasedAuthentication no
GSSAPIAuthentication no
KerberosAuthentication no
UsePAM no
# The keys lie in a folder of this user's alone, below one that is open to others.
StrictModes no
PermitUserEnvironment no
PermitUserRC no
X11Forwarding no
PrintMotd no
LoginGraceTime 30
MaxAuthTries 4
ClientAliveInterval 60
Subsystem sftp internal-sftp
{environment}
"""


def public_key(line: str) -> str:
    """`type base64` of one public key; its comment is dropped. Raises ValueError for options, newlines or nonsense.

    Source: RFC 4253, 6.6: the blob begins with its own type.
    """
    if not line.isprintable():
        raise ValueError("one key on one line: more keys go into SSH_PUBLIC_KEYS_FILE")
    parts = line.split(" ", 2)
    if "PRIVATE KEY" in line:
        raise ValueError("that is a private key: give the one of the .pub file, and make a new pair")
    if parts[0] not in TYPES:
        raise ValueError("expected `ssh-ed25519 AAAA... comment`, as in ~/.ssh/id_ed25519.pub, without options")
    try:
        blob = base64.b64decode(parts[1], validate=True)
    except (IndexError, binascii.Error) as error:
        raise ValueError("the key is not whole: copy the line of the .pub file again") from error
    size = int.from_bytes(blob[:4], "big")
    if blob[4 : 4 + size] != parts[0].encode() or len(blob) < 4 + size + 32:
        raise ValueError("the key is not whole: copy the line of the .pub file again")
    return f"{parts[0]} {parts[1]}"


def keys(environ: Mapping[str, str]) -> list[str]:
    """All keys that may come in. Raises ValueError naming the variable, and the line of a file."""
    found = []
    if text := environ.get("SSH_PUBLIC_KEY", ""):
        found.append(_named("SSH_PUBLIC_KEY", text.strip(" \n")))
    if file := environ.get("SSH_PUBLIC_KEYS_FILE", ""):
        for number, line in enumerate(Path(file).read_text().splitlines(), 1):
            if line.strip() and not line.startswith("#"):
                found.append(_named(f"{file}:{number}", line.strip()))
    return found


def _named(where: str, line: str) -> str:
    try:
        return public_key(line)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def set_env(environ: Mapping[str, str], *, escapes: bool) -> str:
    """sshd's SetEnv line: a session sees what `docker exec` sees. Source: sshd_config(5).

    Left out are values that such a line cannot hold, and those that are a session's own. `escapes` says whether this
    sshd knows them (OpenSSH 8.7); one that does not can hold no quotation mark.
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


def knows_escapes(version: str) -> bool:
    """From what `ssh -V` prints: `OpenSSH_9.2p1 Debian-2+deb12u7, ...`."""
    found = re.match(r"OpenSSH_(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) >= (8, 7)


def host_key(folder: Path) -> Path:
    """The container's host key, made at its first start."""
    home = HOST_KEYS if os.access(HOST_KEYS, os.W_OK) else folder
    key = home / f"ssh_host_key.{os.getuid()}"
    if home == folder:
        print("warning: the host key is new at every start here: /var/lib/workstation cannot be written", flush=True)
    public, draft = Path(f"{key}.pub"), Path(f"{key}.new")
    if not key.exists():  # which is there last, and whole
        for old in (draft, Path(f"{draft}.pub")):
            old.unlink(missing_ok=True)
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(draft)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        Path(f"{draft}.pub").rename(public)
        draft.rename(key)
    return key


def main() -> int:
    environ = os.environ
    try:
        allowed = keys(environ)
    except (OSError, ValueError) as error:
        print(f"error: {error}")
        return 1
    if not allowed:
        print("SSH is off: no SSH_PUBLIC_KEY was given")
        return NOT_WANTED
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        print(
            f"error: SSH needs a user with a name, and {os.getuid()} has none here: "
            "start without --user, or with `--user root -e NB_UID=...`"
        )
        return 1
    folder = Path(environ["STATE_DIR"]) / "ssh"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    key = host_key(folder)
    for suffix in ("", ".pub"):
        (folder / f"host_key{suffix}").symlink_to(f"{key}{suffix}")
    (folder / "authorized_keys").write_text("".join(f"{one}\n" for one in allowed))
    config = folder / "sshd_config"
    version = subprocess.run(["ssh", "-V"], stderr=subprocess.PIPE, text=True, check=False).stderr
    session = {name: value for name, value in environ.items() if name != "STATE_DIR"}
    config.write_text(
        CONFIG.format(
            user=user,
            port=environ.get("SSH_PORT", "22"),
            folder=folder,
            environment=set_env(session, escapes=knows_escapes(version)),
        )
    )
    return subprocess.run(["/usr/sbin/sshd", "-t", "-f", str(config)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
