// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Fio describes fio on a file itself, as a yardstick: what the same work costs without a guest.
type Fio struct {
	Program string
	Engine  string // io_uring or libaio
	// Batch hands in and takes out up to so many requests at a time; 0 does as fio does by itself, one by one.
	Batch int
}

// Fios are the configurations that are asked which is fio's best: both engines, one by one and in batches.
func Fios(program string, w *Workload) (list []Fio) {
	for _, engine := range []string{"io_uring", "libaio"} {
		list = append(list, Fio{Program: program, Engine: engine})
		if w.IODepth > 1 {
			list = append(list, Fio{Program: program, Engine: engine, Batch: (w.IODepth + 3) / 4})
		}
	}
	return list
}

// Subject is fio with the workload on the medium's file.
func (f Fio) Subject(m Medium, w *Workload) Subject {
	name := "fio " + f.Engine
	direct := "1"
	if m.Buffered {
		direct = "0"
	}
	args := []string{f.Program, "--name=sluice-bench", "--output-format=json", "--filename=" + m.Path, "--allow_file_create=0",
		"--ioengine=" + f.Engine, "--direct=" + direct, "--rw=" + w.RW, "--bs=" + strconv.Itoa(w.BS),
		"--iodepth=" + strconv.Itoa(w.IODepth), "--numjobs=" + strconv.Itoa(w.NumJobs), "--rwmixread=" + strconv.Itoa(w.RWMixRead),
		"--time_based", "--runtime=" + milliseconds(w.Runtime), "--ramp_time=" + milliseconds(w.RampTime),
		"--randrepeat=0", "--norandommap", "--invalidate=0", "--thread", "--group_reporting"}
	if w.Size > 0 {
		args = append(args, "--size="+strconv.FormatInt(w.Size, 10))
	}
	if w.Fsync > 0 {
		args = append(args, "--fsync="+strconv.Itoa(w.Fsync))
	}
	if f.Engine == "io_uring" {
		args = append(args, "--fixedbufs=1", "--registerfiles=1")
	}
	if f.Batch > 0 {
		n := strconv.Itoa(f.Batch)
		args = append(args, "--iodepth_batch_submit="+n, "--iodepth_batch_complete_min=1", "--iodepth_batch_complete_max="+strconv.Itoa(w.IODepth))
		name += " batch=" + n
	}
	return Subject{Name: name, Role: Direct, Args: args}
}

func milliseconds(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) + "ms" }

// runFio runs it and reads its figures. Its processor time is what it says itself, user and system, of all its jobs; that
// leaves out the kernel's workers, which do the work of io_uring on some file systems, and so they are watched besides,
// over a part of the run that lies in the measured one for sure.
func runFio(ctx context.Context, s *Subject, w Workload, what Observation) (*Result, error) {
	args := slices.Clone(s.Args)
	for i, a := range args { // the warm-up is shorter than what the subject was made for
		if strings.HasPrefix(a, "--runtime=") {
			args[i] = "--runtime=" + milliseconds(w.Runtime)
		}
	}
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	watching, cancel := context.WithCancel(ctx)
	defer cancel()
	o := &observer{what: Observation{Device: what.Device}, pid: cmd.Process.Pid}
	var workers [2]time.Duration
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		lead := min(fioStart, w.Runtime/2)
		sleep(watching, w.RampTime+lead)
		o.before, workers[0] = o.read(), workerCPU(o.pid)
		sleep(watching, w.Runtime-lead)
		o.after, workers[1] = o.read(), workerCPU(o.pid)
	}()
	err := cmd.Wait()
	cancel()
	<-watched
	if err != nil {
		return nil, errors.Join(err, errors.New(errOut.String()))
	}
	r, err := parseFio(out.Bytes(), w)
	if err != nil {
		return nil, err
	}
	window := o.after.at.Sub(o.before.at)
	r.Limits = limits(&o.before, &o.after, window)
	if window > 0 && workers[1] > workers[0] {
		r.ServerCPU += time.Duration(float64(workers[1]-workers[0]) * float64(r.Elapsed) / float64(window))
	}
	r.Limits.others(r.ServerCPU, r.Elapsed)
	return r, nil
}

// fioStart is more than fio takes from its start to its first request.
const fioStart = 400 * time.Millisecond

// fioOutput is the part of fio's JSON that is read.
type fioOutput struct {
	Jobs []struct {
		Error   int     `json:"error"`
		Runtime int64   `json:"job_runtime"` // ms, of all jobs together
		Usr     float64 `json:"usr_cpu"`     // percent of that
		Sys     float64 `json:"sys_cpu"`
		Read    fioSide `json:"read"`
		Write   fioSide `json:"write"`
		Trim    fioSide `json:"trim"`
	} `json:"jobs"`
}

type fioSide struct {
	IOs     uint64 `json:"total_ios"`
	Bytes   uint64 `json:"io_bytes"`
	Runtime int64  `json:"runtime"` // ms
	Clat    struct {
		Min        float64          `json:"min"`
		Max        float64          `json:"max"`
		Mean       float64          `json:"mean"`
		Percentile map[string]int64 `json:"percentile"`
	} `json:"clat_ns"`
}

func (s *fioSide) direction() Direction {
	p := s.Clat.Percentile
	return Direction{
		IOs: s.IOs, Bytes: s.Bytes, Mean: time.Duration(s.Clat.Mean), Min: time.Duration(s.Clat.Min), Max: time.Duration(s.Clat.Max),
		P50: time.Duration(p["50.000000"]), P99: time.Duration(p["99.000000"]), P999: time.Duration(p["99.900000"]),
	}
}

func parseFio(b []byte, w Workload) (*Result, error) {
	if i := bytes.IndexByte(b, '{'); i > 0 {
		b = b[i:] // warnings may stand before it
	}
	var out fioOutput
	if err := json.Unmarshal(b, &out); err != nil {
		return nil, fmt.Errorf("read fio's output: %w", err)
	}
	if len(out.Jobs) != 1 {
		return nil, fmt.Errorf("read fio's output: %d groups of jobs (want 1)", len(out.Jobs))
	}
	j := &out.Jobs[0]
	if j.Error != 0 {
		return nil, fmt.Errorf("fio failed with error %d", j.Error)
	}
	r := &Result{Workload: w, Read: j.Read.direction(), Write: j.Write.direction(), Trim: j.Trim.direction()}
	r.Elapsed = time.Duration(max(j.Read.Runtime, j.Write.Runtime, j.Trim.Runtime)) * time.Millisecond
	if r.IOs() == 0 || r.Elapsed == 0 {
		return nil, errors.New("fio did no work")
	}
	r.ServerCPU = time.Duration((j.Usr + j.Sys) / 100 * float64(j.Runtime) * float64(time.Millisecond))
	return r, nil
}
