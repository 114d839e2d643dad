// SPDX-License-Identifier: Apache-2.0

package img

import (
	"bytes"
	"testing"
)

func TestParseName(t *testing.T) {
	for _, c := range []struct {
		in   string
		want Location
		err  string
	}{
		{"a.raw", Location{Path: "a.raw"}, ""},
		{"/a/b:c", Location{Path: "/a/b:c"}, ""},
		{"./foo:bar", Location{Path: "./foo:bar"}, ""},
		{"file:a.raw", Location{Path: "a.raw"}, ""},
		{"file:///a.raw", Location{Path: "/a.raw"}, ""},
		{"file:a:b", Location{Path: "./a:b"}, ""},
		{`json:{"driver":"raw","file":{"driver":"file","filename":"base.raw"}}`, Location{Path: "base.raw", Format: "raw"}, ""},
		{`json: { "file" : { "filename" : "base.raw" , "driver":"file" }, "driver" : "raw" } `, Location{Path: "base.raw", Format: "raw"}, ""},
		{`json:{"driver":"qcow2","file.filename":"base.q","file.driver":"file"}`, Location{Path: "base.q", Format: "qcow2"}, ""},
		{`json:{"driver":"qcow2","file":{"filename":"base.q"},"read-only":true,"file.locking":"off"}`, Location{Path: "base.q", Format: "qcow2", NoLock: true}, ""},
		{`json:{"driver":"file","filename":"x"}`, Location{Path: "x", Format: "raw"}, ""},
		{`json:{'driver':'raw',"file":{'driver':'file','filename':'a"b\'c.raw'}}`, Location{Path: `a"b'c.raw`, Format: "raw"}, ""},
		{`json:{"driver":"raw","file.filename":"it's"}`, Location{Path: "it's", Format: "raw"}, ""},
		{`json:{"driver":"qcow2","file":{"filename":"a"},"data-file":{"driver":"file","filename":"d"}}`, Location{Path: "a", Format: "qcow2", DataFile: "d"}, ""},
		{`json:{"filename":"x"}`, Location{Path: "x"}, ""},
		{"", Location{}, "The 'file' block driver requires a file name"},
		{"nbd:localhost:1", Location{}, "Unknown protocol 'nbd'"},
		{`json:{"driver":"raw"`, Location{}, "Could not parse the JSON options: unexpected end of JSON input"},
		{`json:{"driver":"foo","file":{"driver":"file","filename":"x"}}`, Location{}, "Unknown driver 'foo'"},
		{`json:{"driver":"raw","file":{"driver":"nbd","filename":"x"}}`, Location{}, "Unknown driver 'nbd'"},
		{`json:{"driver":"raw","file":{"driver":"file","filename":"x"},"offset":512}`, Location{}, "Block driver 'raw' does not support the option 'offset'"},
		{`json:{"driver":"raw"}`, Location{}, `A block device must be specified for "file"`},
		{`json:{"file":{"filename":"x"},"file.filename":"y"}`, Location{}, "Option 'file.filename' is given twice"},
		{`json:{"file":[1]}`, Location{}, "Option 'file' has a value of a kind that is not known here"},
		{`json:{"a":{"a":{"a":{"a":{"a":{"a":{"a":{"a":{"a":1}}}}}}}}}`, Location{}, "Option 'a.a.a.a.a.a.a.a' nests too deep"},
	} {
		got, err := ParseName(c.in)
		if got != c.want || (err == nil) != (c.err == "") || err != nil && err.Error() != c.err {
			t.Errorf("%q is %+v, %v; want %+v, %s", c.in, got, err, c.want, c.err)
		}
	}
}

func FuzzParseName(f *testing.F) {
	for _, s := range []string{"a", "file:a", "nbd:a", `json:{"driver":"raw","file":{"driver":"file","filename":"base.raw"}}`, `json:{"a":{"a":{"a":1}}}`, "json:[]", "json:null"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		at, err := ParseName(s)
		if err != nil && at != (Location{}) {
			t.Errorf("%q is %+v and %v", s, at, err)
		}
		_, _ = ParseImageOpts(s)
		_ = Beside(s, s)
	})
}

func TestBeside(t *testing.T) {
	for _, c := range []struct{ base, name, want string }{
		{"a.q", "b.q", "b.q"}, {"dir/a.q", "b.q", "dir/b.q"}, {"dir/a.q", "../b.q", "dir/../b.q"}, {"/dir/a.q", "b.q", "/dir/b.q"},
		{"dir/a.q", "/b.q", "/b.q"}, {"dir/a.q", "json:{}", "json:{}"}, {"dir/a.q", "nbd:b", "nbd:b"}, {"dir/a.q", "./x:y", "dir/./x:y"},
	} {
		if got := Beside(c.base, c.name); got != c.want {
			t.Errorf("%q beside %q is %q, want %q", c.name, c.base, got, c.want)
		}
	}
}

func TestWriteJSON(t *testing.T) {
	var b bytes.Buffer
	err := WriteJSON(&b, struct {
		A string   `json:"a"`
		B []string `json:"b"`
		C []int    `json:"c"`
		D []int    `json:"d"`
	}{"<é💾[],", []string{"[],", "x"}, []int{}, []int{}})
	const want = "{\n    \"a\": \"<\\u00E9\\uD83D\\uDCBE[],\",\n    \"b\": [\n        \"[],\",\n        \"x\"\n    ],\n    \"c\": [\n    ],\n    \"d\": [\n    ]\n}\n"
	if err != nil || b.String() != want {
		t.Errorf("%v\n%s\nwant\n%s", err, b.String(), want)
	}
}
