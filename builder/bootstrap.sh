#!/bin/sh
# Makes .venv from the hash-locked requirements in locks/, on a machine that has only Python 3.11.2 or newer.
# Run by `make`; safe to run again. Mirrors and certificates are taken from where pip and uv already have them.
set -eu

cd "$(dirname "$0")/.."
tools=.builder/tools

say() { printf '%s\n' "setup: $*" >&2; }
die() { say "$*"; exit 1; }

# Debian 12 has 3.11.2, and the tests run with it; nothing older was tried.
is_supported='import sys; sys.exit(sys.version_info < (3, 11, 2))'

# The first supported Python on PATH that has pip, or else the first without. The Python of an activated environment is
# ignored: .venv would be gone with that environment, and apt cannot install pip there.
find_python() {
    without_pip=
    old_ifs=$IFS
    IFS=:
    for folder in $PATH; do
        for name in python3 python3.14 python3.13 python3.12 python3.11; do
            path=${folder:-.}/$name
            if ! [ -x "$path" ] || ! "$path" -c "$is_supported" 2>/dev/null ||
                "$path" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'; then
                continue
            fi
            if "$path" -m pip --version >/dev/null 2>&1; then
                printf '%s\n' "$path"
                return
            fi
            without_pip=${without_pip:-$path}
        done
    done
    IFS=$old_ifs
    [ "$without_pip" ] || die "no Python 3.11.2 or newer on PATH. Install one (Debian 12: apt-get install python3), then run make again."
    printf '%s\n' "$without_pip"
}

# A bare Debian has Python without pip, which apt can install. Nothing that is installed is upgraded: this machine is the user's.
install_pip() {
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || ! [ -x /usr/bin/python3 ]; then
        die "$python has no pip. As root run: apt-get install python3-pip   (then run make again)"
    fi
    mkdir -p .builder
    log=.builder/setup-apt.log
    # Hosts of mirrors stay out of the log.
    hidden() { sed 's,//[^/ ]*/,//<mirror>/,g'; }
    apt() { apt-get -y -q --no-install-recommends --no-upgrade --no-remove "$@" python3-pip 2>&1; }
    apt-get update -q 2>&1 | hidden >"$log"
    changes=$(apt -s install) || { printf '%s\n' "$changes" | hidden >>"$log"; die "apt-get cannot install python3-pip; see $log"; }
    # `Inst NAME (VERSION ...)` is a new package, `Inst NAME [OLD] (VERSION ...)` an upgrade. Source: apt-get(8), --simulate.
    upgrades=$(printf '%s\n' "$changes" | sed -n 's/^Inst \([^ ]*\) \[.*/\1/p' | paste -sd ' ')
    [ -z "$upgrades" ] || die "installing python3-pip would upgrade packages of this machine: $upgrades. To allow this, run: apt-get install python3-pip   (then run make again)"
    say "installing with apt-get: $(printf '%s\n' "$changes" | sed -n 's/^Inst \([^ ]*\) .*/\1/p' | paste -sd ' ')"
    output=$(apt install) || { printf '%s\n' "$output" | hidden >>"$log"; die "apt-get failed; see $log"; }
    printf '%s\n' "$output" | hidden >>"$log"
    "$python" -m pip --version >/dev/null 2>&1 || python=/usr/bin/python3
    "$python" -c "$is_supported" || die "$python is too old: Python 3.11.2 or newer is needed"
}

python=$(find_python)
settings=$("$python" -m builder.index.settings --shell) || die "the package index settings cannot be read (see above)"
eval "$settings"

want=$(sed -n 's/^uv==\([^ ]*\).*/\1/p' locks/uv.txt)
if [ "$("$tools/bin/uv" --version 2>/dev/null | cut -d' ' -f2)" != "$want" ]; then
    "$python" -m pip --version >/dev/null 2>&1 || install_pip
    say "installing uv $want into $tools"
    rm -rf "$tools"
    # Only what the settings above say: extra indexes of pip.conf must not answer for a locked file.
    PIP_CONFIG_FILE=/dev/null "$python" -m pip install --quiet --disable-pip-version-check --no-warn-script-location --root-user-action=ignore \
        --require-hashes --no-deps --only-binary :all: --target "$tools" -r locks/uv.txt
fi
uv=$tools/bin/uv

say "making .venv from locks/builder.txt"
if ! .venv/bin/python -c "$is_supported" 2>/dev/null; then
    "$uv" venv --quiet --clear --no-config --python "$python" .venv
fi
VIRTUAL_ENV=$PWD/.venv "$uv" pip sync --quiet --compile-bytecode --require-hashes --only-binary :all: locks/builder.txt
# The project itself, editable; its build backend comes from the locked requirements too.
VIRTUAL_ENV=$PWD/.venv "$uv" pip install --quiet --no-deps --no-build-isolation --offline -e .
cp "$uv" .venv/bin/uv
# Without bytecode, the first run of each command compiles it, and with PYTHONDONTWRITEBYTECODE every run does.
env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -m compileall -q builder
touch .venv/.ready
