// SPDX-License-Identifier: Apache-2.0

// Package arch holds the floor plan of the house as a test.
//
// Goal: nobody builds a door that the plan does not have. Method: every Go file is parsed, each import of ours is looked
// up in the table below, and a breach is named with its file, its import, the rule and what to do about it. The picture
// of the table stands in docs/ARCHITECTURE.md; who moves a wall changes both.
package arch

import (
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/sluice-blk/sluice"

// Rooms by path below the module, longest match first. A room imports from floors strictly below its own.
var floors = map[string]int{
	"cmd/sluice":         11,
	"internal/cli":       10,
	"":                   9, // the public root package
	"internal/demo":      9,
	"internal/daemon":    8,
	"internal/bench":     8,
	"internal/guestvm":   8,
	"internal/img":       8,
	"internal/export":    7,
	"internal/graph":     6,
	"internal/node":      5,
	"internal/block":     4,
	"aio":                3,
	"uring":              2,
	"internal/laio":      2,
	"internal/sys":       1,
	"internal/format":    1,
	"internal/proto":     1,
	"internal/invariant": 0,
	"internal/hist":      0,
	"internal/trace":     0,
	"internal/control":   7,

	"internal/vhostuser": 6,
	"internal/virtqueue": 5,
	"internal/guestmem":  4,

	"internal/node/qcow2/metadata": 4,
	"internal/node/qcow2/create":   2,
	"internal/node/qcow2/check":    2,

	"internal/format/sparse": 0,
}

// Rooms for tests stand beside the house: their own imports are free, and only tests and the bench come in.
var testRooms = []string{"internal/aiotest", "internal/blocktest", "internal/virtqtest", "internal/vhosttest", "internal/sim", "internal/arch", "tests"}

// The two wings, which meet in internal/export only.
var (
	guestWing   = []string{"internal/guestmem", "internal/virtqueue", "internal/vhostuser"}
	storageWing = []string{"uring", "internal/laio", "aio", "internal/block", "internal/node", "internal/graph"}
	public      = []string{"", "aio", "uring"}
)

func in(room string, rooms []string) bool {
	return slices.ContainsFunc(rooms, func(r string) bool { return room == r || r != "" && strings.HasPrefix(room, r+"/") })
}

// floorOf finds the longest entry that room stands under.
func floorOf(room string) (int, bool) {
	for r := room; ; r = r[:strings.LastIndex(r, "/")] {
		if f, ok := floors[r]; ok {
			return f, true
		}
		if !strings.Contains(r, "/") {
			return 0, false
		}
	}
}

// breach tells what is wrong with an import, "" when it is allowed. from and to are rooms of the module.
func breach(from, to string, test bool) string {
	switch {
	case in(to, testRooms):
		if test || in(from, testRooms) || in(from, []string{"internal/bench"}) {
			return ""
		}
		return "rooms for tests are imported by tests and internal/bench alone: move what you need to a room of the house"
	case test || in(from, testRooms):
		return ""
	case in(from, guestWing) && in(to, storageWing):
		return "the guest wing does not know the storage wing: join them in internal/export"
	case in(from, storageWing) && in(to, guestWing):
		return "the storage wing does not know the guest wing: join them in internal/export"
	}
	below, ok := floorOf(to)
	if !ok {
		return "the imported room has no floor: give it one in internal/arch/arch_test.go and docs/ARCHITECTURE.md"
	}
	mine, ok := floorOf(from)
	if !ok {
		return "this room has no floor: give it one in internal/arch/arch_test.go and docs/ARCHITECTURE.md"
	}
	if below >= mine {
		return "floor " + strconv.Itoa(mine) + " imports only from floors below it, and this is floor " + strconv.Itoa(below) +
			": hand it in from above, or move the code down"
	}
	return ""
}

func TestFloors(t *testing.T) {
	root := moduleRoot(t)
	files := 0
	walkGo(t, root, func(path, room string, imports []string) {
		files++
		test := strings.HasSuffix(path, "_test.go")
		for _, imp := range imports {
			if imp == "golang.org/x/sys/unix" && room != "internal/sys" {
				t.Errorf("%s imports %s: only internal/sys does: add a thin wrapper there", path, imp)
			}
			if imp == "C" {
				t.Errorf("%s uses cgo: the default build is pure Go, cgo stands behind a build tag", path)
			}
			to, ours := strings.CutPrefix(imp, module)
			if !ours {
				continue
			}
			to = strings.TrimPrefix(to, "/")
			if to == room {
				continue // an external test of its own package
			}
			if why := breach(room, to, test); why != "" {
				t.Errorf("%s imports %q: %s", path, imp, why)
			}
		}
	})
	if files < 20 {
		t.Fatalf("only %d Go files found below %s: the test looks in the wrong place", files, root)
	}
}

// The rules themselves must be able to say no.
func TestBreachIsNamed(t *testing.T) {
	for _, c := range []struct {
		from, to string
		test, ok bool
	}{
		{"internal/virtqueue", "internal/guestmem", false, true},
		{"internal/virtqueue", "aio", false, false},
		{"internal/block", "internal/guestmem", false, false},
		{"internal/node/file", "internal/node/raw", false, false},
		{"aio", "internal/block", false, false},
		{"aio", "uring", false, true},
		{"internal/export/vhostblk", "internal/vhostuser", false, true},
		{"internal/export/vhostblk", "internal/virtqtest", false, false},
		{"internal/export/vhostblk", "internal/virtqtest", true, true},
		{"internal/bench", "internal/vhosttest", false, true},
		{"internal/nowhere", "aio", false, false},
		{"aio", "internal/nowhere", false, false},
	} {
		if got := breach(c.from, c.to, c.test); (got == "") != c.ok {
			t.Errorf("%s imports %s (test %v): %q", c.from, c.to, c.test, got)
		}
	}
}

// Packages that anybody may import stand on their own feet: their comment is there, and they have runnable examples.
func TestPublicPackagesAreExplained(t *testing.T) {
	root := moduleRoot(t)
	for _, p := range public {
		dir := filepath.Join(root, p)
		set := token.NewFileSet()
		comment, example := false, false
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if !strings.HasSuffix(e.Name(), ".go") {
				continue
			}
			f, err := parser.ParseFile(set, filepath.Join(dir, e.Name()), nil, parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			if f.Doc != nil && len(f.Doc.Text()) > 200 {
				comment = true
			}
			for _, d := range f.Scope.Objects {
				if strings.HasPrefix(d.Name, "Example") && strings.HasSuffix(e.Name(), "_test.go") {
					example = true
				}
			}
		}
		if !comment || !example {
			t.Errorf("package %q: comment of some length %v, example %v: both are owed by a public package", p, comment, example)
		}
	}
}

// Every file says under which licence it stands, so that one copied out of the tree still does.
func TestLicenceLine(t *testing.T) {
	root := moduleRoot(t)
	walkGo(t, root, func(path, _ string, _ []string) {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(string(b), "// SPDX-License-Identifier: Apache-2.0\n") {
			t.Errorf("%s does not begin with // SPDX-License-Identifier: Apache-2.0", path)
		}
	})
}

func moduleRoot(t *testing.T) string {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(root, "go.mod")); err != nil {
		t.Fatal(err)
	}
	return root
}

func walkGo(t *testing.T, root string, visit func(path, room string, imports []string)) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if e.IsDir() && path != root && (strings.HasPrefix(e.Name(), ".") || e.Name() == "testdata" || e.Name() == "build" || e.Name() == "bin") {
			return filepath.SkipDir
		}
		if e.IsDir() || !strings.HasSuffix(path, ".go") {
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, filepath.Dir(path))
		if err != nil {
			return err
		}
		if rel == "." {
			rel = ""
		}
		var imports []string
		for _, i := range f.Imports {
			p, err := strconv.Unquote(i.Path.Value)
			if err != nil {
				return err
			}
			imports = append(imports, p)
		}
		visit(path, rel, imports)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
