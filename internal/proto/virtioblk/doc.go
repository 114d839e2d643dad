// SPDX-License-Identifier: Apache-2.0

// Package virtioblk is the wire form of the virtio block device (virtio 1.3, section 5.2): what lies in the request's
// header, in the ranges of discard and write zeroes, and in the configuration space, and which of its values are valid.
//
// It is a pure codec: bytes in, checked values out. It knows no queue, no memory and no disk, and its functions are
// safe for concurrent use.
package virtioblk

// SectorSize is the unit of capacity, sector and range, in bytes, whatever the block size of the disk.
const SectorSize = 512

// Features of the device, as masks (section 5.2.3). Ring and transport features belong to the virtqueue.
const (
	FeatureSizeMax     uint64 = 1 << 1
	FeatureSegMax      uint64 = 1 << 2
	FeatureGeometry    uint64 = 1 << 4
	FeatureRO          uint64 = 1 << 5
	FeatureBlkSize     uint64 = 1 << 6
	FeatureFlush       uint64 = 1 << 9
	FeatureTopology    uint64 = 1 << 10
	FeatureConfigWCE   uint64 = 1 << 11
	FeatureMQ          uint64 = 1 << 12
	FeatureDiscard     uint64 = 1 << 13
	FeatureWriteZeroes uint64 = 1 << 14
	FeatureLifetime    uint64 = 1 << 15
	FeatureSecureErase uint64 = 1 << 16
	FeatureZoned       uint64 = 1 << 17
)

// RequestType is the first word of a request's header (section 5.2.6). Types of features that were not offered are
// unknown ones.
type RequestType uint32

const (
	TypeIn          RequestType = 0
	TypeOut         RequestType = 1
	TypeFlush       RequestType = 4
	TypeGetID       RequestType = 8
	TypeGetLifetime RequestType = 10
	TypeDiscard     RequestType = 11
	TypeWriteZeroes RequestType = 13
	TypeSecureErase RequestType = 14
)

// Status is the last byte of a request, which the device writes (section 5.2.6).
type Status uint8

const (
	StatusOK     Status = 0
	StatusIOErr  Status = 1
	StatusUnsupp Status = 2
)
