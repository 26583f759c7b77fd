//! Where the tensors of a call lie in a kernel's domain.

use crate::Memory;
use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::kernel::{Role, Shape};
use crate::shape::Sizes;
use warpsmith::DType;

/// One tensor of a call.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub address: *mut u8,
    pub dtype: DType,
    pub role: Role,
    /// Bytes from one row to the next, for each outer dimension.
    pub rows: Vec<isize>,
    /// Elements from one column to the next.
    pub step: isize,
}

/// Rows of a table, for gathers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Table {
    pub rows: usize,
    /// Bytes from one row to the next.
    pub stride: isize,
}

/// The domain of a call as rows of columns, dimensions merged where all tensors allow.
#[derive(Debug)]
pub(crate) struct Geometry {
    pub outer: Vec<usize>,
    pub columns: usize,
    /// In the order of the kernel's tensors; sums last.
    pub places: Vec<Place>,
    pub tables: Vec<Option<Table>>,
    /// Of the outer dimensions, those that sums go over come first: their number.
    pub summed: usize,
}

// SAFETY: addresses, which are used as the caller of a kernel promised.
unsafe impl Sync for Geometry {}

impl Geometry {
    pub fn new(graph: &Graph, shape: &Shape, sizes: &Sizes, tensors: &[Memory<'_>]) -> Result<Geometry> {
        let domain = sizes.shape(&shape.domain)?;
        // Dimensions that are summed over go first; the last stays.
        let last = domain.len().saturating_sub(1);
        let mut order: Vec<usize> = (0..last).filter(|&d| shape.summed[d]).collect();
        let summed = order.len();
        order.extend((0..last).filter(|&d| !shape.summed[d]));
        let own = shape.reads.iter().chain(&shape.writes).map(|tensor| (tensor.node, tensor.role));
        let all = own.chain(shape.sums.iter().map(|&id| (id, Role::Elements)));
        let (mut places, mut tables) = (vec![], vec![]);
        for ((node, role), memory) in all.zip(tensors) {
            let name = graph.node(node).op.name();
            let size = memory.dtype.size() as isize;
            let mut strides = vec![0isize; domain.len()];
            let mut table = None;
            match role {
                Role::Table => {
                    table = Some(Table { rows: memory.shape[0], stride: memory.strides[0] * size });
                    if let Some(stride) = strides.last_mut() {
                        *stride = memory.strides[1];
                    }
                }
                // One for each row.
                Role::Index => fit(&mut strides[..last], memory, &domain[..last]),
                _ => fit(&mut strides, memory, &domain),
            }
            let step = strides.last().copied().unwrap_or(0);
            if step.checked_mul(domain.last().copied().unwrap_or(1) as isize).is_none() {
                return Err(Error::argument(name, "strides that can be addressed", format!("{step}")));
            }
            let rows = order.iter().map(|&d| strides[d].wrapping_mul(size)).collect();
            places.push(Place { address: memory.address as *mut u8, dtype: memory.dtype, role, rows, step });
            tables.push(table);
        }
        let outer = order.iter().map(|&d| domain[d]).collect();
        let columns = domain.last().copied().unwrap_or(1);
        let mut this = Geometry { outer, columns, places, tables, summed };
        this.merge(!shape.has_reductions(graph) && !shape.gathers() && !shape.rotates(graph));
        Ok(this)
    }

    pub fn rows(&self) -> usize {
        self.outer.iter().product()
    }

    /// Merges dimensions: neighbours among the outer ones, and with `inner` the last of them with the columns.
    fn merge(&mut self, inner: bool) {
        let mut d = self.outer.len();
        while d > 1 {
            d -= 1;
            let same_side = (d < self.summed) == (d - 1 < self.summed);
            let size = self.outer[d];
            let follows = |place: &Place| place.rows[d - 1] == place.rows[d].wrapping_mul(size as isize);
            let drops = if self.outer[d - 1] == 1 { Some(d - 1) } else { (size == 1).then_some(d) };
            if let Some(dropped) = drops {
                self.drop_outer(dropped);
            } else if same_side && self.places.iter().all(follows) {
                self.outer[d] *= self.outer[d - 1];
                self.drop_outer(d - 1);
            }
        }
        if self.outer.len() == 1 && self.outer[0] == 1 {
            self.drop_outer(0);
        }
        while inner && self.outer.len() > self.summed {
            let (d, columns) = (self.outer.len() - 1, self.columns as isize);
            let follows = |place: &Place| {
                let size = place.dtype.size() as isize;
                match place.role {
                    Role::Elements if columns == 1 => true,
                    Role::Elements => place.rows[d] == columns.wrapping_mul(place.step).wrapping_mul(size),
                    _ => place.rows[d] == 0,
                }
            };
            if !self.places.iter().all(follows) {
                break;
            }
            for place in &mut self.places {
                if columns == 1 {
                    place.step = place.rows[d] / place.dtype.size() as isize;
                }
            }
            self.columns *= self.outer[d];
            self.drop_outer(d);
        }
    }

    fn drop_outer(&mut self, d: usize) {
        self.outer.remove(d);
        for place in &mut self.places {
            place.rows.remove(d);
        }
        self.summed -= (d < self.summed) as usize;
    }

    /// Bytes from a tensor's address to its row `index`.
    pub fn row_offset(&self, place: &Place, mut index: usize) -> isize {
        let mut offset = 0isize;
        for d in (1..self.outer.len()).rev() {
            let size = self.outer[d];
            offset = offset.wrapping_add(((index % size) as isize).wrapping_mul(place.rows[d]));
            index /= size;
        }
        match place.rows.first() {
            Some(stride) => offset.wrapping_add((index as isize).wrapping_mul(*stride)),
            None => offset,
        }
    }

    /// Bytes from one row to the next, if it is the same for all rows.
    pub fn row_stride(&self, place: &Place) -> Option<isize> {
        match place.rows[..] {
            [] => Some(0),
            [stride] => Some(stride),
            _ => None,
        }
    }
}

/// Strides of a tensor in a domain: 0 where it is repeated.
fn fit(strides: &mut [isize], memory: &Memory<'_>, domain: &[usize]) {
    let ahead = domain.len().saturating_sub(memory.shape.len());
    for (d, stride) in strides.iter_mut().enumerate().skip(ahead) {
        let (size, own) = (memory.shape[d - ahead], memory.strides[d - ahead]);
        *stride = if size == 1 && domain[d] != 1 { 0 } else { own };
    }
}
