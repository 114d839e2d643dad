// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"math"
	"strconv"
	"strings"
	"testing"
)

func TestSizesAreReadAsQEMUImgReadsThem(t *testing.T) {
	for _, c := range []struct {
		text string
		want int64
	}{
		{"0", 0}, {"512", 512}, {"512B", 512}, {"1K", 1 << 10}, {"1k", 1 << 10}, {"1KiB", 1 << 10}, {"64kib", 64 << 10},
		{"3M", 3 << 20}, {"1G", 1 << 30}, {"1.5G", 3 << 29}, {"0.5K", 512}, {"2T", 2 << 40}, {"2TiB", 2 << 40}, {"1P", 1 << 50},
		{"7E", 7 << 60}, {"7.5E", 15 << 59}, {"9223372036854775807", math.MaxInt64}, {"0010", 10},
	} {
		got, err := parseSize(c.text)
		if err != nil || got != c.want {
			t.Errorf("parseSize(%q) = %d, %v; want %d", c.text, got, err, c.want)
		}
	}
}

func TestSizesThatAreNoneAreRefused(t *testing.T) {
	for text, want := range map[string]string{
		"": "not a number", "G": "not a number", "-1": "not a number", "+1": "not a number", "1 G": "not a number", "0x10": "not a number",
		"1e3": "not a number", "1..5G": "not a number", ".5G": "not a number", "5.G": "not a number", "1KB": "ambiguous", "1mb": "ambiguous",
		"1KK": "not a number", "1iB": "ambiguous", "1Q": "not a number", "8E": "too large", "9223372036854775808": "too large",
		"1.1K": "whole", "0.3": "whole", "1G,": "not a number", "١": "not a number", strings.Repeat("9", 100): "not a number",
	} {
		if got, err := parseSize(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("parseSize(%q) = %d, %v; want an error with %q", text, got, err, want)
		}
	}
}

func TestSizesAreWrittenShort(t *testing.T) {
	for n, want := range map[int64]string{
		0: "0 B", 512: "512 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB", 1 << 20: "1 MiB", 3 << 29: "1.5 GiB", 1 << 40: "1 TiB", math.MaxInt64: "8 EiB",
	} {
		if got := formatSize(n); got != want {
			t.Errorf("formatSize(%d) = %q, want %q", n, got, want)
		}
	}
}

func FuzzParseSize(f *testing.F) {
	for _, s := range []string{"", "0", "512", "1K", "1.5GiB", "7E", "8E", "1KB", "9223372036854775807", "1.0000000000000000000000001T", "B", ".", "1iB"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := parseSize(s)
		if err != nil {
			return
		}
		if n < 0 {
			t.Fatalf("parseSize(%q) = %d", s, n)
		}
		again, err := parseSize(strconv.FormatInt(n, 10))
		if err != nil || again != n {
			t.Fatalf("%q gave %d, which reads back as %d, %v", s, n, again, err)
		}
	})
}
