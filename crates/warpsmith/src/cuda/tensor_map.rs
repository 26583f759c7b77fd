//! Descriptions of tensors for the bulk copy engine of Hopper and later.

use super::driver;
use crate::error::{Error, Result};
use crate::jit::{AddressKind, CType};
use crate::tensor::DType;
use cudarc::driver::sys::{
    CUtensorMap, CUtensorMapDataType as DataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave,
    CUtensorMapL2promotion, CUtensorMapSwizzle,
};

/// Dimensions the copy engine knows.
const MOST_DIMENSIONS: usize = 5;
/// Alignment in bytes of the address and of every stride.
const ALIGNMENT: u64 = 16;
/// Strides are smaller than this many bytes.
const STRIDE_LIMIT: u64 = 1 << 40;
/// Sizes are at most this many elements.
const SIZE_LIMIT: u64 = 1 << 32;
/// Extents of a box are at most this many elements.
const BOX_LIMIT: u32 = 256;
/// No encoded map starts like this: its first word is an address.
const PLACEHOLDER: u64 = 0xfeed << 48;

/// How the copy engine permutes the 16-byte units of a box in shared memory, so that columns of it can be read without
/// bank conflicts. The rows of the box are at most as long as the name says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Swizzle {
    /// In order.
    None,
    /// Rows of 32 bytes.
    B32,
    /// Rows of 64 bytes.
    B64,
    /// Rows of 128 bytes.
    B128,
}

impl Swizzle {
    /// The longest row of a box in bytes.
    pub const fn span(self) -> u64 {
        match self {
            Swizzle::None => BOX_LIMIT as u64 * 8,
            Swizzle::B32 => 32,
            Swizzle::B64 => 64,
            Swizzle::B128 => 128,
        }
    }

    fn code(self) -> CUtensorMapSwizzle {
        match self {
            Swizzle::None => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
            Swizzle::B32 => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_32B,
            Swizzle::B64 => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            Swizzle::B128 => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        }
    }
}

/// What a [`TensorMap`] describes: a tensor in device memory and the box of it that one copy moves. Dimensions are
/// listed from the innermost, whose elements are dense, to the outermost.
#[derive(Clone, Copy, Debug)]
pub struct Tiled<'a> {
    /// Device address of the first element, a multiple of 16.
    pub address: u64,
    /// Type of the elements. Copies move bits: any type of the same size works.
    pub dtype: DType,
    /// Elements of each dimension, 1 to 5 of them.
    pub sizes: &'a [u64],
    /// Distance in bytes of neighbours in each dimension but the innermost; multiples of 16.
    pub strides: &'a [u64],
    /// Elements of the box in each dimension, at most 256; the innermost a multiple of 16 bytes.
    pub extents: &'a [u32],
    /// Order of the box in shared memory.
    pub swizzle: Swizzle,
}

impl Tiled<'_> {
    /// Names the first rule of the copy engine that this breaks.
    fn check(&self) -> Result<()> {
        let refuse = |what: String, expected: String, got: String| {
            Err(Error::argument("tensor map", what, expected, got))
        };
        let rank = self.sizes.len();
        if !(1..=MOST_DIMENSIONS).contains(&rank) {
            return refuse("sizes".into(), format!("1 to {MOST_DIMENSIONS} dimensions"), rank.to_string());
        }
        for (what, expected, got) in
            [("strides", rank - 1, self.strides.len()), ("extents", rank, self.extents.len())]
        {
            if got != expected {
                return refuse(what.into(), format!("{expected} of them"), got.to_string());
            }
        }
        if self.address == 0 || !self.address.is_multiple_of(ALIGNMENT) {
            return refuse(
                "address".into(),
                format!("a multiple of {ALIGNMENT}"),
                format!("{:#x}", self.address),
            );
        }
        for (d, &size) in self.sizes.iter().enumerate() {
            if !(1..=SIZE_LIMIT).contains(&size) {
                return refuse(format!("sizes[{d}]"), format!("1 to {SIZE_LIMIT}"), size.to_string());
            }
        }
        for (d, &stride) in self.strides.iter().enumerate() {
            if stride == 0 || stride >= STRIDE_LIMIT || !stride.is_multiple_of(ALIGNMENT) {
                let expected = format!("a positive multiple of {ALIGNMENT} bytes below 2^40");
                return refuse(format!("strides[{d}]"), expected, stride.to_string());
            }
        }
        for (d, &extent) in self.extents.iter().enumerate() {
            if !(1..=BOX_LIMIT).contains(&extent) {
                return refuse(format!("extents[{d}]"), format!("1 to {BOX_LIMIT}"), extent.to_string());
            }
        }
        let row = u64::from(self.extents[0]) * self.dtype.size() as u64;
        if !row.is_multiple_of(ALIGNMENT) || row > self.swizzle.span() {
            let expected =
                format!("a multiple of {ALIGNMENT} bytes, at most {} of them", self.swizzle.span());
            return refuse("extents[0]".into(), expected, format!("{row} bytes"));
        }
        Ok(())
    }
}

