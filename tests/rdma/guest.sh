#!/usr/bin/env bash
# Run a command where there are RDMA devices: in a guest whose kernel has Soft-RoCE (rdma_rxe).
#
#   tests/rdma/guest.sh COMMAND...          make rdma runs the tests marked rdma in it
#
# The guest is emulated: it needs no hardware, and its speed says nothing of any. Its root is this
# machine's, read-only, under an overlay in memory: every file is there under its own name, the command
# starts in this folder, and nothing that it writes stays. guest_run.sh makes the two devices and says
# which settings they need. What the command prints comes out here, both streams as one, and its exit
# code is this script's; 124 means that it took too long, 125 that the guest did not run it to its end:
# the kernel's log is printed then.
#
#   RDMA_GUEST_LIMIT        seconds for the whole run, 900 by default
#   RDMA_GUEST_BOOT_LIMIT   seconds until the command has begun, 120 by default
#
# Needs root on Debian 12 and installs what is missing by apt. The guest's kernel is kept in build/rdma.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin

LIMIT=${RDMA_GUEST_LIMIT:-900}
BOOT_LIMIT=${RDMA_GUEST_BOOT_LIMIT:-120}
MEMORY_MIB=4096
PACKAGES=(qemu-system-x86 busybox-static kmod cpio xz-utils iproute2 ibverbs-providers ucx-utils)
KERNEL_SETTINGS="console=ttyS0 panic=-1 mitigations=off nokaslr audit=0 nowatchdog cryptomgr.notests
  tsc=reliable clocksource=tsc no_timer_check random.trust_cpu=on"

here=$(cd "$(dirname "$0")" && pwd)

say() { echo "${0##*/}: $*" >&2; }
fail() {
  say "$@"
  exit 125
}

install_packages() {
  local missing=() package
  for package in "${PACKAGES[@]}"; do
    [[ $(dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>&1) == ii* ]] || missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  say "installing ${missing[*]}"
  apt-get update -qq >&2 &&
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
}

# Give the folder of the guest's kernel, made anew when the way of making it has changed.
built_guest() {
  local cache made
  cache=$(cd "$here/../.." && pwd)/build/rdma
  made=$cache/$(cat "$here"/guest_{build,init}.sh | sha256sum | cut -c 1-16)
  if [[ ! -s $made/first_root ]]; then
    say "making the guest"
    rm -rf "$cache"
    "$here/guest_build.sh" "$made" || return
  fi
  echo "$made"
}

start_guest() {
  local local="local,security_model=none,multidevs=remap"
  # It ends with this script, however that ends.
  exec setpriv --pdeathsig KILL qemu-system-x86_64 \
    -machine q35 -accel tcg,thread=multi,tb-size=512 -cpu max,la57=off,pku=off \
    -smp 2 -m "$MEMORY_MIB" -nodefaults -no-user-config -display none -no-reboot \
    -kernel "$guest/vmlinux" -initrd "$guest/first_root" -append "${KERNEL_SETTINGS//$'\n'/ }" \
    -chardev "file,id=console,path=$work/console" -serial chardev:console \
    -chardev "file,id=output,path=$work/output" \
    -device virtio-serial-pci -device virtserialport,chardev=output \
    -fsdev "$local,id=root,path=/,readonly=on" -device virtio-9p-pci,fsdev=root,mount_tag=root \
    -fsdev "$local,id=orders,path=$orders" -device virtio-9p-pci,fsdev=orders,mount_tag=orders \
    -device virtio-rng-pci </dev/null
}

# Wait for the guest to end; return the command's exit code, or say why there is none.
await_guest() {
  local began=$SECONDS
  while kill -0 "$qemu" 2>/dev/null; do
    if ((SECONDS - began > LIMIT)); then
      say "ended after $LIMIT s"
      return 124
    elif [[ ! -e $orders/started ]] && ((SECONDS - began > BOOT_LIMIT)); then
      say "no guest after $BOOT_LIMIT s"
      break
    fi
    sleep 0.2
  done
  [[ ! -s $orders/code ]] || return "$(cat "$orders/code")"
  cat "$work/console" >&2
  say "the guest did not run the command to its end"
  return 125
}

end_guest() {
  [[ ! $qemu ]] || kill -KILL "$qemu" 2>/dev/null || true
  : 1<>"$work/output"  # so that cat ends even where QEMU never began to write
  { wait; } 2>/dev/null  # for the last of the output
  rm -rf "$work"
}

(($#)) || fail "usage: ${0##*/} COMMAND..."
[[ $EUID == 0 ]] || fail "needs root"
[[ $(uname -m) == x86_64 ]] || fail "knows x86_64 guests only; this machine is $(uname -m)"
command -v apt-get >/dev/null || fail "needs Debian's apt, for QEMU and the guest's kernel"
install_packages || fail "could not install ${PACKAGES[*]}"
guest=$(built_guest) || fail "could not make the guest"

qemu=
work=$(mktemp -d)
trap end_guest EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
orders=$work/orders  # what this script and guest_run.sh leave for each other
mkdir "$orders"
export -p >"$orders/environment"
printf '%q ' "$@" >"$orders/command"
pwd >"$orders/folder"
install -m 755 "$here/guest_run.sh" "$orders/run"
mkfifo "$work/output"
cat "$work/output" &
start_guest &
qemu=$!
await_guest || exit
