// SPDX-License-Identifier: Apache-2.0

// Package control is the conversation with a running daemon: lines of JSON over a stream socket.
//
// A client sends one request a line, {"v":1,"id":7,"cmd":"stats","args":{...}}, and gets one line for each, in order:
// {"v":1,"id":7,"ok":true,"result":{...}} or {"v":1,"id":7,"ok":false,"error":"..."}. id may be left out, and args too. What
// cannot be understood is answered with an error, and the conversation goes on; a line that is too long ends it.
//
// The room knows the form alone. What commands there are, and what they do, is in the table of handlers that the owner
// of the [Server] hands in. A [Client] belongs to one goroutine; everything else is safe for concurrent use. It touches no
// loop and takes no decision about who may connect: the socket's mode does that.
package control

// Version is the protocol's. It changes when a client of before could misunderstand; what is added does not change it.
const Version = 1

// Limits of a conversation.
const (
	// LineMax is how long a request may be, in bytes: the longest one names a file.
	LineMax = 64 << 10
	// AnswerMax is how long an answer may be that a client takes: figures of a thousand disks with many queues each.
	AnswerMax = 256 << 20
	// ClientsMax is how many clients are served at a time. Who comes beyond is told so.
	ClientsMax = 64
)
