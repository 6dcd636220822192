# shellcheck shell=sh
# For login shells (ssh, su -, bash -l), where Debian's /etc/profile overwrites PATH, and for interactive shells.
case ":$PATH:" in
*:/opt/venv/bin:*) ;;
*) PATH="/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/venv/user/bin" ;;
esac
if [ "$(id -u)" = 0 ]; then
    # Root must not run programs that the image's user can write.
    PATH=$(printf %s "$PATH" | sed -e 's|:/opt/venv/user/bin||g' -e 's|:/home/user/\.local/bin||g')
    if [ "$HOME" = /home/user ]; then
        export HOME=/root USER=root LOGNAME=root HISTFILE=/root/.bash_history
    fi
else
    case ":$PATH:" in
    *":$HOME/.local/bin:"*) ;;
    *) PATH="$PATH:$HOME/.local/bin" ;;
    esac
fi
export PATH
