// SPDX-License-Identifier: Apache-2.0

// Package stamp is what a guest's writer and the host's checker agree on: which writes a job makes in which order, and
// what stands in each sector that it wrote. All follows from a seed, so that the checker can play the job again and
// knows, for each sector, the last write that was flushed and those that came after it.
//
// It makes no I/O, keeps no global state and knows nothing of disks; a Job belongs to one goroutine.
package stamp

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
)

const (
	SectorSize = 512
	SectorsMax = 32   // sectors of one write, at most
	JobSectors = 2048 // sectors that a job writes to, its own; job 0's begin at sector 0
	FlushEvery = 8    // writes between two flushes
)

const magic = 0x504d415453434c53 // "SLCSTAMP" as it stands in the sector

// A Stamp stands at the beginning of a sector; the rest of the sector follows from it.
type Stamp struct {
	Round  uint32 // of the test; a later round overwrites an earlier one
	Job    uint32
	Seq    uint64 // number of the write within its job and round, from 1
	Sector int64  // where it was written to
}

// Later tells whether s was written after o by the same job.
func (s Stamp) Later(o Stamp) bool {
	return s.Round > o.Round || s.Round == o.Round && s.Seq > o.Seq
}

// Encode fills a sector.
func (s Stamp) Encode(p []byte) {
	le := binary.LittleEndian
	le.PutUint64(p, magic)
	le.PutUint32(p[8:], s.Round)
	le.PutUint32(p[12:], s.Job)
	le.PutUint64(p[16:], s.Seq)
	le.PutUint64(p[24:], uint64(s.Sector))
	for i := 32; i < SectorSize-4; i++ {
		p[i] = byte(s.Seq) ^ byte(i) ^ byte(s.Round)
	}
	le.PutUint32(p[SectorSize-4:], crc32.ChecksumIEEE(p[:SectorSize-4]))
}

// Decode reads a sector. It fails for one that is not exactly what Encode makes.
func Decode(p []byte) (Stamp, error) {
	le := binary.LittleEndian
	if le.Uint64(p) != magic {
		return Stamp{}, fmt.Errorf("decode stamp: no magic number but %x", p[:8])
	}
	if sum, want := crc32.ChecksumIEEE(p[:SectorSize-4]), le.Uint32(p[SectorSize-4:SectorSize]); sum != want {
		return Stamp{}, fmt.Errorf("decode stamp: checksum %08x, want %08x", sum, want)
	}
	return Stamp{Round: le.Uint32(p[8:]), Job: le.Uint32(p[12:]), Seq: le.Uint64(p[16:]), Sector: int64(le.Uint64(p[24:]))}, nil
}

// A Write is one write of a job.
type Write struct {
	Stamp         // of its first sector
	Sectors int64 // how many
}

// Fill makes the data of w in buf and returns the part that is used.
func (w Write) Fill(buf []byte) []byte {
	for i := range w.Sectors {
		s := w.Stamp
		s.Sector += i
		s.Encode(buf[i*SectorSize : (i+1)*SectorSize])
	}
	return buf[:w.Sectors*SectorSize]
}

// A Job is a sequence of writes.
type Job struct {
	Number int
	round  uint32
	seq    uint64
	random *rand.Rand
}

// NewJob makes the job of this number in this round. Equal arguments make equal jobs.
func NewJob(seed uint64, round uint32, number int) *Job {
	return &Job{Number: number, round: round, random: rand.New(rand.NewPCG(seed, uint64(round)<<32|uint64(number)))}
}

// Next gives the job's next write.
func (j *Job) Next() Write {
	j.seq++
	n := 1 + j.random.Int64N(SectorsMax)
	first := int64(j.Number)*JobSectors + j.random.Int64N(JobSectors-n+1)
	return Write{Stamp{Round: j.round, Job: uint32(j.Number), Seq: j.seq, Sector: first}, n}
}
