#!/bin/sh
# Adds what a builder command prints to the summary of the run. Usage: summary.sh COMMAND [ARGUMENT...]
set -eu
status=0
{
    echo '```'
    .venv/bin/builder "$@" || status=$?
    echo '```'
} >>"$GITHUB_STEP_SUMMARY"
exit $status
