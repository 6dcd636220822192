# shellcheck shell=sh
# Debian's /etc/profile sets PATH anew for login shells (ssh, su -, bash -l): they get the one of the image again.
case ":$PATH:" in
*:/opt/venv/bin:*) ;;
*) export PATH="/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/venv/user/bin" ;;
esac
