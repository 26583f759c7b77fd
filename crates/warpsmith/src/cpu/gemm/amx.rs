//! AMX: products of tiles, 16 rows of 64 bytes each.
//!
//! A tile of the left operand holds 16 of its rows, 16 units of each, as they lie in a row-major matrix. One of the
//! right operand holds 16 units of half a panel. Each instruction adds 16 units of k to 16 x 16 sums; even and odd
//! elements of 16 bits are summed apart and meet at the end of the instruction. Multiplication commutes, so a sum has the
//! same bits whichever operand is left and whatever the size of the tile.

use super::matrix::Unit;
use super::panel::{HALF, PANEL};
#[cfg(target_arch = "x86_64")]
use std::arch::asm;

/// Units of k that one instruction consumes.
pub(super) const STEP: usize = 16;

/// Rows in the two left tiles and columns in the two right tiles. The second of each may be empty.
#[derive(Copy, Clone, Eq, PartialEq, Default, Debug)]
pub(super) struct Shape {
    pub rows: [usize; 2],
    pub cols: [usize; 2],
}

/// One product: up to 32 rows times up to 32 columns over `steps` steps, into rows of [`PANEL`] at `out`.
#[derive(Copy, Clone)]
pub(super) struct Product {
    pub shape: Shape,
    pub steps: usize,
    /// First rows of the two left tiles; rows are `left_stride` bytes apart.
    pub left: [*const u8; 2],
    pub left_stride: isize,
    /// Units of a panel, rows of `right_width` units.
    pub right: *const u32,
    pub right_width: usize,
    pub out: *mut f32,
    /// Whether `out` holds the sum over the steps before.
    pub resume: bool,
}

/// Rows of the left operand that a product may prefetch while it runs.
pub(super) const AHEAD: usize = 4;

/// [`AHEAD`] rows that are needed next, `stride` bytes apart; of each, 64 bytes per step of the product.
#[derive(Copy, Clone, Debug)]
pub(super) struct Ahead {
    pub start: *const u8,
    pub stride: isize,
}

/// The tile registers of this thread, configured for one shape at a time; released when dropped.
pub(crate) struct Tiles {
    shape: Shape,
    /// Units of k that one instruction consumes.
    step: usize,
}

impl Tiles {
    /// # Safety
    /// AMX must be supported ([`super::Isa::Amx`]).
    pub unsafe fn new() -> Tiles {
        Tiles { shape: Shape::default(), step: 0 }
    }

    /// Configures tiles: 0 to 3 for sums, 4 and 5 for the left operand, 6 and 7 for the right.
    #[inline]
    pub(super) fn configure(&mut self, shape: Shape) {
        if self.shape != shape || self.step != STEP {
            self.load(shape, STEP);
        }
    }

    /// Configures tiles as [`Tiles::configure`], all with 16 rows and columns, for `bytes` bytes of k at a time.
    pub fn configure_bytes(&mut self, bytes: usize) {
        assert!(bytes.is_multiple_of(4) && (4..=4 * STEP).contains(&bytes), "{bytes}");
        self.load(Shape { rows: [HALF; 2], cols: [HALF; 2] }, bytes / 4);
    }

