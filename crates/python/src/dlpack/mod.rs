//! DLPack: memory handed over between libraries without a copy.
//!
//! The structures are those of DLPack 1.1, written down here because they are few and their rules (who deletes, when, on
//! which thread) are ours to keep.

mod exchange;
mod export;
mod import;

pub use exchange::{Exchange, View};
pub use export::{Request, export};
pub use import::import;

use std::ffi::{CStr, c_void};
use warpsmith::{DType, Device};

/// Names of capsules. A consumer renames a capsule it has taken, after which its destructor leaves the tensor alone.
const NAME: &CStr = c"dltensor";
const USED: &CStr = c"used_dltensor";
const NAME_VERSIONED: &CStr = c"dltensor_versioned";
const USED_VERSIONED: &CStr = c"used_dltensor_versioned";

const READ_ONLY: u64 = 1;
const IS_COPIED: u64 = 2;
/// The version that this file follows.
const VERSION: Version = Version { major: 1, minor: 1 };

#[repr(C)]
#[derive(Clone, Copy)]
struct Version {
    major: u32,
    minor: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RawDevice {
    kind: i32,
    id: i32,
}

#[repr(C)]
#[derive(Clone, Copy, PartialEq)]
struct RawType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct RawTensor {
    data: *mut c_void,
    device: RawDevice,
    ndim: i32,
    dtype: RawType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// What a capsule `dltensor` holds.
#[repr(C)]
struct Managed {
    tensor: RawTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// What a capsule `dltensor_versioned` holds. Of another major version, nothing but the first three fields may be touched.
#[repr(C)]
struct ManagedVersioned {
    version: Version,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    flags: u64,
    tensor: RawTensor,
}

/// Kinds of devices. Pinned host memory is host memory, and managed memory can be used on its device.
mod device_kind {
    pub const CPU: i32 = 1;
    pub const CUDA: i32 = 2;
    pub const CUDA_HOST: i32 = 3;
    pub const CUDA_MANAGED: i32 = 13;
}

fn raw_type(dtype: DType) -> RawType {
    let (code, bits) = match dtype {
        DType::F32 => (2, 32),
        DType::F16 => (2, 16),
        DType::BF16 => (4, 16),
        DType::F8E4M3 => (10, 8),
        DType::F8E5M2 => (12, 8),
        DType::I64 => (0, 64),
        DType::I32 => (0, 32),
        DType::U8 => (1, 8),
        DType::Bool => (6, 8),
    };
    RawType { code, bits, lanes: 1 }
}

fn dtype_of(raw: RawType) -> Option<DType> {
    DType::ALL.into_iter().find(|dtype| raw_type(*dtype) == raw)
}

/// What `__dlpack_device__` says of a device.
pub fn device_pair(device: Device) -> (i32, i32) {
    match device {
        Device::Cpu => (device_kind::CPU, 0),
        Device::Cuda(ordinal) => (device_kind::CUDA, ordinal as i32),
    }
}

fn device_of(kind: i32, id: i32) -> Option<Device> {
    match kind {
        device_kind::CPU | device_kind::CUDA_HOST => Some(Device::Cpu),
        device_kind::CUDA | device_kind::CUDA_MANAGED => Some(Device::Cuda(u32::try_from(id).ok()?)),
        _ => None,
    }
}
