// SPDX-License-Identifier: Apache-2.0

package img

// faultsOf names the faults that are put below the format of the image at a path. Tests set it.
var faultsOf = func(path string) string { return "" }
