#!/bin/sh
# Installs Debian packages in a container of an image's operating system, without the network, and writes its file
# system to /mnt/root.tar. builder/build/apt_layer.py compares that with the image.
#
#   SOURCE_DATE_EPOCH=<seconds> add-packages.sh PACKAGE...
#
# /mnt/debs has the packages, all that they need and the image lacks, and their index. /etc/shadow holds
# SOURCE_DATE_EPOCH in place of the day of the build.
set -eu
epoch=$SOURCE_DATE_EPOCH
unset SOURCE_DATE_EPOCH
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
echo 'deb [trusted=yes] copy:/mnt/debs/ ./' >/mnt/sources.list # the hashes were checked
mkdir -p /mnt/lists/partial /mnt/cache/archives/partial
run_apt() {
    /usr/bin/apt-get -q -o Dir::Etc::SourceList=/mnt/sources.list -o Dir::Etc::SourceParts=- \
        -o Dir::State::Lists=/mnt/lists -o Dir::Cache=/mnt/cache -o APT::Sandbox::User=root "$@"
}
# No service is started in this container.
printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
chmod 755 /usr/sbin/policy-rc.d
# The scripts of Java make links in these folders, which images do not have.
mkdir -p /usr/share/man/man1 /usr/share/man/man5 /usr/share/man/man8
run_apt update
run_apt install -y --no-install-recommends "$@"

# As in os.sh.
rm -f /usr/sbin/policy-rc.d /var/lib/apt/extended_states /var/cache/ldconfig/aux-cache /var/lib/dpkg/status-old
rm -f /etc/passwd- /etc/group- /etc/shadow- /etc/gshadow- /etc/ssh/ssh_host_*
rm -rf /var/log/apt /var/log/dpkg.log /var/log/alternatives.log
sed -i -E "s/^([^:]*:[^:]*:)[0-9]+/\1$((epoch / 86400))/" /etc/shadow
find /usr/share/man -mindepth 1 -type d -empty -delete
find / -xdev -type f -perm /6000 -exec chmod a-s {} +
# Without what the engine mounts or makes, and the files of eStargz.
set --
for path in dev proc sys mnt .dockerenv etc/hostname etc/hosts etc/mtab etc/resolv.conf \
    .prefetch.landmark .no.prefetch.landmark stargz.index.json; do
    set -- "$@" "--exclude=./$path"
done
tar -C / --one-file-system --numeric-owner --sort=name -cf /mnt/root.tar "$@" .
