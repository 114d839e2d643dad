// SPDX-License-Identifier: Apache-2.0

package vhostuser

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/sluice-blk/sluice/internal/guestmem"
)

// Limits of the wire.
const (
	// HeaderSize is the size in bytes of what every message begins with: request, flags and size, 32 bits each.
	HeaderSize = 12

	// MaxBody bounds the payload of any message. The largest that we serve has 268 bytes (SET_CONFIG); the rest is room
	// in which a message that a later front-end sends can still be read to its end and skipped. What says more is no
	// message, and to read it would let a peer choose how much memory we take.
	MaxBody = 4096

	// MaxRegions is how many regions, each with its descriptor, SET_MEM_TABLE may carry (memory regions description:
	// region0 to region7). It is also the most descriptors that any message has.
	MaxRegions = 8

	// MaxConfig is the largest piece of the config space that one message reads or writes.
	MaxConfig = 256
)

// Sizes in bytes of payloads.
const (
	u64Size       = 8
	stateSize     = 8
	addrSize      = 40
	tableHeadSize = 8
	regionSize    = 32
	oneRegionSize = 8 + regionSize
	configHead    = 12
)

// Flags of the header.
const (
	FlagVersion   uint32 = 1      // the protocol's version, in the mask FlagVersionMask
	FlagReply     uint32 = 1 << 2 // the message answers another
	FlagNeedReply uint32 = 1 << 3 // the sender waits for an acknowledgement, if ProtocolReplyAck was negotiated

	FlagVersionMask uint32 = 3
)

// VringNoFD in the payload of SET_VRING_KICK, CALL and ERR says that no descriptor comes along.
const (
	VringNoFD      = 1 << 8
	vringIndexMask = 0xff
)

// Request is the type of a message of the front-end.
type Request uint32

// The front-end's messages, under the names of the protocol's document.
const (
	GetFeatures         Request = 1
	SetFeatures         Request = 2
	SetOwner            Request = 3
	ResetOwner          Request = 4
	SetMemTable         Request = 5
	SetLogBase          Request = 6
	SetLogFD            Request = 7
	SetVringNum         Request = 8
	SetVringAddr        Request = 9
	SetVringBase        Request = 10
	GetVringBase        Request = 11
	SetVringKick        Request = 12
	SetVringCall        Request = 13
	SetVringErr         Request = 14
	GetProtocolFeatures Request = 15
	SetProtocolFeatures Request = 16
	GetQueueNum         Request = 17
	SetVringEnable      Request = 18
	SendRARP            Request = 19
	NetSetMTU           Request = 20
	SetBackendReqFD     Request = 21
	IOTLBMsg            Request = 22
	SetVringEndian      Request = 23
	GetConfig           Request = 24
	SetConfig           Request = 25
	CreateCryptoSession Request = 26
	CloseCryptoSession  Request = 27
	PostcopyAdvise      Request = 28
	PostcopyListen      Request = 29
	PostcopyEnd         Request = 30
	GetInflightFD       Request = 31
	SetInflightFD       Request = 32
	GPUSetSocket        Request = 33
	ResetDevice         Request = 34
	VringKick           Request = 35
	GetMaxMemSlots      Request = 36
	AddMemReg           Request = 37
	RemMemReg           Request = 38
	SetStatus           Request = 39
	GetStatus           Request = 40
	GetSharedObject     Request = 41
	SetDeviceStateFD    Request = 42
	CheckDeviceState    Request = 43
	GetShmemConfig      Request = 44
)

