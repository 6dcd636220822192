#!/bin/sh
# Removes from a new file system what differs between runs and machines: files that Docker replaces by mounts, logs, and
# the keyring's path in apt's sources, which mmdebstrap writes on some machines.
#
#   clean.sh ROOT
set -eu
cd "$1"
rm -rf etc/hostname etc/resolv.conf etc/apt/apt.conf.d/99mmdebstrap
rm -rf var/log/apt var/log/bootstrap.log var/log/dpkg.log var/log/alternatives.log
sed -i 's/ \[signed-by=[^]]*\]//' etc/apt/sources.list
