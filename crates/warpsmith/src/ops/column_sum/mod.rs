//! The second stage of gradients that are sums over rows (of weights, of biases): the first leaves one partial sum in
//! f32 for each group of rows in scratch memory, `[gradient][group][hidden]`; this adds the groups in a fixed order.

pub(super) mod cpu;
#[cfg(feature = "cuda")]
pub(super) mod cuda;

/// A gradient to be written: its address, and the distance of its elements.
pub(super) type Target = (usize, isize);
