#!/bin/sh
# NCCL's plugin for libfabric and NCCL's own tests, into /opt/network: run while the trainer's image for GPUs is built.
# Versions come from the environment; `none` leaves a part out.
set -eu
mkdir -p /opt/network/bin /opt/network/lib
[ "$EFA" = none ] && AWS_OFI_NCCL=none
[ "$AWS_OFI_NCCL" = none ] && [ "$NCCL_TESTS" = none ] && exit

apt-get update
apt-get install -y --no-install-recommends ca-certificates curl libhwloc-dev make
wheels=/opt/wheels
/opt/tools/bin/uv pip install --no-cache --quiet --target "$wheels" \
  "cuda-toolkit[cccl,crt,cudart,nvcc,nvvm]==$CUDA" "nvidia-nccl-cu13==$NCCL"
CUDA_HOME=$wheels/nvidia/cu13 NCCL_HOME=$wheels/nvidia/nccl
# Wheels have libraries by their full names alone, and no lib64.
ln -sf libcudart.so.13 "$CUDA_HOME/lib/libcudart.so"
ln -sf libnccl.so.2 "$NCCL_HOME/lib/libnccl.so"
ln -sfn lib "$CUDA_HOME/lib64"

if [ "$AWS_OFI_NCCL" != none ]; then
  name=aws-ofi-nccl-$AWS_OFI_NCCL
  curl -fsSL --retry 3 -o "/tmp/$name.tar.gz" \
    "https://github.com/aws/aws-ofi-nccl/releases/download/v$AWS_OFI_NCCL/$name.tar.gz"
  echo "$AWS_OFI_NCCL_SHA512  /tmp/$name.tar.gz" | sha512sum -c -
  tar xzf "/tmp/$name.tar.gz" -C /tmp
  (cd "/tmp/$name" && ./configure --prefix=/opt/network --with-libfabric=/opt/amazon/efa --with-cuda="$CUDA_HOME" \
    --enable-platform-aws --disable-tests && make -j"$(nproc)" install)
  cp -a /usr/lib/*/libhwloc.so.15* /opt/network/lib/
fi

if [ "$NCCL_TESTS" != none ]; then
  curl -fsSL --retry 3 -o /tmp/nccl-tests.tar.gz \
    "https://github.com/NVIDIA/nccl-tests/archive/refs/tags/v$NCCL_TESTS.tar.gz"
  [ -z "$NCCL_TESTS_SHA512" ] || echo "$NCCL_TESTS_SHA512  /tmp/nccl-tests.tar.gz" | sha512sum -c -
  tar xzf /tmp/nccl-tests.tar.gz -C /tmp
  # At run time the libraries are those of the wheels that torch loads.
  packages=$VIRTUAL_ENV/lib/python$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')/site-packages
  NVCC_APPEND_FLAGS="-Xlinker -rpath=$packages/nvidia/cu13/lib -Xlinker -rpath=$packages/nvidia/nccl/lib" \
    make -C "/tmp/nccl-tests-$NCCL_TESTS" -j"$(nproc)" MPI=0 CUDA_HOME="$CUDA_HOME" NCCL_HOME="$NCCL_HOME"
  cp "/tmp/nccl-tests-$NCCL_TESTS"/build/*_perf /opt/network/bin/
fi
