#!/bin/bash
# In a folder with pkg.tar.xz (new: the hopper wheel with dropout, old: that before, small.so: its kernels with smaller tiles), check.py
# and times.py: at most 75 s on one H200 or H100. FLASH_DIST_SMEM_LIMIT leaves plain calls to the general kernels (64: 101376, 128: 166912).
cd "$(dirname "$0")"; export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONWARNINGS=ignore OMP_NUM_THREADS=2
T0=$SECONDS; el() { echo "-- $1 at $((SECONDS-T0)) s"; }
nvidia-smi --query-gpu=name,clocks.sm --format=csv,noheader
W=/tmp/drop2_trial; rm -rf $W; mkdir -p $W; python3 -c "import tarfile;tarfile.open('pkg.tar.xz').extractall('$W')"
cp -r $W/new $W/small; mv $W/small.so $W/small/flash_dist/libflash_dist_kernels.so; el unpacked
timeout -k 1 34 python3 check.py $W/new 26 > $W/c0.txt 2>&1 & p0=$!
timeout -k 1 34 python3 check.py $W/small 26 > $W/c1.txt 2>&1 & p1=$!
wait $p0; echo "check new rc $?"; wait $p1; echo "check small rc $?"; tail -25 $W/c0.txt | cut -c1-1500; tail -12 $W/c1.txt | cut -c1-700; el checks
t="timeout -k 1 14 python3 times.py"
$t $W/new new d64 d128 drop; el new
$t $W/small small d64 d128 drop; el small
FLASH_DIST_SMEM_LIMIT=166912 $t $W/new new,general d128 drop
for i in 1 2; do for v in old new; do FLASH_DIST_SMEM_LIMIT=101376 $t $W/$v $v,general d64 $([ $v$i = new1 ] && echo drop); done; done; el general
for v in old new; do $t $W/$v $v d64; done; el end
