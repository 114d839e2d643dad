// SPDX-License-Identifier: Apache-2.0

package img

import (
	"errors"
	"strings"
	"syscall"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
	"github.com/sluice-blk/sluice/internal/node/qcow2/create"
)

// preallocations are the names of what create.Preallocation counts.
var preallocations = map[string]create.Preallocation{
	"": create.Off, "off": create.Off, "metadata": create.Metadata, "falloc": create.Falloc, "full": create.Full,
}

// compats are the names of the versions of the format. The empty one is the default.
var compats = map[string]uint32{"": 3, "0.10": 2, "v2": 2, "1.1": 3, "v3": 3}

// compressions are the names of the types of compression.
var compressions = map[string]uint8{"zlib": qcow2.CompressionZlib, "zstd": qcow2.CompressionZstd}

// createQcow2 makes a qcow2 image, and its external data file when it has one.
func createQcow2(path string, o *Options) error {
	c, err := qcow2CreateOptions(o)
	if err != nil {
		return err
	}
	fill := func(s *Store) error {
		_, err := create.Create(s, c)
		if errors.Is(err, syscall.EFBIG) {
			return Wordedf("The image size is too large for file format 'qcow2' (try using a larger cluster size)")
		}
		return err
	}
	if c.DataFile == "" {
		return inNewFile(path, fill)
	}
	return inNewFile(Beside(path, c.DataFile), func(data *Store) error {
		c.Data = data
		return inNewFile(path, fill)
	})
}

// qcow2CreateOptions checks options in the order and with the words of qemu-img.
func qcow2CreateOptions(o *Options) (*create.Options, error) {
	for _, i := range o.table {
		if strings.HasPrefix(i.Name, "encrypt") && o.Has(i.Name) && o.Text(i.Name) != "off" {
			return nil, errors.New("encrypted images are not supported yet")
		}
	}
	version, ok := compats[o.Text("compat")]
	if !ok {
		return nil, Wordedf("Parameter 'version' does not accept value '%s'", o.Text("compat"))
	}
	prealloc, ok := preallocations[o.Text("preallocation")]
	if !ok {
		return nil, Wordedf("Parameter 'preallocation' does not accept value '%s'", o.Text("preallocation"))
	}
	compression, ok := compressions[o.Text("compression_type")]
	if !ok {
		return nil, Wordedf("Parameter 'compression-type' does not accept value '%s'", o.Text("compression_type"))
	}
	c := &create.Options{
		Version: version, Preallocation: prealloc, CompressionType: compression,
		ClusterSize: int64(o.Number("cluster_size")), RefcountBits: int(o.Number("refcount_bits")),
		LazyRefcounts: o.On("lazy_refcounts"), ExtendedL2: o.On("extended_l2"),
		BackingFile: o.Text("backing_file"), BackingFormat: o.Text("backing_fmt"),
		DataFile: o.Text("data_file"), DataFileRaw: o.On("data_file_raw"),
	}
	if err := refuseQcow2(c); err != nil {
		return nil, err
	}
	size := o.Number("size")
	if size > maxDisk {
		return nil, Wordedf("Image size too large: %d", size)
	}
	c.Size = int64(size)
	return c, nil
}

// maxDisk is the largest disk that anything here counts with.
const maxDisk = 1<<63 - 512

// refuseQcow2 says what does not go together.
func refuseQcow2(c *create.Options) error {
	const needV3 = "compatibility level 1.1 and above (use version=v3 or greater)"
	v2 := c.Version == 2
	switch n := c.ClusterSize; {
	case n < 1<<qcow2.MinClusterBits || n > 1<<qcow2.MaxClusterBits || n&(n-1) != 0:
		return Wordedf("Cluster size must be a power of two between %d and %dk", 1<<qcow2.MinClusterBits, 1<<(qcow2.MaxClusterBits-10))
	case c.ExtendedL2 && v2:
		return Wordedf("Extended L2 entries are only supported with %s", needV3)
	case c.ExtendedL2 && n < 1<<qcow2.MinClusterBitsExtended:
		return Wordedf("Extended L2 entries are only supported with cluster sizes of at least %d bytes", 1<<qcow2.MinClusterBitsExtended)
	case c.Preallocation != create.Off && c.BackingFile != "" && !c.ExtendedL2:
		return Wordedf("Backing file and preallocation can only be used at the same time if extended_l2 is on")
	case c.BackingFormat != "" && c.BackingFile == "":
		return Wordedf("Backing format cannot be used without backing file")
	case c.LazyRefcounts && v2:
		return Wordedf("Lazy refcounts only supported with %s", needV3)
	}
	switch n := c.RefcountBits; {
	case n < 1 || n > 64 || n&(n-1) != 0:
		return Wordedf("Refcount width must be a power of two and may not exceed 64 bits")
	case v2 && n != 16:
		return Wordedf("Different refcount widths than 16 bits require compatibility level 1.1 or above (use version=v3 or greater)")
	case c.DataFileRaw && c.DataFile == "":
		return Wordedf("data-file-raw requires data-file")
	case c.DataFileRaw && c.BackingFile != "":
		return Wordedf("Backing file and data-file-raw cannot be used at the same time")
	case c.DataFile != "" && v2:
		return Wordedf("External data files are only supported with %s", needV3)
	case c.CompressionType != qcow2.CompressionZlib && v2:
		return Wordedf("Non-zlib compression type is only supported with %s", needV3)
	}
	return nil
}
