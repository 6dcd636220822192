#!/bin/sh
# Keeps apt to the packages of a lock, a file that builder/debian/os_lock.py writes with one line for each package.
#
#   packages.sh names LOCK        prints the name of each package, one on a line
#   packages.sh pin ROOT LOCK     makes apt in ROOT take the locked version of each package, and no other package
#   packages.sh unpin ROOT        ends that
#   packages.sh purge LOCK        removes the packages that are not locked, which a base image may have
#   packages.sh check LOCK        fails if the installed packages are not the locked ones, by version and SHA-256
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
    # The hashes are those in apt's lists, with which apt compared each file that it downloaded: lists that Debian
    # signed, or those of the builder's local repository. A package that is in no list, as in an old base image, has
    # none.
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
