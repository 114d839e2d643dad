#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Unpacks Debian's cloud kernel (image and modules, nothing is installed) into DIR/PACKAGE and prints that directory.
# Usage: fetch-kernel.sh DIR
set -eu
dir=$1
meta=linux-image-cloud-amd64

for tool in apt-cache apt-get dpkg-deb; do
	if ! command -v "$tool" >/dev/null 2>&1; then
		echo "$tool is missing: a guest kernel is fetched on Debian only (elsewhere name a bzImage whose modules lie beside it, or a directory with boot/vmlinuz-* and lib/modules; Debian's package $meta, unpacked, will do)" >&2
		exit 1
	fi
done

package=$(apt-cache depends "$meta" 2>/dev/null | sed -n 's/^ *Depends: \(linux-image-[^ ]*\)$/\1/p' | head -n 1)
if [ -z "$package" ]; then
	echo "apt knows no package $meta (run apt-get update; on other systems than Debian amd64 name a kernel yourself)" >&2
	exit 1
fi
if [ -d "$dir/$package" ]; then
	echo "$dir/$package"
	exit 0
fi

# Unpacked aside and renamed: half a kernel is never seen, and of two that fetch at once one wins.
mkdir -p "$dir"
work=$(mktemp -d "$dir/.fetch-XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
cd "$work"
if ! apt-get -qq download "$package" >log 2>&1; then
	cat log >&2
	echo "apt-get download $package failed (old package lists? run apt-get update)" >&2
	exit 1
fi
dpkg-deb -x "$package"_*.deb unpacked
chmod 755 unpacked
mv -T unpacked "$dir/$package" 2>/dev/null || [ -d "$dir/$package" ]
echo "$dir/$package"
