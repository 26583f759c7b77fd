//! The checked call of `linear`: sizes, strides and types, and the addresses of its tensors.

use super::{
    ACT, Activation, BIAS, GATE, Gate, OUT, PRECISION, Precision, RESIDUAL, SCALE, SCALING, Scaling,
};
use super::{SPEC, TOLERANCE, W, W_SCALE, X, X_SCALE};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::op::{Args, Attrs, Matcher, survey};
use crate::ops::FLOATS;
use crate::ops::elementwise::function::Kind;
use crate::tensor::{DType, MAX_RANK, Space, TensorView};

/// Elements of K that share a scale with [`Scaling::Block`], and rows of `w` that do.
pub(in crate::ops) const SCALE_BLOCK: usize = 128;
/// The types of `x` and `w`.
pub(super) const INPUTS: [DType; 5] = [DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::F8E5M2];
pub(super) const FP8: [DType; 2] = [DType::F8E4M3, DType::F8E5M2];
/// The types of `w` beside those of `x`, where it need not have the same.
pub(in crate::ops) const WEIGHTS: [(DType, &[DType]); 3] =
    [(DType::F32, &FLOATS), (DType::F8E4M3, &FP8), (DType::F8E5M2, &FP8)];

/// Strides in elements of one matrix of a batch.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(in crate::ops) struct Strides {
    /// From one matrix of the batch to the next.
    pub batch: isize,
    /// From one row to the next.
    pub row: isize,
    /// From one element of a row to the next.
    pub col: isize,
}

/// The dimension along which a matrix can be moved in pieces of 16 bytes: its elements are contiguous, its size is a
/// multiple of 16 bytes, and so are all other strides.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(in crate::ops) enum Order {
    /// Along neither.
    Any,
    /// Along a row. For `x` and `w` that is K.
    Rows,
    /// Along a column.
    Columns,
}

/// What multiplies the sums of 8-bit inputs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(in crate::ops) enum Dequant {
    /// Nothing.
    None,
    /// Scales that do not depend on k: they multiply the whole sum.
    Whole,
    /// Scales for every [`SCALE_BLOCK`] elements of K: they multiply the sum over each block.
    Blocks,
}

/// A checked call: `batch` products of `x` `[m, k]` with `w` `[rows, k]`, repeated over `outer`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    pub(in crate::ops) x_dtype: DType,
    pub(in crate::ops) w_dtype: DType,
    /// Also the type of the residual.
    pub(in crate::ops) out_dtype: DType,
    pub(in crate::ops) batch: usize,
    pub(in crate::ops) m: usize,
    /// Columns of `out`. `w` has [`Problem::weight_rows`].
    pub(in crate::ops) n: usize,
    pub(in crate::ops) k: usize,
    pub(in crate::ops) x: Strides,
    pub(in crate::ops) w: Strides,
    pub(in crate::ops) out: Strides,
    /// Zero if absent.
    pub(in crate::ops) residual: Strides,
    /// Strides of a scale's row and block of K; zero where it has but one.
    pub(in crate::ops) x_scale: Strides,
    pub(in crate::ops) w_scale: Strides,
    /// The type of the result, but for products with results in f32 that are made of narrow ones.
    pub(in crate::ops) bias_dtype: DType,
    pub(in crate::ops) bias_step: isize,
    /// Leading dimensions that no single stride describes, of [`OPERANDS`]; almost always a single point.
    pub(in crate::ops) outer: Space<6>,
    pub(in crate::ops) x_order: Order,
    pub(in crate::ops) w_order: Order,
    pub(in crate::ops) out_order: Order,
    /// [`Order::Any`] if absent.
    pub(in crate::ops) residual_order: Order,
    /// As `x_order` and `w_order`, but lines need not be a multiple of 16 bytes long: it is enough that they start at
    /// one.
    pub(in crate::ops) x_starts: Order,
    pub(in crate::ops) w_starts: Order,
    pub(in crate::ops) activation: Option<Kind>,
    pub(in crate::ops) gate: Gate,
    pub(in crate::ops) dequant: Dequant,
    /// f32 inputs may be cut to the 10 bits of mantissa that TF32 has.
    pub(in crate::ops) tf32: bool,
    /// Products must be added in f32, whatever the inputs are.
    pub(in crate::ops) full: bool,
    pub(in crate::ops) has_bias: bool,
    pub(in crate::ops) has_residual: bool,
    pub(in crate::ops) scale_bits: u32,
    /// Nothing that was given to the device before can still write `w`.
    pub(in crate::ops) constant_w: bool,
    /// `w` is a copy that the launch before this one writes: it cannot be prefetched.
    pub(in crate::ops) copied_w: bool,
    /// Rows of `w` start at any alignment, and the kernel loads them all the same.
    pub(in crate::ops) direct_w: bool,
}

