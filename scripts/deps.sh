#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what `make demo` and `make test` use besides Go: QEMU, busybox, fio, e2fsprogs, strace, and a guest kernel
# unpacked into ${XDG_CACHE_HOME:-~/.cache}/sluice/kernel. Installs only what is missing; says nothing when nothing is.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
kernels=${XDG_CACHE_HOME:-$HOME/.cache}/sluice/kernel
export PATH=$PATH:/usr/sbin:/sbin

say() { echo "deps: $*" >&2; }

# The guest runs this very file, alone: a busybox that needs libraries is of no use.
static_busybox() { [ -x /bin/busybox ] && [[ $(LC_ALL=C ldd /bin/busybox 2>&1) == *"not a dynamic"* ]]; }

# Each line: a program and the Debian package that has it.
missing_packages() {
	local program package
	while read -r program package; do
		command -v "$program" >/dev/null 2>&1 || echo "$package"
	done <<-'LIST' | sort -u
		qemu-system-x86_64 qemu-system-x86
		qemu-storage-daemon qemu-system-common
		qemu-img qemu-utils
		fio fio
		mke2fs e2fsprogs
		e2fsck e2fsprogs
		strace strace
		gcc gcc
	LIST
	static_busybox || echo busybox-static
}

as_root() {
	if [ "$(id -u)" -eq 0 ]; then
		"$@"
	elif command -v sudo >/dev/null 2>&1; then
		sudo "$@"
	else
		say "not root and no sudo; as root run: $*"
		return 1
	fi
}

# What apt prints is shown only when it fails.
quietly() {
	local log
	log=$(mktemp)
	if ! "$@" >"$log" 2>&1; then
		cat "$log" >&2
		rm -f "$log"
		say "failed: $*"
		return 1
	fi
	rm -f "$log"
}

update_lists() { quietly as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq update; }

install_packages() {
	say "installing $*"
	update_lists
	quietly as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@"
}

unpack_kernel() { sh "$here/../internal/guestvm/fetch-kernel.sh" "$kernels" >/dev/null; }

# Old package lists name a kernel that the mirror has no more.
fetch_kernel() {
	if command -v apt-get >/dev/null 2>&1; then
		unpack_kernel 2>/dev/null && return
		update_lists
	fi
	unpack_kernel
}

# A kernel of the host that this user can read will do; guestvm looks closer.
host_kernel() {
	local image
	for image in /boot/vmlinuz-*; do
		[ ! -r "$image" ] || return 0
	done
	return 1
}

have_kernel() { compgen -G "$kernels/linux-image-*/boot/vmlinuz-*" >/dev/null; }

mapfile -t missing < <(missing_packages)
if [ "${#missing[@]}" -gt 0 ]; then
	if ! command -v apt-get >/dev/null 2>&1; then
		say "this is not a Debian system. Install by its own means what these Debian packages hold: ${missing[*]}"
		say "(qemu-system-x86_64, qemu-img, qemu-storage-daemon, a static /bin/busybox, fio, mke2fs, e2fsck, strace)"
		exit 1
	fi
	install_packages "${missing[@]}"
fi

if ! have_kernel; then
	say "fetching a guest kernel into $kernels"
	if ! fetch_kernel; then
		say "no guest kernel was fetched: without a usable kernel in /boot, guest tests are skipped and the demo runs without a guest"
		# On a developer's machine the rest still works; a CI job must not lose its guest tests unnoticed.
		[ "${CI:-}" != true ] || host_kernel || exit 1
	fi
fi
