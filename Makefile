# SPDX-License-Identifier: Apache-2.0
#
# make demo   the main job: a real guest reads and writes a disk that sluice serves
# make test   everything that CI runs; installs what it needs
# make help   the rest

export CGO_ENABLED = 0
GO ?= go
PACKAGES = ./...
FORMAT ?= raw

.PHONY: all build cross demo test check unit race peers guest bench bench-check soak fuzz iotests deps lint clean help

all: build

help:
	@grep -E '^# make|^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^# //; s/:.*## /\t/'

build: ## the static binary, bin/sluice
	$(GO) build -trimpath -ldflags '-s -w' -o bin/sluice ./cmd/sluice

cross: ## the same for both architectures that are supported
	GOARCH=amd64 $(GO) build -trimpath -o /dev/null ./cmd/sluice
	GOARCH=arm64 $(GO) build -trimpath -o /dev/null ./cmd/sluice
	GOARCH=arm64 $(GO) vet $(PACKAGES)

deps: ## installs the Debian packages that demo and test need
	@scripts/deps.sh

demo: deps build ## a guest under QEMU does its work on a disk of ours, and a table of figures; FORMAT=qcow2 for an image, ARGS for flags
	bin/sluice demo --format $(FORMAT) $(ARGS)

test: deps check unit race guest ## all that CI runs
	@echo "make test: all passed"

check: lint cross build

lint: ## gofmt, go vet, staticcheck
	scripts/lint.sh

unit: ## every package's tests, with the fuzz seeds and the real peers
	scripts/gotest.sh unit -timeout 10m -count=1 -p 2 $$($(GO) list ./... | grep -v /tests/guest)

race: ## with the race detector, all but what shares rings with the kernel or a guest
	CGO_ENABLED=1 scripts/gotest.sh race -race -timeout 10m -count=1 -p 2 $$($(GO) list ./... | grep -v /tests/)

guest: build ## boots guests: the demo's test shortened, and the ring suites on the guest's kernel
	scripts/gotest.sh guest -timeout 15m -count=1 -p 1 ./tests/guest/...

iotests: deps build ## QEMU's own tests of its image tool, with ours in its place (fetches them; a quarter of an hour)
	scripts/iotests.sh

fuzz: ## each fuzz target for a minute
	scripts/fuzz.sh 60s

soak: build ## the long tests
	SLUICE_SOAK=1 scripts/gotest.sh soak -timeout 3h -count=1 -p 1 ./...

bench: deps build ## the figures of docs/BENCHMARKING.md, beside the peer's and fio's, into build/bench (an hour)
	scripts/bench.sh

bench-check: deps build ## three of them with wide bounds: fails when what was won is lost (under five minutes)
	scripts/bench.sh check

clean:
	rm -rf bin build
