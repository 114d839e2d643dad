// SPDX-License-Identifier: Apache-2.0

package img

import (
	"errors"
	"slices"
	"syscall"
	"time"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/format/qcow2"
	"github.com/sluice-blk/sluice/internal/node/qcow2/metadata"
)

// SnapshotAction is what snapshot does.
type SnapshotAction byte

// The actions.
const (
	SnapshotList   SnapshotAction = 'l'
	SnapshotCreate SnapshotAction = 'c'
	SnapshotApply  SnapshotAction = 'a'
	SnapshotDelete SnapshotAction = 'd'
)

// Snapshots lists the internal snapshots of an image.
func Snapshots(src Source) ([]SnapshotInfo, error) {
	i, err := InfoOf(src)
	if err != nil {
		return nil, err
	}
	return i.Snapshots, nil
}

// ChangeSnapshot makes, applies or deletes an internal snapshot.
func ChangeSnapshot(src Source, action SnapshotAction, name string) error {
	i, err := OpenImage(src)
	if err != nil {
		return err
	}
	if i.ProbedRaw() {
		src.warn(RawWarning(src.Name))
	}
	if i.Format != FormatQcow2 {
		return errors.Join(noSnapshots(action, name), i.Close())
	}
	t, err := i.tables(src, metadata.Options{})
	if err != nil {
		return errors.Join(err, i.Close())
	}
	if err := t.changeSnapshot(action, name); err != nil {
		return errors.Join(err, t.Close())
	}
	return t.Close()
}

// noSnapshots is the answer of a format that has none.
func noSnapshots(action SnapshotAction, name string) error {
	switch action {
	case SnapshotCreate:
		return snapshotNotMade(name, syscall.EOPNOTSUPP)
	case SnapshotApply:
		return Wordedf("Could not apply snapshot '%s': Block driver does not support snapshots", name)
	}
	return Wordedf("Could not delete snapshot '%s': snapshot not found", name)
}

func (t *tables) changeSnapshot(action SnapshotAction, name string) error {
	switch action {
	case SnapshotCreate:
		now := time.Now()
		_, err := t.CreateSnapshot(metadata.SnapshotInfo{Name: name, Seconds: uint32(now.Unix()), Nanoseconds: uint32(now.Nanosecond())})
		if err != nil {
			return snapshotNotMade(name, err)
		}
		return nil
	case SnapshotApply:
		err := t.ApplySnapshot(name)
		if errors.Is(err, syscall.ENOENT) {
			return Wordedf("Could not apply snapshot '%s': Failed to load snapshot: No such file or directory", name)
		}
		return snapshotFailed("apply", name, err)
	}
	// Here a number is a name, and no ID.
	all := t.Snapshots()
	i := slices.IndexFunc(all, func(s qcow2.Snapshot) bool { return s.Name == name })
	if i < 0 {
		return Wordedf("Could not delete snapshot '%s': snapshot not found", name)
	}
	return snapshotFailed("delete", name, t.DeleteSnapshot(all[i].ID))
}

func snapshotFailed(verb, name string, err error) error {
	if err == nil {
		return nil
	}
	return Wordedf("Could not %s snapshot '%s': %s", verb, name, err.Error())
}

// snapshotNotMade tells the errno. That there is no room to count one more use is EINVAL to those who ask.
func snapshotNotMade(name string, err error) error {
	errno := block.Errno(err)
	if errno == syscall.ERANGE {
		errno = syscall.EINVAL
	}
	return Wordedf("Could not create snapshot '%s': %d (%s)", name, -int(errno), errno)
}
