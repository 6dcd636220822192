# shellcheck shell=sh disable=SC3028
# ssh passes on the name of the user's terminal, such as xterm-kitty; with an unknown one, tmux and clear fail.
if [ -n "${TERM-}" ] && ! /usr/bin/infocmp -- "$TERM" >/dev/null 2>&1; then
    export TERM=xterm-256color
fi
# An SSH session starts in the workspace, whether it is for a shell or for a command. sshd takes away what the launcher's
# umask gives to group 0.
# SHLVL excludes shells that are started within the session. Shells that do not count leave it unset.
if [ -n "${SSH_CONNECTION-}" ] && [ "${SHLVL:-1}" -le 1 ]; then
    if [ "$PWD" = "$HOME" ] && [ -d /workspace ]; then
        cd /workspace || :
    fi
    case "$(umask) $(/usr/bin/id -u) $(/usr/bin/id -g)" in
    0022\ 0\ 0) ;;
    0022\ *\ 0) umask 002 ;;
    esac
fi
