#!/bin/sh
# Installs the wheels that /mnt/wheels.txt lists, each by its hash; nothing is resolved or built. They come from the
# index that the list names, with the logins in /mnt/netrc, or from the default index; with UV_FIND_LINKS, only from
# that folder.
#
#   wheels.sh         into /opt/venv, with their bytecode; what is installed already stays as it is
#   wheels.sh cuda    CUDA's libraries, whose modules are empty and get no bytecode
set -eu
# shellcheck source=/dev/null
. /mnt/host/env.sh
python=/opt/venv/bin/python
index=$(sed -n 's/^# index: //p' /mnt/wheels.txt)
export NETRC=/mnt/netrc
UV_CACHE_DIR=/mnt/uv-cache UV_LINK_MODE=copy /mnt/uv/bin/uv pip install --no-progress --no-config --no-deps --no-build \
    --require-hashes --requirement /mnt/wheels.txt --python "$python" ${index:+--default-index "$index"} \
    ${UV_FIND_LINKS:+--no-index}
rm -f /opt/venv/.lock
[ "${1-}" = cuda ] || "$python" -B /mnt/steps/compile.py
site=$("$python" -c 'import os, sysconfig; print(os.path.realpath(sysconfig.get_path("purelib")))')
"$python" -B /mnt/steps/overlaps.py "$site"
find /opt/venv -type d ! -perm 0775 -exec chmod 0775 {} + # group 0 installs and removes packages
if [ -n "${UV_FIND_LINKS-}" ]; then
    # uv notes the time of a wheel from a folder.
    for note in "$site"/*.dist-info/uv_cache.json; do
        [ -e "$note" ] || continue
        sed -i '/\.dist-info\/uv_cache\.json,/d' "${note%/*}/RECORD"
        rm "$note"
    done
fi
