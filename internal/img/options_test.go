// SPDX-License-Identifier: Apache-2.0

package img

import (
	"errors"
	"math"
	"testing"
)

func TestParseSize(t *testing.T) {
	for _, c := range []struct {
		in   string
		want uint64
		err  error
	}{
		{"0", 0, nil}, {"1000", 1000, nil}, {"1k", 1024, nil}, {"1K", 1024, nil}, {"2M", 2 << 20, nil}, {"3g", 3 << 30, nil},
		{"1T", 1 << 40, nil}, {"1P", 1 << 50, nil}, {"1E", 1 << 60, nil}, {"1.5k", 1536, nil}, {"1.1k", 1126, nil},
		{"12b", 12, nil}, {"0x100", 256, nil}, {"+1M", 1 << 20, nil}, {" 1M", 1 << 20, nil}, {"1.0", 1, nil},
		{"18446744073709551615", math.MaxUint64, nil}, {"8E", 8 << 60, nil}, {"16E", 0, ErrSizeRange},
		{"18446744073709551616", 0, ErrSizeRange}, {"0x10000000000000000", 0, ErrSizeRange},
		{"", 0, ErrSizeForm}, {"k", 0, ErrSizeForm}, {"-1", 0, ErrSizeForm}, {"1.1", 0, ErrSizeForm}, {"1.5b", 0, ErrSizeForm},
		{"1kB", 0, ErrSizeForm}, {"1X", 0, ErrSizeForm}, {"1e3", 0, ErrSizeForm}, {"0x10k", 0, ErrSizeForm},
		{".5k", 0, ErrSizeForm}, {"1 k", 0, ErrSizeForm}, {"abc", 0, ErrSizeForm},
	} {
		got, err := ParseSize(c.in)
		if got != c.want || !errors.Is(err, c.err) {
			t.Errorf("ParseSize(%q) = %d, %v; want %d, %v", c.in, got, err, c.want, c.err)
		}
	}
}

func FuzzParseSize(f *testing.F) {
	for _, s := range []string{"1k", "0x1", "1.5E", "18446744073709551616", "", "9999999999999999999999999999999999999999999E"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if n, err := ParseImageSize(s); err == nil && n < 0 {
			t.Errorf("%q is %d", s, n)
		}
	})
}

func TestFormatSize(t *testing.T) {
	for n, want := range map[int64]string{
		0: "0 B", 1: "1 B", 999: "999 B", 1000: "0.977 KiB", 1024: "1 KiB", 1536: "1.5 KiB", 196 << 10: "196 KiB", 1 << 20: "1 MiB",
		1023 << 10: "0.999 MiB", 10 << 30: "10 GiB", 1<<30 + 1<<29: "1.5 GiB", math.MaxInt64: "8 EiB", 1126: "1.1 KiB", 999 << 10: "999 KiB",
		1000 << 10: "0.977 MiB", 1023590: "1e+03 KiB",
	} {
		if got := FormatSize(n); got != want {
			t.Errorf("FormatSize(%d) = %q, want %q", n, got, want)
		}
	}
}

func TestOptions(t *testing.T) {
	table := CreateOptions(FormatQcow2, true)
	for _, c := range []struct {
		in, want, err string
	}{
		{in: "size=1M", want: "cluster_size=65536 extended_l2=off compression_type=zlib size=1048576 lazy_refcounts=off refcount_bits=16"},
		{in: "backing_file=a,,b,lazy_refcounts,cluster_size=4k,refcount_bits=0x10,nocow=yes",
			want: "cluster_size=4096 extended_l2=off compression_type=zlib backing_file=a,,b lazy_refcounts=on refcount_bits=16 nocow=yes"},
		{in: "nolazy_refcounts", want: "cluster_size=65536 extended_l2=off compression_type=zlib lazy_refcounts=off refcount_bits=16"},
		{in: "", err: "Invalid option list: "},
		{in: ",size=1", err: "Invalid option list: ,size=1"},
		{in: "size=1,", err: "Invalid option list: size=1,"},
		{in: "foo=1", err: "Invalid parameter 'foo'"},
		{in: "lazy_refcounts=foo", err: "Parameter 'lazy_refcounts' expects 'on' or 'off'"},
		{in: "refcount_bits=foo", err: "Parameter 'refcount_bits' expects a number"},
		{in: "size=99E", err: "Value '99E' is out of range for parameter 'size'"},
	} {
		o := NewOptions(table)
		err := o.Parse(c.in)
		if c.err != "" {
			if err == nil || err.Error() != c.err {
				t.Errorf("%q: error is %v, want %s", c.in, err, c.err)
			}
			continue
		}
		if err != nil || o.String() != c.want {
			t.Errorf("%q: %v, got %s, want %s", c.in, err, o, c.want)
		}
	}
}
