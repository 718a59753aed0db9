#!/bin/sh
# The guest's process 1 at first: put the machine's root, read-only, under an overlay, and go there.
share=trans=virtio,version=9p2000.L,msize=512000

mount -t proc proc /proc
mount -t devtmpfs dev /dev
for module in /modules/*; do insmod "$module"; done

mount -t 9p -o "ro,$share,cache=loose" root /lower
mount -t tmpfs -o size=75% memory /memory
mkdir /memory/upper /memory/work
mount -t overlay -o lowerdir=/lower,upperdir=/memory/upper,workdir=/memory/work overlay /root
mkdir -p /root/run/guest
mount -t 9p -o "$share,cache=none" orders /root/run/guest
mount --move /dev /root/dev
mount --move /proc /root/proc
exec switch_root /root /run/guest/run
