//! Fused kernels on GPUs: a source for each, from the library's headers, through the library's compiler and cache.

mod call;
mod expression;
mod source;

use crate::error::Result;
use crate::graph::Graph;
use crate::kernel::Role;
use crate::plan::{Kernel, Kind};
pub use call::CudaCompiled;
pub use source::Rows;
use source::Writer;
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};
use warpsmith::jit::{Arch, Request, Source};

/// Registers of a thread for elements of its row, at most.
const MAX_HELD: usize = 96;
/// Threads of a row, at most.
const MAX_LANES: usize = 1024;

/// How a kernel's threads are laid out.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// Neighbouring columns of a thread.
    pub vector: usize,
    /// Times that many a thread has in registers.
    pub items: usize,
    /// Threads of a row.
    pub lanes: usize,
    /// Rows of a block.
    pub rows: usize,
    /// Whether rows stay in registers.
    pub kept: Rows,
}

/// The source of a fused kernel, and what it is compiled with.
#[derive(Clone, Debug)]
pub struct CudaSource {
    /// Its name, which says what it is made of.
    pub name: String,
    /// CUDA C++.
    pub code: String,
    /// Macros.
    pub defines: Vec<(String, String)>,
    /// The layout of its threads.
    pub config: Config,
    /// Sizes that its parameters have, in order.
    pub sizes: Vec<crate::shape::Dim>,
}

impl Config {
    /// The layout for rows of so many columns.
    pub fn new(graph: &Graph, kernel: &Kernel, columns: usize) -> Config {
        let writer = Writer::new(graph, kernel, Rows::Kept);
        let all = writer.shape.reads.iter().chain(&writer.shape.writes);
        let elements = all.filter(|tensor| matches!(tensor.role, Role::Elements | Role::Table));
        let narrow = elements.map(|tensor| tensor.dtype.size()).any(|size| size == 2);
        let vector = if narrow { 8 } else { 4 };
        if kernel.kind == Kind::Elements {
            return Config { vector, items: 1, lanes: 256, rows: 1, kept: Rows::Kept };
        }
        let held = writer.held().max(1);
        let units = columns.div_ceil(vector).max(1);
        if kernel.kind == Kind::Columns && writer.phases == 1 {
            // Columns are dealt to blocks.
            let lanes = units.next_power_of_two().clamp(32, 128);
            return Config { vector, items: 1, lanes, rows: 1, kept: Rows::Kept };
        }
        for items in 1..=4 {
            let lanes = units.div_ceil(items).next_power_of_two().max(32);
            let most = if items < 4 { 256 } else { MAX_LANES };
            if lanes <= most && held * items * vector <= MAX_HELD {
                let rows = if lanes == 32 && kernel.kind == Kind::Rows { 4 } else { 1 };
                return Config { vector, items, lanes, rows, kept: Rows::Kept };
            }
        }
        Config { vector, items: 1, lanes: 512, rows: 1, kept: Rows::ReadAgain }
    }
}

impl CudaSource {
    /// The source of a kernel for rows of so many columns; `dense` says of each tensor, in order, whether its rows are
    /// dense and aligned to 16 bytes.
    ///
    /// # Errors
    /// If a node has no CUDA code.
    pub fn new(
        graph: &Graph,
        kernel: &Kernel,
        columns: usize,
        dense: &dyn Fn(usize) -> bool,
    ) -> Result<CudaSource> {
        let config = Config::new(graph, kernel, columns);
        let writer = Writer::new(graph, kernel, config.kept);
        if kernel.kind == Kind::Columns && config.kept == Rows::ReadAgain {
            let what = "sums over rows that are too long to be kept in registers have no CUDA code";
            return Err(crate::Error::node("sum_to", what));
        }
        let (tensors, sizes) = (writer.shape.tensors().count(), writer.sizes.clone());
        let text = writer.write("fuse_kernel")?;
        let hash = blake3::hash(text.as_bytes()).to_hex();
        let name = format!("fuse_{}", &hash[..12]);
        let code = text.replace("fuse_kernel", &name);
        let mut defines = vec![
            ("WIDTH".to_string(), config.vector.to_string()),
            ("ITEMS".to_string(), config.items.to_string()),
            ("LANES".to_string(), config.lanes.to_string()),
            ("ROWS".to_string(), config.rows.to_string()),
        ];
        defines.extend((0..tensors).map(|t| (format!("DENSE_{t}"), u8::from(dense(t)).to_string())));
        Ok(CudaSource { name, code, defines, config, sizes })
    }

    /// The layout of its threads in words.
    pub fn describe(&self) -> String {
        let Config { vector, items, lanes, rows, kept } = self.config;
        let keeps = match kept {
            Rows::Kept => "kept in registers",
            Rows::ReadAgain => "read again after each reduction",
        };
        format!(
            "{}, {vector} columns x {items} for each of {lanes} threads, {rows} rows a block, {keeps}",
            self.name
        )
    }

    /// Calls `f` with the request that compiles it. Sources of requests live as long as the process; each is kept once.
    pub fn with_request<R>(&self, arch: Arch, f: impl FnOnce(&Request<'_>) -> R) -> R {
        static SOURCES: LazyLock<Mutex<HashMap<String, &'static Source>>> = LazyLock::new(Mutex::default);
        let source =
            *SOURCES.lock().unwrap_or_else(PoisonError::into_inner).entry(self.name.clone()).or_insert_with(
                || {
                    let leak = |text: &str| -> &'static str { Box::leak(text.to_owned().into_boxed_str()) };
                    Box::leak(Box::new(Source { name: leak(&self.name), code: leak(&self.code) }))
                },
            );
        let defines: Vec<(&str, String)> =
            self.defines.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
        let request = Request { defines: &defines, ..Request::new(source, arch) };
        f(&request)
    }
}
