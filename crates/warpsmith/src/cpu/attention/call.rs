//! One call that passed the op's check.

use super::cache::Cache;
use super::dropout::Dropout;
use super::heads::{Grid, Heads, PerHead, Request};
use crate::cpu::Tier;
use crate::tensor::DType;
use std::ops::Range;

/// Keys of a block, unless the caller wants fewer.
pub(crate) const KEYS: usize = 128;
/// Keys of a segment.
pub(super) const SEGMENT: usize = 8 * KEYS;

/// One call.
pub(crate) struct Call<'a> {
    pub tier: Tier,
    /// The type of queries and results.
    pub dtype: DType,
    pub num_kv_heads: usize,
    /// Query heads that share a KV head.
    pub group: usize,
    /// A multiple of the widest vectors' lanes.
    pub head_dim: usize,
    pub q: Heads,
    pub cache: Cache,
    pub out: Heads,
    /// Elements are f32, one for a head.
    pub lse: Option<Heads>,
    pub sinks: Option<PerHead>,
    /// Bytes; scores where they are zero do not count.
    pub mask: Option<Grid>,
    /// Added to scores.
    pub bias: Option<(Grid, DType)>,
    /// Zero for none.
    pub softcap: f32,
    pub scale: f32,
    /// Which weights do not count after they are summed up.
    pub dropout: Option<Dropout>,
    /// Rows of a job, at least `group`; zero to choose the best number.
    pub block_rows: usize,
    /// Keys of a block: whole panels, at most [`KEYS`].
    pub block_keys: usize,
    /// The keys a query of a request sees, before masking. Both ends ascend with the query.
    pub keys: &'a (dyn Fn(usize, &Request) -> Range<usize> + Sync),
}
