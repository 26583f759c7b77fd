//! Tensors of PyTorch's, as kernels see them.

use super::shim::{Handle, Shim, succeeded};
use warpsmith::op::{OpSpec, list_types};
use warpsmith::tensor::{Layout, MAX_RANK, Shape};
use warpsmith::{DType, Device, Error, Result};

/// A handle that is deleted when this is dropped.
pub struct Owned {
    shim: &'static Shim,
    handle: Handle,
}

impl Owned {
    /// # Safety
    /// `handle` must be a tensor that the caller owns.
    pub unsafe fn new(shim: &'static Shim, handle: Handle) -> Owned {
        Owned { shim, handle }
    }

    /// The handle, for somebody else to delete.
    pub fn release(self) -> Handle {
        let handle = self.handle;
        std::mem::forget(self);
        handle
    }

    /// Address of the first element.
    pub fn address(&self) -> Result<usize> {
        let mut address = std::ptr::null_mut();
        // SAFETY: the handle is alive.
        succeeded("an address", unsafe { (self.shim.data_ptr)(self.handle, &mut address) })?;
        Ok(address as usize)
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: owned, and deleted once.
        unsafe { (self.shim.delete)(self.handle) };
    }
}

/// What a kernel needs to know of an argument.
pub struct Seen {
    /// Address of the first element.
    pub address: usize,
    /// Element type.
    pub dtype: DType,
    /// Shape and strides.
    pub layout: Layout,
    /// Where it is.
    pub device: Device,
}

impl Seen {
    /// Argument `arg` of an op. PyTorch may call the kernel of one device with tensors of another among its arguments, also
    /// with those of no device, which have no memory.
    pub fn new(shim: &Shim, tensor: &Owned, spec: &'static OpSpec, arg: usize) -> Result<Seen> {
        let handle = tensor.handle;
        let (mut kind, mut index, mut code, mut rank) = (0, 0, 0, 0);
        let (mut sizes, mut strides) = (std::ptr::null(), std::ptr::null());
        let wrong = |expected: String, got: String| {
            Err(Error::argument(spec.name, spec.args[arg].name, expected, got))
        };
        // SAFETY: the handle is alive, and each function writes the value it is named after.
        unsafe {
            (shim.device_type)(handle, &mut kind);
            (shim.device_index)(handle, &mut index);
            (shim.dtype)(handle, &mut code);
            succeeded("a tensor's rank", (shim.dim)(handle, &mut rank))?;
        }
        let device = match kind {
            0 => Device::Cpu,
            1 => Device::Cuda(u32::try_from(index).unwrap_or(0)),
            other => {
                let got =
                    if other == META { "a meta tensor, which has no data" } else { "one of another device" };
                return wrong("a tensor of the CPU or of CUDA".into(), got.into());
            }
        };
        let Some(dtype) = DType::ALL.into_iter().find(|dtype| dtype_code(*dtype) == code) else {
            return wrong(format!("dtype {}", list_types(&spec.types_of(arg))), type_name(code));
        };
        if rank as usize > MAX_RANK {
            return wrong(format!("at most {MAX_RANK} dimensions"), rank.to_string());
        }
        // SAFETY: the handle is alive and has sizes and strides for each dimension, all of them zero or more.
        let layout = unsafe {
            succeeded("a tensor's sizes", (shim.sizes)(handle, &mut sizes))?;
            succeeded("a tensor's strides", (shim.strides)(handle, &mut strides))?;
            let (mut shape, mut steps) = ([0usize; MAX_RANK], [0isize; MAX_RANK]);
            for d in 0..rank as usize {
                (shape[d], steps[d]) = (*sizes.add(d) as usize, *strides.add(d) as isize);
            }
            Layout::strided(Shape::new(&shape[..rank as usize])?, &steps[..rank as usize])?
        };
        Ok(Seen { address: tensor.address()?, dtype, layout, device })
    }
}

/// PyTorch's number for tensors without memory.
const META: i32 = 14;

/// PyTorch's numbers for types.
pub fn dtype_code(dtype: DType) -> i32 {
    match dtype {
        DType::U8 => 0,
        DType::I32 => 3,
        DType::I64 => 4,
        DType::F16 => 5,
        DType::F32 => 6,
        DType::Bool => 11,
        DType::BF16 => 15,
        DType::F8E5M2 => 23,
        DType::F8E4M3 => 24,
    }
}

/// The name of a type that ops do not have.
fn type_name(code: i32) -> String {
    match code {
        1 => "int8".into(),
        2 => "int16".into(),
        7 => "float64".into(),
        8..=10 => "a complex type".into(),
        other => format!("type number {other} of PyTorch's"),
    }
}
