# shellcheck shell=sh disable=SC3028
# PATH and HOME by user, for every bash (BASH_ENV) and every login shell. It is read by each script, so it sets no other
# variable and keeps the rest of PATH. Bash has EUID, other shells do not.
if [ "${EUID:-$(id -u)}" = 0 ]; then
    # Root must not run programs that the image's user can write.
    case ":$PATH:" in
    *:/opt/venv/user/bin:* | *:/home/user/.local/bin:*)
        PATH=$(printf %s ":$PATH:" | sed -e 's|:/opt/venv/user/bin:|:|g' -e 's|:/home/user/\.local/bin:|:|g' -e 's|^:||' -e 's|:$||')
        ;;
    esac
    if [ "${HOME-}" = /home/user ]; then
        export HOME=/root USER=root LOGNAME=root HISTFILE=/root/.bash_history
    fi
else
    # Behind the image's programs: what users install. Only here, so that root never finds it.
    case ":$PATH:" in
    *:/opt/venv/user/bin:*) ;;
    *) PATH="$PATH:/opt/venv/user/bin" ;;
    esac
    case ":$PATH:" in
    *":${HOME-/home/user}/.local/bin:"*) ;;
    *) PATH="$PATH:${HOME-/home/user}/.local/bin" ;;
    esac
fi
export PATH
