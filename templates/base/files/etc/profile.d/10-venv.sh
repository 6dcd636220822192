# shellcheck shell=sh
# For login shells (ssh, su -, bash -l), where Debian's /etc/profile overwrites PATH, and for interactive shells.
case ":$PATH:" in
*:/opt/venv/bin:*) ;;
*) PATH="/usr/local/sbin:/usr/local/bin:/opt/venv/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/nvidia/bin" ;;
esac
# The image's PATH has the programs in /home/user. HOME may be another folder: `-e HOME=...`, root, Apptainer.
_programs="${HOME:-/home/user}/.local/bin"
case ":$PATH:" in
*":$_programs:"*) ;;
*) PATH="$PATH:$_programs" ;;
esac
export PATH
unset _programs
