# shellcheck shell=sh disable=SC3067  # dash and bash have -O
# For login shells (ssh, su -, bash -l), where Debian's /etc/profile overwrites PATH, and for interactive shells.
case ":$PATH:" in
*:/opt/venv/bin:*) ;;
*) PATH="/usr/local/sbin:/usr/local/bin:/opt/venv/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/nvidia/bin" ;;
esac
# Where GKE mounts its driver. `su -` clears the variable of the image.
[ ! -d /usr/local/nvidia/lib64 ] || export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:-/usr/local/nvidia/lib:/usr/local/nvidia/lib64}"
# As the launcher does, which `docker exec` and SSH do not run: users of group 0 share files, root leaves none in caches of
# the user, and a home that cannot be written is replaced.
if [ -z "${STATE_DIR-}" ]; then
    _id=$(/usr/bin/id -u)
    if [ "$_id" = 0 ]; then
        [ "${HOME-}" != /home/user ] || export HOME=/root USER=root LOGNAME=root
    else
        [ "$(/usr/bin/id -g)" != 0 ] || umask 002
    fi
    for _home in "/run/workstation/of-$_id/home" "/tmp/workstation-of-$_id/home"; do
        [ -w "${HOME-}" ] || [ ! -O "$_home" ] || export HOME="$_home"
    done
    unset _id _home
fi
# The image's PATH has the programs in /home/user. HOME may be another folder: `-e HOME=...`, root, Apptainer.
_programs="${HOME:-/home/user}/.local/bin"
case ":$PATH:" in
*":$_programs:"*) ;;
*) PATH="$PATH:$_programs" ;;
esac
export PATH
unset _programs
