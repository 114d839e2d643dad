#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# scripts/gotest.sh NAME ARG...: go test with the arguments, the whole output in build/NAME.log, a summary on the
# terminal. In CI a skipped test is a failure, since everything that a test may need is installed there.
set -uo pipefail
cd "$(dirname "$0")/.."
name=$1
shift
mkdir -p build
log=build/$name.log
start=$SECONDS
go test -v "$@" >"$log" 2>&1
status=$?

passed=$(grep -cE '^ *--- PASS' "$log")
failed=$(grep -cE '^ *--- FAIL' "$log")
skipped=$(grep -cE '^ *--- SKIP' "$log")
if [ "$status" -ne 0 ]; then
	echo "== $name: what failed (whole output in $log)"
	grep -nE '^ *--- FAIL|^FAIL|^panic:|^fatal error:|DATA RACE|\[build failed\]|\[setup failed\]|^#' "$log" | head -n 60
	first=$(grep -nE -m1 '^ *--- FAIL|^panic:|^fatal error:|DATA RACE|\[build failed\]|^#' "$log" | cut -d: -f1)
	[ -n "$first" ] && sed -n "$((first > 40 ? first - 40 : 1)),$((first + 60))p" "$log"
fi
if [ "$skipped" -ne 0 ]; then
	echo "== $name: what was skipped, and why"
	grep -E -A1 '^ *--- SKIP' "$log" | grep -v '^--$' | head -n 60
fi
grep -E '^(ok|FAIL)\s' "$log" | sed -E 's/\s+coverage:.*//'
echo "$name: $passed passed, $failed failed, $skipped skipped, $((SECONDS - start)) s"
[ "$status" -eq 0 ] || exit "$status"
if [ "${CI:-}" = true ] && [ "$skipped" -ne 0 ]; then
	echo "== $name: in CI nothing may be skipped: install what is missing in scripts/deps.sh"
	exit 1
fi
