// SPDX-License-Identifier: Apache-2.0

package guestvm

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"strings"
)

// bootImage writes the initramfs of one boot: the base files, then an archive with the script and what belongs to this
// boot. The kernel unpacks archives that follow each other, packed or not, as long as each begins at a multiple of 4
// bytes. The file has no name: it goes away with its last user, whatever happens to us. The caller closes it.
func (c *Config) bootImage(ctx context.Context, nonce string) (_ *os.File, err error) {
	f, err := os.CreateTemp("", "sluice-initrd-*")
	if err != nil {
		return nil, fmt.Errorf("create boot image: %w", err)
	}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	if err := os.Remove(f.Name()); err != nil {
		return nil, fmt.Errorf("create boot image: %w", err)
	}
	if len(c.Initrd) == 0 {
		base := Initramfs{Kernel: c.Kernel}
		if err := base.Build(ctx, f); err != nil {
			return nil, err
		}
	}
	for _, name := range c.Initrd {
		if err := appendFile(f, name); err != nil {
			return nil, fmt.Errorf("create boot image: %w", err)
		}
	}
	out := bufio.NewWriter(f)
	if err := packFiles(ctx, newCPIOWriter(out), c.overlayFiles(nonce)); err != nil {
		return nil, fmt.Errorf("create boot image: %w", err)
	}
	if err := out.Flush(); err != nil {
		return nil, fmt.Errorf("create boot image: %w", err)
	}
	return f, nil
}

func (c *Config) overlayFiles(nonce string) []File {
	conf := fmt.Sprintf("nonce=%s\ndevices='%s'\ndevice_wait=%d\n",
		nonce, strings.Join(c.devices(), " "), int(cmp.Or(c.deviceWait, defaultDeviceWait).Seconds()))
	return append([]File{
		{Path: guestBootConf, Data: []byte(conf)},
		{Path: guestScript, Data: []byte(c.Script)},
	}, c.Files...)
}

// appendFile copies a file to the end of f and pads it to the alignment of the next archive.
func appendFile(f *os.File, name string) error {
	in, err := os.Open(name)
	if err != nil {
		return err
	}
	defer in.Close()
	if _, err := io.Copy(f, in); err != nil {
		return err
	}
	end, err := f.Seek(0, io.SeekCurrent)
	if err != nil {
		return err
	}
	_, err = f.Write(make([]byte, (4-end%4)%4))
	return err
}
