# shellcheck shell=sh
# Debian's /etc/profile sets PATH anew for login shells (su -, ssh, bash -l): put the environment first again.
case ":$PATH:" in
*:/opt/venv/bin:*) ;;
*) export PATH="/opt/venv/bin:$PATH" ;;
esac
