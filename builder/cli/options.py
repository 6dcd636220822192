"""Options and arguments that several commands have. Quick to import, as every start of the program needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from builder.common import machine
from builder.common.errors import UsageError
from builder.common.text import parse_size

_Command = TypeVar("_Command", bound=Callable[..., Any])
CELLS = (
    "CELLS are cell ids (pt-2.9-cu128-py313), shell patterns ('pt-*', '{pt-2.9,tf-2.21}-*'), or sets: the "
    "sets in matrix.yaml, its Debian releases and frameworks, `unsupported` (cells with `after_support`), `not-built` "
    "(cells with `not_built`), `all` (all other cells), and `arm64` (all cells for arm64, which no other built-in set "
    "has)."
)
CELLS_HELP = "CELLS are ids, patterns or sets of images: see `builder --help`. Default: the set `default`."
ALL_CELLS_HELP = CELLS_HELP.replace("the set `default`", "every cell ('*')")
JSON_HELP = "json: print the result to standard output."

cells_argument = click.argument("patterns", metavar="[CELLS]...", nargs=-1)
jobs_option = click.option(
    "-j",
    "--jobs",
    type=click.IntRange(1, 32),
    default=machine.default_jobs,
    show_default="one for each processor and each 4 GB of memory",
    help="Number of images, and of operating systems, to process at the same time.",
)


def _signer(context: click.Context, option: click.Parameter, value: str) -> Any:
    from builder.evidence.signing import Signer  # noqa: PLC0415  --help does not need it

    return Signer(key=value) if value else None


sign_option = click.option(
    "--sign",
    "signer",
    default="",
    metavar="KEY",
    envvar="GPU_IMAGES_SIGN",
    show_envvar=True,
    callback=_signer,
    help="Sign with cosign: the file or KMS address of a private key, or `keyless` for the identity of a CI job. The "
    "password of a key is read from COSIGN_PASSWORD. Default: nothing is signed.",
)


key_option = click.option(
    "--key",
    "keys",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False),
    help="A public key of cosign that verifies the image's signature. Repeat the option to accept any of several keys.",
)
identity_option = click.option(
    "--identity",
    default="",
    metavar="ADDRESS",
    help="The identity that must have signed the image, such as https://github.com/ORG/REPO/.github/workflows/ci.yml"
    "@refs/heads/main. Needs --issuer.",
)
issuer_option = click.option(
    "--issuer",
    default="",
    metavar="ADDRESS",
    help="The OpenID Connect issuer of --identity, such as https://token.actions.githubusercontent.com.",
)


def trusted_signers(keys: Sequence[str], identity: str, issuer: str) -> list[Any]:
    """The signers that --key, --identity and --issuer name. Raises UsageError."""
    from builder.matrix.schema import Trusted  # noqa: PLC0415  --help does not need it

    if bool(identity) != bool(issuer):
        raise UsageError("--identity and --issuer must be used together")
    signers = [Trusted.model_construct(key=key) for key in keys]
    try:
        return [*signers, *([Trusted(identity=identity, issuer=issuer)] if identity else [])]
    except ValueError as error:
        raise UsageError("--identity and --issuer must be addresses, such as https://example.com") from error


# Read in `builder.cli.main`, which also handles errors that are raised before click has parsed the options.
debug_option = click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
start_option = click.option(
    "--start-engine",
    is_flag=True,
    help="If no Docker Engine is running, install and start one first, as `builder engine` does. Default: fail.",
)


def format_option(help_text: str = JSON_HELP, *forms: str) -> Callable[[_Command], _Command]:
    """The option `--format`. `forms` are its choices (`text` and `json` if empty); the first is the default."""
    forms = forms or ("text", "json")
    return click.option(
        "--format", "form", type=click.Choice(forms), default=forms[0], show_default=True, help=help_text
    )


def size_in_bytes(context: click.Context, option: click.Parameter, value: str | None) -> int | None:
    """The callback of an option with a size, such as 40GB or 1.5G."""
    try:
        return None if value is None else parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