// requestNames are the protocol's own, for logs and errors.
var requestNames = [...]string{
	GetFeatures: "GET_FEATURES", SetFeatures: "SET_FEATURES", SetOwner: "SET_OWNER", ResetOwner: "RESET_OWNER",
	SetMemTable: "SET_MEM_TABLE", SetLogBase: "SET_LOG_BASE", SetLogFD: "SET_LOG_FD", SetVringNum: "SET_VRING_NUM",
	SetVringAddr: "SET_VRING_ADDR", SetVringBase: "SET_VRING_BASE", GetVringBase: "GET_VRING_BASE",
	SetVringKick: "SET_VRING_KICK", SetVringCall: "SET_VRING_CALL", SetVringErr: "SET_VRING_ERR",
	GetProtocolFeatures: "GET_PROTOCOL_FEATURES", SetProtocolFeatures: "SET_PROTOCOL_FEATURES",
	GetQueueNum: "GET_QUEUE_NUM", SetVringEnable: "SET_VRING_ENABLE", SendRARP: "SEND_RARP", NetSetMTU: "NET_SET_MTU",
	SetBackendReqFD: "SET_BACKEND_REQ_FD", IOTLBMsg: "IOTLB_MSG", SetVringEndian: "SET_VRING_ENDIAN",
	GetConfig: "GET_CONFIG", SetConfig: "SET_CONFIG", CreateCryptoSession: "CREATE_CRYPTO_SESSION",
	CloseCryptoSession: "CLOSE_CRYPTO_SESSION", PostcopyAdvise: "POSTCOPY_ADVISE", PostcopyListen: "POSTCOPY_LISTEN",
	PostcopyEnd: "POSTCOPY_END", GetInflightFD: "GET_INFLIGHT_FD", SetInflightFD: "SET_INFLIGHT_FD",
	GPUSetSocket: "GPU_SET_SOCKET", ResetDevice: "RESET_DEVICE", VringKick: "VRING_KICK",
	GetMaxMemSlots: "GET_MAX_MEM_SLOTS", AddMemReg: "ADD_MEM_REG", RemMemReg: "REM_MEM_REG", SetStatus: "SET_STATUS",
	GetStatus: "GET_STATUS", GetSharedObject: "GET_SHARED_OBJECT", SetDeviceStateFD: "SET_DEVICE_STATE_FD",
	CheckDeviceState: "CHECK_DEVICE_STATE", GetShmemConfig: "GET_SHMEM_CONFIG",
}

// String is the name that the protocol's document uses, or "message N".
func (r Request) String() string {
	if int64(r) < int64(len(requestNames)) && requestNames[r] != "" {
		return requestNames[r]
	}
	return fmt.Sprintf("message %d", uint32(r))
}

// Feature bits that the conversation itself knows (virtio 1.3, section 6, and the protocol's document).
const (
	FeatureIndirectDesc     uint64 = 1 << 28 // VIRTIO_RING_F_INDIRECT_DESC
	FeatureEventIdx         uint64 = 1 << 29 // VIRTIO_RING_F_EVENT_IDX
	FeatureProtocolFeatures uint64 = 1 << 30 // VHOST_USER_F_PROTOCOL_FEATURES
	FeatureVersion1         uint64 = 1 << 32 // VIRTIO_F_VERSION_1
)

// Protocol feature bits that this back-end has.
const (
	ProtocolMQ                uint64 = 1 << 0
	ProtocolReplyAck          uint64 = 1 << 3
	ProtocolConfig            uint64 = 1 << 9
	ProtocolResetDevice       uint64 = 1 << 13
	ProtocolConfigureMemSlots uint64 = 1 << 15
	ProtocolStatus            uint64 = 1 << 16

	ProtocolOffered = ProtocolMQ | ProtocolReplyAck | ProtocolConfig | ProtocolResetDevice | ProtocolConfigureMemSlots |
		ProtocolStatus
)

// ErrMalformed marks a message whose header or payload cannot be what the protocol's document describes.
var ErrMalformed = errors.New("malformed message")

// native is the byte order of every number: the machine's own.
var native = binary.NativeEndian

// Header begins every message in both directions.
type Header struct {
	Request Request
	Flags   uint32
	Size    uint32 // of the payload, in bytes
}

// ParseHeader reads a header and checks what can be checked without knowing the request: [ErrMalformed] for another
// version, for a payload above [MaxBody], and for less than [HeaderSize] bytes. Bits of Flags that have no meaning yet
// are let through.
func ParseHeader(p []byte) (Header, error) {
	if len(p) < HeaderSize {
		return Header{}, fmt.Errorf("header of %d bytes: %w", len(p), ErrMalformed)
	}
	h := Header{Request: Request(native.Uint32(p)), Flags: native.Uint32(p[4:]), Size: native.Uint32(p[8:])}
	if v := h.Flags & FlagVersionMask; v != FlagVersion {
		return h, fmt.Errorf("%v: version %d, want %d: %w", h.Request, v, FlagVersion, ErrMalformed)
	}
	if h.Size > MaxBody {
		return h, fmt.Errorf("%v: payload of %d bytes, at most %d: %w", h.Request, h.Size, MaxBody, ErrMalformed)
	}
	return h, nil
}

