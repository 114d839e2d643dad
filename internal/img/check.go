// SPDX-License-Identifier: Apache-2.0

package img

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"syscall"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
	"github.com/sluice-blk/sluice/internal/node/qcow2/check"
)

// ErrNoCheck is the answer of a format that cannot be checked.
var ErrNoCheck error = Wordedf("This image format does not support checks")

// CheckResult is what a check has found. The order of the fields is that of the JSON.
type CheckResult struct {
	ImageEndOffset     int64  `json:"image-end-offset,omitempty"`
	CompressedClusters int64  `json:"compressed-clusters,omitempty"`
	TotalClusters      int64  `json:"total-clusters,omitempty"`
	Corruptions        int64  `json:"corruptions,omitempty"`
	CorruptionsFixed   int64  `json:"corruptions-fixed,omitempty"`
	CheckErrors        int64  `json:"check-errors"`
	Leaks              int64  `json:"leaks,omitempty"`
	LeaksFixed         int64  `json:"leaks-fixed,omitempty"`
	AllocatedClusters  int64  `json:"allocated-clusters,omitempty"`
	Filename           string `json:"filename"`
	Format             string `json:"format"`
	FragmentedClusters int64  `json:"fragmented-clusters,omitempty"`
}

// CheckRequest is what a person asks of check.
type CheckRequest struct {
	Source
	Repair check.Repair
	// Report is told each finding, and Repaired what was repaired before the image is looked at again.
	Report   func(line string)
	Repaired func(leaks, corruptions int64)
}

// Check looks through an image and repairs what it is asked to. After a repair it looks again, and tells what is left.
func Check(r *CheckRequest) (result *CheckResult, err error) {
	r.Store.ReadOnly = r.Repair == check.Nothing
	i, err := OpenImage(r.Source)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, i.Close()) }()
	if i.Format != FormatQcow2 {
		return nil, ErrNoCheck
	}
	if err := i.recognised(); err != nil {
		return nil, Wordedf("Could not open '%s': %s", r.Name, err.Error())
	}
	found, err := r.run(i, r.Repair)
	if err != nil {
		return nil, err
	}
	result = checkResult(i, found)
	if found.LeaksFixed == 0 && found.CorruptionsFixed == 0 {
		return result, nil
	}
	r.Repaired(found.LeaksFixed, found.CorruptionsFixed)
	left, err := r.run(i, check.Nothing)
	if err != nil {
		return nil, err
	}
	result = checkResult(i, left)
	result.LeaksFixed, result.CorruptionsFixed = found.LeaksFixed, found.CorruptionsFixed
	return result, nil
}

// recognised refuses what is no image that can be looked at. What is wrong with its tables is for the check to find.
func (i *Image) recognised() error {
	h, err := qcow2.ReadHeaderUnchecked(i.Read)
	if err == nil {
		err = h.Supported()
	}
	if err == nil && h.HasDataFile() && h.DataFile() == "" && i.DataFile == "" {
		// Rather a bit that was damaged than a data file without a name: a repair would take all guest data for leaks.
		return Wordedf("'data-file' is required for this image")
	}
	return qcow2Error(err)
}

func (r *CheckRequest) run(i *Image, repair check.Repair) (*check.Result, error) {
	found, err := check.Run(i.Store, &check.Options{Repair: repair, Report: func(f check.Finding) { r.Report(f.Text) }})
	switch {
	case errors.Is(err, syscall.EFBIG): // the header asks for more than the format has
		return nil, Wordedf("Could not open '%s': Image is too big", r.Name)
	case err != nil:
		return nil, Wordedf("Check failed: %s", err)
	}
	return found, nil
}

func checkResult(i *Image, r *check.Result) *CheckResult {
	return &CheckResult{
		ImageEndOffset: r.ImageEndOffset, CompressedClusters: r.CompressedClusters, TotalClusters: r.TotalClusters,
		Corruptions: r.Corruptions, CorruptionsFixed: r.CorruptionsFixed, CheckErrors: r.CheckErrors, Leaks: r.Leaks,
		LeaksFixed: r.LeaksFixed, AllocatedClusters: r.AllocatedClusters, Filename: i.Name, Format: i.Format,
		FragmentedClusters: r.FragmentedClusters,
	}
}

// ExitStatus is what the tool ends with: 0 clean, 1 something could not be checked, 2 corrupt, 3 leaks.
func (r *CheckResult) ExitStatus() int {
	switch {
	case r.Corruptions != 0:
		return 2
	case r.Leaks != 0:
		return 3
	case r.CheckErrors != 0:
		return 1
	}
	return 0
}

// WriteText writes the result as people read it.
func (r *CheckResult) WriteText(w io.Writer) error {
	var b strings.Builder
	if r.Corruptions == 0 && r.Leaks == 0 && r.CheckErrors == 0 {
		b.WriteString("No errors were found on the image.\n")
	}
	if r.Corruptions != 0 {
		fmt.Fprintf(&b, "\n%d errors were found on the image.\nData may be corrupted, or further writes to the image may corrupt it.\n", r.Corruptions)
	}
	if r.Leaks != 0 {
		fmt.Fprintf(&b, "\n%d leaked clusters were found on the image.\nThis means waste of disk space, but no harm to data.\n", r.Leaks)
	}
	if r.CheckErrors != 0 {
		fmt.Fprintf(&b, "\n%d internal errors have occurred during the check.\n", r.CheckErrors)
	}
	if r.TotalClusters != 0 && r.AllocatedClusters != 0 {
		percent := func(n, of int64) float64 { return float64(n) * 100 / float64(of) }
		fmt.Fprintf(&b, "%d/%d = %.2f%% allocated, %.2f%% fragmented, %.2f%% compressed clusters\n", r.AllocatedClusters, r.TotalClusters,
			percent(r.AllocatedClusters, r.TotalClusters), percent(r.FragmentedClusters, r.AllocatedClusters), percent(r.CompressedClusters, r.AllocatedClusters))
	}
	if r.ImageEndOffset != 0 {
		fmt.Fprintf(&b, "Image end offset: %d\n", r.ImageEndOffset)
	}
	_, err := io.WriteString(w, b.String())
	return err
}