/// A tensor as the copy engine sees it, passed to kernels by value inside their parameters: its C twin is `TensorMap`,
/// aligned to 64 bytes. What lies outside the tensor is read as zero and not written.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMap {
    opaque: [u64; 16],
}

impl TensorMap {
    /// A map for a parameter that the kernel does not use.
    pub const UNUSED: TensorMap = TensorMap { opaque: [0; 16] };

    /// Stands for description `index` of a recording until it is encoded.
    pub(super) fn placeholder(index: usize) -> TensorMap {
        let mut opaque = [0; 16];
        opaque[0] = PLACEHOLDER | index as u64;
        TensorMap { opaque }
    }

    /// The description this stands for, if it is a placeholder.
    pub(super) fn placeholder_index(&self) -> Option<usize> {
        let [first, rest @ ..] = self.opaque;
        let stands = first & PLACEHOLDER == PLACEHOLDER && rest == [0; 15];
        stands.then_some((first & !PLACEHOLDER) as usize)
    }

    /// The map with another first word.
    pub(super) fn with_first_word(mut self, word: u64) -> TensorMap {
        self.opaque[0] = word;
        self
    }

    /// Puts another address into the map.
    pub(super) fn replace_address(&mut self, address: u64) -> Result<()> {
        let api = driver::api()?;
        let replace =
            api.cuTensorMapReplaceAddress.ok_or_else(|| unavailable("cuTensorMapReplaceAddress"))?;
        // SAFETY: the map is one that the driver encoded, and is aligned as it asks; the address is only recorded.
        let code = unsafe { replace((&raw mut *self).cast(), address as *mut std::ffi::c_void) };
        api.check("cuTensorMapReplaceAddress", code)
    }

