#!/usr/bin/env bash
# The guest's process 1, once the root is there: two RDMA devices on one wire, then the command.
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
orders=/run/guest

mount -t sysfs sysfs /sys
mkdir -p /dev/shm /dev/pts
mount -t tmpfs shm /dev/shm
mount -t devpts devpts /dev/pts
ln -sfn /proc/self/fd /dev/fd
echo guest >/proc/sys/kernel/hostname

# Linux 6.1 knows rxe in its first network namespace only, so both ends of the wire are in this one,
# where a packet from one end to the other would go over lo. With these rules, what a device sends
# takes the wire: the addresses of this machine are looked up for what has come in by the wire, and
# for what no device asks for.
for scope in all default; do
  echo 0 >/proc/sys/net/ipv4/conf/$scope/rp_filter
  echo 1 >/proc/sys/net/ipv4/conf/$scope/accept_local
done
ip -batch - <<'END'
link set lo up
link add veth0 mtu 4200 type veth peer name veth1 mtu 4200
addr add 10.9.0.1/24 dev veth0
addr add 10.9.0.2/24 dev veth1
link set veth0 up
link set veth1 up
rule add pref 10 iif veth0 lookup local
rule add pref 11 iif veth1 lookup local
rule add pref 20 oif veth0 lookup main
rule add pref 21 oif veth1 lookup main
rule add pref 100 lookup local
rule del pref 0
END
rdma link add rxe0 type rxe netdev veth0
rdma link add rxe1 type rxe netdev veth1

source $orders/environment
export TAPCHANNEL_RDMA_GUEST=1
# rc needs ud to connect. Whether a ud packet is IPv4 or IPv6 UCX learns from the completion's sl, as
# mlx5 fills it; rxe leaves it 0, and the check would drop every IPv4 packet. To retry 7 times means
# for ever to rxe: a dead peer would never be noticed.
export UCX_TLS=${UCX_TLS:-rc_v,self} UCX_NET_DEVICES=${UCX_NET_DEVICES:-rxe0:1,rxe1:1}
export UCX_UD_ETH_DGID_CHECK=n UCX_RC_RETRY_COUNT=6 UCX_WARN_UNUSED_ENV_VARS=n
# Tests fork here, since to import torch takes half a minute: nothing may make threads before they do.
export OPENBLAS_NUM_THREADS=1
ulimit -l unlimited
cd "$(cat $orders/folder)" || exit
touch $orders/started
bash -c "$(cat $orders/command)" </dev/null >/dev/vport*p1 2>&1
echo $? >$orders/code
sync
echo b >/proc/sysrq-trigger
sleep 60
