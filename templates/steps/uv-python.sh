#!/bin/sh
# uv's build of Python in /opt/python, with the bytecode of its standard library: users cannot write it there, so each
# start would compile the modules again.
#
#   uv-python.sh PYTHON UV...     UV is the command that installs it, PYTHON the program that it installs
set -eu
python=$1
shift
if [ -e /mnt/host/env.sh ]; then
    # shellcheck source=/dev/null
    . /mnt/host/env.sh
fi
"$@"
rm -rf /opt/python/.[a-z]* # the lock and the temporary files of uv
library=$("$python" -I -S -B -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
find "$library" -name __pycache__ -prune -exec rm -r {} +
PYTHONHASHSEED=0 COMPILE_SITE=$library "$python" -S -B /mnt/steps/compile.py
