//! Where keys and values are, and how a block of them becomes panels.

use super::{Heads, PerHead, Request, Space};
use crate::cpu::gemm::{Blocks, Matrix, Place};
use crate::cpu::prefetch::fetch_near;
use crate::dtype::DType;
use std::ops::Range;

/// The keys and values of all requests.
#[derive(Clone, Copy)]
pub(crate) struct Cache {
    pub dtype: DType,
    pub k: Heads,
    pub v: Heads,
    pub pages: Option<Pages>,
    /// Factors of what is stored, for each KV head.
    pub k_scale: Option<PerHead>,
    pub v_scale: Option<PerHead>,
}

/// Keys are in pages: key `j` of a request is slot `j % size` of the page that its row of a table of i32 names.
#[derive(Clone, Copy)]
pub(crate) struct Pages {
    pub table: usize,
    /// Distances in elements between the rows of neighbouring requests, and between neighbouring pages of a row.
    pub row: isize,
    pub step: isize,
    pub size: usize,
}

/// A block of keys of a request and KV head.
#[derive(Clone)]
pub(super) struct Block<'a> {
    pub request: &'a Request,
    pub kv_head: usize,
    pub keys: Range<usize>,
    /// How many keys after one that is packed is the one that is asked for.
    pub ahead: usize,
}

/// Where a block is packed: keys and values as panels, and copies of some of them.
#[derive(Clone, Copy)]
pub(super) struct Packed {
    pub keys: *mut f32,
    pub values: *mut f32,
    pub gathered: *mut f32,
}

impl Cache {
    /// Whether keys and values are copied before they are packed: where a page is cut by a tile, or a head is not dense.
    pub(super) fn is_gathered(&self) -> bool {
        let dense = self.k.dim == 1 && self.v.dim == 1;
        self.pages.is_some_and(|pages| !pages.size.is_multiple_of(Blocks::TILE) || !dense)
    }

    /// Whether products use values where they are: heads are whole panels of f32, and one band needs them. More bands
    /// would not find them in the first cache, where tokens a power of two apart compete for the same lines.
    pub(super) fn multiplies_values_in_place(&self, blocks: &Blocks, head_dim: usize, bands: usize) -> bool {
        let panels = self.v.dim == 1 && head_dim.is_multiple_of(Blocks::PANEL);
        let f32 = self.dtype == DType::F32 && blocks.dtype() == DType::F32;
        f32 && panels && bands == 1 && !self.is_gathered()
    }

    /// Whether tiles use keys, and pairs of values, where they are: heads are whole steps of bf16, for few rows.
    pub(super) fn is_direct(&self, blocks: &Blocks, head_dim: usize, rows: usize) -> bool {
        let steps = head_dim.is_multiple_of(Blocks::PANEL) && self.k.dim == 1 && self.v.dim == 1;
        self.dtype == DType::BF16 && steps && blocks.multiplies_direct(rows) && !self.is_gathered()
    }

    /// Address of a key or value of a request, and how many from it on lie evenly in memory.
    ///
    /// # Safety
    /// The key must exist, and its page in the table.
    pub(super) unsafe fn find(
        &self,
        heads: &Heads,
        request: &Request,
        key: usize,
        head: usize,
    ) -> (usize, usize) {
        let size = self.dtype.size();
        let Some(pages) = self.pages else {
            let token = request.first_key + key;
            return (heads.at(size, [request.batch, token, head]), request.kv_len - key);
        };
        let at = request.batch as isize * pages.row + (key / pages.size) as isize * pages.step;
        // SAFETY: the table has this page.
        let page = unsafe { *(pages.table as *const i32).offset(at) } as usize;
        (heads.at(size, [page, key % pages.size, head]), pages.size - key % pages.size)
    }

    /// Bytes from a key or value to the one that is needed later.
    ///
    /// # Safety
    /// As for [`Self::find`].
    unsafe fn ahead(&self, heads: &Heads, block: &Block<'_>, key: usize, address: usize) -> isize {
        let next = key + block.ahead;
        if next >= block.request.kv_len {
            return 0;
        }
        // SAFETY: the key exists.
        let (next, _) = unsafe { self.find(heads, block.request, next, block.kv_head) };
        next.wrapping_sub(address) as isize
    }

    /// Packs a block of some heads, and asks for what comes after it. Where rows are few, memory is the limit: all heads of some
    /// tokens are packed before those of the next, as they lie in memory.
    ///
    /// # Safety
    /// The keys must be the request's, and the targets have the space.
    pub(super) unsafe fn pack(
        &self,
        blocks: &Blocks,
        space: &Space,
        head_dim: usize,
        block: &Block<'_>,
        heads: Range<usize>,
        to: Packed,
    ) {
        let packing = Packing { blocks, space, head_dim, dtype: self.dtype, count: block.keys.len() };
        let most = if space.head_bands == 1 { Blocks::TILE } else { usize::MAX };
        let mut key = block.keys.start;
        while key < block.keys.end {
            let mut packed = 0;
            for (index, kv_head) in heads.clone().enumerate() {
                let block = Block { kv_head, ..block.clone() };
                // SAFETY: passed on.
                unsafe {
                    let [keys, values] = if self.is_gathered() {
                        let copies = to.gathered.wrapping_add(Blocks::TILE * head_dim);
                        let keys = self.gather(&self.k, head_dim, &block, key, to.gathered.cast());
                        [keys, self.gather(&self.v, head_dim, &block, key, copies.cast())]
                    } else {
                        [&self.k, &self.v].map(|heads| self.run(heads, &block, key, most))
                    };
                    packed = keys.at.len();
                    packing.keys(&keys, to.keys.wrapping_add(index * space.keys()));
                    if !space.in_place {
                        packing.values(&values, to.values.wrapping_add(index * space.values()));
                    }
                }
            }
            key += packed;
        }
    }

