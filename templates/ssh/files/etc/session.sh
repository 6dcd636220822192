# shellcheck shell=sh disable=SC3028
# An SSH session starts in the workspace, whether it is for a shell or for a command.
# SHLVL excludes shells that are started within the session. Shells that do not count leave it unset.
if [ -n "${SSH_CONNECTION-}" ] && [ "${SHLVL:-1}" -le 1 ] && [ "$PWD" = "$HOME" ] && [ -d /workspace ]; then
    cd /workspace || :
fi