/// The tensors with a batch, in the order of [`Problem::outer`] and of [`Part`].
pub(in crate::ops) const OPERANDS: [usize; 6] = [X, W, OUT, RESIDUAL, X_SCALE, W_SCALE];

/// The addresses of the tensors of one point of [`Problem::outer`]; zero for what is absent.
#[derive(Clone, Copy, Debug)]
pub(in crate::ops) struct Part {
    pub x: usize,
    pub w: usize,
    pub out: usize,
    pub residual: usize,
    pub x_scale: usize,
    pub w_scale: usize,
    pub bias: usize,
}

impl Problem {
    /// Rows of `w`: twice the columns of `out` with a gate.
    pub(in crate::ops) fn weight_rows(&self) -> usize {
        if self.gate == Gate::None { self.n } else { 2 * self.n }
    }

    /// The row of `w` that gives column `j`, or its gate.
    pub(in crate::ops) fn gate_row(&self, j: usize) -> usize {
        if self.gate == Gate::Interleaved { 2 * j } else { j }
    }

    /// The row of `w` that gives column `j` of up.
    pub(in crate::ops) fn up_row(&self, j: usize) -> usize {
        if self.gate == Gate::Interleaved { 2 * j + 1 } else { self.n + j }
    }

    /// The factor of the result.
    pub(in crate::ops) fn scale(&self) -> f32 {
        f32::from_bits(self.scale_bits)
    }

    /// The products the call consists of: each is one launch.
    pub(in crate::ops) fn parts<'a>(&'a self, args: &'a Args<'_>) -> impl Iterator<Item = Part> + 'a {
        (0..self.outer.len()).map(move |index| {
            let offsets = self.outer.offsets(index);
            let at = |operand: usize| {
                args.get(OPERANDS[operand])
                    .map_or(0, |view| view.address() + offsets[operand] * view.dtype().size())
            };
            Part {
                x: at(0),
                w: at(1),
                out: at(2),
                residual: at(3),
                x_scale: at(4),
                w_scale: at(5),
                bias: args.address(BIAS),
            }
        })
    }

    /// How a kernel without tensor cores multiplies the inputs, as text.
    pub(in crate::ops) fn arithmetic(&self) -> String {
        match self.x_dtype {
            DType::F32 if self.w_dtype != DType::F32 => {
                format!("f32 in full precision, {} widened as it is read", self.w_dtype)
            }
            DType::F32 => "f32 in full precision".into(),
            dtype => format!("{dtype} exactly, sums in f32"),
        }
    }

    /// How a kernel with tensor cores does.
    #[cfg(feature = "cuda")]
    pub(in crate::ops) fn tensor_arithmetic(&self) -> String {
        match self.x_dtype {
            _ if self.tf32 => "f32 as TF32".into(),
            dtype if FP8.contains(&dtype) => format!("{dtype}, sums as tensor cores make them"),
            _ => self.arithmetic(),
        }
    }
}

