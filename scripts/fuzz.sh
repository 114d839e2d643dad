#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# scripts/fuzz.sh TIME: runs every fuzz target for so long, one after the other. Finds are kept in testdata/fuzz.
set -euo pipefail
cd "$(dirname "$0")/.."
time=${1:-60s}
grep -rl --include='*_test.go' '^func Fuzz' . | xargs -n1 dirname | sort -u | while read -r dir; do
	grep -hoE '^func Fuzz[A-Za-z0-9_]+' "$dir"/*_test.go | sed 's/^func //' | while read -r target; do
		echo "== $dir $target"
		go test "$dir" -run '^$' -fuzz "^$target\$" -fuzztime "$time" -fuzzminimizetime 10x # by time, whole images would be made smaller and nothing else done
	done
done
