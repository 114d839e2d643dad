// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/daemon"
)

func TestDiskOptions(t *testing.T) {
	for text, want := range map[string]daemon.DiskConfig{
		"disk.raw":                                   {Path: "disk.raw"},
		"/a b/ü.raw":                                 {Path: "/a b/ü.raw"},
		"a,,b.raw,readonly":                          {Path: "a,b.raw", ReadOnly: true},
		",,a,,,,b,,":                                 {Path: ",a,,b,"},
		"a,,,readonly":                               {Path: "a,", ReadOnly: true},
		"./size=3":                                   {Path: "./size=3"},
		"path=size=3":                                {Path: "size=3"},
		"path=a,,b=c":                                {Path: "a,b=c"},
		"d,readonly=off":                             {Path: "d"},
		"d,format=probe,engine=linux-aio":            {Path: "d", Format: "probe", Engine: aio.EngineLinuxAIO},
		"d,format=raw,offset=1M,size=64K":            {Path: "d", Format: "raw", Offset: 1 << 20, Size: 64 << 10},
		"d,cache=writethrough":                       {Path: "d", Cache: block.CacheWritethrough},
		"d,cache=none,discard=ignore":                {Path: "d", Cache: block.CacheNone, NoDiscard: true},
		"d,discard=unmap":                            {Path: "d"},
		"d,readonly,lock=shared":                     {Path: "d", ReadOnly: true, Lock: "shared"},
		"d,lock=off":                                 {Path: "d", Lock: "off"},
		"d,queues=4,serial=A,,B C":                   {Path: "d", Queues: 4, Serial: "A,B C"},
		"d,queues=8@0-1":                             {Path: "d", Queues: 8, Groups: []daemon.QueueGroup{{Queues: 8, First: 0, Last: 1}}},
		"d,queues=1@0+4@2-3,merge=off":               {Path: "d", Queues: 5, NoMerge: true, Groups: []daemon.QueueGroup{{Queues: 1}, {Queues: 4, First: 2, Last: 3}}},
		"d,merge=on":                                 {Path: "d"},
		"d,serial=12345678901234567890":              {Path: "d", Serial: "12345678901234567890"},
		"d,logical-block-size=4K":                    {Path: "d", LogicalBlock: 4096},
		"driver=mem,size=1G":                         {Driver: "mem", Size: 1 << 30},
		"size=1G,driver=null,latency=100us,queues=2": {Driver: "null", Size: 1 << 30, Latency: 100 * time.Microsecond, Queues: 2},
		"d,format=qcow2,backing=off,l2-cache-size=1M,refcount-cache-size=64K,discard=keep": {Path: "d", Format: "qcow2", Backing: "off", L2CacheSize: 1 << 20, RefcountCacheSize: 64 << 10, KeepOnDiscard: true},
		"d,format=qcow2,snapshot=a b,readonly,data-file=e,,f":                              {Path: "d", Format: "qcow2", Snapshot: "a b", ReadOnly: true, DataFile: "e,f"},
		"d,coalesce=50us": {Path: "d", Coalesce: 50 * time.Microsecond},
		"driver=mem,size=1M,fault=read error=EIO # a,,b": {Driver: "mem", Size: 1 << 20, Fault: "read error=EIO # a,b"},
	} {
		got, err := parseDisk(text)
		if err != nil {
			t.Errorf("parseDisk(%q): %v", text, err)
			continue
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("parseDisk(%q) (-want +got):\n%s", text, d)
		}
	}
}

