#!/bin/sh
# Page-locking measured on a machine with a GPU, in less than four minutes: sh ffi-tests/device/pin.sh [OUT]
#
# Builds without a GPU. Where there is no compiler: build `cargo build --release --benches` elsewhere, and name the program in PIN_BENCH.
#   PIN_GIB=1,8,64          sizes
#   PIN_LLAMA=/dir          a stock llama.cpp with its CUDA backend (llama-bench), to be run beside Berth in one process
#   PIN_MODEL=/m.gguf       a model with experts, for that
set -eu
cd "$(dirname "$0")/../.."
out=${1:-${TMPDIR:-/tmp}/berth-pin}
mkdir -p "$out"
target=${CARGO_TARGET_DIR:-target}

bench=${PIN_BENCH:-}
if [ -z "$bench" ]; then
    cargo build --release -p ggml-berth --lib --bench pin
    bench=$(ls -t "$target"/release/deps/pin-* | grep -v '\.d$' | head -n 1)
fi

{ nvidia-smi -L 2>/dev/null || echo "no nvidia-smi"; nproc; head -n 3 /proc/meminfo; uname -r; } > "$out/machine.txt"
timeout 150 "$bench" > "$out/pin.md" 2> "$out/pin.log" || { cat "$out/pin.md" "$out/pin.log"; exit 1; }
cat "$out/pin.md"

if [ -n "${PIN_LLAMA:-}" ] && [ -n "${PIN_MODEL:-}" ]; then
    # The same prompts with the experts mapped and with the experts page-locked.
    for place in CPU CUDA_Host; do
        echo "stock CUDA backend, experts in $place:"
        GGML_BACKEND_PATH=$(cd "$target/release" && pwd)/libberth.so BERTH_FUSE=0 BERTH_REPORT="$out/report-$place.json" timeout 40 \
            "$PIN_LLAMA/llama-bench" -m "$PIN_MODEL" -ngl 99 -p 2048 -n 0 -r 1 -ot "exps=$place" -o md 2> "$out/llama-$place.log" || tail -n 5 "$out/llama-$place.log"
    done | tee "$out/llama.md"
fi