pub(super) fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
    let op = SPEC.name;
    let mut sizes = Matcher::new(args, attrs);
    sizes.arg(X)?;
    sizes.arg(W)?;
    let (x, w, out) = (args.at(X), args.at(W), args.at(OUT));
    let (rows, gate) = (sizes.size("rows"), Gate::ALL[attrs.choice(GATE)]);
    if gate != Gate::None && rows % 2 != 0 {
        let expected = "an even number of rows, because of the gate";
        return Err(Error::argument(op, "w", expected, format!("{:?}", w.shape())));
    }
    sizes.all()?;
    let (n, k) = (sizes.size("n"), sizes.size("k"));
    let (x_dtype, w_dtype, out_dtype) = (x.dtype(), w.dtype(), out.dtype());
    // In a survey, CPU tensors represent those of a GPU.
    if x_dtype.size() != w_dtype.size() && (x.device() != Device::Cpu || survey::is_running()) {
        let expected = format!("dtype {x_dtype}, that of x, because only the CPU mixes them");
        return Err(Error::argument(op, "w", expected, w_dtype.name()));
    }
    let leading = &x.shape()[..x.shape().len() - 1];
    let dequant = check_scales(args, Scaling::ALL[attrs.choice(SCALING)])?;
    let asked = (attrs.choice(PRECISION), attrs.float(TOLERANCE));
    let (precision, scale) = check_options(&sizes, op, (x_dtype, k), asked, attrs.float(SCALE))?;

    let shared = w.layout().rank() == 2;
    let batches = collapse(args, leading, shared);
    let Batches { batch, m, outer, strides } = batches;
    let [x_strides, w_strides, out_strides, residual_strides, x_scale, w_scale] = strides;
    let order = |index: usize, operand: usize, [rows, cols]: [usize; 2], lines: Lines| match args.get(index) {
        None => Order::Any,
        Some(view) => order_of(view, &strides[operand], [batch, rows, cols], &outer, operand, lines),
    };
    Ok(Problem {
        x_dtype,
        w_dtype,
        out_dtype,
        batch,
        m,
        n,
        k,
        x: x_strides,
        w: w_strides,
        out: out_strides,
        residual: residual_strides,
        x_scale,
        w_scale,
        bias_dtype: out_dtype,
        bias_step: args.get(BIAS).map_or(0, |bias| bias.layout().step()),
        outer,
        x_order: order(X, 0, [m, k], Lines::Whole),
        w_order: order(W, 1, [rows, k], Lines::Whole),
        out_order: order(OUT, 2, [m, n], Lines::Whole),
        residual_order: order(RESIDUAL, 3, [m, n], Lines::Whole),
        x_starts: order(X, 0, [m, k], Lines::Started),
        w_starts: order(W, 1, [rows, k], Lines::Started),
        activation: Activation::ALL[attrs.choice(ACT)].kind(),
        gate,
        dequant,
        tf32: precision == Precision::Tf32,
        full: precision == Precision::Full,
        has_bias: args.get(BIAS).is_some(),
        has_residual: args.get(RESIDUAL).is_some(),
        scale_bits: scale.to_bits(),
        constant_w: w.is_constant(),
        copied_w: false,
        direct_w: false,
    })
}

/// The precision and the factor of the result, for inputs of `dtype` and sums over `k`. `asked` are the options `precision` and
/// `tolerance`.
pub(super) fn check_options(
    sizes: &Matcher<'_>,
    op: &'static str,
    (dtype, k): (DType, usize),
    (precision, tolerance): (usize, f64),
    scale: f64,
) -> Result<(Precision, f32)> {
    let precision = Precision::ALL[precision];
    if precision == Precision::Tf32 && dtype != DType::F32 {
        let expected = "auto or full, because only f32 has a TF32 mode";
        return Err(Error::argument(op, "precision", expected, "tf32"));
    }
    let is_error = tolerance.is_finite() && tolerance >= 0.0;
    sizes.option("tolerance", tolerance, "a finite number of at least 0", is_error)?;
    sizes.option("scale", scale, "a finite number", (scale as f32).is_finite())?;
    Ok((precision.chosen(tolerance, dtype, k), scale as f32))
}

fn check_scales(args: &Args<'_>, scaling: Scaling) -> Result<Dequant> {
    let op = SPEC.name;
    for (name, index, of) in [("x_scale", X_SCALE, X), ("w_scale", W_SCALE, W)] {
        let Some(scale) = args.get(index) else { return Ok(Dequant::None) };
        let of = args.at(of);
        if !FP8.contains(&of.dtype()) {
            let expected = format!("nothing, because scales are for 8-bit inputs and x is {}", of.dtype());
            return Err(Error::argument(op, name, expected, "a tensor"));
        }
        // One matrix has one set of scales, several have one each.
        let rank = match scaling {
            Scaling::Tensor => 1,
            Scaling::Row => of.layout().rank() - 1,
            Scaling::Block => of.layout().rank(),
        };
        if scale.layout().rank() != rank {
            let expected = format!("{rank} dimensions, as many as its matrices have");
            return Err(Error::argument(op, name, expected, format!("shape {:?}", scale.shape())));
        }
    }
    Ok(if scaling == Scaling::Block { Dequant::Blocks } else { Dequant::Whole })
}

struct Batches {
    batch: usize,
    m: usize,
    outer: Space<6>,
    /// Of [`OPERANDS`].
    strides: [Strides; 6],
}

