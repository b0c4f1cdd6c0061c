#!/usr/bin/env bash
# Installs what the operators of this folder need, those that must be built from source aside: packages by pip, checkouts
# into FOLDER. Prints what PYTHONPATH must have.
#
#   export PYTHONPATH=$(suites/operators/install.sh FOLDER)
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)

python -m pip install --quiet --disable-pip-version-check fla-core==0.6.0 nvidia-cudnn-frontend==1.32.0 \
  nvidia-cutlass-dsl==4.8.1 native-sparse-attention-pytorch==0.2.3 einops 'setuptools<81' pandas >&2

checkout() {
  git clone --quiet "https://github.com/$1" "$folder/${1#*/}"
  git -C "$folder/${1#*/}" checkout --quiet "$2"
}
checkout XunhaoLai/native-sparse-attention-triton 9bea856c
checkout mdy666/Scalable-Flash-Native-Sparse-Attention fcf117c3
checkout Relaxed-System-Lab/Flash-Sparse-Attention 1da34f35
find "$folder" -mindepth 1 -maxdepth 1 -type d | sort | paste -sd :
