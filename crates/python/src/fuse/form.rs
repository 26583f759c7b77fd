//! Forms of calls: sizes, strides, alignment and device of the inputs. What follows from them is found out once.

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use warpsmith::{DType, Device};
use warpsmith_fuse::Memory;
use warpsmith_fuse::cuda::Prepared;

/// Forms that are kept; with more, all are found out again.
const MOST: usize = 256;
/// What kernels for GPUs depend on of an address.
const ALIGNMENT: usize = 16;

/// A tensor but for its address.
pub struct Form {
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub strides: Vec<isize>,
}

impl Form {
    /// The same tensor with the dimensions that a graph sees; nothing if it has others.
    pub fn seen_as(&self, dims: &[Option<usize>]) -> Option<Form> {
        let own = dims.iter().flatten().count();
        let size = |dim: &Option<usize>| dim.map_or(1, |dim| self.shape[dim]);
        let stride = |dim: &Option<usize>| dim.map_or(0, |dim| self.strides[dim]);
        (own == self.shape.len()).then(|| Form {
            dtype: self.dtype,
            shape: dims.iter().map(size).collect(),
            strides: dims.iter().map(stride).collect(),
        })
    }

    pub fn memory(&self, address: usize) -> Memory<'_> {
        Memory { address, dtype: self.dtype, shape: &self.shape, strides: &self.strides }
    }
}

/// A new output: as the graph sees it, and PyTorch's arguments for it.
pub struct Made {
    pub form: Form,
    pub sizes: Py<PyTuple>,
    pub strides: Py<PyTuple>,
}

/// What is known of calls of one form.
pub struct Known {
    pub inputs: Vec<Form>,
    pub outputs: Vec<Made>,
    /// On a GPU.
    pub prepared: Option<Prepared>,
}

/// The inputs of a call: addresses, and all the rest as words.
pub struct Given {
    pub device: Device,
    pub addresses: Vec<usize>,
    key: Vec<i64>,
}

impl Given {
    pub fn new(device: Device, count: usize) -> Given {
        let ordinal = match device {
            Device::Cpu => -1,
            Device::Cuda(ordinal) => i64::from(ordinal),
        };
        let mut key = Vec::with_capacity(1 + count * 8);
        key.push(ordinal);
        Given { device, addresses: Vec::with_capacity(count), key }
    }

    pub fn add(&mut self, address: usize, shape: &[i64], strides: &[i64]) {
        self.addresses.push(address);
        self.key.push(((address % ALIGNMENT) << 8 | shape.len()) as i64);
        self.key.extend_from_slice(shape);
        self.key.extend_from_slice(strides);
    }

    /// The forms of the inputs, which have these types.
    pub fn forms(&self, dtypes: impl Iterator<Item = DType>) -> Vec<Form> {
        let mut words = self.key[1..].iter().copied();
        let form = |dtype| {
            let rank = words.next().unwrap_or(0) as usize & 0xff;
            let shape = words.by_ref().take(rank).map(|size| size as usize).collect();
            let strides = words.by_ref().take(rank).map(|stride| stride as isize).collect();
            Form { dtype, shape, strides }
        };
        dtypes.map(form).collect()
    }
}

/// The forms that a graph was called with.
#[derive(Default)]
pub struct Forms(Mutex<HashMap<Box<[i64]>, Arc<Known>>>);

impl Forms {
    pub fn find(&self, given: &Given) -> Option<Arc<Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&given.key[..]).cloned()
    }

    pub fn keep(&self, given: Given, known: Arc<Known>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let dropped = if all.len() >= MOST { std::mem::take(&mut *all) } else { HashMap::new() };
        all.insert(given.key.into_boxed_slice(), known);
        drop(all);
        // Outside of the lock: Python's objects may run anything when they end.
        drop(dropped);
    }
}

/// Whether kernels that were prepared without addresses may be called with these.
pub fn are_aligned(addresses: &[usize]) -> bool {
    addresses.iter().all(|address| address.is_multiple_of(ALIGNMENT))
}
