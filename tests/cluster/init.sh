#!/bin/bash
# Process 1 of one machine of the test cluster: unshare(1) gives it its own process ids, network,
# host name, mounts and IPC. When it is killed, the kernel ends every process of the machine and removes
# its network and mounts. The tests use this to crash a node and to clean up.
#
# usage: init.sh HOSTNAME HOSTS_FILE READY_FILE [MEMORY_CGROUP]
set -eu
hostname "$1"
mount --bind "$2" /etc/hosts
# Slurm creates its cgroups below this one, so that clusters that run at the same time do not share limits.
[ -z "${4-}" ] || mount --bind "$4" /sys/fs/cgroup/memory
mount -t tmpfs -o mode=755 run /run      # pid files, sshd's folder
mount -t tmpfs -o mode=1777 shm /dev/shm # nodes share no memory
mkdir -p /run/sshd
mkdir -p -m 700 /run/user/0 # root's runtime folder, which a login creates
ip link set lo up
: >"$3"
# While it waits, bash reaps orphaned processes of daemons and jobs, which would otherwise stay as zombies.
while :; do
    sleep 3600 &
    wait $! || true
done
