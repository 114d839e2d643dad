#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# gofmt, go vet and staticcheck; each complaint fails the run.
set -euo pipefail
cd "$(dirname "$0")/.."

unformatted=$(gofmt -l $(git ls-files --cached --others --exclude-standard '*.go'))
if [ -n "$unformatted" ]; then
	echo "lint: not formatted (gofmt -w FILE):"
	echo "$unformatted"
	exit 1
fi
go vet ./...
go vet -tags invariants ./...

# The linter has a module of its own, so that what it needs is no dependency of the product.
mkdir -p build
if [ ! -x build/staticcheck ] || [ tools/go.sum -nt build/staticcheck ]; then
	go -C tools build -o ../build/staticcheck honnef.co/go/tools/cmd/staticcheck
fi
build/staticcheck ./...
