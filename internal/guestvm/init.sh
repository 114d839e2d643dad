#!/bin/busybox sh
# SPDX-License-Identifier: Apache-2.0
# The guest's process 1. It mounts the kernel's file systems, loads the modules of /sluice/modules.list, waits for the
# devices that this boot expects, runs /sluice/script, tells its exit status and powers off.
#
# /sluice/boot.conf sets: nonce (stands in every marker line, so that no output can be taken for one), devices (to wait
# for), device_wait (seconds). Marker lines go to ttyS1, which nobody else writes to; console noise stays on ttyS0:
#   #sluice-guest NONCE init UPTIME          process 1 runs
#   #sluice-guest NONCE start UPTIME         the next byte is the script's output
#   #sluice-guest NONCE exit STATUS UPTIME   after byte 036, which ends the output wherever in a line it stands
#   #sluice-guest NONCE fail TEXT            instead of start: the guest could not be prepared

# Packed programs come before busybox's applets, see also prefer_packed.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin:/sluice/bin HOME=/root TERM=dumb LC_ALL=C
busybox=/bin/busybox
$busybox mount -t proc proc /proc
$busybox mount -t sysfs sys /sys
$busybox mount -t devtmpfs dev /dev
. /sluice/boot.conf

say() {
	read -r uptime rest </proc/uptime
	echo "#sluice-guest $nonce $* $uptime"
}

# Busybox's shell runs its own applets without looking at PATH. Aliases make it find a packed mke2fs, say; a shell that
# the script starts knows nothing of them and has to name the path.
prefer_packed() {
	for program in /usr/sbin/* /usr/bin/* /sbin/* /bin/*; do
		[ ! -f "$program" ] || [ "$program" -ef "$busybox" ] || echo "alias '${program##*/}=$program'"
	done >/sluice/prelude
	echo ". /sluice/script" >>/sluice/prelude
}

prepare() {
	$busybox --install -s /sluice/bin
	[ -e /bin/sh ] || ln -s busybox /bin/sh
	mkdir -p /dev/pts /dev/shm
	mount -t devpts pts /dev/pts
	mount -t tmpfs shm /dev/shm
	mount -t tmpfs tmp /tmp
	prefer_packed
	while read -r module; do
		insmod "$module" || { why="load module $module"; return 1; }
	done </sluice/modules.list
	deadline=$device_wait
	for device in $devices; do
		until [ -e "$device" ]; do
			if [ "$deadline" -le 0 ]; then
				why="no $device after $device_wait seconds"
				return 1
			fi
			sleep 0.1
			ticks=$((ticks + 1))
			[ $((ticks % 10)) -ne 0 ] || deadline=$((deadline - 1))
		done
	done
}

main() {
	$busybox stty 115200 raw -echo <&1
	say init
	if prepare; then
		say start
		(cd /tmp && exec $busybox sh /sluice/prelude) </dev/null
		status=$?
		# What the script left behind would hold the line open, and the last close is what waits for its bytes to leave.
		kill -9 -1
		printf '\036'
		say exit $status
	else
		say fail "$why:"
		dmesg | tail -n 20 >/dev/console
	fi
}

main >/dev/ttyS1 2>&1
sync
poweroff -f
