# shellcheck shell=sh
# shellcheck source=templates/ssh/files/etc/session.sh
. /etc/session.sh