    /// Encodes a map. Needs the driver's library, and neither allocates nor touches a device: it can be done for every
    /// launch. The map holds the address: it is good for as long as the memory there is.
    pub fn encode(tensor: &Tiled<'_>) -> Result<TensorMap> {
        tensor.check()?;
        let api = driver::api()?;
        let encode = api.cuTensorMapEncodeTiled.ok_or_else(|| unavailable("cuTensorMapEncodeTiled"))?;
        let mut map = CUtensorMap { opaque: [0; 16] };
        let steps = [1u32; MOST_DIMENSIONS];
        // SAFETY: the driver reads `rank` sizes, extents and steps and `rank - 1` strides, whose numbers `check`
        // compared, and writes the map. The address is only recorded.
        let code = unsafe {
            encode(
                &mut map,
                data_type(tensor.dtype),
                tensor.sizes.len() as u32,
                tensor.address as *mut std::ffi::c_void,
                tensor.sizes.as_ptr(),
                tensor.strides.as_ptr(),
                tensor.extents.as_ptr(),
                steps.as_ptr(),
                CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                tensor.swizzle.code(),
                CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        api.check("cuTensorMapEncodeTiled", code)?;
        Ok(TensorMap { opaque: map.opaque })
    }
}

fn unavailable(function: &str) -> Error {
    Error::Unavailable {
        what: function.into(),
        why: "the driver does not have it".into(),
        fix: "Update the driver to CUDA 12 or newer".into(),
    }
}

fn data_type(dtype: DType) -> DataType {
    match dtype {
        DType::F32 => DataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        DType::F16 => DataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        DType::BF16 => DataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        DType::I64 => DataType::CU_TENSOR_MAP_DATA_TYPE_INT64,
        DType::I32 => DataType::CU_TENSOR_MAP_DATA_TYPE_INT32,
        DType::F8E4M3 | DType::F8E5M2 | DType::U8 | DType::Bool => DataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }
}

// SAFETY: the C twin has the same bytes and alignment.
unsafe impl CType for TensorMap {
    fn field(name: &str) -> String {
        format!("TensorMap {name}")
    }
    fn addresses(at: usize, found: &mut Vec<(usize, AddressKind)>) {
        found.push((at, AddressKind::TensorMap));
    }
    fn declare(out: &mut String) {
        if !out.contains("TensorMap {") {
            out.push_str("struct alignas(64) TensorMap {\n  unsigned long long opaque[16];\n};\n");
        }
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use crate::kernel_params;

    const GOOD: Tiled<'static> = Tiled {
        address: 0x1000,
        dtype: DType::BF16,
        sizes: &[4096, 100, 3],
        strides: &[8192, 819200],
        extents: &[64, 128, 1],
        swizzle: Swizzle::B128,
    };

    /// The argument an error names.
    fn refused(tensor: Tiled<'_>) -> Option<String> {
        match tensor.check() {
            Ok(()) => None,
            Err(Error::Argument { arg, .. }) => Some(arg),
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn every_rule_of_the_copy_engine_is_named() {
        assert_eq!(refused(GOOD), None);
        let cases = [
            (Tiled { sizes: &[], ..GOOD }, "sizes"),
            (Tiled { sizes: &[1; 6], ..GOOD }, "sizes"),
            (Tiled { strides: &[8192], ..GOOD }, "strides"),
            (Tiled { extents: &[64, 128], ..GOOD }, "extents"),
            (Tiled { address: 0, ..GOOD }, "address"),
            (Tiled { address: 0x1008, ..GOOD }, "address"),
            (Tiled { sizes: &[4096, 0, 3], ..GOOD }, "sizes[1]"),
            (Tiled { sizes: &[(1 << 32) + 1, 1, 1], ..GOOD }, "sizes[0]"),
            (Tiled { strides: &[8200, 819200], ..GOOD }, "strides[0]"),
            (Tiled { strides: &[8192, 0], ..GOOD }, "strides[1]"),
            (Tiled { strides: &[8192, 1 << 40], ..GOOD }, "strides[1]"),
            (Tiled { extents: &[64, 257, 1], ..GOOD }, "extents[1]"),
            (Tiled { extents: &[64, 128, 0], ..GOOD }, "extents[2]"),
            (Tiled { extents: &[72, 128, 1], ..GOOD }, "extents[0]"),
            (Tiled { extents: &[4, 128, 1], ..GOOD }, "extents[0]"),
            (Tiled { swizzle: Swizzle::B64, ..GOOD }, "extents[0]"),
        ];
        for (tensor, argument) in cases {
            assert_eq!(refused(tensor).as_deref(), Some(argument), "{tensor:?}");
        }
    }

    #[test]
    fn bad_tensors_are_refused_before_the_driver_is_looked_for() {
        let error = TensorMap::encode(&Tiled { address: 8, ..GOOD }).unwrap_err();
        assert!(matches!(error, Error::Argument { .. }), "{error}");
    }

    kernel_params! { struct WithMaps { a: TensorMap, b: TensorMap, size: i32 } }

    #[test]
    fn the_twin_of_a_struct_with_maps_is_aligned() {
        let text = WithMaps::prelude();
        assert_eq!(text.matches("struct alignas(64) TensorMap {").count(), 1, "{text}");
        assert!(text.contains("sizeof(WithMaps) == 320"), "{text}");
        assert_eq!(align_of::<WithMaps>(), 64);
    }
}