// Append appends the header's [HeaderSize] bytes to dst.
func (h Header) Append(dst []byte) []byte {
	dst = native.AppendUint32(dst, uint32(h.Request))
	dst = native.AppendUint32(dst, h.Flags)
	return native.AppendUint32(dst, h.Size)
}

// AppendMessage appends a whole message to dst: a header with the version set, then the payload.
func AppendMessage(dst []byte, r Request, flags uint32, payload []byte) []byte {
	dst = Header{Request: r, Flags: flags&^FlagVersionMask | FlagVersion, Size: uint32(len(payload))}.Append(dst)
	return append(dst, payload...)
}

// exact is the error of a payload that has another size than its message.
func exact(p []byte, want int) error {
	if len(p) != want {
		return fmt.Errorf("payload of %d bytes, want %d: %w", len(p), want, ErrMalformed)
	}
	return nil
}

// ParseU64 reads the payload that is one number.
func ParseU64(p []byte) (uint64, error) {
	if err := exact(p, u64Size); err != nil {
		return 0, err
	}
	return native.Uint64(p), nil
}

// AppendU64 appends the payload that is one number.
func AppendU64(dst []byte, v uint64) []byte { return native.AppendUint64(dst, v) }

// VringState is the payload "vring state description": a queue and a number, whose meaning depends on the message.
type VringState struct {
	Index uint32
	Num   uint32
}

// ParseVringState reads the payload.
func ParseVringState(p []byte) (VringState, error) {
	if err := exact(p, stateSize); err != nil {
		return VringState{}, err
	}
	return VringState{Index: native.Uint32(p), Num: native.Uint32(p[4:])}, nil
}

// Append appends the payload to dst.
func (v VringState) Append(dst []byte) []byte {
	return native.AppendUint32(native.AppendUint32(dst, v.Index), v.Num)
}

// VringAddr is the payload "vring address description". The addresses are the front-end's own.
type VringAddr struct {
	Index uint32
	Flags uint32 // bit 0: log writes to the used ring
	Desc  uint64
	Used  uint64
	Avail uint64
	Log   uint64 // guest address for logging
}

// ParseVringAddr reads the payload.
func ParseVringAddr(p []byte) (VringAddr, error) {
	if err := exact(p, addrSize); err != nil {
		return VringAddr{}, err
	}
	return VringAddr{
		Index: native.Uint32(p), Flags: native.Uint32(p[4:]), Desc: native.Uint64(p[8:]), Used: native.Uint64(p[16:]),
		Avail: native.Uint64(p[24:]), Log: native.Uint64(p[32:]),
	}, nil
}

// Append appends the payload to dst.
func (v VringAddr) Append(dst []byte) []byte {
	dst = native.AppendUint32(native.AppendUint32(dst, v.Index), v.Flags)
	dst = native.AppendUint64(native.AppendUint64(dst, v.Desc), v.Used)
	return native.AppendUint64(native.AppendUint64(dst, v.Avail), v.Log)
}

// ParseVringFile reads the payload of SET_VRING_KICK, CALL and ERR: the queue, and whether a descriptor comes along.
// [ErrMalformed] when a bit is set that has no meaning.
func ParseVringFile(p []byte) (index int, hasFD bool, err error) {
	v, err := ParseU64(p)
	if err != nil {
		return 0, false, err
	}
	if v&^uint64(vringIndexMask|VringNoFD) != 0 {
		return 0, false, fmt.Errorf("queue and flags %#x: %w", v, ErrMalformed)
	}
	return int(v & vringIndexMask), v&VringNoFD == 0, nil
}

// parseRegion reads the regionSize bytes of one region. Its descriptor travels apart.
func parseRegion(p []byte) guestmem.Region {
	return guestmem.Region{
		GuestAddr: native.Uint64(p), Size: native.Uint64(p[8:]), UserAddr: native.Uint64(p[16:]),
		Offset: native.Uint64(p[24:]), FD: -1,
	}
}

