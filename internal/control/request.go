// SPDX-License-Identifier: Apache-2.0

package control

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
)

// Request is one line of a client.
type Request struct {
	Version int             `json:"v"`
	ID      uint64          `json:"id,omitempty"` // comes back in the answer
	Command string          `json:"cmd"`
	Args    json.RawMessage `json:"args,omitempty"` // an object, or nothing
}

// Answer is one line of the server.
type Answer struct {
	Version int             `json:"v"`
	ID      uint64          `json:"id,omitempty"`
	OK      bool            `json:"ok"`
	Error   string          `json:"error,omitempty"`
	Result  json.RawMessage `json:"result,omitempty"`
}

// Parse reads a request. After an error the request has the ID that could be read, for the answer.
func Parse(line []byte) (Request, error) {
	var r Request
	if err := strict(line, &r); err != nil {
		return Request{ID: r.ID}, fmt.Errorf("read request: %w", err)
	}
	switch {
	case r.Version != Version:
		return Request{ID: r.ID}, fmt.Errorf("read request: version is %d, this server speaks %d (\"v\":%d)", r.Version, Version, Version)
	case r.Command == "":
		return Request{ID: r.ID}, errors.New("read request: no command is given (\"cmd\":\"...\")")
	}
	if args := bytes.TrimLeft(r.Args, " \t\r\n"); len(args) > 0 && args[0] != '{' {
		return Request{ID: r.ID}, errors.New("read request: args is not an object")
	}
	return r, nil
}

// DecodeArgs reads the arguments of a command into the struct that v points to. An argument that it does not have is an
// error: a misspelt one must not be taken for none.
func DecodeArgs(args json.RawMessage, v any) error {
	if len(args) == 0 {
		return nil
	}
	if err := strict(args, v); err != nil {
		return fmt.Errorf("read arguments: %w", err)
	}
	return nil
}

// strict decodes one value and nothing behind it.
func strict(b []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	if d.More() {
		return errors.New("more than one value in a line")
	}
	return nil
}
