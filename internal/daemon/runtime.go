// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"os"
	"runtime"
	"runtime/debug"
	"strings"
)

// TuneRuntime gives the Go runtime what that many loops need. A process calls it once, before it starts them; a library
// does not, since the settings are the whole process's.
//
// A loop that wakes needs a P. With none idle it waits up to 10 ms until a busy goroutine is preempted, so there is one
// for each CPU, one for each loop, and one in reserve. Garbage is made by the control plane alone and is little, so it is
// collected seldom. Whoever sets GOMAXPROCS or GOGC in the environment keeps it.
func TuneRuntime(loops int) {
	if os.Getenv("GOMAXPROCS") == "" {
		// With the variable unset, GOMAXPROCS(0) is the CPUs that affinity and the control group allow.
		runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + loops + 1)
	}
	if os.Getenv("GOGC") == "" {
		const percent = 400
		debug.SetGCPercent(percent)
	}
}

// RuntimeWarning names a setting of the environment that hurts the loops, or is empty.
func RuntimeWarning() string {
	for _, s := range strings.Split(os.Getenv("GODEBUG"), ",") {
		if s == "asyncpreemptoff=1" {
			return "GODEBUG has asyncpreemptoff=1: the garbage collector may have to wait for a loop's turn to end (unset it)"
		}
	}
	return ""
}
