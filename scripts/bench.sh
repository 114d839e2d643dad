#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The figures of docs/BENCHMARKING.md: our engines with batching on and off beside qemu-storage-daemon, interleaved, on a
# memory file system and on the disk below DIR (default: the directory for temporary files). ROUNDS and RUNTIME as they
# stand, or from the environment.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${DIR:-${TMPDIR:-/tmp}}
rounds=${ROUNDS:-5}
runtime=${RUNTIME:-3s}
size=${SIZE_MIB:-1024}

shm=$(mktemp /dev/shm/sluice-bench.XXXXXX)
disk=$(mktemp "$dir/sluice-bench.XXXXXX")
trap 'rm -f "$shm" "$disk"' EXIT
echo "filling two images of $size MiB" >&2
for f in "$shm" "$disk"; do
	dd if=/dev/urandom of="$f" bs=1M count="$size" status=none
done
sync "$disk"

echo "$(uname -sr), $(nproc) CPUs ($(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n1)), $(date +%F)"
echo "disk: $(stat -f -c %T "$disk"), $(df --output=source "$disk" | tail -n1)"
qemu-storage-daemon --version | head -n1
run() {
	echo
	echo "### $1"
	shift
	echo
	bin/sluice bench compare --rounds "$rounds" --runtime "$runtime" --ramp-time 500ms "$@"
}
run "/dev/shm, 4k random read, depth 64" --file "$shm" --iodepth 64 --engine auto,io_uring,threads
run "disk, 4k random read, depth 64" --file "$disk" --iodepth 64 --engine io_uring,linux-aio,threads
run "/dev/shm, 4k random write, depth 64" --file "$shm" --iodepth 64 --rw randwrite --engine auto
run "disk, 4k random write, depth 64" --file "$disk" --iodepth 64 --rw randwrite --engine io_uring,linux-aio
run "/dev/shm, 4k random read, depth 1" --file "$shm" --engine auto
run "disk, 4k random read, depth 1" --file "$disk" --engine io_uring,linux-aio
run "null, depth 64" --null --iodepth 64
