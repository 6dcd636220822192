#!/bin/sh
# Keeps apt to the packages of a lock. Its lines are those that builder/lock/os_lock.py writes, one for each package.
#
#   packages.sh names LOCK        prints the name of each package, one on a line
#   packages.sh pin ROOT LOCK     in ROOT, apt takes the locked version of each package, and no other package
#   packages.sh unpin ROOT
#   packages.sh purge LOCK        removes the packages that are not locked, which a base image may have
#   packages.sh check LOCK        the installed packages are the locked ones, by version and by the hash of their files
set -eu
pins=etc/apt/preferences.d/locked

# NAME VERSION ARCHITECTURE SHA256, for each locked package
locked() {
    sed -nE 's/^ *\{"name": "([^"]+)", "version": "([^"]+)", "architecture": "([^"]+)", .*"sha256": "([^"]+)"\},?$/\1 \2 \3 \4/p' "$1"
}

case $1 in
names)
    locked "$2" | cut -d ' ' -f 1
    ;;
pin)
    [ -r "$3" ]
    mkdir -p "$2/${pins%/*}"
    {
        printf 'Package: *\nPin: release *\nPin-Priority: -1\n'
        locked "$3" | while read -r name version _; do
            printf '\nPackage: %s\nPin: version %s\nPin-Priority: 1001\n' "$name" "$version"
        done
    } >"$2/$pins"
    ;;
unpin)
    rm "$2/$pins"
    ;;
purge)
    names=$(mktemp)
    locked "$2" | cut -d ' ' -f 1 | sort >"$names"
    dpkg-query -W -f '${Package}\n' | sort | comm -13 "$names" - | xargs -r apt-get purge -q -y
    rm "$names"
    ;;
check)
    differences=$(mktemp)
    locked "$2" | sort >"$differences.locked"
    # The hashes are those of the archive's lists, which are signed; a package that no archive has gets none.
    dpkg-query -W -f '${Package}=${Version}\n' | xargs apt-cache show --no-all-versions |
        awk '/^(Package|Version|Architecture|SHA256): / { field[$1] = $2 }
            /^$/ { print field["Package:"], field["Version:"], field["Architecture:"], field["SHA256:"]; delete field }' |
        sort -u >"$differences.installed"
    if ! diff "$differences.locked" "$differences.installed" >"$differences"; then
        echo "The installed packages (>) are not the locked ones (<):" >&2
        grep '^[<>]' "$differences" >&2
        exit 1
    fi
    rm "$differences" "$differences.locked" "$differences.installed"
    ;;
*)
    exit 2
    ;;
esac
