//! bf16 to e4m3 by tables, 64 elements at a time.
//!
//! With one scale for all of them the code of an element is a function of its bits. An element of the next binade has a code
//! larger by 8: so the bits of exponent and upper mantissa, less a constant, are the code but for a small number that
//! the mantissa alone decides, and 128 of those can be looked up in two registers. Subnormal results are few: their
//! codes go up by one at eight elements, and of the cells between an eighth of a binade and the next none has two of these.

use super::scaled::Scaled;
use crate::cpu::prefetch::{LINE, SIDE_BY_SIDE, claim_ahead, fetch_line};
use crate::cpu::runs::Runs;
use crate::cpu::simd::Avx512;
use std::arch::x86_64::*;

/// Fewer elements are not worth their tables.
const FEWEST: usize = 1024;
/// Elements at a time.
const BLOCK: usize = 64;
/// The lowest cell: everything below becomes zero, as it does.
const LOWEST: i8 = -48;
/// Magnitude of infinity in bf16; what is above it is NaN.
const INFINITY: i16 = 0x7f80;

/// [`super::bf16_to_e4m3`].
///
/// # Safety
/// As there.
pub(super) unsafe fn convert(runs: &Runs<'_, u16, u8>, scaled: &[Scaled], stream: bool) -> usize {
    if runs.n < FEWEST
        || runs.at.len() > SIDE_BY_SIDE
        || !std::arch::is_x86_feature_detected!("avx512vbmi")
        || !scaled.iter().all(|scaled| scaled.is_moderate())
    {
        return 0;
    }
    let whole = runs.n - runs.n % BLOCK;
    let stream = stream && runs.at.iter().all(|&(_, out)| (out as usize).is_multiple_of(LINE));
    // SAFETY: the processor has VBMI, which there is not without the rest; the caller promised the memory.
    unsafe {
        let mut tables = [Tables::new(scaled[0]); SIDE_BY_SIDE];
        for k in 1..runs.at.len() {
            tables[k] = if scaled[k] == scaled[k - 1] { tables[k - 1] } else { Tables::new(scaled[k]) };
        }
        convert_runs(&tables, runs, whole, stream);
    }
    whole
}

/// Converts the first `whole` elements of all runs, blocks of them.
///
/// # Safety
/// As [`super::bf16_to_e4m3`].
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
unsafe fn convert_runs(
    tables: &[Tables; SIDE_BY_SIDE],
    runs: &Runs<'_, u16, u8>,
    whole: usize,
    stream: bool,
) {
    let mut i = 0;
    while i < whole {
        let reach = i.wrapping_add(runs.ahead / size_of::<u16>());
        for ((k, &(x, out)), tables) in runs.at.iter().enumerate().zip(tables) {
            let ahead = match runs.next.get(k) {
                Some(next) if reach >= whole => next.wrapping_add(reach - whole).cast::<u8>(),
                _ => x.wrapping_add(reach).cast::<u8>(),
            };
            fetch_line(ahead);
            fetch_line(ahead.wrapping_add(LINE));
            // SAFETY: passed on.
            unsafe {
                let (x, out) = (x.add(i), out.add(i));
                let codes = tables.codes(_mm512_loadu_si512(x.cast()), _mm512_loadu_si512(x.add(32).cast()));
                if stream {
                    _mm512_stream_si512(out.cast(), codes);
                } else {
                    claim_ahead::<Avx512, f32>(out.cast());
                    _mm512_storeu_si512(out.cast(), codes);
                }
            }
        }
        i = i.wrapping_add(BLOCK);
    }
}

impl Scaled {
    /// Whether results that are not zero and not saturated are far from the ends of f32, and so are what they are made of.
    fn is_moderate(self) -> bool {
        let (Scaled::Times(scale) | Scaled::Over(scale)) = self;
        (1e-18..1e18).contains(&scale)
    }

