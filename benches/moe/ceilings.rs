//! What this machine can do, measured with the same threads as the operation: reading memory, and `vpdpbusd`.
//!
//! Owns: the two ceilings that every figure is a share of. Must not know: the operation.

use std::hint::black_box;
use std::time::Instant;

use berth::moe::ParallelFor;

/// Best of several runs of `body` on all threads, in seconds.
pub(crate) fn best(runs: usize, mut body: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..runs {
        let start = Instant::now();
        body();
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}

/// Bytes per second of reading `memory` once, front to back, a part per thread.
pub(crate) fn read_bytes_per_second(memory: &[u8], threads: &dyn ParallelFor) -> f64 {
    let count = threads.threads();
    let part = memory.len() / count / 4096 * 4096;
    let seconds = best(5, || {
        threads.run(&|i| {
            black_box(sum(&memory[i * part..][..part]));
        });
    });
    (part * count) as f64 / seconds
}

#[cfg(target_arch = "x86_64")]
fn sum(bytes: &[u8]) -> u64 {
    use std::arch::x86_64::*;
    #[target_feature(enable = "avx512f")]
    fn wide(bytes: &[u8]) -> u64 {
        let mut sums = [_mm512_setzero_si512(); 8];
        for chunk in bytes.as_chunks::<512>().0 {
            for (sum, line) in sums.iter_mut().zip(chunk.as_chunks::<64>().0) {
                // SAFETY: an array of 64 bytes; the load has no alignment. A prefetch does not fault.
                unsafe {
                    _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().wrapping_add(4096).cast());
                    *sum = _mm512_xor_si512(*sum, _mm512_loadu_si512(line.as_ptr().cast()));
                }
            }
        }
        let mut all = _mm512_setzero_si512();
        for sum in sums {
            all = _mm512_xor_si512(all, sum);
        }
        _mm512_reduce_or_epi64(all) as u64
    }
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: just asked.
        return unsafe { wide(bytes) };
    }
    plain(bytes)
}

#[cfg(not(target_arch = "x86_64"))]
fn sum(bytes: &[u8]) -> u64 {
    plain(bytes)
}

fn plain(bytes: &[u8]) -> u64 {
    bytes.as_chunks::<8>().0.iter().fold(0, |sum, b| sum ^ u64::from_le_bytes(*b))
}

/// Multiply-adds per second of `vpdpbusd` on 512-bit registers, all threads together. 0 where there is none.
pub(crate) fn vnni_macs_per_second(threads: &dyn ParallelFor) -> f64 {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::*;
        const ROUNDS: usize = 2_000_000;
        const CHAINS: usize = 12;
        #[target_feature(enable = "avx512f,avx512vnni")]
        fn rounds() -> i32 {
            let mut sums = [_mm512_setzero_si512(); CHAINS];
            let (a, b) = (black_box(_mm512_set1_epi8(3)), black_box(_mm512_set1_epi8(1)));
            for _ in 0..ROUNDS {
                for sum in &mut sums {
                    *sum = _mm512_dpbusd_epi32(*sum, a, b);
                }
            }
            sums.iter().map(|s| _mm512_reduce_add_epi32(*s)).fold(0, i32::wrapping_add)
        }
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni") {
            let seconds = best(5, || {
                threads.run(&|_| {
                    // SAFETY: just asked.
                    black_box(unsafe { rounds() });
                });
            });
            return (threads.threads() * ROUNDS * CHAINS * 64) as f64 / seconds;
        }
    }
    let _ = threads;
    0.0
}
