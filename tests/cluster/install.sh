#!/bin/sh
# Installs the programs that the test cluster (tests/cluster) needs: Slurm, munge, MariaDB, iproute2, OpenSSH.
# No service is started, now or at boot: the test cluster starts its own daemons in its own namespaces.
set -eu

# Keep this list in step with PROGRAMS in daemons.py.
packages="slurmctld slurmd slurm-client slurmdbd munge mariadb-server iproute2 util-linux openssh-server openssh-client"

refuse() {
    echo "tests/cluster/install.sh: $1" >&2
    echo "The tests marked 'cluster' are skipped on this machine; everything else runs." >&2
    exit 1
}

command -v apt-get >/dev/null 2>&1 ||
    refuse "needs Debian or Ubuntu (there is no apt-get here); install by hand: $packages"

missing=""
for package in $packages; do
    status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$status" = installed ] || missing="$missing $package"
done
if [ -z "$missing" ]; then
    echo "tests/cluster/install.sh: everything is installed already"
    exit 0
fi
[ "$(id -u)" = 0 ] || refuse "needs root to install:$missing; try: sudo $0"

# invoke-rc.d starts a service only if policy-rc.d allows it; exit code 101 forbids it.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    trap 'exit 130' INT TERM
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi

export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086  # the words of $missing are separate packages
apt-get install -y --no-install-recommends $missing || {
    echo "tests/cluster/install.sh: fetching the package lists, then once more" >&2
    apt-get update
    apt-get install -y --no-install-recommends $missing ||
        refuse "apt-get could not install:$missing"
}

# Otherwise systemd would start the services at the next boot.
if command -v systemctl >/dev/null 2>&1 && [ -d /run/systemd/system ]; then
    for package in $missing; do
        case $package in
        slurmctld | slurmd | slurmdbd | munge) systemctl disable --quiet "$package" || true ;;
        mariadb-server) systemctl disable --quiet mariadb || true ;;
        esac
    done
fi
