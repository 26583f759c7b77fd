//! The products of a step: six for each pair of tiles, all added to the same sums.
//!
//! Tiles 0 to 3 are the sums (row-major in a 2 x 2 grid), 4 and 5 hold a term of the left operand, 6 and 7 one of the right.
//! From one product to the next only one operand's term changes, so that 24 products take 14 loads. A sum must get the six in
//! the same order whichever operand is left: there are kernels for `x` left and for the weights left, the one the other's
//! mirror image.

use super::terms::STEP_BYTES;
use crate::cpu::gemm::panel::PANEL;
use std::arch::asm;

/// Which tiles of the grid are used, and which operand is left.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub(super) struct Form {
    /// Whether both tiles of the left operand count, or only the first.
    pub tall: bool,
    /// Whether both tiles of the right operand count.
    pub wide: bool,
    /// Whether the weights are left.
    pub swapped: bool,
}

/// Products after another term of the left operand was loaded, `$at` bytes into the step.
#[rustfmt::skip]
macro_rules! left {
    (2 2 $at:literal) => { concat!(
        "tileloadd tmm4, [{l} + {row} + ", $at, "]\n",
        "tdpbf16ps tmm0, tmm4, tmm6\n", "tdpbf16ps tmm1, tmm4, tmm7\n",
        "tileloadd tmm5, [{l} + {row} + ", $at, " + 1024]\n",
        "tdpbf16ps tmm2, tmm5, tmm6\n", "tdpbf16ps tmm3, tmm5, tmm7\n") };
    (2 1 $at:literal) => { concat!(
        "tileloadd tmm4, [{l} + {row} + ", $at, "]\n", "tdpbf16ps tmm0, tmm4, tmm6\n",
        "tileloadd tmm5, [{l} + {row} + ", $at, " + 1024]\n", "tdpbf16ps tmm2, tmm5, tmm6\n") };
    (1 2 $at:literal) => { concat!(
        "tileloadd tmm4, [{l} + {row} + ", $at, "]\n",
        "tdpbf16ps tmm0, tmm4, tmm6\n", "tdpbf16ps tmm1, tmm4, tmm7\n") };
    (1 1 $at:literal) => { concat!(
        "tileloadd tmm4, [{l} + {row} + ", $at, "]\n", "tdpbf16ps tmm0, tmm4, tmm6\n") };
}

/// Products after another term of the right operand was loaded.
#[rustfmt::skip]
macro_rules! right {
    (2 2 $at:literal) => { concat!(
        "tileloadd tmm6, [{r} + {row} + ", $at, "]\n",
        "tdpbf16ps tmm0, tmm4, tmm6\n", "tdpbf16ps tmm2, tmm5, tmm6\n",
        "tileloadd tmm7, [{r} + {row} + ", $at, " + 1024]\n",
        "tdpbf16ps tmm1, tmm4, tmm7\n", "tdpbf16ps tmm3, tmm5, tmm7\n") };
    (2 1 $at:literal) => { concat!(
        "tileloadd tmm6, [{r} + {row} + ", $at, "]\n",
        "tdpbf16ps tmm0, tmm4, tmm6\n", "tdpbf16ps tmm2, tmm5, tmm6\n") };
    (1 2 $at:literal) => { concat!(
        "tileloadd tmm6, [{r} + {row} + ", $at, "]\n", "tdpbf16ps tmm0, tmm4, tmm6\n",
        "tileloadd tmm7, [{r} + {row} + ", $at, " + 1024]\n", "tdpbf16ps tmm1, tmm4, tmm7\n") };
    (1 1 $at:literal) => { concat!(
        "tileloadd tmm6, [{r} + {row} + ", $at, "]\n", "tdpbf16ps tmm0, tmm4, tmm6\n") };
}

/// Loads a term of the right operand, for the products that [`left`] makes; and the reverse.
#[rustfmt::skip]
macro_rules! load {
    (right 1 $at:literal) => { concat!("tileloadd tmm6, [{r} + {row} + ", $at, "]\n") };
    (right 2 $at:literal) => { concat!(
        "tileloadd tmm6, [{r} + {row} + ", $at, "]\n", "tileloadd tmm7, [{r} + {row} + ", $at, " + 1024]\n") };
    (left 1 $at:literal) => { concat!("tileloadd tmm4, [{l} + {row} + ", $at, "]\n") };
    (left 2 $at:literal) => { concat!(
        "tileloadd tmm4, [{l} + {row} + ", $at, "]\n", "tileloadd tmm5, [{l} + {row} + ", $at, " + 1024]\n") };
}

