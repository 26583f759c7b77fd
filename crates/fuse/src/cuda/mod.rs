//! Fused kernels on GPUs: a source for each, from the library's headers, through the library's compiler and cache.

mod call;
mod expression;
mod params;
mod prepared;
mod source;
mod variant;

use crate::error::Result;
use crate::graph::Graph;
use crate::plan::{Kernel, Kind};
pub use call::CudaCompiled;
use params::Extents;
pub use prepared::Prepared;
use source::Writer;
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};
pub use variant::{Config, Rows, Variant};
use warpsmith::jit::{Arch, Request, Source};

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
    extents: Extents,
}

impl CudaSource {
    /// The source of a kernel for tensors that lie as the variant says.
    ///
    /// # Errors
    /// If a node has no CUDA code, or there are too many tensors for one kernel.
    pub fn new(graph: &Graph, kernel: &Kernel, variant: &Variant) -> Result<CudaSource> {
        let config = Config::new(graph, kernel, variant);
        let writer = Writer::new(graph, kernel, config.kept).ahead(config.ahead);
        let (tensors, sums) = (writer.shape.tensors().count(), writer.shape.sums.len());
        let sizes = writer.sizes.clone();
        let extents = Extents::new(tensors, variant.rank, sizes.len())?;
        let text = writer.write("fuse_kernel")?;
        let hash = blake3::hash(text.as_bytes()).to_hex();
        let name = format!("fuse_{}", &hash[..12]);
        let code = text.replace("fuse_kernel", &name);
        let direct = config.pieces == 1 && config.kept == Rows::Kept;
        let numbers = [
            ("WIDTH", config.vector),
            ("ITEMS", config.items),
            ("LANES", config.lanes),
            ("ROWS", config.rows),
            ("JUMP", config.jump),
            // Columns that were merged with rows are as many as there are elements, which is no property of the graph.
            ("COLUMNS", if variant.fixed { variant.columns } else { 0 }),
            ("EXACT", usize::from(config.exact)),
            ("LARGE", usize::from(variant.large)),
            ("SUMS", sums),
            ("ONE", usize::from(variant.kept == 1)),
            ("GROUPS", config.groups()),
            ("DIRECT", usize::from(direct)),
        ];
        let mut defines: Vec<(String, String)> =
            numbers.iter().map(|(name, number)| (name.to_string(), number.to_string())).collect();
        defines.extend(extents.defines());
        let dense = |t: usize| variant.dense.get(t).copied().unwrap_or(false);
        defines.extend((0..tensors).map(|t| (format!("DENSE_{t}"), u8::from(dense(t)).to_string())));
        Ok(CudaSource { name, code, defines, config, sizes, extents })
    }

    /// Whether a second kernel adds up pieces of sums over rows.
    fn has_totals(&self, kind: Kind) -> bool {
        kind == Kind::Columns && !(self.config.pieces == 1 && self.config.kept == Rows::Kept)
    }

    /// The layout of its threads in words.
    pub fn describe(&self) -> String {
        let Config { vector, items, lanes, rows, kept, .. } = self.config;
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
