// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

func TestHandedSocketsAreReadFromTheEnvironment(t *testing.T) {
	const self = 77
	for name, c := range map[string]struct {
		pid, fds, names string
		named           bool
		want            int
		err             string
	}{
		"none":                {"", "", "", false, 0, ""},
		"another process":     {"78", "2", "", false, 0, ""},
		"garbage pid":         {"x", "2", "", false, 0, ""},
		"one":                 {"77", "1", "", false, 1, ""},
		"two with names":      {"77", "2", "a:b", true, 2, ""},
		"zero":                {"77", "0", "", false, 0, "LISTEN_FDS is 0"},
		"garbage":             {"77", "many", "", false, 0, `LISTEN_FDS is "many" and not a number`},
		"nothing":             {"77", "", "", false, 0, `LISTEN_FDS is "" and not a number`},
		"negative":            {"77", "-1", "", false, 0, "not a number"},
		"far too many":        {"77", "1000000000", "", false, 0, "more than the 1024"},
		"beyond any integer":  {"77", "99999999999999999999", "", false, 0, "not a number"},
		"too few names":       {"77", "2", "a", true, 0, "1 names for 2 sockets"},
		"garbage, not for us": {"78", "many", "a:b:c", true, 0, ""},
	} {
		h, err := parseHanded(self, c.pid, c.fds, c.names, c.named)
		switch {
		case c.err != "":
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%s: %v; want %q", name, err, c.err)
			}
		case err != nil || len(h.names) != c.want:
			t.Errorf("%s: %+v, %v; want %d sockets", name, h, err, c.want)
		}
	}
}

func TestHandedSocketsAreFoundByNameAndIndex(t *testing.T) {
	h := &HandedSockets{names: []string{"a", "b", "b", ""}, taken: []bool{false, false, false, true}}
	for ref, want := range map[string]string{
		"c": "those handed in are named", "b": "several have this name", "4": "counted from 0", "-1": "counted from 0", "3": "already in use", "": "are named",
	} {
		if i, err := h.find(ref); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %d, %v; want %q", ref, i, err, want)
		}
	}
	for ref, want := range map[string]int{"a": 0, "0": 0, "1": 1, "2": 2} {
		if i, err := h.find(ref); err != nil || i != want {
			t.Errorf("%q: %d, %v; want %d", ref, i, err, want)
		}
	}
	if err := h.Unused(); err == nil || !strings.Contains(err.Error(), `socket 0 (named "a") belongs to no export`) {
		t.Error(err)
	}
	none := &HandedSockets{why: "LISTEN_PID is not set"}
	if _, err := none.Take("a"); err == nil || !strings.Contains(err.Error(), "none was handed in (LISTEN_PID is not set)") {
		t.Error(err)
	}
	if err := none.Unused(); err != nil {
		t.Error(err)
	}
}

func TestTheServicesVariablesAreTakenOutOfTheEnvironment(t *testing.T) {
	t.Setenv("LISTEN_PID", strconv.Itoa(os.Getpid()+1))
	t.Setenv("LISTEN_FDS", "1")
	t.Setenv("LISTEN_FDNAMES", "a")
	t.Setenv("NOTIFY_SOCKET", "/nowhere")
	if _, err := TakeHandedSockets(); err != nil {
		t.Fatal(err)
	}
	FindServiceManager()
	for _, v := range []string{"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "NOTIFY_SOCKET"} {
		if s, ok := os.LookupEnv(v); ok {
			t.Errorf("%s is still %q", v, s)
		}
	}
}

func TestTheServiceManagerHears(t *testing.T) {
	for _, address := range []string{filepath.Join(t.TempDir(), "n"), "@sluice-test-" + strconv.Itoa(os.Getpid())} {
		l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: address, Net: "unixgram"})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		t.Setenv("NOTIFY_SOCKET", address)
		if err := FindServiceManager().Notify("READY=1"); err != nil {
			t.Error(err)
		}
		if err := l.SetReadDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		var b [64]byte
		if n, err := l.Read(b[:]); err != nil || string(b[:n]) != "READY=1" {
			t.Errorf("%s: heard %q, %v", address, b[:n], err)
		}
	}
	t.Setenv("NOTIFY_SOCKET", filepath.Join(t.TempDir(), "none"))
	if err := FindServiceManager().Notify("READY=1"); err == nil {
		t.Error("a service manager that is not there was told")
	}
	os.Unsetenv("NOTIFY_SOCKET")
	if err := FindServiceManager().Notify("READY=1"); err != nil {
		t.Error(err)
	}
}

func TestPIDFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "pid")
	for _, earlier := range []string{"", "123456\n", "garbage"} {
		if err := os.WriteFile(path, []byte(earlier), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := WritePIDFile(path); err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(path); err != nil || string(b) != strconv.Itoa(os.Getpid())+"\n" {
			t.Errorf("it holds %q, %v", b, err)
		}
	}
	RemovePIDFile(path)
	RemovePIDFile(path)
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 0 {
		t.Errorf("the directory holds %v, %v", entries, err)
	}
	if err := os.WriteFile(path, []byte("1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	RemovePIDFile(path)
	if _, err := os.Stat(path); err != nil {
		t.Errorf("another process's file was removed: %v", err)
	}
	if err := WritePIDFile(filepath.Join(dir, "none", "pid")); err == nil {
		t.Error("wrote into a directory that is not there")
	}
}