    /// The values of elements.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn of(self, x: __m512) -> __m512 {
        match self {
            Scaled::Times(scale) => _mm512_mul_ps(x, _mm512_set1_ps(scale)),
            Scaled::Over(scale) => _mm512_div_ps(x, _mm512_set1_ps(scale)),
        }
    }

    /// The elements near these values.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn undone(self, y: __m512) -> __m512 {
        match self {
            Scaled::Times(scale) => Scaled::Over(scale).of(y),
            Scaled::Over(scale) => Scaled::Times(scale).of(y),
        }
    }
}

/// What the codes for one scale are made of.
#[derive(Clone, Copy)]
struct Tables {
    /// Subtracted from magnitudes, whose upper bits then are codes but for what is `added`; those of the least normal
    /// result are 8.
    bias: i16,
    /// By mantissa.
    added: [__m512i; 2],
    /// Of cells, by the lowest bits of their numbers: the code of what they begin with if that is subnormal, ...
    first: __m512i,
    /// ... and the mantissa from which on it is one more.
    step: __m512i,
}

impl Tables {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn new(scaled: Scaled) -> Tables {
        // One in the binade in which its value is from 1 to below 2, and all values of the binade from 1 to below 4.
        let exponent = |scale: f32| (scale.to_bits() >> 23) as i32 - 127;
        let up = match scaled {
            Scaled::Times(scale) => exponent(scale),
            Scaled::Over(scale) => -exponent(scale) - 1,
        };
        let bias = ((127 - 7 - up) << 7) as i16;
        let (first, step) = Self::subnormal(scaled, bias);
        Tables { bias, added: Self::normal(scaled, 127 - up), first, step }
    }

