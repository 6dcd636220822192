# shellcheck shell=sh
# Sourced by every build step that downloads: the build host's certificates, index and apt settings, if there are any.
host=/mnt/host
if [ -f "$host/ca.crt" ]; then
    export SSL_CERT_FILE="$host/ca.crt" PIP_CERT="$host/ca.crt"
fi
if [ -f "$host/index.env" ]; then
    # shellcheck source=/dev/null
    . "$host/index.env"
fi
if [ -f "$host/apt.conf" ]; then
    export APT_CONFIG="$host/apt.conf"
fi
