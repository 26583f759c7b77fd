//! The CUDA driver layer, the only place that touches the driver: contexts, streams, memory, graphs, modules and
//! launches. Nothing here panics or fails to build where CUDA is missing: [`device_count`] is 0 and
//! [`Context::get`] says why.

mod activity;
mod arena;
mod context;
mod copy;
pub mod cublaslt;
mod driver;
mod graph;
mod launch;
mod memory;
mod module;
mod order;
mod pinned;
mod recording;
pub mod rows;
mod stream;
mod tensor_map;
mod timing;

pub use context::{Context, DeviceProps, MemoryStats, device_count, status};
pub use copy::{copy_d2d, download, download_async, fill_u8, fill_u32, measure_copy, upload, upload_async};
pub use driver::probe_library;
pub use graph::{Graph, GraphExec};
pub use launch::{LaunchConfig, check_limits, launch};
pub use memory::DeviceBuffer;
pub(crate) use memory::{Allocation, Capture};
pub use module::{Function, FunctionAttributes, Module};
pub use order::Access;
pub use pinned::{PinnedBuffer, PinnedStats};
pub use recording::{Recorder, Recording, load};
pub use stream::{Event, Stream};
pub use tensor_map::{Swizzle, TensorMap, Tiled};
pub(crate) use timing::Timing;
