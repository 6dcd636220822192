#!/bin/sh
# Makes the file system of an operating system with mmdebstrap, as root.tar in the working directory. Runs as root, on
# the build machine or in a container of Debian: the same packages give the same bytes.
#
#   [TMPFS=<bytes>] mmdebstrap.sh RELEASE [EPOCH PYTHON [UV]]
#
# The directory has steps/ (these scripts), packages.json (the lock), and, where the build host has such settings,
# apt.conf, sources.list and ca.crt. PYTHON is the interpreter of the image. UV is a release of uv's own Python, which
# the program `uv` of the directory installs. Without EPOCH and PYTHON, root.tar has the release alone, for a base image.
# shellcheck disable=SC2016 # mmdebstrap calls a hook with the root directory as $1
set -eu
release=$1 epoch=${2-} python=${3-} uv=${4-}
sources='"$1/etc/apt/sources.list"'
export TMPDIR="$PWD/tmp"
mkdir -p "$TMPDIR"
# dpkg syncs each file to a disk, so the files are written to memory if the caller found enough of it.
[ -z "${TMPFS-}" ] || mount -t tmpfs -o "size=$TMPFS" tmpfs "$TMPDIR"

# apt's sandbox user may not be able to write here, and apt would give its directories to that user.
set -- --format=tar --skip=check/qemu,cleanup/run --keyring=/usr/share/keyrings/debian-archive-keyring.gpg \
    '--aptopt=APT::Sandbox::User "root";' '--extract-hook=sh steps/slim.sh "$1"'
[ ! -e apt.conf ] || set -- "$@" --aptopt=apt.conf
[ ! -e sources.list ] || set -- "$@" "--setup-hook=cp $sources canonical.list; cp sources.list $sources"
if [ "$python" ]; then
    # All packages in one call: of two calls, the second would calculate a set of packages again.
    set -- "$@" --variant=essential "--include=$(sh steps/packages.sh names packages.json | paste -sd ,)" \
        '--setup-hook=sh steps/packages.sh pin "$1" packages.json' \
        '--customize-hook=mkdir -p "$1/mnt/steps"; cp -R steps/. "$1/mnt/steps"; cp packages.json "$1/mnt"'
    if [ "$uv" ]; then
        set -- "$@" '--customize-hook=cp uv "$1/mnt"; [ ! -e ca.crt ] || cp ca.crt "$1/mnt"' \
            "--customize-hook=chroot \"\$1\" env HOME=/root UV_NO_CACHE=1 $([ ! -e ca.crt ] || echo SSL_CERT_FILE=/mnt/ca.crt) \
                /mnt/uv python install --no-config --no-bin --install-dir /opt/python $uv"
    fi
    set -- "$@" "--customize-hook=chroot \"\$1\" env -i HOME=/root SOURCE_DATE_EPOCH=$epoch \
        PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin sh /mnt/steps/os.sh $python" \
        '--customize-hook=rm -rf "$1/mnt/"*'
else
    set -- "$@" --variant=minbase
fi
[ ! -e sources.list ] || set -- "$@" "--customize-hook=cp canonical.list $sources"
exec mmdebstrap "$@" '--customize-hook=sh steps/clean.sh "$1"' "$release" root.tar