/// One step of `$down` x `$across` tiles. Of `x` and the weights: terms 2 and 0, 1 and 0, 1 and 1, 0 and 1, 0 and 2, 0 and 0.
/// After the products of each pair of terms it calls `between`.
macro_rules! step {
    ($name:ident, $mirrored:ident, $down:tt $across:tt) => {
        /// # Safety
        /// As for [`step`], with `x` left.
        #[inline(always)]
        unsafe fn $name(l: *const u8, r: *const u8, mut between: impl FnMut()) {
            // SAFETY: passed on.
            unsafe {
                asm!(
                    load!(right $across 0), left!($down $across 4096),
                    l = in(reg) l, r = in(reg) r, row = in(reg) 64usize, options(nostack, readonly)
                );
                between();
                asm!(left!($down $across 2048), l = in(reg) l, row = in(reg) 64usize, options(nostack, readonly));
                between();
                asm!(right!($down $across 2048), r = in(reg) r, row = in(reg) 64usize, options(nostack, readonly));
                between();
                asm!(left!($down $across 0), l = in(reg) l, row = in(reg) 64usize, options(nostack, readonly));
                between();
                asm!(right!($down $across 4096), r = in(reg) r, row = in(reg) 64usize, options(nostack, readonly));
                between();
                asm!(right!($down $across 0), r = in(reg) r, row = in(reg) 64usize, options(nostack, readonly));
                between();
            }
        }

        /// # Safety
        /// As for [`step`], with the weights left.
        #[inline(always)]
        unsafe fn $mirrored(l: *const u8, r: *const u8, mut between: impl FnMut()) {
            // SAFETY: passed on.
            unsafe {
                asm!(
                    load!(left $down 0), right!($down $across 4096),
                    l = in(reg) l, r = in(reg) r, row = in(reg) 64usize, options(nostack, readonly)
                );
                between();
                asm!(right!($down $across 2048), r = in(reg) r, row = in(reg) 64usize, options(nostack, readonly));
                between();
                asm!(left!($down $across 2048), l = in(reg) l, row = in(reg) 64usize, options(nostack, readonly));
                between();
                asm!(right!($down $across 0), r = in(reg) r, row = in(reg) 64usize, options(nostack, readonly));
                between();
                asm!(left!($down $across 4096), l = in(reg) l, row = in(reg) 64usize, options(nostack, readonly));
                between();
                asm!(left!($down $across 0), l = in(reg) l, row = in(reg) 64usize, options(nostack, readonly));
                between();
            }
        }
    };
}

step!(step_2x2, mirrored_2x2, 2 2);
step!(step_2x1, mirrored_2x1, 2 1);
step!(step_1x2, mirrored_1x2, 1 2);
step!(step_1x1, mirrored_1x1, 1 1);

/// How often [`step`] calls what is to be done between its products.
pub(super) const CALLS: usize = 6;

/// Adds the products of a step to the sums in the tiles, and calls `between` after each sixth of them: tiles multiply on while it
/// computes with vectors.
///
/// The compiler knows no tile registers, so they keep from one of these functions to the next what is not changed here.
///
/// # Safety
/// The tiles must be configured as 16 rows of 64 bytes each, and `left` and `right` hold a step. `between` must not use tiles.
#[inline(always)]
pub(super) unsafe fn step(form: Form, left: *const u8, right: *const u8, between: impl FnMut()) {
    // SAFETY: passed on.
    unsafe {
        match (form.swapped, form.tall, form.wide) {
            (false, true, true) => step_2x2(left, right, between),
            (false, true, false) => step_2x1(left, right, between),
            (false, false, true) => step_1x2(left, right, between),
            (false, false, false) => step_1x1(left, right, between),
            (true, true, true) => mirrored_2x2(left, right, between),
            (true, true, false) => mirrored_2x1(left, right, between),
            (true, false, true) => mirrored_1x2(left, right, between),
            (true, false, false) => mirrored_1x1(left, right, between),
        }
    }
}

/// One after the other, [`step`] of `steps` steps that follow each other in memory; after each it calls `between` with the number
/// that are under way: tiles multiply on while `between` computes with vectors.
///
/// # Safety
/// As for [`step`]; `out` must hold a tile of sums, to go on with if `resume`. `between` must not use tiles.
#[inline(always)]
pub(super) unsafe fn product(
    form: Form,
    left: *const u8,
    right: *const u8,
    steps: usize,
    (out, resume): (*mut f32, bool),
    mut between: impl FnMut(usize),
) {
    // SAFETY: passed on.
    unsafe {
        begin(form, resume.then_some(out));
        for index in 0..steps {
            step(form, left.wrapping_add(index * STEP_BYTES), right.wrapping_add(index * STEP_BYTES), || ());
            between(index + 1);
        }
        store(form, out);
    }
}

