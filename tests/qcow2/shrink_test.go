// SPDX-License-Identifier: Apache-2.0

package qcow2

import "slices"

// Shrink drops operations, as many at a time as it can, for as long as the list fails. It runs the list at most tries
// times. What the list needs to be valid is for fails to know: a list that is not must not fail.
func Shrink(l *List, tries int, fails func(*List) bool) *List {
	best := l
	for step := max(len(best.Ops)/2, 1); step > 0; {
		dropped := false
		for at := 0; at < len(best.Ops) && tries > 0; {
			shorter := *best
			shorter.Ops = slices.Delete(slices.Clone(best.Ops), at, min(at+step, len(best.Ops)))
			tries--
			if valid(&shorter) && fails(&shorter) {
				best, dropped = &shorter, true
			} else {
				at += step
			}
		}
		switch {
		case tries == 0:
			return best
		case step > 1:
			step /= 2
		case !dropped:
			return best
		}
	}
	return best
}

// snapshotsMax keeps the refcounts within their width: one for the disk, one while a snapshot is being applied, and many
// when compressed clusters share one of the file.
func (l *List) snapshotsMax() int {
	packed := slices.ContainsFunc(l.Ops, func(o Op) bool { return o.Kind == Compressed })
	if l.Data != "" || packed && l.Image.Refcount < 16 {
		return 0
	}
	return min(max(1<<min(l.Image.Refcount, 3)-3, 0), 4)
}

// valid tells whether every operation names what is there, within the disk, and is one that the format can do.
func valid(l *List) bool {
	size := l.Image.Size
	snapshots := map[string]int64{}
	backed := len(l.Backing) > 0
	for _, o := range l.Ops {
		switch {
		case o.ranged() && (o.Len <= 0 || o.Off < 0 || o.Off+o.Len > size):
			return false
		case o.Kind == Compressed && o.Len%l.Image.Cluster != 0 && o.Off+o.Len != size:
			return false
		case o.Kind == Resize:
			if !l.Image.v3() && (backed || len(snapshots) > 0) {
				return false
			}
			size = o.Len
		case o.Kind == Snapshot:
			old, ok := snapshots[o.Name]
			switch {
			case o.Verb == "create":
				snapshots[o.Name] = size
				if len(snapshots) > l.snapshotsMax() {
					return false
				}
			case !ok:
				return false
			case o.Verb == "apply":
				size = old
			default:
				delete(snapshots, o.Name)
			}
		case (o.Kind == Commit || o.Kind == Rebase) && (!backed || len(snapshots) > 0):
			return false // what a snapshot shows would change
		case o.Kind == Rebase:
			backed = o.Target >= 0
		}
	}
	return true
}
