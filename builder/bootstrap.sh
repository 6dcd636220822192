#!/bin/sh
# Makes .venv from the hash-locked requirements in locks/, on a machine that has only Python 3.11 or newer.
# Run by `make`; safe to run again. Mirrors and certificates are taken from where pip and uv already have them.
set -eu

cd "$(dirname "$0")/.."
tools=.builder/tools

say() { printf '%s\n' "setup: $*" >&2; }
die() { say "$*"; exit 1; }

find_python() {
    for name in python3 python3.14 python3.13 python3.12 python3.11; do
        path=$(command -v "$name") || continue
        if "$path" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$path"
            return
        fi
    done
    die "no Python 3.11 or newer on PATH. Install one (Debian 12: apt-get install python3), then run make again."
}

# A bare Debian has Python without pip: fetch pip from Debian's packages.
need_pip() {
    "$python" -m pip --version >/dev/null 2>&1 && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing python3-pip from the distribution's packages"
        mkdir -p .builder
        # Hosts of mirrors stay out of the log.
        { { apt-get update -q && apt-get install -y -q --no-install-recommends python3-pip ca-certificates; } 2>&1 ||
            touch .builder/setup-failed; } | sed 's,//[^/ ]*/,//<mirror>/,g' >.builder/setup-apt.log
        [ ! -e .builder/setup-failed ] ||
            { rm .builder/setup-failed; die "apt-get failed; see .builder/setup-apt.log"; }
        "$python" -m pip --version >/dev/null 2>&1 || python=/usr/bin/python3
    else
        die "this Python has no pip. As root run: apt-get install python3-pip   (then run make again)"
    fi
}

python=$(find_python)
settings=$("$python" -m builder.index.settings --shell) || die "the package index settings cannot be read (see above)"
eval "$settings"

want=$(sed -n 's/^uv==\([^ ]*\).*/\1/p' locks/uv.txt)
if [ "$("$tools/bin/uv" --version 2>/dev/null | cut -d' ' -f2)" != "$want" ]; then
    need_pip
    say "installing uv $want into $tools"
    rm -rf "$tools"
    # Only what the settings above say: extra indexes of pip.conf must not answer for a locked file.
    PIP_CONFIG_FILE=/dev/null "$python" -m pip install --quiet --disable-pip-version-check --no-warn-script-location --root-user-action=ignore \
        --require-hashes --no-deps --only-binary :all: --target "$tools" -r locks/uv.txt
fi
uv=$tools/bin/uv

say "making .venv from locks/builder.txt"
if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    "$uv" venv --quiet --clear --no-config --python "$python" .venv
fi
VIRTUAL_ENV=$PWD/.venv "$uv" pip sync --quiet --compile-bytecode --require-hashes --only-binary :all: locks/builder.txt
# The project itself, editable; its build backend comes from the locked requirements too.
VIRTUAL_ENV=$PWD/.venv "$uv" pip install --quiet --no-deps --no-build-isolation --offline -e .
cp "$uv" .venv/bin/uv
# Without bytecode, the first run of each command compiles it, and with PYTHONDONTWRITEBYTECODE every run does.
env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -m compileall -q builder
touch .venv/.ready
