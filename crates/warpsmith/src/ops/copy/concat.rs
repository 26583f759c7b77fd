//! Tensors joined along a dimension.

use super::{Copy, Forward};
use crate::device::Stream;
use crate::error::{Error, Result};
use crate::op::Op;
use crate::tensor::{Tensor, TensorView, TensorViewMut};

/// The tensors of `parts`, one after the other along `dim`, in a new tensor on the default stream of their device.
///
/// ```
/// use warpsmith::{ops, DType, Device, Tensor};
/// let (a, b) = (Tensor::zeros(&[2, 3], DType::I64, Device::Cpu)?, Tensor::zeros(&[2, 5], DType::I64, Device::Cpu)?);
/// assert_eq!(ops::concat(&[a.view(), b.view()], 1)?.shape(), [2, 8]);
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub fn concat(parts: &[TensorView<'_>], dim: usize) -> Result<Tensor> {
    let Some(first) = parts.first() else {
        return wrong("parts", "one tensor or more", "none");
    };
    let Some(mut shape) = Some(first.shape().to_vec()).filter(|shape| dim < shape.len()) else {
        return wrong("dim", &format!("a dimension of shape {:?}", first.shape()), &dim.to_string());
    };
    shape[dim] = 0;
    for part in parts {
        check_part(first, part, dim)?;
        shape[dim] += part.shape()[dim];
    }
    let stream = first.device().default_stream()?;
    let mut out = Tensor::empty_on(&shape, first.dtype(), &stream)?;
    concat_into(parts, dim, &mut out, &stream)?;
    Ok(out)
}

/// As [`concat`], on `stream` into the caller's memory. Nothing is written if the parts do not fit it.
pub fn concat_into<'b>(
    parts: &[TensorView<'_>],
    dim: usize,
    out: impl Into<TensorViewMut<'b>>,
    stream: &Stream,
) -> Result<()> {
    let mut rest: TensorViewMut<'_> = out.into();
    let whole = rest.shape().to_vec();
    if dim >= whole.len() {
        return wrong("dim", &format!("a dimension of shape {whole:?}"), &dim.to_string());
    }
    let mut length = 0usize;
    for part in parts {
        let mut expected = whole.clone();
        if part.shape().len() == whole.len() {
            expected[dim] = part.shape()[dim];
            length = length.saturating_add(expected[dim]);
        }
        if part.shape() != expected {
            return wrong(
                "x",
                &format!("the shape {whole:?} but for dimension {dim}"),
                &format!("{:?}", part.shape()),
            );
        }
        let (dtype, device) = (rest.as_view().dtype(), rest.as_view().device());
        if (part.dtype(), part.device()) != (dtype, device) {
            let got = format!("{} on {}", part.dtype(), part.device());
            return wrong("x", &format!("{dtype} on {device}, as out"), &got);
        }
        if !rest.as_view().is_apart_from(part) {
            return wrong("out", "memory that no part uses", "memory that overlaps one");
        }
    }
    if length != whole[dim] {
        return wrong(
            "out",
            &format!("a dimension {dim} of {length}, that of all parts"),
            &format!("{whole:?}"),
        );
    }
    for part in parts {
        let Some((head, tail)) = rest.split_at(dim, part.shape()[dim]) else {
            unreachable!("the parts are as long together as out")
        };
        Copy::new(*part).run_into(head, stream)?;
        rest = tail;
    }
    Ok(())
}

fn check_part(first: &TensorView<'_>, part: &TensorView<'_>, dim: usize) -> Result<()> {
    let same_rank = part.shape().len() == first.shape().len();
    let fits = same_rank && (0..first.shape().len()).all(|d| d == dim || part.shape()[d] == first.shape()[d]);
    if !fits {
        let expected = format!("the shape {:?} but for dimension {dim}", first.shape());
        return wrong("x", &expected, &format!("{:?}", part.shape()));
    }
    if (part.dtype(), part.device()) != (first.dtype(), first.device()) {
        let expected = format!("{} on {}, as the first part", first.dtype(), first.device());
        return wrong("x", &expected, &format!("{} on {}", part.dtype(), part.device()));
    }
    Ok(())
}

fn wrong<T>(arg: &str, expected: &str, got: &str) -> Result<T> {
    Err(Error::argument(Forward::SPEC.name, arg, expected, got))
}
