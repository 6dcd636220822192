#!/bin/sh
# Installs Debian packages in the operating system of an image that exists, and writes the new file system as root.tar.
# Runs as mmdebstrap.sh does, in its place and on the same files.
#
#   [TMPFS=<bytes>] add-packages.sh RELEASE EPOCH PACKAGES
#
# PACKAGES are separated by commas, and in the archive of sources.list with all that they need and the image lacks.
# layers/ has the layers of the operating system, in order. /etc/shadow holds EPOCH in place of the day of the build.
# shellcheck disable=SC2016 # mmdebstrap calls a hook with the root directory as $1
set -eu
release=$1 epoch=$2 packages=$3
sources='"$1/etc/apt/sources.list"'
export TMPDIR="$PWD/tmp"
mkdir -p "$TMPDIR"
[ -z "${TMPFS-}" ] || mount -t tmpfs -o "size=$TMPFS" tmpfs "$TMPDIR"
# Services are not started: nothing runs them here. Setuid, logs and days are handled as in os.sh.
cat >finish.sh <<'END'
cd "$1"
rm -f usr/sbin/policy-rc.d var/lib/apt/extended_states var/cache/ldconfig/aux-cache var/lib/dpkg/status-old
rm -f etc/dpkg/dpkg.cfg.d/99mmdebstrap etc/passwd- etc/group- etc/shadow- etc/gshadow- etc/ssh/ssh_host_*
sed -i -E "s/^([^:]*:[^:]*:)[0-9]+/\1$(($2 / 86400))/" etc/shadow
find usr/share/man -type d -empty -delete
mkdir -p usr/share/man
find . -xdev -type f -perm /6000 -exec chmod a-s {} +
END
# The scripts of Java make links in usr/share/man/man1, which images do not have. What slim.sh wrote. dpkg in the image reads it, mmdebstrap itself, which unpacks the packages first, does not.
tar -xzOf layers/000.tar.gz etc/dpkg/dpkg.cfg.d/slim >slim.cfg
exec mmdebstrap --format=tar --variant=custom --skip=check/qemu,cleanup/run \
    --keyring=/usr/share/keyrings/debian-archive-keyring.gpg '--aptopt=APT::Sandbox::User "root";' \
    '--aptopt=APT::Install-Recommends "false";' \
    '--setup-hook=for layer in layers/*; do tar -C "$1" -xzpf "$layer" --numeric-owner --xattrs --xattrs-include="*" --exclude=.*prefetch.landmark --exclude=stargz.index.json; done' \
    "--setup-hook=cp $sources canonical.list; cp sources.list $sources" \
    '--setup-hook=mkdir -p "$1"/usr/share/man/man1 "$1"/usr/share/man/man5 "$1"/usr/share/man/man8' \
    --dpkgopt=slim.cfg "--include=$packages" \
    "--customize-hook=sh finish.sh \"\$1\" $epoch" "--customize-hook=cp canonical.list $sources" \
    '--customize-hook=sh steps/clean.sh "$1"' "$release" root.tar