    /// For each mantissa how much larger than its upper three bits the code is, in the binade with the `exponent` whose
    /// values are from 1 on.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn normal(scaled: Scaled, exponent: i32) -> [__m512i; 2] {
        const ONE: i32 = 0x3f80_0000;
        let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        let mut added = [0i8; 128];
        for (upper, added) in added.chunks_exact_mut(16).enumerate() {
            let upper = upper as i32;
            let elements = _mm512_or_si512(_mm512_set1_epi32(exponent << 7 | upper << 4), lanes);
            let values = scaled.of(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(elements)));
            let bits = _mm512_sub_epi32(_mm512_castps_si512(values), _mm512_set1_epi32(ONE));
            // To three bits, ties to even.
            let odd = _mm512_and_si512(_mm512_srli_epi32::<20>(bits), _mm512_set1_epi32(1));
            let half = _mm512_add_epi32(odd, _mm512_set1_epi32((1 << 19) - 1));
            let code = _mm512_srai_epi32::<20>(_mm512_add_epi32(bits, half));
            let code = _mm512_cvtepi32_epi8(_mm512_sub_epi32(code, _mm512_set1_epi32(upper)));
            // SAFETY: the part of the array is 16 bytes long.
            unsafe { _mm_storeu_si128(added.as_mut_ptr().cast(), code) };
        }
        // SAFETY: two vectors of 64 bytes.
        unsafe {
            [_mm512_loadu_si512(added.as_ptr().cast()), _mm512_loadu_si512(added.as_ptr().add(64).cast())]
        }
    }

    /// `first` and `step`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn subnormal(scaled: Scaled, bias: i16) -> (__m512i, __m512i) {
        /// What codes become 1, 2, ... from: past the middle between two values, or at it if that goes to the upper.
        const FROM: [f32; 16] = {
            let mut from = [f32::INFINITY; 16];
            let mut k = 0;
            while k < 8 {
                let middle = (2 * k + 1) as f32 / 1024.0;
                from[k] = if k % 2 == 0 { middle.next_up() } else { middle };
                k += 1;
            }
            from
        };
        /// The numbers of the cells.
        const CELLS: [i8; 64] = {
            let mut cells = [0; 64];
            let mut cell = LOWEST;
            while cell < LOWEST + 64 {
                cells[cell as usize % 64] = cell;
                cell += 1;
            }
            cells
        };
        let mut magnitudes = [0i32; 16];
        // SAFETY: the arrays hold a vector each.
        let cells = unsafe {
            let from = _mm512_loadu_ps(FROM.as_ptr());
            // At most one too low, by rounding, and cut off besides.
            let mut element = _mm512_srli_epi32::<16>(_mm512_castps_si512(scaled.undone(from)));
            for _ in 0..3 {
                let value = scaled.of(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(element)));
                let low = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(value, from);
                element = _mm512_mask_add_epi32(element, low, element, _mm512_set1_epi32(1));
            }
            _mm512_storeu_si512(magnitudes.as_mut_ptr().cast(), element);
            _mm512_loadu_si512(CELLS.as_ptr().cast())
        };
        // From the end of every mantissa on: never.
        let (mut first, mut step) = (_mm512_setzero_si512(), _mm512_set1_epi8(i8::MIN));
        for magnitude in &magnitudes[..8] {
            let cell = _mm512_set1_epi8(((magnitude - bias as i32) >> 4) as i8);
            let above = _mm512_cmpgt_epi8_mask(cells, cell);
            first = _mm512_mask_add_epi8(first, above, first, _mm512_set1_epi8(1));
            step = _mm512_mask_set1_epi8(step, _mm512_cmpeq_epi8_mask(cells, cell), (magnitude & 0x7f) as i8);
        }
        (first, step)
    }

    /// The codes of `a`, then of `b`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn codes(&self, a: __m512i, b: __m512i) -> __m512i {
        const LARGEST: i8 = 0x7e;
        const NAN: i8 = 0x7f;
        const LEAST_NORMAL: i8 = 8;
        // No closures over vectors: passed to functions that are compiled for less, they would stay calls.
        let (sign_off, bias) = (_mm512_set1_epi16(i16::MAX), _mm512_set1_epi16(self.bias));
        let (magnitude_a, magnitude_b) = (_mm512_and_si512(a, sign_off), _mm512_and_si512(b, sign_off));
        // Numbers of cells, and but for what is added codes. Those out of range stay so.
        let cells = _mm512_packs_epi16(
            _mm512_srai_epi16::<4>(_mm512_sub_epi16(magnitude_a, bias)),
            _mm512_srai_epi16::<4>(_mm512_sub_epi16(magnitude_b, bias)),
        );
        let mantissa = _mm512_set1_epi16(0x7f);
        let mantissas = _mm512_packus_epi16(_mm512_and_si512(a, mantissa), _mm512_and_si512(b, mantissa));
        let signs = _mm512_packs_epi16(a, b);

        let added = _mm512_permutex2var_epi8(self.added[0], mantissas, self.added[1]);
        let normal = _mm512_adds_epi8(cells, added);
        let small = _mm512_cmplt_epi8_mask(normal, _mm512_set1_epi8(LEAST_NORMAL));
        let codes = _mm512_min_epi8(normal, _mm512_set1_epi8(LARGEST));

        let cells = _mm512_max_epi8(cells, _mm512_set1_epi8(LOWEST));
        let step = _mm512_permutexvar_epi8(cells, self.step);
        let stepped = _mm512_mask_cmpge_epu8_mask(small, mantissas, step);
        let codes = _mm512_mask_permutexvar_epi8(codes, small, cells, self.first);
        let codes = _mm512_mask_add_epi8(codes, stepped, codes, _mm512_set1_epi8(1));

        // The code, or the sign where that is: a | (b & c).
        let codes = _mm512_ternarylogic_epi32::<0xf8>(codes, signs, _mm512_set1_epi8(i8::MIN));
        // Packing took turns by eights.
        let codes = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), codes);
        let infinity = _mm512_set1_epi16(INFINITY);
        let nan_a = _mm512_cmpgt_epi16_mask(magnitude_a, infinity);
        let nan_b = _mm512_cmpgt_epi16_mask(magnitude_b, infinity);
        if nan_a | nan_b == 0 {
            return codes;
        }
        _mm512_mask_set1_epi8(codes, (nan_b as u64) << 32 | nan_a as u64, NAN)
    }
}
