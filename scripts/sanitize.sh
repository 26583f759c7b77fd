#!/usr/bin/env bash
# AddressSanitizer and ThreadSanitizer over the CPU tests of tensors, plans, threads, the radix tree, matrix products and ops, and
# over random calls.
# The sanitizers' run-time libraries come with the stable toolchain; only the flag is behind a gate.
# usage: scripts/sanitize.sh [address|thread ...]
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(rustc -vV | sed -n 's/^host: //p')
export RUSTC_BOOTSTRAP=1
flags=${RUSTFLAGS:-}
# The library that distributes the lab's own work orders by fences, which the thread sanitizer does not know. One thread of it
# leaves those of the kernels.
export RAYON_NUM_THREADS=1
# As optimised as what is shipped: built without, the kernels would take hours, and the library longer to compile.
export CARGO_PROFILE_RELEASE_LTO=off
for kind in "${@:-address thread}"; do
    for sanitizer in $kind; do
        echo "sanitize: $sanitizer"
        # The standard library is not built with the sanitizer: what it orders with atomics of its own is not seen. The
        # compiler wants to be told that this is known. One test at a time: tests that wait for each other at a lock of the
        # standard library would be reported. Threads that a test starts are seen. Tests ask for memory that nobody has.
        export RUSTFLAGS="-Zsanitizer=$sanitizer -Cunsafe-allow-abi-mismatch=sanitizer $flags"
        export ASAN_OPTIONS="allocator_may_return_null=1"
        export TSAN_OPTIONS="allocator_may_return_null=1 suppressions=$PWD/scripts/tsan.txt"
        # The harness takes one part of a name.
        for part in tensor:: op::plan op::args cpu::threads cpu::scratch cpu::gemm ops:: radix; do
            cargo test --release --target "$target" --target-dir "target/$sanitizer" -p warpsmith --test units -- \
                --test-threads=1 "$part"
        done
        cargo test --release --target "$target" --target-dir "target/$sanitizer" -p warpsmith --test units -- \
            --ignored --nocapture a_minute_of_random_calls
    done
done
