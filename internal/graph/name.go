// SPDX-License-Identifier: Apache-2.0

package graph

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// location is what the name of another image in an image says.
type location struct {
	path   string
	format string // empty where the name does not say
}

// parseName reads a name as it stands in an image: a path, file:PATH, or json: and a description. What describes anything
// but a file in one of our formats is refused.
func parseName(name string) (location, error) {
	if text, ok := strings.CutPrefix(name, "json:"); ok {
		return parseJSON(text)
	}
	if rest, ok := strings.CutPrefix(name, "file:"); ok {
		name = strings.TrimPrefix(rest, "//")
	} else if i := strings.IndexAny(name, ":/"); i > 0 && name[i] == ':' {
		return location{}, fmt.Errorf("protocol %q is not known (only files can be named): %w", name[:i], syscall.ENOTSUP)
	}
	if name == "" {
		return location{}, fmt.Errorf("name is empty: %w", syscall.EINVAL)
	}
	return location{path: name}, nil
}

// parseJSON reads a description, whose keys may be nested or dotted: {"driver":"raw","file":{"driver":"file","filename":"x"}}
// and {"driver":"raw","file.filename":"x"} say the same.
func parseJSON(text string) (location, error) {
	var tree map[string]any
	if err := json.Unmarshal([]byte(StrictJSON(text)), &tree); err != nil {
		return location{}, fmt.Errorf("read a name that is JSON: %w: %w", err, syscall.EINVAL)
	}
	flat := make(map[string]string)
	if err := flatten(flat, "", tree); err != nil {
		return location{}, err
	}
	at := location{format: take(flat, "driver")}
	below := "file."
	if at.format == DriverFile || at.format == "" && flat["filename"] != "" {
		below, at.format = "", "" // no format: the file itself
	} else if d := take(flat, "file.driver"); d != "" && d != DriverFile {
		return location{}, fmt.Errorf("driver %q is not known (a format must stand on a file): %w", d, syscall.ENOTSUP)
	}
	if at.path = take(flat, below+"filename"); at.path == "" {
		return location{}, fmt.Errorf("a name that is JSON names no file: %w", syscall.EINVAL)
	}
	if below == "" {
		at.format = FormatRaw
	}
	for key := range flat {
		if !harmless[strings.TrimPrefix(key, "file.")] {
			return location{}, fmt.Errorf("property %q in a name that is JSON is not known: %w", key, syscall.ENOTSUP)
		}
	}
	return at, nil
}

// harmless are properties that change nothing of what is read.
var harmless = map[string]bool{
	"read-only": true, "auto-read-only": true, "node-name": true, "discard": true, "detect-zeroes": true, "aio": true, "locking": true,
	"cache.direct": true, "cache.no-flush": true, "force-share": true,
}

// flatten writes nested keys as dotted ones. The depth is bounded by what the JSON decoder takes.
func flatten(to map[string]string, prefix string, v any) error {
	switch v := v.(type) {
	case map[string]any:
		for key, value := range v {
			name := key
			if prefix != "" {
				name = prefix + "." + key
			}
			if err := flatten(to, name, value); err != nil {
				return err
			}
		}
		return nil
	case string, bool, float64:
		if _, twice := to[prefix]; twice {
			return fmt.Errorf("property %q is given twice: %w", prefix, syscall.EINVAL)
		}
		to[prefix] = fmt.Sprint(v)
		return nil
	}
	return fmt.Errorf("property %q has a value that is not understood: %w", prefix, syscall.EINVAL)
}

func take(m map[string]string, key string) string {
	v := m[key]
	delete(m, key)
	return v
}

// Beside resolves a path that stands in the image at base, as Build does.
func Beside(base, path string) string { return beside(base, path) }

// beside resolves a path that stands in the image at base: what is relative lies in the folder of that file. Where base is
// a symbolic link, that is the folder of the file it points to; should there be nothing, the folder of the link.
func beside(base, path string) string {
	if filepath.IsAbs(path) {
		return path
	}
	link := filepath.Join(filepath.Dir(base), path)
	real, err := filepath.EvalSymlinks(base)
	if err != nil {
		return link
	}
	there := filepath.Join(filepath.Dir(real), path)
	if _, err := os.Stat(there); errors.Is(err, fs.ErrNotExist) && there != link {
		if _, err := os.Stat(link); err == nil {
			return link
		}
	}
	return there
}

// StrictJSON writes strings in single quotes, which names may have, as JSON has them.
func StrictJSON(text string) string {
	var b strings.Builder
	quote := byte(0) // the one of the string that we are in
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case c == '\\' && quote != 0 && i+1 < len(text):
			i++
			if text[i] != '\'' {
				b.WriteByte(c)
			}
			b.WriteByte(text[i])
		case quote == 0 && (c == '\'' || c == '"'):
			quote = c
			b.WriteByte('"')
		case c == quote && c != 0:
			quote = 0
			b.WriteByte('"')
		case c == '"':
			b.WriteString(`\"`)
		default:
			b.WriteByte(c)
		}
	}
	return b.String()
}