func TestDiskOptionsThatMakeNoSense(t *testing.T) {
	for text, want := range map[string]string{
		"":                                  "no path",
		",readonly":                         "no path",
		"readonly=on":                       "no path",
		"d,":                                "option is empty",
		"d,,":                               "", // the path "d,"
		"d,reedonly":                        `unknown key "reedonly" (known keys: format, driver,`,
		"d,sise=1":                          `unknown key "sise" (known keys: format, driver,`,
		"drvier=mem,size=1G":                `unknown key "drvier"`,
		"d,readonly=maybe":                  "neither on nor off",
		"d,readonly,readonly":               "readonly is given twice",
		"d,path=e":                          "path is given twice",
		"d,size":                            "size needs a value (size=SIZE)",
		"d,engine=":                         "engine is empty (want auto|io_uring|linux-aio|threads)",
		"d,engine=fast":                     `unknown engine "fast" (want auto, io_uring, linux-aio or threads)`,
		"d,cache=directsync":                "want none, writeback, writethrough or unsafe",
		"d,format=qed":                      "want raw, qcow2, vmdk, vhdx, vpc, vdi or probe",
		"d,format=qcow2,backing=maybe":      "want on, off or probe",
		"d,format=qcow2,snapshot=x":         "add readonly",
		"d,backing=off":                     "backing is for format=qcow2",
		"d,l2-cache-size=1M":                "for format=qcow2",
		"d,discard=keep":                    "for format=qcow2",
		"d,format=qcow2,file-fault=explode": "explode",
		"d,queues=0":                        "from 1 to 256",
		"d,queues=257":                      "from 1 to 256",
		"d,queues=-1":                       "from 1 to 256",
		"d,queues=99999999999999999999":     "from 1 to 256",
		"d,queues=4@":                       "not a number from 0 to 255",
		"d,queues=@1":                       "from 1 to 256",
		"d,queues=4@1-":                     "not a number from 0 to 255",
		"d,queues=4@256":                    "not a number from 0 to 255",
		"d,queues=4@2-1":                    "loops 2-1 are no range",
		"d,queues=2@0-2":                    "2 queues cannot use the 3 loops 0-2",
		"d,queues=4@0+4":                    `"4" names no loops`,
		"d,queues=4@0+":                     `"" names no loops`,
		"d,queues=200@0+57@1":               "queues is 257",
		"d,merge=maybe":                     "neither on nor off",
		"d,serial=123456789012345678901":    "21 bytes, a guest can read 20",
		"d,logical-block-size=513":          "not 512, 1024, 2048 or 4096",
		"d,discard=on":                      "want unmap, ignore or keep",
		"d,lock=shared":                     "needs readonly",
		"d,lock=no":                         "want on, off or shared",
		"driver=mem,size=1G,lock=off":       "takes no lock",
		"d,fault=explode":                   "explode",
		"d,size=1KB":                        "ambiguous",
		"d,offset=-1":                       "not a number",
		"d,latency=1ms":                     "latency is for driver=null",
		"driver=null,size=1G,latency=-1s":   "not a duration",
		"d,coalesce=1s":                     "want 0 to 10ms",
		"driver=null":                       "driver=null needs a size",
		"driver=tape,size=1G":               "want file, null or mem",
		"driver=mem,size=1G,path=d":         "takes no path",
		"d,driver=mem,size=1G":              "takes no path",
		"driver=mem,size=1G,engine=threads": "takes no engine",
		"driver=mem,size=1G,cache=none":     "takes no cache",
		"driver=mem,size=1G,offset=1M":      "takes no offset",
		"driver=mem,size=1G,format=raw":     "takes no format",
	} {
		_, err := parseDisk(text)
		switch {
		case want == "" && err != nil:
			t.Errorf("parseDisk(%q): %v", text, err)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
			t.Errorf("parseDisk(%q): %v; want an error with %q", text, err, want)
		}
	}
}

// Every key that the help text lists is one that the parser takes, and the other way round.
func TestHelpListsEveryDiskKey(t *testing.T) {
	for _, k := range diskKeys {
		if !strings.Contains(serveText(), "\n  "+k.name+"="+k.want+"\n") {
			t.Errorf("the help text of serve does not list %s=%s", k.name, k.want)
		}
		if !strings.Contains(diskKeyNames(), k.name) {
			t.Errorf("the error of an unknown key does not list %s", k.name)
		}
	}
}

func FuzzParseDisk(f *testing.F) {
	for _, s := range []string{
		"", "disk.raw", "a,,b,readonly", "driver=mem,size=1G", "path=a,size=1.5G,offset=4K,format=probe", "d,queues=4,serial=x,,y", "d,queues=1@0+4@2-3,merge=off",
		"d,cache=none,engine=io_uring,discard=ignore,logical-block-size=4096", "driver=null,size=8E", "d,=,", ",,,", "d,fault=read error=EIO # a,,b",
		"d,format=qcow2,backing=probe,l2-cache-size=1M,discard=keep", "d,format=qcow2,snapshot=x,readonly,data-file=e",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		d, err := parseDisk(s)
		if err != nil {
			if strings.TrimSpace(err.Error()) == "" {
				t.Fatalf("parseDisk(%q): an error without words", s)
			}
			return
		}
		// What was understood can be said again, and means the same.
		again, err := parseDisk(writeDisk(d))
		if err != nil || !cmp.Equal(again, d) {
			t.Fatalf("parseDisk(%q) = %+v; written as %q it reads as %+v, %v", s, d, writeDisk(d), again, err)
		}
	})
}
