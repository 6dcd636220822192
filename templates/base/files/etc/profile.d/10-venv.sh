# shellcheck shell=sh
# For login shells (ssh, su -, bash -l), where Debian's /etc/profile overwrites PATH, and for interactive shells.
case ":$PATH:" in
*:/opt/venv/bin:*) ;;
*) PATH="/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" ;;
esac
# shellcheck source=templates/base/files/etc/shell-path.sh
. /etc/shell-path.sh
