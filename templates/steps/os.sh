#!/bin/sh
# The operating system of an image: Debian packages, the user, and the folders that everything else is put into.
#
#   SOURCE_DATE_EPOCH=<seconds> os.sh PYTHON [PACKAGE...]
#
# PYTHON makes the environment in /opt/venv. /etc/shadow holds SOURCE_DATE_EPOCH in place of the day of the build.
# Without a PACKAGE, the locked packages are installed already: mmdebstrap did it.
set -eu
python=$1
shift
export DEBIAN_FRONTEND=noninteractive
epoch=$SOURCE_DATE_EPOCH
unset SOURCE_DATE_EPOCH # if it is set, Python writes bytecode that is checked by hashes: slower at each import

# In a Dockerfile: the base image may have newer versions, or packages that are not locked.
packages=/mnt/steps/packages.sh
if [ $# -gt 0 ]; then
    # shellcheck source=/dev/null
    . /mnt/host/env.sh
    debs=/var/cache/apt/locked
    sh $packages fetch /mnt/packages.json $debs
    export APT_CONFIG=$debs/apt.conf # from here on without the network
    sh $packages pin / /mnt/packages.json
    apt-get update -q
    apt-get full-upgrade -q -y --no-install-recommends --allow-downgrades
    apt-get install -q -y --no-install-recommends "$@"
    sh $packages purge /mnt/packages.json
fi
sh $packages check /mnt/packages.json
sh $packages unpin /
rm -f /var/lib/apt/extended_states # nothing counts as installed automatically: autoremove removes nothing of the image

# Before Python 3.11, bytecode depends on the seed of hashes and on what was compiled before, and Debian's packages of
# Python compile without PYTHONHASHSEED. Compile it again, always in the same order.
export PYTHONHASHSEED=0
"$python" -S -B -c 'if True:
    import glob, importlib.util, os, py_compile, sys
    for path in sorted(glob.glob("/usr/lib/python3*/**/*.py", recursive=True)) if sys.version_info < (3, 11) else []:
        if os.path.exists(importlib.util.cache_from_source(path)):
            py_compile.compile(path, doraise=True)
'
# git-lfs writes its settings in an order that differs between builds: two builds of one lock had different bytes.
if [ -e /etc/gitconfig ] && [ "$(grep -c '^\[' /etc/gitconfig)" = 1 ]; then
    { sed -n 1p /etc/gitconfig && sed 1d /etc/gitconfig | LC_ALL=C sort; } >/etc/gitconfig.sorted
    mv /etc/gitconfig.sorted /etc/gitconfig
fi
rm -rf /var/log/apt /var/log/dpkg.log /var/log/alternatives.log /var/cache/ldconfig/aux-cache /var/lib/dpkg/status-old

# A primary group that dev containers can renumber; group 0, in which containers run, owns all files: see decision 35.
useradd --no-log-init --uid 1000 --user-group --groups root --create-home --home-dir /home/user --shell /bin/bash user
chgrp -R 0 /home/user
sed -i -E "s/^([^:]*:[^:]*:)[0-9]+/\\1$((epoch / 86400))/" /etc/shadow # the day of the last change, also of packages' users
rm -f /etc/passwd- /etc/group- /etc/shadow- /etc/gshadow-

# Host keys are made by each container; no tool of this image needs setuid or setgid.
rm -f /etc/ssh/ssh_host_*
find / -xdev -type f -perm /6000 -exec chmod a-s {} +

# A container may run as any user id. Each can write to the home folder and to the state of services, and has a name,
# which the launcher writes to /var/lib/extrausers.
install -d -o 1000 -g 0 -m 0775 /workspace
install -d -o 0 -g 0 -m 1777 /run/workstation /var/lib/workstation /var/lib/extrausers
chmod 1777 /home/user
install -d -o 1000 -g 0 -m 1777 /home/user/.cache # a new volume there gets this owner and mode
sed -i '/^# set PATH/,$d' /home/user/.profile # these lines put ~/.local/bin first, if it exists
sed -i -E '/extrausers/! s/^(passwd|group):.*/& extrausers/' /etc/nsswitch.conf

# An ordinary virtual environment, in which group 0 installs and removes packages. lib/python3.11 is a link, so CUDA's
# layers are the same for every Python.
version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
install -d /opt/venv/lib/python
ln -s python "/opt/venv/lib/$version"
"$python" -m venv --without-pip --system-site-packages /opt/venv
find /opt/venv -type d -exec chmod 0775 {} +
# A path file of the Python that /opt/venv was made with. By its first line, environments of users with
# --system-site-packages have the image's packages too; root's Python outside of environments has not, because Debian's
# programs must not run what users install. The second line is for pip's isolated builds: one that needs torch was built
# with the newest. PIP_BUILD_CONSTRAINT cannot always be set, since pip refuses it with --no-build-isolation; pip sets
# the variable of the condition while it installs what an isolated build needs.
site=/opt/venv/lib/$version/site-packages
base=$("$python" -c 'import site; print(site.getsitepackages()[0])')
install -d "$base"
cat >"$base/image.pth" <<END
import os, site, sys; (os.getuid() == 0 and sys.prefix == sys.base_prefix) or '$site' in known_paths or site.addsitedir('$site', known_paths)
import os; '_PIP_IN_BUILD_IGNORE_CONSTRAINTS' in os.environ and os.environ.setdefault('PIP_BUILD_CONSTRAINT', os.environ.get('PIP_CONSTRAINT', ''))
END
# The programs that the image runs as root start with /usr/bin/python3. Debian's package has it, uv's build has not.
[ -e /usr/bin/python3 ] || ln -s "$python" /usr/bin/python3
# Jupyter reads its files in the environment that it runs in and in /usr/local: with the links, an environment of a
# user with --system-site-packages has the image's.
install -d /usr/local/etc /usr/local/share
ln -s /opt/venv/etc/jupyter /usr/local/etc/jupyter
ln -s /opt/venv/share/jupyter /usr/local/share/jupyter

# For interactive shells. The first line is also for shells that sshd starts for a command: Debian's bash reads this
# file for them.
sed -i '1i [ ! -r /etc/session.sh ] || . /etc/session.sh' /etc/bash.bashrc
echo '. /etc/profile.d/10-venv.sh' >>/etc/bash.bashrc
