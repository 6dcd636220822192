# shellcheck shell=sh disable=SC3028
# ssh passes on the name of the user's terminal, such as xterm-kitty; with an unknown one, tmux and clear fail.
if [ -n "${TERM-}" ] && ! /usr/bin/infocmp -- "$TERM" >/dev/null 2>&1; then
    export TERM=xterm-256color
fi
# An SSH session starts in the workspace, whether it is for a shell or for a command.
# SHLVL excludes shells that are started within the session. Shells that do not count leave it unset.
if [ -n "${SSH_CONNECTION-}" ] && [ "${SHLVL:-1}" -le 1 ] && [ "$PWD" = "$HOME" ] && [ -d /workspace ]; then
    cd /workspace || :
fi
