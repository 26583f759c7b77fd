//! Where keys and values are, and how a block of them becomes panels.

use super::{Heads, KEYS, PerHead, Request, Space};
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

/// A block of keys of a request and KV head, and the one that is needed next.
pub(super) struct Block<'a> {
    pub request: &'a Request,
    pub kv_head: usize,
    pub keys: Range<usize>,
    pub next_head: usize,
    /// Its first key, which need not exist.
    pub next_key: usize,
}

/// Where a block is packed: keys and values as panels, and copies of either.
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

    /// Whether products can use values where they are: heads are whole panels of f32, and long runs of keys lie evenly or
    /// are used once.
    pub(super) fn has_values_for(&self, blocks: &Blocks, head_dim: usize, bands: usize) -> bool {
        let panels = self.v.dim == 1 && head_dim.is_multiple_of(Blocks::PANEL);
        let evenly = self.pages.is_none() || (bands == 1 && !self.is_gathered());
        self.dtype == DType::F32 && blocks.dtype() == DType::F32 && panels && evenly
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

    /// Bytes from a key or value of a block to the one in its place in the next block.
    ///
    /// # Safety
    /// As for [`Self::find`].
    unsafe fn ahead(&self, heads: &Heads, block: &Block<'_>, key: usize, address: usize) -> isize {
        let next = block.next_key + (key - block.keys.start);
        if next >= block.request.kv_len {
            return 0;
        }
        // SAFETY: the key exists.
        let (next, _) = unsafe { self.find(heads, block.request, next, block.next_head) };
        next.wrapping_sub(address) as isize
    }

    /// Packs a block, and asks for the next.
    ///
    /// # Safety
    /// The keys must be the request's, and the targets have the space.
    pub(super) unsafe fn pack(
        &self,
        blocks: &Blocks,
        space: &Space,
        head_dim: usize,
        block: &Block<'_>,
        to: Packed,
    ) {
        // Keys are columns of panels, elements of a head units. Of the values elements are columns.
        let columns = block.keys.len().next_multiple_of(Blocks::PANEL);
        let pack_keys = |data, count, token, dim, at: usize, ahead| {
            let k = Matrix {
                data,
                dtype: self.dtype,
                rows: count,
                k: head_dim,
                row_stride: token,
                k_stride: dim,
            };
            let end = if at + count == block.keys.len() { columns } else { at + count };
            let place = Place { columns: at..end, units: 0..space.units, panel: space.units };
            // SAFETY: the block's keys are readable, and all columns are inside the panels.
            unsafe { blocks.pack_panels(&k, ahead, &place, to.keys.cast()) };
        };
        let pack_values = |data, count, token, dim, at: usize, ahead| {
            let v = Matrix {
                data,
                dtype: self.dtype,
                rows: head_dim,
                k: count,
                row_stride: dim,
                k_stride: token,
            };
            let from = at / blocks.per_unit();
            let end = if at + count == block.keys.len() { KEYS } else { at + count };
            let units = from..end / blocks.per_unit();
            let place = Place { columns: 0..space.panels * Blocks::PANEL, units, panel: space.value_units };
            // SAFETY: as above.
            unsafe { blocks.pack_panels(&v, ahead, &place, to.values.cast()) };
        };
        // SAFETY: passed on.
        unsafe {
            if self.is_gathered() {
                let dense = head_dim as isize;
                self.gather(&self.k, head_dim, block, to.gathered.cast());
                pack_keys(to.gathered.cast(), block.keys.len(), dense, 1, 0, 0);
                self.gather(&self.v, head_dim, block, to.gathered.cast());
                pack_values(to.gathered.cast(), block.keys.len(), dense, 1, 0, 0);
                return;
            }
            let mut key = block.keys.start;
            while key < block.keys.end {
                let (k, evenly) = self.find(&self.k, block.request, key, block.kv_head);
                let (v, _) = self.find(&self.v, block.request, key, block.kv_head);
                let (count, at) = (evenly.min(block.keys.end - key), key - block.keys.start);
                let ahead = self.ahead(&self.k, block, key, k);
                pack_keys(k as *const u8, count, self.k.token, self.k.dim, at, ahead);
                let ahead = self.ahead(&self.v, block, key, v);
                if space.in_place {
                    let rows =
                        (0..count).map(|i| v.wrapping_add_signed(ahead + i as isize * self.v.token * 4));
                    rows.for_each(|row| fetch_near(row as *const u8, head_dim * size_of::<f32>()));
                } else {
                    pack_values(v as *const u8, count, self.v.token, self.v.dim, at, ahead);
                }
                key += count;
            }
        }
    }

    /// Copies the keys or values of a block one after the other.
    ///
    /// # Safety
    /// The keys must be the request's, and `to` hold a block.
    unsafe fn gather(&self, heads: &Heads, head_dim: usize, block: &Block<'_>, to: *mut u8) {
        let size = self.dtype.size();
        for (i, key) in block.keys.clone().enumerate() {
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
    }
}
