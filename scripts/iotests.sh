#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# scripts/iotests.sh [-j N] [--baseline] [--update] [TEST...]
#
# Runs those of QEMU's own block tests that need an image tool, with ours in its place, and compares the outcome of each
# with tests/iotests/expected.txt: a test that passed once must go on passing. Without names, all tests of the list.
#
#   --baseline   Debian's own qemu-img instead: what fails then cannot be blamed on ours
#   --update     write the list anew from this run, keeping the reasons that are there
#   -j N         so many tests at a time (default 1)
#
# The tests are QEMU's, under the GPL: they are fetched from Debian's source package when this runs, into
# ${XDG_CACHE_HOME:-~/.cache}/sluice/iotests, and are no part of this project. What differs is kept in build/iotests.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/sluice/iotests
suite=$cache/suite/tests/qemu-iotests
expected=$here/tests/iotests/expected.txt
results=$here/build/iotests
export PATH=$PATH:/usr/sbin:/sbin LC_ALL=C

say() { echo "iotests: $*" >&2; }
die() { say "$*"; exit 1; }

jobs=1 baseline= update= tests=()
while [ $# -gt 0 ]; do
	case $1 in
	-j) jobs=$2; shift ;;
	--baseline) baseline=1 ;;
	--update) update=1 ;;
	-*) die "unknown option $1 (see the head of scripts/iotests.sh)" ;;
	*) tests+=("$1") ;;
	esac
	shift
done

# Source packages have an index of their own, which most machines do not fetch: it is fetched here, beside the system's.
fetch() {
	local conf=$cache/apt/apt.conf code
	code=$(. /etc/os-release && echo "$VERSION_CODENAME")
	mkdir -p "$cache/apt/lists/partial" "$cache/apt/cache/archives/partial"
	cat >"$cache/apt/sources.list" <<-END
		deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian $code main
		deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian-security $code-security main
	END
	cat >"$conf" <<-END
		Dir::Etc::sourcelist "$cache/apt/sources.list";
		Dir::Etc::sourceparts "/dev/null";
		Dir::State::lists "$cache/apt/lists";
		Dir::Cache "$cache/apt/cache";
		APT::Sandbox::User "root";
	END
	say "fetching the source package of qemu into $cache"
	(cd "$cache" && APT_CONFIG=$conf apt-get -qq update && APT_CONFIG=$conf apt-get -qq source --download-only qemu)
}

# The tests of the release, with what Debian's later stable releases changed in them: the package keeps that as patches.
unpack() {
	local origin debian
	origin=$(ls "$cache"/qemu_*.orig.tar.xz | tail -1)
	debian=$(ls "$cache"/qemu_*.debian.tar.xz | tail -1)
	rm -rf "$cache/unpacking" "$cache/suite"
	mkdir -p "$cache/unpacking/debian"
	tar -xf "$origin" -C "$cache/unpacking" --strip-components=1 --wildcards '*/tests/qemu-iotests' '*/python'
	tar -xf "$debian" -C "$cache/unpacking"
	local name
	while read -r name; do
		awk '/^diff --git/ { keep = $0 ~ / a\/(tests\/qemu-iotests|python)\// } keep' "$cache/unpacking/debian/patches/$name" |
			patch -d "$cache/unpacking" -p1 -s -f
	done < <(grep -E '^v[0-9.]+\.diff$' "$cache/unpacking/debian/patches/series")
	mv "$cache/unpacking" "$cache/suite"
}

for program in qemu-img qemu-io qemu-nbd qemu-storage-daemon qemu-system-x86_64 python3 patch xz; do
	command -v "$program" >/dev/null || die "needs $program (apt-get install qemu-utils qemu-system-x86 python3 patch xz-utils)"
done
[ -d "$suite" ] || { ls "$cache"/qemu_*.orig.tar.xz >/dev/null 2>&1 || fetch; unpack; }

work=$(mktemp -d /tmp/iotXXXXXX) # short, since sockets are named below it; some tests take no dot
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/bin" "$work/test" "$work/sock"

# Debian's emulator has no accelerator for tests; without one that runs, tests that only look at its devices fail.
cat >"$work/bin/qemu" <<'END'
#!/bin/bash
last=
for word; do
	shift
	[ "$last" = -accel ] && [ "$word" = qtest ] && word=tcg
	last=$word
	set -- "$@" "$word"
done
exec -a "$0" qemu-system-x86_64 "$@"
END
chmod +x "$work/bin/qemu"

if [ -n "$baseline" ]; then
	ln -s "$(command -v qemu-img)" "$work/bin/qemu-img"
else
	[ -x "$here/bin/sluice" ] || die "bin/sluice is not built (make build)"
	ln -s "$here/bin/sluice" "$work/bin/qemu-img"
fi

if [ ${#tests[@]} -eq 0 ]; then
	mapfile -t tests < <(awk '!/^#/ && NF { print $1 }' "$expected")
fi

run() {
	cd "$suite"
	env QEMU_PROG="$work/bin/qemu" QEMU_IMG_PROG="$work/bin/qemu-img" QEMU_IO_PROG="$(command -v qemu-io)" \
		QEMU_NBD_PROG="$(command -v qemu-nbd)" QSD_PROG="$(command -v qemu-storage-daemon)" \
		TEST_DIR="$work/test" SOCK_DIR="$work/sock" PYTHON=/usr/bin/python3 \
		/usr/bin/python3 ./check --color off -qcow2 -j "$jobs" "${tests[@]}"
}

mkdir -p "$results"
rm -f "$results"/*
(run) >"$results/log" 2>&1 || true # its exit status tells no more than its lines
find "$work/test" -name '*.out.bad' -exec cp {} "$results/" \;

# One line a test: name and outcome.
grep -oE '[0-9a-z-]+ +(pass|fail|not run) +\[' "$results/log" | sed -E 's/not run/notrun/; s/ +\[$//; s/ +/ /' | sort -u >"$results/outcome" || true
[ -s "$results/outcome" ] || { cat "$results/log" >&2; die "no test ran"; }

if [ -n "$update" ]; then
	awk '
		FNR == NR { if (/^#/) head = head $0 "\n"; else if (NF) { name = $1; was[name] = $2; $1 = $2 = ""; sub(/^ +/, ""); why[name] = $0 } next }
		FNR == 1 { printf "%s", head }
		{ print $1, $2 ($2 != "pass" ? " " ($1 in why && why[$1] != "" ? why[$1] : "(no reason yet)") : "") }
	' "$expected" "$results/outcome" >"$results/expected" && cp "$results/expected" "$expected"
fi

awk -v whole="${#tests[@]}" '
	FNR == NR { if (!/^#/ && NF) want[$1] = $2; next }
	{ count[$2]++; seen[$1] = 1 }
	$2 != want[$1] && want[$1] == "pass" { print "iotests: " $1 " passed before: " $2; bad++ }
	$2 == "pass" && want[$1] != "" && want[$1] != "pass" { print "iotests: " $1 " passes now: write it to tests/iotests/expected.txt" }
	$2 != "pass" && want[$1] == "" { print "iotests: " $1 ": " $2 }
	END {
		for (t in seen) n++
		if (n < whole) { print "iotests: " whole - n " tests told nothing"; bad++ }
		printf "iotests: %d passed, %d failed, %d not run\n", count["pass"], count["fail"], count["notrun"]
		exit bad > 0
	}' "$expected" "$results/outcome"