/// Zeros the sums, or loads those at `from`.
///
/// # Safety
/// The tiles of the form must be configured, and a tile of sums be readable.
#[inline(always)]
pub(super) unsafe fn begin(form: Form, from: Option<*const f32>) {
    macro_rules! begin {
        ($tile:literal, $at:literal) => {
            match from {
                None => asm!(concat!("tilezero ", $tile), options(nomem, nostack)),
                Some(from) => asm!(
                    concat!("tileloadd ", $tile, ", [{from} + {width} + ", $at, "]"),
                    from = in(reg) from, width = in(reg) PANEL * size_of::<f32>(), options(nostack, readonly),
                ),
            }
        };
    }
    // SAFETY: tile registers, and what the caller promised.
    unsafe {
        begin!("tmm0", 0);
        if form.wide {
            begin!("tmm1", 64);
        }
        if form.tall {
            begin!("tmm2", 2048);
        }
        if form.tall && form.wide {
            begin!("tmm3", 2112);
        }
    }
}

/// Stores the sums.
///
/// # Safety
/// The tiles of the form must be configured, and `out` hold a tile of sums.
#[inline(always)]
pub(super) unsafe fn store(form: Form, out: *mut f32) {
    macro_rules! store {
        ($tile:literal, $at:literal) => {
            asm!(
                concat!("tilestored [{out} + {width} + ", $at, "], ", $tile),
                out = in(reg) out, width = in(reg) PANEL * size_of::<f32>(), options(nostack),
            )
        };
    }
    // SAFETY: what the caller promised.
    unsafe {
        store!("tmm0", 0);
        if form.wide {
            store!("tmm1", 64);
        }
        if form.tall {
            store!("tmm2", 2048);
        }
        if form.tall && form.wide {
            store!("tmm3", 2112);
        }
    }
}

/// A step of one tile of `x`, which may be smaller than 16 x 64 bytes, with one tile of the weights where they are left, or two
/// where they are right.
#[derive(Copy, Clone)]
pub(super) struct Narrow {
    /// The terms of `x`.
    pub x: [*const u8; 3],
    /// Bytes from one row of their tiles to the next.
    pub x_stride: usize,
    /// The step of the weights.
    pub w: *const u8,
    /// Whether the weights are left.
    pub swapped: bool,
}

/// [`step`] for few rows. [`begin`] and [`store`] are those of one tile of sums where the weights are left, of two side by side
/// where they are right.
///
/// # Safety
/// As for [`step`], but for the shape of the tiles of `x` and the sums.
#[inline(always)]
pub(super) unsafe fn narrow_step(p: Narrow) {
    // SAFETY: passed on.
    unsafe {
        if p.swapped {
            asm!(
                "tileloadd tmm4, [{w} + {row}]", "tileloadd tmm6, [{x2} + {xs}]", "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm6, [{x1} + {xs}]", "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm4, [{w} + {row} + 2048]", "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm6, [{x0} + {xs}]", "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm4, [{w} + {row} + 4096]", "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm4, [{w} + {row}]", "tdpbf16ps tmm0, tmm4, tmm6",
                x0 = in(reg) p.x[0], x1 = in(reg) p.x[1], x2 = in(reg) p.x[2], xs = in(reg) p.x_stride,
                w = in(reg) p.w, row = in(reg) 64usize, options(nostack, readonly),
            );
        } else {
            asm!(
                "tileloadd tmm6, [{w} + {row}]", "tileloadd tmm4, [{x2} + {xs}]", "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{w} + {row} + 1024]", "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm4, [{x1} + {xs}]", "tdpbf16ps tmm0, tmm4, tmm6", "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm6, [{w} + {row} + 2048]", "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{w} + {row} + 3072]", "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm4, [{x0} + {xs}]", "tdpbf16ps tmm0, tmm4, tmm6", "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm6, [{w} + {row} + 4096]", "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{w} + {row} + 5120]", "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm6, [{w} + {row}]", "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{w} + {row} + 1024]", "tdpbf16ps tmm1, tmm4, tmm7",
                x0 = in(reg) p.x[0], x1 = in(reg) p.x[1], x2 = in(reg) p.x[2], xs = in(reg) p.x_stride,
                w = in(reg) p.w, row = in(reg) 64usize, options(nostack, readonly),
            );
        }
    }
}
