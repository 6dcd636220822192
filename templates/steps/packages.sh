#!/bin/sh
# Keeps apt to the packages of a lock, a file that builder/debian/os_lock.py writes with one line for each package.
#
#   packages.sh names LOCK        prints the name of each package, one on a line
#   packages.sh fetch LOCK FOLDER downloads each package, and makes FOLDER a repository; apt.conf there selects it
#   packages.sh pin ROOT LOCK     makes apt in ROOT take the locked version of each package, and no other package
#   packages.sh unpin ROOT        ends that
#   packages.sh purge LOCK        removes the packages that are not locked, which a base image may have
#   packages.sh check LOCK        fails if the installed packages are not the locked ones, by version and SHA-256
set -eu
pins=etc/apt/preferences.d/locked

# NAME VERSION ARCHITECTURE SHA256 SOURCE, for each locked package; SOURCE is empty if the source package has its name
locked() {
    sed -nE 's/^ *\{"name": "([^"]+)", "version": "([^"]+)", "architecture": "([^"]+)", ("source": "([^" ]+)[^"]*", )?.*"sha256": "([^"]+)"\},?$/\1 \2 \3 \6 \5/p' "$1"
}

# SHA256 PATH, for each locked package without its file in FOLDER; PATH is that below the folder `main` of a pool
missing() {
    locked "$1" | while read -r name version architecture sha256 source; do
        source=${source:-$name}
        case $source in lib*) length=4 ;; *) length=1 ;; esac
        echo "$sha256  $2/$sha256.deb" | sha256sum --check --status 2>/dev/null ||
            printf "%s %.${length}s/%s/%s\n" "$sha256" "$source" "$source" "${name}_${version#*:}_$architecture.deb"
    done
}

# The addresses of the folders of packages, one a line: those that the builder found, snapshot archives included, or
# those of the archives that apt has here. An archive keeps files that its lists no longer name.
pools() {
    if [ -s /mnt/host/pools ]; then
        cat /mnt/host/pools
        return
    fi
    # shellcheck disable=SC2016 # apt's own variables
    apt-get indextargets --no-release-info --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' |
        sed -E 's| .*-security$|pool/updates/main|; s| .*|pool/main|' | sort -u
}

case $1 in
fetch)
    mkdir -p "$3"
    messages=$(mktemp)
    for pool in $(pools); do
        # apt-helper goes on after a file that this archive does not have.
        missing "$2" "$3" | sed -E "s|^(.*) (.*)$|$pool/\2 $3/\1.deb SHA256:\1|" |
            xargs -r -n 90 /usr/lib/apt/apt-helper download-file >/dev/null 2>>"$messages" || true
    done
    gone=$(missing "$2" "$3")
    if [ "$gone" ]; then
        cat "$messages" >&2
        printf 'No archive has these locked packages any more. Lock the current ones: builder lock --os\n%s\n' "$gone" >&2
        exit 1
    fi
    rm "$messages"
    locked "$2" | while read -r _ _ _ sha256 _; do
        dpkg-deb --field "$3/$sha256.deb"
        printf 'Filename: ./%s.deb\nSize: %s\nSHA256: %s\n\n' "$sha256" "$(stat -c %s "$3/$sha256.deb")" "$sha256"
    done >"$3/Packages"
    echo "deb [trusted=yes] copy:$3 ./" >"$3/sources.list"
    printf 'Dir::Etc::SourceList "%s";\nDir::Etc::SourceParts "-";\nAPT::Sandbox::User "root";\n' "$3/sources.list" >"$3/apt.conf"
    ;;
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
    locked "$2" | cut -d ' ' -f -4 | sort >"$differences.locked"
    # The hashes are those in the list of the local repository, with which apt compared each file. A package that is
    # not in it, as in an old base image, has none.
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
