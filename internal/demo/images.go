// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
)

// imageSize is that of the image which the table's rows read. It is written in full, since reads of holes never reach
// the device.
const imageSize = 256 << 20

func makeSparse(path string, size int64) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("make image: %w", err)
	}
	if err := f.Truncate(size); err != nil {
		_ = f.Close() // the first error is the one to tell
		return fmt.Errorf("make image: %w", err)
	}
	return f.Close()
}

// makeFilled writes random bytes, which no device can shorten.
func makeFilled(ctx context.Context, path string, size int64) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("make image: %w", err)
	}
	defer f.Close()
	random := rand.NewChaCha8([32]byte{1})
	block := make([]byte, 1<<20)
	for done := int64(0); done < size; done += int64(len(block)) {
		if err := ctx.Err(); err != nil {
			return err
		}
		_, _ = random.Read(block) // it never fails
		if _, err := f.Write(block); err != nil {
			return fmt.Errorf("make image: %w", err)
		}
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("make image: %w", err)
	}
	return nil
}
