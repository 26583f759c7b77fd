//! `linear` through cuBLASLt, where this machine has it: a yardstick, and a choice for those who tune and do not mind that
//! its sums depend on M.

use super::problem::{Dequant, Order, Strides};
use super::{Gate, Problem};
use crate::cuda::cublaslt::{self, Addresses, Compute, Last, Matrix, Product, Type, WORKSPACE};
use crate::device::{DeviceInfo, Stream};
use crate::error::{Error, Result};
use crate::op::{Kernel, Launch, VendorLibrary};
use crate::ops::elementwise::function::Kind;
use crate::tensor::DType;

const LIBRARY: VendorLibrary = VendorLibrary {
    name: "cuBLASLt",
    sources: &[include_str!("cublaslt.rs"), include_str!("../../cuda/cublaslt.rs")],
};

/// Whatever algorithm the library's heuristic proposes, which is asked once for each problem.
pub(super) const CUBLASLT: Kernel<Problem> = Kernel::library("linear_cublaslt", LIBRARY, run)
    .when(supports)
    .with_workspace(|_, _| WORKSPACE)
    .configured(|p, _| match cublaslt::find() {
        Ok(library) => {
            format!("{}, {} {}", p.tensor_arithmetic(), library.path().display(), library.version())
        }
        Err(_) => String::new(),
    });

fn supports(p: &Problem, _: &DeviceInfo) -> std::result::Result<(), String> {
    product(p)?;
    cublaslt::find().map(|_| ()).map_err(|error| error.to_string())
}

/// The problem as the library takes it.
fn product(p: &Problem) -> std::result::Result<Product, String> {
    let dtype = |dtype| match dtype {
        DType::F32 => Ok(Type::F32),
        DType::F16 => Ok(Type::F16),
        DType::BF16 => Ok(Type::BF16),
        other => Err(format!("{other} is not offered through it")),
    };
    let last = match p.activation {
        None => Last::None,
        Some(Kind::Relu) => Last::Relu,
        Some(Kind::GeluTanh) if p.out_dtype == DType::F16 => {
            return Err("its gelu_tanh is less exact than ours in f16".into());
        }
        Some(Kind::GeluTanh) => Last::Gelu,
        Some(_) => return Err("its activations are relu and gelu_tanh".into()),
    };
    let (input, output) = (dtype(p.x_dtype)?, dtype(p.out_dtype)?);
    if input != output {
        return Err("it is asked for results of the inputs' type only".into());
    }
    if p.gate != Gate::None || p.has_residual || p.dequant != Dequant::None {
        return Err("it has no gate, residual or scales like these".into());
    }
    if p.scale() != 1.0 && (p.has_bias || last != Last::None) {
        return Err("it would apply the scale before bias and activation".into());
    }
    if p.has_bias && p.bias_step != 1 && p.n > 1 {
        return Err("`bias` has gaps".into());
    }
    if p.m == 0 || p.n == 0 || p.k == 0 {
        return Err("there is nothing to multiply".into());
    }
    // Sizes and strides are those of 32-bit integers in some of its versions.
    if [p.m, p.n, p.k, p.batch].iter().any(|&size| size > i32::MAX as usize) {
        return Err("a size is more than 2^31".into());
    }
    Ok(Product {
        input,
        output,
        compute: if p.tf32 { Compute::Tf32 } else { Compute::Full },
        last,
        bias: p.has_bias,
        sizes: [p.m, p.n, p.k],
        batch: p.batch,
        x: matrix("x", p.x_order, p.x, [p.m, p.k])?,
        w: matrix("w", p.w_order, p.w, [p.n, p.k])?,
        out: matrix("out", p.out_order, p.out, [p.m, p.n]).and_then(|out| match out.by_rows {
            true => Ok(out),
            false => Err("`out` is transposed".into()),
        })?,
    })
}

fn matrix(
    name: &str,
    order: Order,
    strides: Strides,
    [rows, cols]: [usize; 2],
) -> std::result::Result<Matrix, String> {
    let (stride, outer, inner) = match order {
        Order::Any => return Err(format!("`{name}` cannot be moved in pieces of 16 bytes")),
        Order::Rows => (strides.row, rows, cols),
        Order::Columns => (strides.col, cols, rows),
    };
    // The distance of a single row is of no meaning.
    let pitch = if outer > 1 { stride } else { inner as isize };
    if pitch < inner as isize || strides.batch < 0 {
        return Err(format!("`{name}` repeats elements"));
    }
    Ok(Matrix { by_rows: order == Order::Rows, pitch: pitch as usize, batch: strides.batch as usize })
}

fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let Stream::Cuda(stream) = launch.stream else {
        return Err(Error::parse("stream", "a CUDA stream", "the host stream"));
    };
    let product = product(p).expect("`supports` has passed");
    let library = cublaslt::find()?;
    p.parts(launch.args).try_for_each(|part| {
        let at =
            Addresses { x: part.x, w: part.w, bias: part.bias, out: part.out, workspace: launch.workspace };
        // SAFETY: `check` bound the shapes and `product` describes these very tensors; the workspace has the size
        // asked for.
        unsafe { library.run(stream, &product, p.scale(), &at) }
    })
}

#[cfg(feature = "tests")]
mod tests {
    use super::super::problem;
    use super::*;

    #[test]
    fn what_the_library_cannot_do_as_the_contract_says_is_refused() {
        let dense = |cols| problem::Matrix { row: cols, col: 1, aligned: true };
        let product_of = Problem::product(DType::BF16, false, [8, 16, 32], [dense(32), dense(32), dense(16)]);
        let plain = Problem { bias_step: 1, ..product_of };
        assert!(product(&plain).is_ok());
        let gelu = Problem { activation: Some(Kind::Gelu), ..plain };
        assert!(product(&gelu).unwrap_err().contains("gelu_tanh"));
        let tanh = Problem { activation: Some(Kind::GeluTanh), has_bias: true, ..plain };
        assert_eq!(product(&tanh).unwrap().last, Last::Gelu);
        let f16 = DType::F16;
        for wrong in [
            Problem { x_dtype: f16, w_dtype: f16, out_dtype: f16, ..tanh },
            Problem { gate: Gate::Halves, ..plain },
            Problem { has_residual: true, ..plain },
            Problem { scale_bits: 2f32.to_bits(), has_bias: true, ..plain },
            Problem { bias_step: 2, has_bias: true, ..plain },
            Problem { x_order: Order::Any, ..plain },
            Problem { out_order: Order::Columns, ..plain },
            Problem { out_dtype: DType::F32, ..plain },
            Problem { x_dtype: DType::F8E4M3, w_dtype: DType::F8E4M3, ..plain },
            Problem { w: Strides { row: 0, ..plain.w }, ..plain },
            Problem { k: 0, ..plain },
        ] {
            assert!(product(&wrong).is_err(), "{wrong:?}");
        }
        let transposed =
            Problem { x_order: Order::Columns, x: Strides { batch: 0, row: 1, col: 8 }, ..plain };
        assert_eq!(product(&transposed).unwrap().x, Matrix { by_rows: false, pitch: 8, batch: 0 });
    }
}
