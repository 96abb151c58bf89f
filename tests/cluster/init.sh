#!/bin/bash
# Process 1 of one machine of the test cluster: unshare(1) gives it its own process ids, network,
# host name, mounts and IPC. When it is killed the kernel ends every process of the machine,
# and with them go its network and its mounts: a crash of the node, and the way to leave no trace.
#
# usage: init.sh HOSTNAME HOSTS_FILE READY_FILE [MEMORY_CGROUP]
set -eu
hostname "$1"
mount --bind "$2" /etc/hosts
# Slurm makes its cgroups below this one, so that clusters beside each other do not share limits.
[ -z "${4-}" ] || mount --bind "$4" /sys/fs/cgroup/memory
mount -t tmpfs -o mode=755 run /run      # pid files, sshd's folder
mount -t tmpfs -o mode=1777 shm /dev/shm # nodes share no memory
mkdir -p /run/sshd
ip link set lo up
: >"$3"
# bash reaps the orphans that daemons and jobs leave to process 1; without that they stay as zombies.
while :; do
    sleep 3600 &
    wait $! || true
done
