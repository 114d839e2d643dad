// SPDX-License-Identifier: Apache-2.0

package img

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"

	"github.com/sluice-blk/sluice/internal/node/file"
)

// Strerror is the text of the errno that err carries, as the C library words it.
func Strerror(err error) string {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		return err.Error()
	}
	text := errno.Error()
	return strings.ToUpper(text[:1]) + text[1:]
}

// OpenText words what went wrong when path was opened, as qemu-img words the reason behind "Could not open".
func OpenText(path string, err error) string {
	var lock *file.LockError
	var at *os.PathError
	var special *specialError
	switch {
	case errors.As(err, &special) || errors.Is(err, syscall.EISDIR):
		return fmt.Sprintf("'file' driver requires '%s' to be a regular file", path)
	case errors.As(err, &lock):
		shared := ""
		if lock.Shared {
			shared = "shared "
		}
		return fmt.Sprintf("Failed to get %s%q lock\nIs another process using the image [%s]?", shared, lock.Permission, path)
	case errors.As(err, &at):
		return fmt.Sprintf("Could not open '%s': %s", path, Strerror(at.Err))
	}
	return err.Error()
}

// createText words what went wrong when the file of a new image was made.
func createText(path string, err error) string {
	var at *os.PathError
	if errors.As(err, &at) {
		return fmt.Sprintf("Could not create '%s': %s", path, Strerror(at.Err))
	}
	return OpenText(path, err)
}

// Worded is an error whose text is the one that qemu-img has for the same fault, capitals and all, so that scripts which
// look for it find it.
type Worded struct {
	text string
	err  error // the cause, nil when there is none
}

// Error is the text.
func (w *Worded) Error() string { return w.text }

// Unwrap gives the cause.
func (w *Worded) Unwrap() error { return w.err }

// Wordedf makes such an error. The last argument that is an error is its cause, and is written as the C library would.
func Wordedf(format string, args ...any) error {
	w := &Worded{}
	for i, a := range args {
		if err, ok := a.(error); ok {
			w.err, args[i] = err, Strerror(err)
		}
	}
	w.text = fmt.Sprintf(format, args...)
	return w
}