func appendRegion(dst []byte, r guestmem.Region) []byte {
	dst = native.AppendUint64(native.AppendUint64(dst, r.GuestAddr), r.Size)
	return native.AppendUint64(native.AppendUint64(dst, r.UserAddr), r.Offset)
}

// ParseMemTable reads the payload "memory regions description" of SET_MEM_TABLE. The regions have no descriptor yet.
// [ErrMalformed] for more than [MaxRegions], and for a payload that does not hold those it names. A front-end that
// always sends all eight places is understood.
func ParseMemTable(p []byte) ([]guestmem.Region, error) {
	if len(p) < tableHeadSize {
		return nil, fmt.Errorf("payload of %d bytes: %w", len(p), ErrMalformed)
	}
	n := native.Uint32(p) // 32 bits of padding follow
	if n > MaxRegions {
		return nil, fmt.Errorf("%d regions, at most %d: %w", n, MaxRegions, ErrMalformed)
	}
	if want := tableHeadSize + int(n)*regionSize; len(p) != want && len(p) != tableHeadSize+MaxRegions*regionSize {
		return nil, fmt.Errorf("%d regions in a payload of %d bytes, want %d: %w", n, len(p), want, ErrMalformed)
	}
	regions := make([]guestmem.Region, n)
	for i := range regions {
		regions[i] = parseRegion(p[tableHeadSize+i*regionSize:])
	}
	return regions, nil
}

// AppendMemTable appends the payload of SET_MEM_TABLE to dst.
func AppendMemTable(dst []byte, regions []guestmem.Region) []byte {
	dst = native.AppendUint64(dst, uint64(uint32(len(regions))))
	for _, r := range regions {
		dst = appendRegion(dst, r)
	}
	return dst
}

// ParseMemReg reads the payload "single memory region description" of ADD_MEM_REG and REM_MEM_REG.
func ParseMemReg(p []byte) (guestmem.Region, error) {
	if err := exact(p, oneRegionSize); err != nil {
		return guestmem.Region{}, err
	}
	return parseRegion(p[8:]), nil // 64 bits of padding come first
}

// AppendMemReg appends the payload of ADD_MEM_REG and REM_MEM_REG to dst.
func AppendMemReg(dst []byte, r guestmem.Region) []byte {
	return appendRegion(native.AppendUint64(dst, 0), r)
}

// ConfigSpace is the payload "virtio device config space" of GET_CONFIG and SET_CONFIG.
type ConfigSpace struct {
	Offset uint32
	Size   uint32 // of Data, in bytes
	Flags  uint32 // 0: fields that the driver may write; 1: live migration
	Data   []byte // a part of the message
}

// ParseConfig reads the payload. [ErrMalformed] when Size is 0 or above [MaxConfig], when the piece does not lie within
// 32 bits, and when the payload holds other than Size bytes. Where payload is not needed (GET_CONFIG) its bytes may be
// missing, and Data is then empty.
func ParseConfig(p []byte, needData bool) (ConfigSpace, error) {
	if len(p) < configHead {
		return ConfigSpace{}, fmt.Errorf("payload of %d bytes: %w", len(p), ErrMalformed)
	}
	c := ConfigSpace{Offset: native.Uint32(p), Size: native.Uint32(p[4:]), Flags: native.Uint32(p[8:]), Data: p[configHead:]}
	if c.Size == 0 || c.Size > MaxConfig {
		return c, fmt.Errorf("%d bytes of config space, want 1 to %d: %w", c.Size, MaxConfig, ErrMalformed)
	}
	if c.Offset > ^uint32(0)-c.Size {
		return c, fmt.Errorf("config space at %#x, %d bytes: %w", c.Offset, c.Size, ErrMalformed)
	}
	if len(c.Data) != int(c.Size) && (needData || len(c.Data) != 0) {
		return c, fmt.Errorf("%d bytes of config space in a payload of %d: %w", c.Size, len(p), ErrMalformed)
	}
	return c, nil
}

// Append appends the payload to dst.
func (c ConfigSpace) Append(dst []byte) []byte {
	dst = native.AppendUint32(native.AppendUint32(dst, c.Offset), c.Size)
	return append(native.AppendUint32(dst, c.Flags), c.Data...)
}
