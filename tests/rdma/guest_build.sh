#!/usr/bin/env bash
# Make what the guest starts from, by apt: FOLDER/vmlinux, Debian's kernel, and FOLDER/first_root, the
# file system that it starts in: busybox, the modules, and guest_init.sh.
set -euo pipefail

target=$1
here=$(cd "$(dirname "$0")" && pwd)
# In the order of their loading. modprobe does not know that rdma_rxe needs crc32.
MODULES=(virtio_pci virtio_console 9pnet_virtio 9p overlay veth sch_netem crc32_generic rdma_rxe ib_uverbs)

# Not the kernel for clouds: that has neither rdma_rxe nor 9p.
download_kernel() {
  local package
  package=$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image/ { print $2; exit }')
  [[ $package ]] && apt-get -o APT::Sandbox::User=root download -qq "$package" >&2
}

# Unpacked, a kernel starts by itself: the emulated CPU need neither run a BIOS nor unpack it.
unpack_kernel() {
  local offset
  offset=$(LC_ALL=C grep -aboP '\xFD7zXZ\x00' "$1" | cut -d : -f 1 | sed -n 1p)
  xz -dc --single-stream < <(tail -c "+$((offset + 1))" "$1")
}

list_modules() {
  local module
  for module in "${MODULES[@]}"; do
    modprobe -d tree -S "$version" --show-depends "$module"
  done | awk '/^insmod/ && !seen[$2]++ { print $2 }'
}

pack_first_root() {
  local module number=100 name
  mkdir -p root/{bin,dev,proc,modules,lower,memory,root}
  cp "$(command -v busybox)" root/bin/
  for name in sh mount mkdir insmod switch_root; do ln -s busybox root/bin/$name; done
  for module in $(list_modules); do
    cp "$module" "root/modules/$((number++))-${module##*/}"
  done
  install -m 755 "$here/guest_init.sh" root/init
  (cd root && find . | cpio -o -H newc --quiet)
}

mkdir -p "$target"
parts=$(mktemp -d "$target.XXXXXX")
trap 'rm -rf "$parts"' EXIT
cd "$parts"
download_kernel || { apt-get update -qq >&2 && download_kernel; }
dpkg-deb -x linux-image-*.deb tree
version=$(ls tree/lib/modules)
depmod -b tree "$version"
unpack_kernel "tree/boot/vmlinuz-$version" >vmlinux
pack_first_root >first_root
mv vmlinux first_root "$target/"
