//! Products with AMX: 16 rows of `x` times 16 rows of the weight. Tiles make the integers; vectors scale and add them, in
//! the order of all tiers.
//!
//! While tiles are in use, only one of the two vector multipliers is. Conversions use the multiplier too, but additions
//! do not: so sums of integers start from the bits of a float whose last place is one, which a subtraction removes.

use super::wide::{Steps, WIDE, WideProduct, WideRecord};
use super::{AHEAD, ROWS, Shape};
use crate::cpu::prefetch;
use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

/// 1.5 times 2^23: a sum of it and an integer of up to 22 bits has the integer in its last bits.
const LARGE: f32 = 12_582_912.0;

/// What the sums of integers begin with: as many lines as a tile has rows.
#[repr(C, align(64))]
struct Begin([[u32; ROWS]; WIDE]);

static BEGIN: Begin = Begin([[LARGE.to_bits(); ROWS]; WIDE]);

/// Sums of integers on their way from tiles to vectors.
#[repr(C, align(64))]
struct Dots([[[f32; ROWS]; WIDE]; SLOTS]);

const SLOTS: usize = 4;

/// Steps from the product on tiles to its use: one until it is stored, and one until it is read.
const DELAY: usize = 2;

/// The sums of a product.
///
/// # Safety
/// As [`super::wide::Multiplier::run`]; the machine must have the features, and the tiles be configured for the shape.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn sums<S: Shape>(p: &WideProduct) {
    let steps = p.num_tiles * S::IN_TILE;
    let mut dots = MaybeUninit::<Dots>::uninit();
    let dots = dots.as_mut_ptr().cast::<f32>();
    let mut sums = [_mm512_setzero_ps(); WIDE];
    /// The products of one step, what the step before has stored, and the sums of the one before that. Tiles take turns.
    macro_rules! step {
        ($step:expr, $dots:literal, $x:literal, $w:literal, $before:literal) => {
            let step: usize = $step;
            // SAFETY: the panel has the steps and `x` the tiles that they belong to; slots are used in turn, and read after
            // they were written.
            unsafe {
                if step < steps {
                    let x = p.x.add(step / S::IN_TILE).cast::<u8>().add(step % S::IN_TILE * 16);
                    asm!(
                        concat!("tileloadd ", $dots, ", [{begin} + {line}]"),
                        concat!("tileloadd ", $x, ", [{x} + {x_row}]"),
                        concat!("tileloadd ", $w, ", [{w} + {line}]"),
                        concat!("tdpbssd ", $dots, ", ", $x, ", ", $w),
                        begin = in(reg) &raw const BEGIN,
                        x = in(reg) x,
                        x_row = in(reg) 32usize,
                        w = in(reg) p.panel.add(step * S::STEP_BYTES),
                        line = in(reg) 64usize,
                        options(nostack, readonly),
                    );
                }
                if (1..=steps).contains(&step) {
                    asm!(
                        concat!("tilestored [{slot} + {line}], ", $before),
                        slot = in(reg) slot(dots, step - 1),
                        line = in(reg) 64usize,
                        options(nostack),
                    );
                }
                if (DELAY..steps + DELAY).contains(&step) {
                    let step = step - DELAY;
                    let scales = p.panel.add(step * S::STEP_BYTES + S::STEP_QUANTS);
                    let (x, half) = (&*p.x.add(step / S::IN_TILE), step % S::IN_TILE);
                    add::<S>(&mut sums, slot(dots, step), scales.cast(), x, half);
                }
            }
        };
    }
    let mut first = 0;
    while first < steps + DELAY {
        step!(first, "tmm0", "tmm4", "tmm6", "tmm1");
        step!(first + 1, "tmm1", "tmm5", "tmm7", "tmm0");
        first += 2;
    }
    for (r, sum) in sums.into_iter().enumerate() {
        // SAFETY: there is room for the sums of each row.
        unsafe { _mm512_storeu_ps(p.sums.add(r * p.pitch), sum) };
    }
}

/// Where the integers of a step are.
#[inline(always)]
fn slot(dots: *mut f32, step: usize) -> *mut f32 {
    dots.wrapping_add(step % SLOTS * (WIDE * ROWS))
}

/// Adds a step, scaled.
///
/// # Safety
/// There must be integers, scales and minima.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn add<S: Shape>(
    sums: &mut [__m512; WIDE],
    dots: *const f32,
    scales: *const f32,
    x: &WideRecord,
    half: usize,
) {
    let large = _mm512_set1_ps(LARGE);
    // SAFETY: passed on.
    unsafe {
        let scale = _mm512_load_ps(scales);
        let min = if S::MIN { _mm512_load_ps(scales.add(ROWS)) } else { _mm512_setzero_ps() };
        for (r, sum) in sums.iter_mut().enumerate() {
            let dot = _mm512_sub_ps(_mm512_load_ps(dots.add(r * ROWS)), large);
            let factor = _mm512_mul_ps(_mm512_set1_ps(x.scales[r]), scale);
            *sum = _mm512_fmadd_ps(dot, factor, *sum);
            if S::MIN {
                *sum = _mm512_fmadd_ps(_mm512_set1_ps(x.totals[half][r]), min, *sum);
            }
        }
    }
}

/// Makes a wide panel.
///
/// # Safety
/// As [`super::wide::widen`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn widen<S: Shape>(zero_point: i32, panel: *const u8, num_tiles: usize, to: *mut u8) {
    let (low, zero) = (_mm512_set1_epi8(15), _mm512_set1_epi8(zero_point as i8));
    for tile in 0..num_tiles {
        // SAFETY: the panel has the tile, and there is room for its steps; what is asked for need not exist.
        unsafe {
            let (from, to) = (panel.add(tile * S::BYTES), to.add(tile * S::IN_TILE * S::STEP_BYTES));
            for line in 0..S::BYTES.div_ceil(64) {
                prefetch::fetch_line(from.wrapping_add(AHEAD + line * 64));
            }
            // Lines of quants, four k each.
            let place = |line: usize| {
                let (step, line) = (line * 64 / S::STEP_QUANTS, line % (S::STEP_QUANTS / 64));
                to.add(step * S::STEP_BYTES + line * 64).cast::<__m512i>()
            };
            for line in 0..S::QUANTS / 64 {
                let bytes = _mm512_loadu_si512(from.add(line * 64).cast());
                if S::NIBBLES {
                    let (first, second) =
                        (_mm512_and_si512(bytes, low), _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), low));
                    _mm512_store_si512(place(line), _mm512_sub_epi8(first, zero));
                    _mm512_store_si512(place(line + 4), _mm512_sub_epi8(second, zero));
                } else {
                    _mm512_store_si512(place(line), _mm512_sub_epi8(bytes, zero));
                }
            }
            for i in 0..S::NUMBERS {
                let at = from.add(S::QUANTS + i * S::SCALES);
                let numbers = match S::F16 {
                    true => _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())),
                    false => _mm512_loadu_ps(at.cast()),
                };
                let offset = i % S::PARTS * S::STEP_BYTES + i / S::PARTS * 64;
                _mm512_store_ps(to.add(S::STEP_QUANTS + offset).cast(), numbers);
            }
        }
    }
}
