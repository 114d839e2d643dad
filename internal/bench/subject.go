// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"slices"
	"strings"
)

// Role says what a subject is in a comparison: ratios are taken to the best of the peer's.
type Role string

// The roles.
const (
	Ours   Role = "ours"
	Peer   Role = "peer"
	Direct Role = "direct" // no server: fio on the file itself
	Other  Role = "other"
)

// Subject is something under comparison: a server and how to start it on a socket, or fio.
type Subject struct {
	Name string `json:"name"`
	Role Role   `json:"role"`
	// Args is the command line; in each word %S stands for the socket's path. For [Direct] it is fio's, with its output as
	// JSON.
	Args []string `json:"args"`
}

// Medium is what the servers serve: a file, or nothing when Path is empty.
type Medium struct {
	Name string `json:"name"` // null, /dev/shm, disk
	Path string `json:"path,omitempty"`
	// Buffered goes through the page cache in place of O_DIRECT.
	Buffered bool `json:"buffered,omitempty"`
	// Format of the file; empty: raw.
	Format string `json:"format,omitempty"`
}

// FormatRaw is the format of a file of which each byte is one of the disk.
const FormatRaw = "raw"

func (m Medium) format() string {
	if m.Format == "" {
		return FormatRaw
	}
	return m.Format
}

// Title is the medium for people.
func (m Medium) Title() string {
	if m.Path == "" {
		return "null disks"
	}
	title := m.Path
	if m.format() != FormatRaw {
		title += " (" + m.format() + ")"
	}
	if m.Buffered {
		title += ", through the page cache"
	}
	return title
}

// NullSize is the size of the disks of the medium without a path.
const NullSize = 1 << 30

// Sluice describes a server of ours.
type Sluice struct {
	Program string
	Engine  string // empty: auto
	Batch   string // on or off; empty: on
	Loops   int    // 0: 1
	// More are further arguments of serve, and Keys further keys of its disk.
	More []string
	Keys []string
}

// Subject is the server on a medium, with so many queues.
func (s Sluice) Subject(m Medium, queues int) Subject {
	name := []string{"sluice"}
	disk := fmt.Sprintf("driver=null,size=%d", NullSize)
	if m.Path != "" {
		engine := s.Engine
		if engine == "" {
			engine = "auto"
		}
		if engine != "auto" {
			name = append(name, engine)
		}
		cache := "none"
		if m.Buffered {
			cache = "writeback"
		}
		disk = fmt.Sprintf("%s,engine=%s,cache=%s", doubleCommas(m.Path), engine, cache)
		if m.format() != FormatRaw {
			disk += ",format=" + m.Format
		}
	}
	args := []string{s.Program, "serve", "--log-format", "json"}
	if s.Batch != "" {
		args = append(args, "--batch", s.Batch)
		name = append(name, "batch="+s.Batch)
	}
	if s.Loops > 0 {
		args = append(args, "--loops", fmt.Sprint(s.Loops))
		name = append(name, fmt.Sprintf("loops=%d", s.Loops))
	}
	args = append(args, s.More...)
	name = append(append(name, s.More...), s.Keys...)
	for _, key := range s.Keys {
		disk += "," + doubleCommas(key)
	}
	args = append(args, "--disk", fmt.Sprintf("%s,queues=%d", disk, queues), "--vhost-user", "%S")
	return Subject{Name: strings.Join(name, " "), Role: Ours, Args: args}
}

// Storaged describes a qemu-storage-daemon.
type Storaged struct {
	Program  string
	AIO      string // native, io_uring or threads
	IOThread bool   // a thread of its own for the export, in place of the main loop
}

// Subject is the server on a medium, with so many queues.
func (s Storaged) Subject(m Medium, queues int) Subject {
	name := "qemu-storage-daemon"
	nodes := []string{"--blockdev", fmt.Sprintf("driver=null-co,node-name=d,size=%d,read-zeroes=off", NullSize)}
	if m.Path == "" {
		name += " null-co"
	} else {
		name += " aio=" + s.AIO
		direct := "on"
		if m.Buffered {
			direct = "off"
		}
		nodes = []string{
			"--blockdev", fmt.Sprintf("driver=file,node-name=f,filename=%s,cache.direct=%s,aio=%s", doubleCommas(m.Path), direct, s.AIO),
			"--blockdev", fmt.Sprintf("driver=%s,node-name=d,file=f", m.format()),
		}
	}
	export := fmt.Sprintf("type=vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path=%%S,writable=on,num-queues=%d", queues)
	args := append([]string{s.Program}, nodes...)
	if s.IOThread {
		name += " iothread"
		args = append(args, "--object", "iothread,id=t")
		export += ",iothread=t"
	}
	return Subject{Name: name, Role: Peer, Args: append(args, "--export", export)}
}

// Configurations are the peer's on a medium: each of the engines, on the main loop and on a thread of its own. An engine
// that the medium does not use is left out.
func Configurations(program string, m Medium, engines []string, loops []string) (list []Storaged) {
	if m.Path == "" {
		engines = engines[:min(len(engines), 1)]
	}
	if m.Buffered { // Linux AIO works on O_DIRECT alone, and the peer refuses it otherwise
		engines = slices.DeleteFunc(slices.Clone(engines), func(e string) bool { return e == "native" })
	}
	for _, engine := range engines {
		for _, loop := range loops {
			list = append(list, Storaged{Program: program, AIO: engine, IOThread: loop == "iothread"})
		}
	}
	return list
}

// Command is a server of whatever kind by its command line: %S stands for the socket, %F for the file.
func Command(name, line string, m Medium) Subject {
	args := strings.Fields(line)
	for i := range args {
		args[i] = strings.ReplaceAll(args[i], "%F", m.Path)
	}
	return Subject{Name: name, Role: Other, Args: args}
}

func doubleCommas(s string) string { return strings.ReplaceAll(s, ",", ",,") }