    fn load(&mut self, shape: Shape, step: usize) {
        /// What `ldtilecfg` reads: palette, and for each tile the bytes of a row and the rows.
        #[repr(C, align(64))]
        #[derive(Default)]
        struct Config {
            palette: u8,
            start_row: u8,
            reserved: [u8; 14],
            row_bytes: [u16; 16],
            rows: [u8; 16],
        }
        (self.shape, self.step) = (shape, step);
        let mut config = Config { palette: 1, ..Config::default() };
        let mut set = |tile: usize, rows: usize, units: usize| {
            if rows > 0 && units > 0 {
                config.rows[tile] = rows as u8;
                config.row_bytes[tile] = 4 * units as u16;
            }
        };
        for i in 0..2 {
            for j in 0..2 {
                set(2 * i + j, shape.rows[i], shape.cols[j]);
            }
            set(4 + i, shape.rows[i], step);
            set(6 + i, step, shape.cols[i]);
        }
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the configuration is valid for palette 1 (at most 16 rows of 64 bytes); it changes tile registers only.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const config, options(readonly, nostack))
        };
    }

    /// Configures all tiles as 16 rows of 64 bytes.
    pub(super) fn configure_whole(&mut self) {
        self.configure(Shape { rows: [HALF; 2], cols: [HALF; 2] });
    }

    /// Computes `product`.
    ///
    /// # Safety
    /// The memory of `product` must be as its fields say.
    pub(super) unsafe fn multiply(&mut self, unit: Unit, product: &Product) {
        let Shape { rows, cols } = product.shape;
        debug_assert!(rows[0] > 0 && cols[0] > 0 && rows.iter().chain(&cols).all(|&n| n <= HALF));
        self.configure(product.shape);
        #[cfg(not(target_arch = "x86_64"))]
        unreachable!("{unit:?} on tiles, which only x86-64 has");
        #[cfg(target_arch = "x86_64")]
        // SAFETY: passed on.
        unsafe {
            match (unit, rows[1] > 0, cols[1] > 0) {
                (Unit::Bf16, true, true) => bf16_2x2(product),
                (Unit::Bf16, true, false) => bf16_2x1(product),
                (Unit::Bf16, false, true) => bf16_1x2(product),
                (Unit::Bf16, false, false) => bf16_1x1(product),
                (Unit::F16, true, true) => f16_2x2(product),
                (Unit::F16, true, false) => f16_2x1(product),
                (Unit::F16, false, true) => f16_1x2(product),
                (Unit::F16, false, false) => f16_1x1(product),
                (Unit::F32, ..) => unreachable!("tiles do not multiply f32"),
            }
        }
    }

    /// [`Tiles::multiply`] for a left operand that comes from far away and is used by few products: neither operand is
    /// kept in L1, and rows that are needed next are prefetched. Where possible it calls `between` every `at_once`
    /// steps, with the number of steps in flight: tiles keep multiplying while `between` computes with vectors.
    ///
    /// # Safety
    /// As for [`Tiles::multiply`]. What is prefetched need not exist. `between` must not use tiles.
    pub(super) unsafe fn stream(
        &mut self,
        unit: Unit,
        product: &Product,
        ahead: Option<Ahead>,
        at_once: usize,
        mut between: impl FnMut(usize),
    ) {
        let Shape { rows, cols } = product.shape;
        // SAFETY: passed on.
        unsafe {
            if rows[1] == 0 || cols[1] == 0 || product.right_width != PANEL {
                return self.multiply(unit, product);
            }
            self.configure(product.shape);
            let ahead = ahead.unwrap_or(Ahead { start: product.left[0], stride: 0 });
            #[cfg(not(target_arch = "x86_64"))]
            unreachable!("{unit:?} with {ahead:?} on tiles");
            #[cfg(target_arch = "x86_64")]
            {
                begin(product);
                let mut done = 0;
                while done < product.steps {
                    let count = at_once.min(product.steps - done);
                    match unit {
                        Unit::Bf16 => bf16_streamed(product, ahead, done, count),
                        Unit::F16 => f16_streamed(product, ahead, done, count),
                        Unit::F32 => unreachable!("tiles do not multiply f32"),
                    }
                    done += count;
                    between(done);
                }
                finish(product);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Tiles {
    /// Multiplies full tiles of zeros, `rounds` times four, and returns the number of operations: the peak of the unit.
    pub(super) fn spin(&mut self, rounds: usize) -> f64 {
        const OPERATIONS: usize = 2 * HALF * HALF * 2 * STEP;
        assert!(rounds > 0);
        self.configure_whole();
        // SAFETY: the caller of `new` promised AMX; only tile registers are used, by nothing else on this thread.
        unsafe {
            asm!(
                "tilezero tmm4",
                "tilezero tmm5",
                "tilezero tmm6",
                "tilezero tmm7",
                "2:",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "dec {rounds}",
                "jnz 2b",
                rounds = inout(reg) rounds => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nomem, nostack)
            );
        }
        (4 * OPERATIONS * rounds) as f64
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        if self.shape != Shape::default() {
            // SAFETY: gives up the tile registers, which nothing else on this thread uses.
            unsafe { asm!("tilerelease", options(nomem, nostack)) };
        }
    }
}

/// A kernel: tiles 0 to 3 hold the sums (row-major in the 2 x 2 grid), 4 and 5 the left operand, 6 and 7 the right.
#[cfg(target_arch = "x86_64")]
macro_rules! kernel {
    ($name:ident, $($step:expr),+; $($clear:literal),+; $($load:literal),+; $($store:literal),+) => {
        /// # Safety
        /// The tiles must be configured for the product's shape and its memory be as its fields say.
        unsafe fn $name(p: &Product) {
            let rows_apart = (HALF * PANEL * size_of::<f32>()) as isize;
            // SAFETY: tile loads and stores touch the rows of the configured shape, which the caller promised.
            unsafe {
                asm!(
                    "test {resume:e}, {resume:e}",
                    "jnz 2f",
                    $($clear,)+
                    "jmp 3f",
                    "2:",
                    $($load,)+
                    "3:",
                    "test {steps}, {steps}",
                    "jz 5f",
                    "4:",
                    $($step,)+
                    "add {l0}, 64",
                    "add {l1}, 64",
                    "add {r}, {right_step}",
                    "dec {steps}",
                    "jnz 4b",
                    "5:",
                    $($store,)+
                    resume = in(reg) u32::from(p.resume),
                    steps = inout(reg) p.steps => _,
                    l0 = inout(reg) p.left[0] => _,
                    l1 = inout(reg) p.left[1] => _,
                    ls = in(reg) p.left_stride,
                    r = inout(reg) p.right => _,
                    rs = in(reg) p.right_width * size_of::<u32>(),
                    right_step = in(reg) p.right_width * size_of::<u32>() * STEP,
                    o0 = in(reg) p.out,
                    o1 = in(reg) p.out.wrapping_byte_offset(rows_apart),
                    os = in(reg) PANEL * size_of::<f32>(),
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

/// The four kernels of one instruction. Left rows are used again by the next panel and should stay in L1; the panel
/// streams past them, hence the hint `t1` on its loads.
#[cfg(target_arch = "x86_64")]
macro_rules! kernels {
    ($dot:literal, $k22:ident, $k21:ident, $k12:ident, $k11:ident) => {
        kernel!($k22,
            "tileloadd tmm4, [{l0} + {ls}]",
            "tileloaddt1 tmm6, [{r} + {rs}]",
            concat!($dot, " tmm0, tmm4, tmm6"),
            "tileloaddt1 tmm7, [{r} + {rs} + 64]",
            concat!($dot, " tmm1, tmm4, tmm7"),
            "tileloadd tmm5, [{l1} + {ls}]",
            concat!($dot, " tmm2, tmm5, tmm6"),
            concat!($dot, " tmm3, tmm5, tmm7");
            "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3";
            "tileloadd tmm0, [{o0} + {os}]", "tileloadd tmm1, [{o0} + {os} + 64]",
            "tileloadd tmm2, [{o1} + {os}]", "tileloadd tmm3, [{o1} + {os} + 64]";
            "tilestored [{o0} + {os}], tmm0", "tilestored [{o0} + {os} + 64], tmm1",
            "tilestored [{o1} + {os}], tmm2", "tilestored [{o1} + {os} + 64], tmm3");
        kernel!($k21,
            "tileloaddt1 tmm6, [{r} + {rs}]",
            "tileloadd tmm4, [{l0} + {ls}]",
            concat!($dot, " tmm0, tmm4, tmm6"),
            "tileloadd tmm5, [{l1} + {ls}]",
            concat!($dot, " tmm2, tmm5, tmm6");
            "tilezero tmm0", "tilezero tmm2";
            "tileloadd tmm0, [{o0} + {os}]", "tileloadd tmm2, [{o1} + {os}]";
            "tilestored [{o0} + {os}], tmm0", "tilestored [{o1} + {os}], tmm2");
        kernel!($k12,
            "tileloadd tmm4, [{l0} + {ls}]",
            "tileloaddt1 tmm6, [{r} + {rs}]",
            concat!($dot, " tmm0, tmm4, tmm6"),
            "tileloaddt1 tmm7, [{r} + {rs} + 64]",
            concat!($dot, " tmm1, tmm4, tmm7");
            "tilezero tmm0", "tilezero tmm1";
            "tileloadd tmm0, [{o0} + {os}]", "tileloadd tmm1, [{o0} + {os} + 64]";
            "tilestored [{o0} + {os}], tmm0", "tilestored [{o0} + {os} + 64], tmm1",
            "/* {o1} */");
        kernel!($k11,
            "tileloadd tmm4, [{l0} + {ls}]",
            "tileloaddt1 tmm6, [{r} + {rs}]",
            concat!($dot, " tmm0, tmm4, tmm6");
            "tilezero tmm0";
            "tileloadd tmm0, [{o0} + {os}]";
            "tilestored [{o0} + {os}], tmm0",
            "/* {o1} */");
    };
}

#[cfg(target_arch = "x86_64")]
kernels!("tdpbf16ps", bf16_2x2, bf16_2x1, bf16_1x2, bf16_1x1);
#[cfg(target_arch = "x86_64")]
kernels!("tdpfp16ps", f16_2x2, f16_2x1, f16_1x2, f16_1x1);

/// Zeros two by two tiles, or loads them where a sum goes on.
///
/// The compiler does not use tile registers, so their contents survive from one of these functions to the next.
///
/// # Safety
/// As for the other kernels.
#[cfg(target_arch = "x86_64")]
unsafe fn begin(p: &Product) {
    // SAFETY: tile loads touch the rows of the configured shape, which the caller promised.
    unsafe {
        if !p.resume {
            asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nomem, nostack));
            return;
        }
        asm!(
            "tileloadd tmm0, [{out} + {width}]", "tileloadd tmm1, [{out} + {width} + 64]",
            "tileloadd tmm2, [{out} + {width} + 2048]", "tileloadd tmm3, [{out} + {width} + 2112]",
            out = in(reg) p.out, width = in(reg) PANEL * size_of::<f32>(),
            options(nostack, readonly),
        );
    }
}

/// Stores what [`begin`] began.
///
/// # Safety
/// As for the other kernels.
#[cfg(target_arch = "x86_64")]
unsafe fn finish(p: &Product) {
    // SAFETY: tile stores touch the rows of the configured shape, which the caller promised.
    unsafe {
        asm!(
            "tilestored [{out} + {width}], tmm0", "tilestored [{out} + {width} + 64], tmm1",
            "tilestored [{out} + {width} + 2048], tmm2", "tilestored [{out} + {width} + 2112], tmm3",
            out = in(reg) p.out, width = in(reg) PANEL * size_of::<f32>(),
            options(nostack),
        );
    }
}

/// Some steps of two by two tiles that stream from L2, of panels of full width.
#[cfg(target_arch = "x86_64")]
macro_rules! streamed {
    ($dot:literal, $name:ident) => {
        /// # Safety
        /// As for the other kernels, after [`begin`]; `count` steps from `from` on, at least one.
        #[inline(always)]
        unsafe fn $name(p: &Product, ahead: Ahead, from: usize, count: usize) {
            let bytes = from * 64;
            // SAFETY: tile loads touch the rows of the configured shape, which the caller promised; prefetches are hints,
            // and never a fault.
            unsafe {
                asm!(
                    "4:",
                    "tileloaddt1 tmm4, [{l0} + {ls}]",
                    "prefetcht0 [{a0}]",
                    "tileloaddt1 tmm6, [{r} + {width}]",
                    concat!($dot, " tmm0, tmm4, tmm6"),
                    "prefetcht0 [{a0} + {ahead_stride}]",
                    "tileloaddt1 tmm7, [{r} + {width} + 64]",
                    concat!($dot, " tmm1, tmm4, tmm7"),
                    "prefetcht0 [{a0} + 2*{ahead_stride}]",
                    "tileloaddt1 tmm5, [{l1} + {ls}]",
                    concat!($dot, " tmm2, tmm5, tmm6"),
                    "prefetcht0 [{a3}]",
                    concat!($dot, " tmm3, tmm5, tmm7"),
                    "add {l0}, 64",
                    "add {l1}, 64",
                    "add {a0}, 64",
                    "add {a3}, 64",
                    "add {r}, 2048",
                    "dec {steps}",
                    "jnz 4b",
                    steps = inout(reg) count => _,
                    l0 = inout(reg) p.left[0].wrapping_add(bytes) => _,
                    l1 = inout(reg) p.left[1].wrapping_add(bytes) => _,
                    ls = in(reg) p.left_stride,
                    r = inout(reg) p.right.wrapping_add(from * STEP * PANEL) => _,
                    width = in(reg) PANEL * size_of::<u32>(),
                    a0 = inout(reg) ahead.start.wrapping_add(bytes) => _,
                    a3 = inout(reg) ahead.start.wrapping_add(bytes).wrapping_offset(3 * ahead.stride) => _,
                    ahead_stride = in(reg) ahead.stride,
                    options(nostack, readonly),
                );
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
streamed!("tdpbf16ps", bf16_streamed);
#[cfg(target_arch = "x86_64")]
streamed!("tdpfp16ps", f16_streamed);
