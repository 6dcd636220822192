#!/bin/sh
# Installs the wheels that /mnt/wheels.txt lists, each by its hash; nothing is resolved or built. They come from the
# index that the list names, with the logins in /mnt/netrc, or from the default index; with UV_FIND_LINKS, only from
# that folder.
#
#   wheels.sh         into /opt/venv, with their bytecode; what is installed already stays as it is
#   wheels.sh cuda    CUDA's libraries into /opt/nvidia, once for all of Python
set -eu
# shellcheck source=/dev/null
. /mnt/host/env.sh
python=/opt/venv/bin/python
index=$(sed -n 's/^# index: //p' /mnt/wheels.txt)
export NETRC=/mnt/netrc
install_wheels() {
    UV_CACHE_DIR=/mnt/uv-cache UV_LINK_MODE=copy /mnt/uv/bin/uv pip install --no-progress --no-config --no-deps --no-build \
        --require-hashes --requirement /mnt/wheels.txt --python "$python" ${index:+--default-index "$index"} \
        ${UV_FIND_LINKS:+--no-index} "$@"
}
if [ "${1-}" = cuda ]; then
    install_wheels --target /opt/nvidia
    rm -f /opt/nvidia/.lock
    # Python finds the libraries through a link, and their metadata through a .pth file.
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    ln -sfn /opt/nvidia/nvidia "$site/nvidia"
    echo /opt/nvidia > "$site/nvidia.pth"
    target=/opt/nvidia
else
    target=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    install_wheels
    rm -f /opt/venv/.lock
    "$python" -B /mnt/steps/compile.py
fi
"$python" -B /mnt/steps/overlaps.py "$target"
if [ -n "${UV_FIND_LINKS-}" ]; then
    # uv notes the time of a wheel from a folder.
    for note in "$target"/*.dist-info/uv_cache.json; do
        [ -e "$note" ] || continue
        sed -i '/\.dist-info\/uv_cache\.json,/d' "${note%/*}/RECORD"
        rm "$note"
    done
fi
# Beside each package's record a second one, which an installer removes when it replaces the package: see
# docs/decisions/0015-packages-over-the-image.md.
for record in "$target"/*.dist-info; do
    links=/opt/venv/user/lib/python/site-packages/${record##*/}
    if [ ! -e "$links" ]; then
        mkdir -m 0775 "$links"
        find "$record" -maxdepth 1 -type f -exec ln -s -t "$links" {} +
    fi
done
