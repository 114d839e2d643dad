# What the guest does. RUNTIME is seconds a row, ROWS a list of NUMBER:DEVICE.
set -e
echo "cache: $(cat /sys/block/vda/queue/write_cache)"
mke2fs -q -t ext4 -E discard /dev/vda
mkdir -p /mnt
mount -t ext4 /dev/vda /mnt
for i in 1 2 3 4 5 6 7 8; do
	dd if=/dev/urandom of=/mnt/file$i bs=64k count=$((i * 4)) 2>/dev/null
done
# Verified at the end of the job, from the disk and not from the page cache.
fio --name=write --filename=/mnt/verified --rw=randwrite --bs=4k --size=16m --ioengine=libaio --direct=1 --iodepth=32 \
	--verify=crc32c --verify_fatal=1 --do_verify=1 --output-format=json --eta=never >/tmp/write.json
echo "fio: write"
cat /tmp/write.json
echo "end:"
rm /mnt/file8
sync
fstrim -v /mnt
cd /mnt
for f in file*; do
	echo "sum: $(sha256sum $f)"
done
cd /
sync
umount /mnt
# The job of the batching series.
for row in $ROWS; do
	fio --name=series --filename=${row#*:} --readonly --rw=randread --bs=4k --ioengine=libaio --direct=1 --iodepth=64 --numjobs=4 \
		--group_reporting --time_based --runtime=$RUNTIME --output-format=json --eta=never >/tmp/row.json
	echo "fio: ${row%%:*}"
	cat /tmp/row.json
	echo "end:"
done
