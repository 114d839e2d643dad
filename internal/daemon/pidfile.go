// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// WritePIDFile writes this process's number and a newline to path, whole or not at all; a file of an earlier run is
// replaced.
func WritePIDFile(path string) error {
	t, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("write pid file %s: %w", path, errnoOf(err))
	}
	_, err = t.WriteString(strconv.Itoa(os.Getpid()) + "\n")
	if err == nil {
		err = t.Chmod(0o644)
	}
	if closeErr := t.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = os.Rename(t.Name(), path)
	}
	if err != nil {
		_ = os.Remove(t.Name()) // best effort: the error that matters is already known
		return fmt.Errorf("write pid file %s: %w", path, errnoOf(err))
	}
	return nil
}

// RemovePIDFile removes the file at path if it holds this process's number. Another process may have written its own.
func RemovePIDFile(path string) {
	b, err := os.ReadFile(path)
	if err == nil && strings.TrimSpace(string(b)) == strconv.Itoa(os.Getpid()) {
		_ = os.Remove(path) // one that stays behind is replaced by the next start
	}
}
