# shellcheck shell=sh
# For login shells (ssh, su -, bash -l), where Debian's /etc/profile overwrites PATH, and for interactive shells.
case ":$PATH:" in
*:/opt/venv/bin:*) ;;
*) PATH="/usr/local/sbin:/usr/local/bin:/opt/venv/bin:/usr/sbin:/usr/bin:/sbin:/bin:/home/user/.local/bin" ;;
esac
export PATH
