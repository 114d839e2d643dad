#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# scripts/imgbench.sh [-n ROUNDS] [-s GIB] [-d FOLDER]
#
# Converts a half-empty image with QEMU's qemu-img and with bin/sluice, in turn, and prints for each way the medians of wall
# time and processor time (user and system), with the range of the former. FOLDER (default: a new one in /tmp) needs room for
# three times the image. The page cache is warm: what is compared is the tools, not the disk.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
rounds=5 size=1 folder=
while getopts n:s:d: flag; do
	case $flag in
	n) rounds=$OPTARG ;;
	s) size=$OPTARG ;;
	d) folder=$OPTARG ;;
	*) exit 2 ;;
	esac
done
command -v qemu-img >/dev/null || { echo "imgbench: needs qemu-img (apt-get install qemu-utils)" >&2; exit 1; }
[ -x "$here/bin/sluice" ] || { echo "imgbench: bin/sluice is not built (make build)" >&2; exit 1; }
work=$(mktemp -d "${folder:-/tmp}/imgbenchXXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir "$work/ours"
ln -s "$here/bin/sluice" "$work/ours/qemu-img"

# Files of this machine, in every second stretch of 2 MiB.
raw=$work/half.raw
truncate -s "${size}G" "$raw"
tar -cf - /usr 2>/dev/null | head -c "$((size * 512))M" >"$work/data" || true
for ((i = 0; i < size * 256; i++)); do
	dd if="$work/data" of="$raw" bs=2M count=1 skip=$i seek=$((2 * i)) conv=notrunc status=none
done
rm "$work/data"
qemu-img convert -O qcow2 "$raw" "$work/half.qcow2"
qemu-img convert -c -O qcow2 -o compression_type=zstd -W -m 16 "$raw" "$work/zstd.qcow2"

once() { # TOOL ARGUMENTS...: wall, user and system seconds
	rm -f "$work/out"
	{ TIMEFORMAT='%R %U %S'; time "$@" "$work/out" >/dev/null; } 2>&1
}

middle() { sort -n | awk '{ v[NR] = $1 } END { printf "%.3f %.3f %.3f\n", v[int((NR + 1) / 2)], v[1], v[NR] }'; }

row() { # NAME ARGUMENTS...
	local name=$1 i tool
	shift
	for ((i = 0; i < rounds; i++)); do
		once qemu-img convert "$@" >>"$work/qemu-img.$name"
		once "$work/ours/qemu-img" convert "$@" >>"$work/sluice.$name"
	done
	for tool in qemu-img sluice; do
		read -r wall least most < <(awk '{ print $1 }' "$work/$tool.$name" | middle)
		read -r cpu _ < <(awk '{ print $2 + $3 }' "$work/$tool.$name" | middle)
		printf '%-12s %-9s wall %8s s (%s to %s), processor %8s s\n' "$name" "$tool" "$wall" "$least" "$most" "$cpu"
	done
}

echo "image of $size GiB, half empty; $rounds rounds; load $(cut -d' ' -f1 /proc/loadavg) on $(nproc) processors"
row raw-raw -m 16 -W -O raw "$raw"
row raw-qcow2 -m 16 -W -O qcow2 "$raw"
row qcow2-raw -m 16 -W -O raw "$work/half.qcow2"
row raw-zlib -c -m 16 -W -O qcow2 "$raw"
row raw-zstd -c -m 16 -W -O qcow2 -o compression_type=zstd "$raw"
row zstd-raw -m 16 -W -O raw "$work/zstd.qcow2"
