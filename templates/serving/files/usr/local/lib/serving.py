"""Checks before `serve` starts an engine: there is a GPU, and the engine gets an API key.

The server listens on all addresses of the container, so without a key, whoever reaches the port could use it.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from workstation import gpus, state
from workstation.refusal import UNAVAILABLE, Refusal

SHORTEST = 3  # with so few characters, --g, several options begin


def prepare(engine: str, prefix: str, refused: Collection[str]) -> dict[str, str]:
    """The engine's variables, with <prefix>_API_KEY unless the user asked for none. Ends if it cannot start.

    `refused` are options of the engine that open a port without a key, or show the key in the list of processes.
    """
    try:
        # vLLM takes --api_key for --api-key, and both engines take the beginning of an option, such as --grpc-p.
        given = [word.partition("=")[0].replace("_", "-") for word in (*sys.argv, *_configured(sys.argv))]
        for option in refused:
            if any(len(word) > SHORTEST and option.startswith(word) for word in given):
                raise Refusal(
                    f"{option}: not with `serve`, nor in the file of --config. For the API key, set {prefix}_API_KEY"
                )
        driver = gpus.read()
        if not gpus.visible(driver.gpus, os.environ):
            _, warnings = gpus.describe(driver, {**os.environ, "GPU_REQUIRED": "0"})
            raise Refusal(f"{engine} needs a GPU, but {' '.join(warnings)}", UNAVAILABLE)
        environ = dict(os.environ)
        key = _api_key(environ, f"{prefix}_API_KEY", f"{prefix}_ALLOW_NO_KEY")
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        sys.exit(refusal.status)
    for name in ("API_KEY", "API_KEY_FILE", "ALLOW_NO_KEY"):
        environ.pop(f"{prefix}_{name}", None)
    return {**environ, f"{prefix}_API_KEY": key} if key else environ


def _configured(words: Sequence[str]) -> list[str]:
    """The options in the YAML file of --config: all keys, as only the engine's Python can read YAML."""
    for word, following in zip(words, (*words[1:], ""), strict=True):
        option, _, file = word.partition("=")
        if option == "--config":
            try:
                text = Path(file or following).read_text()
            except (OSError, UnicodeDecodeError):
                return []  # the engine says so
            return [f"--{key}" for key in re.findall(r"""([\w-]+)["']?\s*:""", re.sub(r"#.*", "", text))]
    return []


def _api_key(environ: dict[str, str], name: str, allowed: str) -> str:
    """The user's key; else the key of an earlier start, or a new random one. Empty if the user asked for no key."""
    key, file = environ.get(name), environ.get(f"{name}_FILE")
    if key and file:
        raise Refusal(f"{name} and {name}_FILE are both set: unset one of them")
    if file:
        name = f"{name}_FILE"
        try:
            key = Path(file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            message = f"user {os.getuid()} cannot read {name}={file} ({error}): make it a readable text file"
            raise Refusal(message) from error
    if key or environ.get(allowed) == "1":
        return key or ""
    if key is not None:
        raise Refusal(
            f"{name} is empty, so anyone could use the server: unset it for a random key, set a key, or set "
            f"{allowed}=1 if only you can reach the port"
        )
    kept = Path(state.make(), "api-key")
    if not kept.exists():
        state.write(kept, secrets.token_hex(24))
    key = kept.read_text()
    print(f"API key of the server: {key}", file=sys.stderr, flush=True)
    return key
