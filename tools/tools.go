// SPDX-License-Identifier: Apache-2.0

//go:build tools

// Package tools pins the programs that the build uses, apart from what the product depends on.
package tools

import _ "honnef.co/go/tools/cmd/staticcheck"
