#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# scripts/bench.sh [check]: the figures of docs/BENCHMARKING.md, beside qemu-storage-daemon and fio, interleaved, into
# build/bench as text, Markdown, JSON and SVG. With "check", three rows with wide bounds in under five minutes; the exit
# status tells whether what was won is kept. From the environment: DIR, a directory on the disk to measure (default: that
# for temporary files); ROUNDS, RUNTIME and SIZE as sluice bench targets --help explains them.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${DIR:-${TMPDIR:-/tmp}}
out=build/bench

if [ "${1:-}" = check ]; then
	exec bin/sluice bench targets --check --dir "$dir" --runtime "${RUNTIME:-1s}" --rounds "${ROUNDS:-auto:9}" \
		--image-size "${SIZE:-256M}" --out "$out"
fi
set -- --dir "$dir" --runtime "${RUNTIME:-2s}" --image-size "${SIZE:-1G}" --out "$out" --format markdown
bin/sluice bench targets --rounds "${ROUNDS:-auto}" "$@"
bin/sluice bench seeds --rounds "${ROUNDS:-5}" "$@"
echo "bench: reports and charts are in $out" >&2
