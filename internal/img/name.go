// SPDX-License-Identifier: Apache-2.0

package img

import (
	"encoding/json"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-blk/sluice/internal/graph"
)

// Location is where an image lies and, when its name says so, what it is.
type Location struct {
	Path   string
	Format string // "" when the name does not say
	// DataFile is in place of the external data file that the image names, "" when the name does not say.
	DataFile string
	// NoLock tells that the image is not to be locked, although somebody else may have.
	NoLock bool
}

// ParseName takes the name of an image apart: a path, file:PATH, or json: with the properties of a block device.
func ParseName(name string) (Location, error) {
	if text, ok := strings.CutPrefix(name, "json:"); ok {
		return parseJSONName(text)
	}
	protocol := protocolOf(name)
	switch {
	case protocol == "file":
		path := strings.TrimPrefix(strings.TrimPrefix(name, "file:"), "//")
		if protocolOf(path) != "" {
			path = "./" + path // as it has to be written without file:
		}
		return Location{Path: path}, nil
	case protocol != "":
		return Location{}, Wordedf("Unknown protocol '%s'", protocol)
	case name == "":
		return Location{}, Wordedf("The 'file' block driver requires a file name")
	}
	return Location{Path: name}, nil
}

// protocolOf is what stands before the first colon, when that comes before the first slash.
func protocolOf(name string) string {
	i := strings.IndexAny(name, ":/")
	if i <= 0 || name[i] != ':' {
		return ""
	}
	return name[:i]
}

// maxNameDepth bounds how deep the properties in a json: name may nest.
const maxNameDepth = 8

func parseJSONName(text string) (Location, error) {
	var tree map[string]any
	if err := json.Unmarshal([]byte(graph.StrictJSON(text)), &tree); err != nil {
		return Location{}, Wordedf("Could not parse the JSON options: %s", err)
	}
	flat := make(map[string]string)
	if err := flatten(flat, "", tree, maxNameDepth); err != nil {
		return Location{}, err
	}
	return locate(flat)
}

// flatten writes a tree of properties as dotted keys.
func flatten(to map[string]string, prefix string, v any, depth int) error {
	if depth == 0 {
		return Wordedf("Option '%s' nests too deep", strings.TrimSuffix(prefix, "."))
	}
	switch v := v.(type) {
	case map[string]any:
		for key, value := range v {
			if err := flatten(to, prefix+key+".", value, depth-1); err != nil {
				return err
			}
		}
		return nil
	case string:
		return setOnce(to, strings.TrimSuffix(prefix, "."), v)
	case bool:
		return setOnce(to, strings.TrimSuffix(prefix, "."), map[bool]string{true: "on", false: "off"}[v])
	case float64:
		return setOnce(to, strings.TrimSuffix(prefix, "."), strconv.FormatFloat(v, 'f', -1, 64))
	}
	return Wordedf("Option '%s' has a value of a kind that is not known here", strings.TrimSuffix(prefix, "."))
}

func setOnce(to map[string]string, key, value string) error {
	if _, twice := to[key]; twice {
		return Wordedf("Option '%s' is given twice", key)
	}
	to[key] = value
	return nil
}

// ParseImageOpts reads the value of --image-opts: the properties of a block device as dotted keys.
func ParseImageOpts(list string) (Location, error) {
	parts, err := SplitOptions(list)
	if err != nil {
		return Location{}, err
	}
	flat := make(map[string]string)
	for _, p := range parts {
		key, value, given := strings.Cut(p, "=")
		if !given {
			value = "on"
		}
		if err := setOnce(flat, key, value); err != nil {
			return Location{}, err
		}
	}
	return locate(flat)
}

// indifferent are properties that change nothing of what a tool does here.
var indifferent = []string{"read-only", "auto-read-only", "force-share", "node-name", "discard", "detect-zeroes", "cache.direct",
	"cache.no-flush", "aio", "locking", "lazy-refcounts", "cache-size", "l2-cache-size", "l2-cache-entry-size", "refcount-cache-size",
	"cache-clean-interval", "overlap-check"}

// locate finds path and format in the properties of a block device.
func locate(p map[string]string) (Location, error) {
	driver := p["driver"]
	delete(p, "driver")
	if driver == "" || driver == "file" || driver == "host_device" {
		path, ok := p["filename"]
		if driver == "" && !ok {
			return locateFile(p, "")
		}
		delete(p, "filename")
		if driver == "" {
			return leftOver(Location{Path: path}, p, "file")
		}
		return leftOver(Location{Path: path, Format: FormatRaw}, p, driver)
	}
	if !KnownFormat(driver) {
		return Location{}, Wordedf("Unknown driver '%s'", driver)
	}
	return locateFile(p, driver)
}

// locateFile is for a format on a file.
func locateFile(p map[string]string, format string) (Location, error) {
	if d, ok := p["file.driver"]; ok && d != "file" && d != "host_device" {
		return Location{}, Wordedf("Unknown driver '%s'", d)
	}
	delete(p, "file.driver")
	path, ok := p["file.filename"]
	if !ok {
		if path, ok = p["filename"]; !ok {
			return Location{}, Wordedf("A block device must be specified for \"file\"")
		}
		delete(p, "filename")
	}
	delete(p, "file.filename")
	at := Location{Path: path, Format: format, DataFile: p["data-file.filename"]}
	if at.DataFile != "" {
		delete(p, "data-file.driver")
		delete(p, "data-file.filename")
	}
	return leftOver(at, p, format)
}

// leftOver is at, unless there are properties that would change something and are not known.
func leftOver(at Location, p map[string]string, driver string) (Location, error) {
	at.NoLock = p["locking"] == "off" || p["file.locking"] == "off"
	for key := range p {
		if !slices.Contains(indifferent, strings.TrimPrefix(strings.TrimPrefix(key, "data-"), "file.")) {
			return Location{}, Wordedf("Block driver '%s' does not support the option '%s'", driver, key)
		}
	}
	return at, nil
}

// Beside resolves a name that stands in the image called base: what is relative lies in the folder of that image, as its
// name has it. Where base is a symbolic link it is what the graph opens.
func Beside(base, name string) string {
	if strings.HasPrefix(name, "/") || strings.HasPrefix(name, "json:") || protocolOf(name) != "" {
		return name
	}
	if st, err := os.Lstat(base); err == nil && st.Mode()&os.ModeSymlink != 0 {
		return graph.Beside(base, name)
	}
	return base[:strings.LastIndexByte(base, '/')+1] + name
}
