// SPDX-License-Identifier: Apache-2.0

package img

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
)

// OptionKind is what the value of an option is.
type OptionKind uint8

// The kinds.
const (
	OptionString OptionKind = iota
	OptionBool
	OptionNumber
	OptionSize
)

func (k OptionKind) String() string {
	return [...]string{"str", "bool (on/off)", "num", "size"}[k]
}

// OptionInfo describes one option of -o.
type OptionInfo struct {
	Name    string
	Kind    OptionKind
	Help    string
	Default string // in force although nobody gave it, and told by create
}

// Options are values given to options of a table. The order is the table's.
type Options struct {
	table  []OptionInfo
	values map[string]string // as given; sizes and numbers as plain decimals
}

// NewOptions has nothing set.
func NewOptions(table []OptionInfo) *Options {
	return &Options{table: table, values: make(map[string]string)}
}

// SplitOptions cuts key=value,key=value at its commas; two commas are one in the text. The list must not be empty, nor
// begin or end with a comma.
func SplitOptions(list string) ([]string, error) {
	if list == "" || list[0] == ',' || oddTail(list) {
		return nil, Wordedf("Invalid option list: %s", list)
	}
	var parts []string
	var b strings.Builder
	for i := 0; i < len(list); i++ {
		switch {
		case list[i] != ',':
			b.WriteByte(list[i])
		case i+1 < len(list) && list[i+1] == ',':
			b.WriteByte(',')
			i++
		default:
			parts = append(parts, b.String())
			b.Reset()
		}
	}
	return append(parts, b.String()), nil
}

// oddTail tells that the text ends with a comma that separates.
func oddTail(s string) bool {
	return (len(s)-len(strings.TrimRight(s, ",")))%2 == 1
}

// WantsHelp tells that an option list asks for the list of options.
func WantsHelp(list string) bool {
	parts, err := SplitOptions(list)
	return err == nil && (slices.Contains(parts, "help") || slices.Contains(parts, "?"))
}

// Parse takes a list of -o. A name alone means on, and with "no" before it off.
func (o *Options) Parse(list string) error {
	parts, err := SplitOptions(list)
	if err != nil {
		return err
	}
	for _, p := range parts {
		name, value, given := strings.Cut(p, "=")
		if !given {
			value = "on"
			if bare, no := strings.CutPrefix(name, "no"); no && o.info(name) == nil && o.info(bare) != nil {
				name, value = bare, "off"
			}
		}
		if err := o.Set(name, value); err != nil {
			return err
		}
	}
	return nil
}

func (o *Options) info(name string) *OptionInfo {
	i := slices.IndexFunc(o.table, func(i OptionInfo) bool { return i.Name == name })
	if i < 0 {
		return nil
	}
	return &o.table[i]
}

// Set gives an option a value, and says what is wrong with it in qemu-img's words.
func (o *Options) Set(name, value string) error {
	info := o.info(name)
	if info == nil {
		return Wordedf("Invalid parameter '%s'", name)
	}
	switch info.Kind {
	case OptionBool:
		if _, ok := boolWords[value]; !ok {
			return Wordedf("Parameter '%s' expects 'on' or 'off'", name)
		}
	case OptionNumber:
		digits, negative := strings.CutPrefix(value, "-") // which then is too large for anything
		n, err := strconv.ParseUint(digits, 0, 64)
		if err != nil {
			return Wordedf("Parameter '%s' expects a number", name)
		}
		if negative {
			n = -n
		}
		value = strconv.FormatUint(n, 10)
	case OptionSize:
		n, err := ParseSize(value)
		switch {
		case errors.Is(err, ErrSizeRange):
			return Wordedf("Value '%s' is out of range for parameter '%s'", value, name)
		case err != nil:
			return Wordedf("Parameter '%s' expects a non-negative number below 2^64\nOptional suffix k, M, G, T, P or E means kilo-, mega-, giga-, tera-, peta-\nand exabytes, respectively.", name)
		}
		value = strconv.FormatUint(n, 10)
	}
	o.values[name] = value
	return nil
}

// boolWords are what a bool may be called.
var boolWords = map[string]bool{"on": true, "yes": true, "true": true, "y": true, "off": false, "no": false, "false": false, "n": false}

// Has tells whether somebody gave the option.
func (o *Options) Has(name string) bool {
	_, ok := o.values[name]
	return ok
}

// Text is the value of an option, its default when nobody gave one.
func (o *Options) Text(name string) string {
	if v, ok := o.values[name]; ok {
		return v
	}
	if i := o.info(name); i != nil {
		return i.Default
	}
	return ""
}

// On tells whether a bool is on.
func (o *Options) On(name string) bool { return boolWords[o.Text(name)] }

// Number is the value of a number or size, 0 when there is none.
func (o *Options) Number(name string) uint64 {
	n, err := strconv.ParseUint(o.Text(name), 10, 64)
	if err != nil {
		return 0 // not set: what was set has been checked
	}
	return n
}

// String lists what is set and what is so by default, as create tells it.
func (o *Options) String() string {
	var b strings.Builder
	for _, i := range o.table {
		if !o.Has(i.Name) && i.Default == "" {
			continue
		}
		fmt.Fprintf(&b, " %s=%s", i.Name, quoteValue(o.Text(i.Name)))
	}
	return strings.TrimPrefix(b.String(), " ")
}

// quoteValue doubles the commas, so that the text could be given to -o again.
func quoteValue(s string) string { return strings.ReplaceAll(s, ",", ",,") }

// WriteHelp lists the options in the order of their names.
func WriteHelp(w io.Writer, title string, table []OptionInfo) error {
	sorted := slices.SortedFunc(slices.Values(table), func(a, b OptionInfo) int { return cmp.Compare(a.Name, b.Name) })
	if _, err := fmt.Fprintln(w, title); err != nil {
		return err
	}
	for _, i := range sorted {
		left := fmt.Sprintf("  %s=<%s>", i.Name, i.Kind)
		if _, err := fmt.Fprintf(w, "%-24s - %s\n", left, i.Help); err != nil {
			return err
		}
	}
	return nil
}
