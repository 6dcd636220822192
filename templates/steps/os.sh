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
unset SOURCE_DATE_EPOCH

# The locked versions of all packages, and no others. The base may have newer ones, or packages that are not locked.
packages=/mnt/steps/packages.sh
if [ $# -gt 0 ]; then
    # shellcheck source=/dev/null
    . /mnt/host/env.sh
    sh $packages pin / /mnt/packages.json
    apt-get update -q
    apt-get full-upgrade -q -y --no-install-recommends --allow-downgrades
    apt-get install -q -y --no-install-recommends "$@"
    sh $packages purge /mnt/packages.json
fi
sh $packages check /mnt/packages.json
sh $packages unpin /
rm -f /var/lib/apt/extended_states # nothing counts as installed automatically: autoremove removes nothing of the image

# Until Python 3.11, bytecode depends on the seed of hashes and on what was compiled before, and the packages of Python
# ignore PYTHONHASHSEED. Compile it again, always in the same order.
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

useradd --no-log-init --uid 1000 --gid 0 --create-home --home-dir /home/user --shell /bin/bash user
sed -i -E "s/^([^:]*:[^:]*:)[0-9]+/\\1$((epoch / 86400))/" /etc/shadow # the day of the last change, also of packages' users
rm -f /etc/passwd- /etc/group- /etc/shadow- /etc/gshadow-

# Host keys are made by each container; no tool of this image needs setuid or setgid.
rm -f /etc/ssh/ssh_host_*
find / -xdev -type f -perm /6000 -exec chmod a-s {} +

# A user of any number has a home, a place for the state of services, and a name, which the launcher writes down.
install -d -o 1000 -g 0 -m 0775 /workspace
install -d -o 0 -g 0 -m 1777 /run/workstation /var/lib/workstation /var/lib/extrausers
chmod 1777 /home/user
install -d -o 1000 -g 0 -m 1777 /home/user/.cache # a new volume there gets this owner and mode
sed -i '/^# set PATH/,$d' /home/user/.profile # it would put ~/.local/bin first, if that exists
sed -i -E '/extrausers/! s/^(passwd|group):.*/& extrausers/' /etc/nsswitch.conf

# The image's packages, and over them those that people install: see image_environment.py.
"$python" -m venv --without-pip --system-site-packages /opt/venv
install -d -o 0 -g 0 -m 1775 /opt/venv/user /opt/venv/user/lib /opt/venv/user/lib/python
install -d -o 0 -g 0 -m 0775 /opt/venv/user/bin /opt/venv/user/lib/python/site-packages
touch /opt/venv/user/bin/.keep # pip removes a folder as a whole if all of its files belong to the package
cp /opt/venv/pyvenv.cfg /opt/venv/user/pyvenv.cfg
ln -s /opt/venv /.venv # where uv looks for an environment, whatever the folder it runs in
install -d /usr/local/lib/image-python
install -m 0644 /mnt/steps/image_environment.py /usr/local/lib/image-python/
"$python" -m compileall -q --invalidation-mode unchecked-hash /usr/local/lib/image-python
site=$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
base=$("$python" -c 'import site; print(site.getsitepackages()[0])')
version=${site#/opt/venv/lib/}
ln -s python "/opt/venv/user/lib/${version%/*}" # CUDA's layers, which are of no Python's version, have a path without
install -d "$base"
echo 'import sys; sys.path.append("/usr/local/lib/image-python"); import image_environment; sys.path.pop(); image_environment.enter(sitedir, known_paths)' \
    >"$site/00-image.pth"
echo "import site; '$site' in known_paths or site.addsitedir('$site', known_paths)" >"$base/image.pth"
# Jupyter reads its files below the environment that it runs in, which is people's, and here.
install -d /usr/local/etc /usr/local/share
ln -s /opt/venv/etc/jupyter /usr/local/etc/jupyter
ln -s /opt/venv/share/jupyter /usr/local/share/jupyter

# Interactive shells; root's do not get the settings of the image's user. The first line also serves shells that sshd
# starts for a command, for which Debian's bash reads this file.
sed -i '1i [ ! -r /etc/session.sh ] || . /etc/session.sh' /etc/bash.bashrc
echo '. /etc/profile.d/10-venv.sh' >>/etc/bash.bashrc
