#!/bin/sh
# Keeps manuals and translations out of a new file system, but not licences, as Debian's own slim images do.
#
#   slim.sh ROOT
#
# mmdebstrap runs it when the essential packages are unpacked and before dpkg installs them. dpkg follows the rule for
# all other packages; mmdebstrap's own option for these packages starts one program per package.
set -eu
root=$1
cd "$root/usr/share"
find doc -mindepth 2 ! -type d ! -name copyright -delete
find doc -mindepth 2 -type d -empty -delete
rm -rf man/* groff/* info/* locale/*
mkdir -p "$root/etc/dpkg/dpkg.cfg.d"
cat >"$root/etc/dpkg/dpkg.cfg.d/slim" <<'END'
path-exclude=/usr/share/doc/*
path-include=/usr/share/doc/*/copyright
path-exclude=/usr/share/man/*
path-exclude=/usr/share/groff/*
path-exclude=/usr/share/info/*
path-exclude=/usr/share/locale/*
END
