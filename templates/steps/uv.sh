#!/bin/sh
# The locked uv in /opt/uv, of a stage that no image has.
#
#   uv.sh PACKAGE...     the Debian packages that give pip
set -eu
# shellcheck source=/dev/null
. /mnt/host/env.sh
apt-get update -q
DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$@"
/usr/bin/python3 -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-deps --require-hashes \
    --only-binary :all: --target /opt/uv --requirement /mnt/uv.txt