/// Merges leading dimensions as far as all tensors allow: the last into the rows of one product (unless each has its
/// own weight), the one before into the batch, the rest into the outer space.
fn collapse(args: &Args<'_>, leading: &[usize], shared: bool) -> Batches {
    // Strides over the leading dimensions; zero where a tensor does not have them.
    let mut over = [[0isize; MAX_RANK]; 6];
    let mut inner = [Strides::default(); 6];
    for (operand, &index) in OPERANDS.iter().enumerate() {
        let Some(view) = args.get(index) else { continue };
        let strides = view.layout().strides();
        let last = strides.last().copied().unwrap_or(0);
        match index {
            // Its rows are not a leading dimension of the others.
            W => {
                inner[operand].row = strides[strides.len() - 2];
                inner[operand].col = last;
                over[operand][..strides.len() - 2].copy_from_slice(&strides[..strides.len() - 2]);
            }
            W_SCALE if view.shape() == [1] => {}
            W_SCALE => {
                let rank = args.at(W).layout().rank();
                inner[operand].row = strides[rank - 2];
                inner[operand].col = strides.get(rank - 1).copied().unwrap_or(0);
                over[operand][..rank - 2].copy_from_slice(&strides[..rank - 2]);
            }
            X_SCALE if view.shape() == [1] && leading != [1] => {}
            _ => {
                let count = leading.len();
                inner[operand].col = strides.get(count).copied().unwrap_or(0);
                over[operand][..count].copy_from_slice(&strides[..count]);
            }
        }
    }
    // Without a row dimension there is one row.
    let own_rows = if shared { 0 } else { 1 };
    let dims = leading.len().saturating_sub(own_rows);
    let mut space = Space::<6> { rank: 0, sizes: [0; MAX_RANK], strides: [[0; MAX_RANK]; 6] };
    for d in (0..dims).filter(|&d| leading[d] != 1) {
        let last = space.rank.wrapping_sub(1);
        let follows = |t: usize| space.strides[t][last] == over[t][d] * leading[d] as isize;
        let merges = space.rank > 0 && (0..6).all(follows);
        let slot = if merges { last } else { space.rank };
        space.sizes[slot] = if merges { space.sizes[slot] * leading[d] } else { leading[d] };
        for (t, strides) in over.iter().enumerate() {
            space.strides[t][slot] = strides[d];
        }
        space.rank = slot + 1;
    }
    let pop = |space: &mut Space<6>| {
        if space.rank == 0 {
            return (1, [0; 6]);
        }
        space.rank -= 1;
        (space.sizes[space.rank], space.strides.map(|s| s[space.rank]))
    };
    let (m, rows) = match shared {
        true => pop(&mut space),
        false => (leading[dims], over.map(|strides| strides[dims])),
    };
    let (batch, between) = pop(&mut space);
    if space.rank == 0 {
        space = Space { rank: 1, sizes: [1; MAX_RANK], strides: [[0; MAX_RANK]; 6] };
    }
    for (operand, strides) in inner.iter_mut().enumerate() {
        strides.batch = between[operand];
        if ![W, W_SCALE].contains(&OPERANDS[operand]) {
            strides.row = rows[operand];
        }
    }
    Batches { batch, m, outer: space, strides: inner }
}

/// What the lines of an order must be a multiple of 16 bytes in.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lines {
    /// Their starts and their length.
    Whole,
    /// Their starts.
    Started,
}

fn order_of(
    view: &TensorView<'_>,
    strides: &Strides,
    [batch, rows, cols]: [usize; 3],
    outer: &Space<6>,
    operand: usize,
    lines: Lines,
) -> Order {
    let size = view.dtype().size();
    let outside = (0..outer.rank).all(|d| are_pieces_apart(size, outer.sizes[d], outer.strides[operand][d]));
    match view.is_aligned(16) && outside && are_pieces_apart(size, batch, strides.batch) {
        true => order_of_matrix(size, strides, [rows, cols], lines),
        false => Order::Any,
    }
}

/// Whether neighbours of a dimension with `count` indices are a multiple of 16 bytes apart.
fn are_pieces_apart(size: usize, count: usize, stride: isize) -> bool {
    count <= 1 || (stride as usize * size).is_multiple_of(16)
}

/// The order of a matrix that starts on a boundary of 16 bytes.
fn order_of_matrix(size: usize, strides: &Strides, [rows, cols]: [usize; 2], lines: Lines) -> Order {
    let whole = |elements: usize| lines == Lines::Started || (elements * size).is_multiple_of(16);
    if strides.col == 1 && whole(cols) && are_pieces_apart(size, rows, strides.row) {
        Order::Rows
    } else if strides.row == 1 && whole(rows) && are_pieces_apart(size, cols, strides.col) {
        Order::Columns
    } else {
        Order::Any
    }
}

