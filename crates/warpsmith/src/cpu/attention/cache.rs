//! Where keys and values are.

use super::heads::{Heads, PerHead, Request};
use crate::cpu::gemm::Blocks;
use crate::cpu::prefetch::fetch_near;
use crate::tensor::DType;
use std::ops::Range;

/// The keys and values of all requests.
#[derive(Clone, Copy)]
pub(crate) struct Cache {
    /// The call's, or one of 8 bits.
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

/// A block of keys of a request.
pub(super) struct Block<'a> {
    pub request: &'a Request,
    pub keys: Range<usize>,
    /// How many keys ahead of the one being packed to prefetch.
    pub ahead: usize,
}

impl Block<'_> {
    pub fn of_head(&self, kv_head: usize) -> HeadBlock<'_> {
        HeadBlock { block: self, kv_head }
    }
}

/// A block of keys of one KV head.
pub(super) struct HeadBlock<'a> {
    block: &'a Block<'a>,
    kv_head: usize,
}

impl Cache {
    /// Whether keys and values are copied before they are packed: needed where a tile crosses a page boundary or a head
    /// is not dense.
    pub(super) fn is_gathered(&self) -> bool {
        let dense = self.k.dim == 1 && self.v.dim == 1;
        self.pages.is_some_and(|pages| !pages.size.is_multiple_of(Blocks::TILE) || !dense)
    }

    /// Whether products use values where they are: heads are whole panels of f32, and one band needs them. With more
    /// bands they would not stay in L1, where tokens a power of two apart compete for the same lines.
    pub(super) fn multiplies_values_in_place(&self, blocks: &Blocks, head_dim: usize, bands: usize) -> bool {
        let panels = self.v.dim == 1 && head_dim.is_multiple_of(Blocks::PANEL);
        let f32 = self.dtype == DType::F32 && blocks.dtype() == DType::F32;
        f32 && panels && bands == 1 && !self.is_gathered()
    }

    /// Whether tiles use keys, and pairs of values, where they are: heads are whole steps, for few rows.
    pub(super) fn is_direct(&self, blocks: &Blocks, head_dim: usize, rows: usize) -> bool {
        let steps = head_dim.is_multiple_of(Blocks::PANEL) && self.k.dim == 1 && self.v.dim == 1;
        self.dtype == blocks.dtype() && steps && blocks.multiplies_direct(rows) && !self.is_gathered()
    }

    /// Address of a key or value of a request, and how many from there on are evenly spaced in memory.
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
    unsafe fn ahead(&self, heads: &Heads, of: &HeadBlock<'_>, key: usize, address: usize) -> isize {
        let HeadBlock { block, kv_head } = *of;
        let next = key + block.ahead;
        if next >= block.request.kv_len {
            return 0;
        }
        // SAFETY: the key exists.
        let (next, _) = unsafe { self.find(heads, block.request, next, kv_head) };
        next.wrapping_sub(address) as isize
    }

    /// The evenly spaced keys or values of a block from `key` on, at most `most`.
    ///
    /// # Safety
    /// The key must be the block's.
    pub(super) unsafe fn run(&self, heads: &Heads, of: &HeadBlock<'_>, key: usize, most: usize) -> Run {
        let HeadBlock { block, kv_head } = *of;
        // SAFETY: passed on.
        let (data, evenly) = unsafe { self.find(heads, block.request, key, kv_head) };
        let at = key - block.keys.start..evenly.min(block.keys.end - key).min(most) + key - block.keys.start;
        // SAFETY: as above.
        let ahead = unsafe { self.ahead(heads, of, key, data) };
        Run { data: data as *const u8, token: heads.token, dim: heads.dim, at, ahead }
    }

    /// Copies some keys or values of a block from `key` on, so that they are evenly spaced, and prefetches later ones.
    ///
    /// # Safety
    /// The key must be the block's, and `to` hold [`Blocks::TILE`] heads.
    pub(super) unsafe fn gather(
        &self,
        heads: &Heads,
        head_dim: usize,
        of: &HeadBlock<'_>,
        key: usize,
        to: *mut u8,
    ) -> Run {
        let HeadBlock { block, kv_head } = *of;
        let size = self.dtype.size();
        let keys = key..block.keys.end.min(key + Blocks::TILE);
        for (i, key) in keys.clone().enumerate() {
            // SAFETY: the elements of the key's head, and room for them.
            unsafe {
                let (from, _) = self.find(heads, block.request, key, kv_head);
                let ahead = self.ahead(heads, of, key, from);
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

/// Keys or values of a block that are evenly spaced in memory.
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