    /// The keys or values of a block from `key` on that lie evenly, but no more than `most`.
    ///
    /// # Safety
    /// The key must be the block's.
    unsafe fn run(&self, heads: &Heads, block: &Block<'_>, key: usize, most: usize) -> Run {
        // SAFETY: passed on.
        let (data, evenly) = unsafe { self.find(heads, block.request, key, block.kv_head) };
        let at = key - block.keys.start..evenly.min(block.keys.end - key).min(most) + key - block.keys.start;
        // SAFETY: as above.
        let ahead = unsafe { self.ahead(heads, block, key, data) };
        Run { data: data as *const u8, token: heads.token, dim: heads.dim, at, ahead }
    }

    /// Copies some keys or values of a block from `key` on, so that they lie evenly, and asks for later ones.
    ///
    /// # Safety
    /// The key must be the block's, and `to` hold [`Blocks::TILE`] heads.
    pub(super) unsafe fn gather(
        &self,
        heads: &Heads,
        head_dim: usize,
        block: &Block<'_>,
        key: usize,
        to: *mut u8,
    ) -> Run {
        let size = self.dtype.size();
        let keys = key..block.keys.end.min(key + Blocks::TILE);
        for (i, key) in keys.clone().enumerate() {
            // SAFETY: the elements of the key's head, and room for them.
            unsafe {
                let (from, _) = self.find(heads, block.request, key, block.kv_head);
                let ahead = self.ahead(heads, block, key, from);
                let (from, to) = (from as *const u8, to.add(i * head_dim * size));
                if heads.dim == 1 {
                    fetch_near(from.wrapping_offset(ahead), head_dim * size);
                    std::ptr::copy_nonoverlapping(from, to, head_dim * size);
                    continue;
                }
                for d in 0..head_dim {
                    let from = from.offset(d as isize * heads.dim * size as isize);
                    std::ptr::copy_nonoverlapping(from, to.add(d * size), size);
                }
            }
        }
        let at = keys.start - block.keys.start..keys.end - block.keys.start;
        Run { data: to, token: head_dim as isize, dim: 1, at, ahead: 0 }
    }
}

/// Keys or values of a block that lie evenly in memory.
pub(super) struct Run {
    pub data: *const u8,
    /// Distances in elements.
    pub token: isize,
    pub dim: isize,
    /// Where in the block they are.
    pub at: Range<usize>,
    /// Bytes to those that are needed later.
    pub ahead: isize,
}

/// What is the same for all runs of a block.
struct Packing<'a> {
    blocks: &'a Blocks,
    space: &'a Space,
    head_dim: usize,
    dtype: DType,
    /// Keys of the block.
    count: usize,
}

impl Packing<'_> {
    /// Keys are columns, elements of a head units.
    ///
    /// # Safety
    /// The run must be readable, and `to` hold a block's keys.
    unsafe fn keys(&self, run: &Run, to: *mut f32) {
        let matrix = Matrix {
            data: run.data,
            dtype: self.dtype,
            rows: run.at.len(),
            k: self.head_dim,
            row_stride: run.token,
            k_stride: run.dim,
        };
        let last = run.at.end == self.count;
        let end = if last { run.at.end.next_multiple_of(Blocks::PANEL) } else { run.at.end };
        let units = self.space.units;
        let place = Place { columns: run.at.start..end, units: 0..units, panel: units };
        // SAFETY: passed on.
        unsafe { self.blocks.pack_panels(&matrix, run.ahead, &place, to.cast()) };
    }

    /// Elements of a head are columns, keys units.
    ///
    /// # Safety
    /// The run must be readable, and `to` hold a block's values.
    unsafe fn values(&self, run: &Run, to: *mut f32) {
        let matrix = Matrix {
            data: run.data,
            dtype: self.dtype,
            rows: self.head_dim,
            k: run.at.len(),
            row_stride: run.dim,
            k_stride: run.token,
        };
        let end = if run.at.end == self.count { self.space.block_keys } else { run.at.end };
        let per_unit = self.blocks.per_unit();
        let units = run.at.start / per_unit..end / per_unit;
        let columns = 0..self.space.panels * Blocks::PANEL;
        let place = Place { columns, units, panel: self.space.value_units };
        // SAFETY: passed on.
        unsafe { self.blocks.pack_panels(&matrix, run.ahead, &place, to.cast()) };
    }
}