/// A matrix of a plain product.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(in crate::ops) struct Matrix {
    pub row: isize,
    pub col: isize,
    /// Whether it starts on a boundary of 16 bytes.
    pub aligned: bool,
}

impl Matrix {
    /// A tensor's last dimension as columns, and all before it as rows, which must be the same distance apart.
    pub fn of_rows(op: &'static str, name: &str, view: &TensorView<'_>) -> Result<Matrix> {
        let (shape, strides) = (view.shape(), view.layout().strides());
        let leading = shape.len() - 1;
        let mut row = None;
        let mut reach = 1;
        for d in (0..leading).rev().filter(|&d| shape[d] != 1) {
            match row {
                None => row = Some(strides[d]),
                Some(row) if strides[d] == row * reach => {}
                Some(_) => {
                    let expected = "rows that are the same distance apart over all leading dimensions";
                    return Err(Error::argument(op, name, expected, format!("{:?}", view.layout())));
                }
            }
            reach *= shape[d] as isize;
        }
        Ok(Matrix { row: row.unwrap_or(0), col: view.layout().step(), aligned: view.is_aligned(16) })
    }

    /// A tensor of two dimensions.
    pub fn of_weight(view: &TensorView<'_>) -> Matrix {
        let strides = view.layout().strides();
        Matrix { row: strides[0], col: strides[1], aligned: view.is_aligned(16) }
    }

    /// With rows and columns swapped.
    pub fn transposed(self) -> Self {
        Matrix { row: self.col, col: self.row, ..self }
    }
}

impl Problem {
    /// The plain product of `x` `[m, k]` and `w` `[n, k]`, all of one type.
    pub(in crate::ops) fn product(
        dtype: DType,
        tf32: bool,
        [m, n, k]: [usize; 3],
        [x, w, out]: [Matrix; 3],
    ) -> Problem {
        let strides = |matrix: Matrix| Strides { batch: 0, row: matrix.row, col: matrix.col };
        let order_with = |matrix: Matrix, sizes: [usize; 2], lines: Lines| match matrix.aligned {
            true => order_of_matrix(dtype.size(), &strides(matrix), sizes, lines),
            false => Order::Any,
        };
        let order = |matrix: Matrix, sizes: [usize; 2]| order_with(matrix, sizes, Lines::Whole);
        let starts = |matrix: Matrix, sizes: [usize; 2]| order_with(matrix, sizes, Lines::Started);
        Problem {
            x_dtype: dtype,
            w_dtype: dtype,
            out_dtype: dtype,
            batch: 1,
            m,
            n,
            k,
            x: strides(x),
            w: strides(w),
            out: strides(out),
            residual: Strides::default(),
            x_scale: Strides::default(),
            w_scale: Strides::default(),
            bias_dtype: dtype,
            bias_step: 0,
            outer: Space { rank: 1, sizes: [1; MAX_RANK], strides: [[0; MAX_RANK]; 6] },
            x_order: order(x, [m, k]),
            w_order: order(w, [n, k]),
            out_order: order(out, [m, n]),
            residual_order: Order::Any,
            x_starts: starts(x, [m, k]),
            w_starts: starts(w, [n, k]),
            activation: None,
            gate: Gate::None,
            dequant: Dequant::None,
            tf32,
            full: false,
            has_bias: false,
            has_residual: false,
            scale_bits: 1f32.to_bits(),
            constant_w: false,
            copied_w: false,
            direct_w: false,
        }
    }
}

impl Problem {
    /// This plain product, with results in f32.
    pub(in crate::ops) fn into_f32(self) -> Problem {
        let out_order = match self.out_order {
            // What is whole in narrow elements is so in wide ones.
            Order::Any => Order::Any,
            _ => order_of_matrix(DType::F32.size(), &self.out, [self.m, self.n], Lines::Whole),
        };
        Problem { out_dtype: DType::F32, out_order, ..self }
    }

    /// This plain product, added to what its results are.
    pub(in crate::ops) fn adding(self) -> Problem {
        Problem { has_residual: true, residual: self.out, residual_order: self.out_order, ..self }
    }
}

impl Part {
    /// The same, with results that are added to.
    pub(in crate::ops) fn adding(self) -> Part {
        Part { residual: self.out, ..self }
    }

    /// The tensors of a plain product.
    pub(in crate::ops) fn product(x: usize, w: usize, out: usize) -> Part {
        Part { x, w, out, residual: 0, x_scale: 0, w_scale: 0, bias: 0 }
    }
}
