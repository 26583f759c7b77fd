//! The memory of keys and values: pages of all layers in one allocation.

use crate::error::{Error, Result};
use std::collections::HashSet;
use warpsmith::op::survey;
use warpsmith::ops::KvCopy;
use warpsmith::ops::paged_attention::SharedPrefixes;
use warpsmith::{DType, Device, Stream, Tensor, TensorViewMut};

/// What a model keeps of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Number of layers.
    pub layers: usize,
    /// Heads of keys and of values in a layer.
    pub heads: usize,
    /// Numbers in a head.
    pub head_dim: usize,
}

impl KvShape {
    /// Bytes that a page takes in all layers.
    pub fn page_bytes(self, page_size: usize, dtype: DType) -> usize {
        self.layers * 2 * page_size * self.heads * self.head_dim * dtype.size()
    }
}

/// Keys and values of all layers. A page has the same number in every layer.
///
/// On a GPU the memory is `[layers, 2, pages, page_size, kv_heads, head_dim]`. On the CPU it is `[pages, layers * 2 * page_size,
/// kv_heads, head_dim]`: memory counts only once it is touched, and pages that are used together lie together.
#[derive(Debug)]
pub struct KvCache {
    memory: Tensor,
    layers: usize,
    page_size: usize,
}

impl KvCache {
    /// Pages for the keys and values of a model.
    ///
    /// # Errors
    /// If the device has too little memory.
    pub fn new(
        shape: KvShape,
        num_pages: usize,
        page_size: usize,
        dtype: DType,
        device: Device,
    ) -> Result<KvCache> {
        let KvShape { layers, heads, head_dim } = shape;
        // In a survey, memory of the CPU stands for a GPU's.
        let by_page = device == Device::Cpu && !survey::is_running();
        let memory = match by_page {
            true => Tensor::zeros(&[num_pages, layers * 2 * page_size, heads, head_dim], dtype, device)?,
            false => Tensor::zeros(&[layers, 2, num_pages, page_size, heads, head_dim], dtype, device)?,
        };
        Ok(KvCache { memory, layers, page_size })
    }

    /// Keys and values of a layer, each `[pages, page_size, kv_heads, head_dim]`.
    ///
    /// # Errors
    /// If there is no such layer.
    pub fn layer(&mut self, layer: usize) -> Result<(TensorViewMut<'_>, TensorViewMut<'_>)> {
        let (layers, page_size) = (self.layers, self.page_size);
        let both = match *self.memory.shape() {
            [_, _, pages, _, heads, head_dim] => {
                let shape = [pages, page_size, heads, head_dim];
                let both = self.memory.view_mut().narrow(0, layer, 1).and_then(|layer| layer.split_at(1, 1));
                both.and_then(|(keys, values)| Some((keys.reshape(&shape)?, values.reshape(&shape)?)))
            }
            _ => {
                let of_layer = self.memory.view_mut().narrow(1, 2 * layer * page_size, 2 * page_size);
                of_layer.and_then(|layer| layer.split_at(1, page_size))
            }
        };
        both.ok_or_else(|| Error::Broken(format!("layer {layer} of {layers} has no pages")))
    }

    /// The part of `groups` that saves time if their pages are read once per group.
    ///
    /// # Errors
    /// If the device cannot be asked.
    pub(crate) fn that_pay(&mut self, groups: SharedPrefixes) -> Result<SharedPrefixes> {
        let (keys, _) = self.layer(0)?;
        Ok(groups.that_pay(keys.as_view())?)
    }

    /// Copies page `from` onto page `to`, for each pair `[from, to]` in order, in all layers, in the order of `stream`.
    ///
    /// # Errors
    /// If a page does not exist.
    pub fn copy_pages(&mut self, pairs: &[[i32; 2]], stream: &Stream) -> Result<()> {
        let mut rest = pairs;
        while !rest.is_empty() {
            let together = independent(rest);
            let (now, later) = rest.split_at(together);
            let mut pairs = Tensor::empty_on(&[together, 2], DType::I32, stream)?;
            pairs.write(0, now.as_flattened(), stream)?;
            KvCopy::new(&pairs).run_into(&mut self.memory, stream)?;
            rest = later;
        }
        Ok(())
    }
}

/// How many of the first pairs can be copied at once, because none writes a page that another reads or writes.
fn independent(pairs: &[[i32; 2]]) -> usize {
    let (mut read, mut written) = (HashSet::new(), HashSet::new());
    let depends = |[from, to]: &[i32; 2]| {
        let depends = written.contains(from) || written.contains(to) || read.contains(to);
        read.insert(*from);
        written.insert(*to);
        depends
    };
    pairs.iter().position(depends).unwrap_or(pairs.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_copied_together_as_long_as_they_are_independent() {
        assert_eq!(independent(&[[1, 2], [1, 3], [4, 5]]), 3);
        assert_eq!(independent(&[[1, 2], [3, 1]]), 1, "a page that was read is written");
        assert_eq!(independent(&[[1, 2], [2, 3]]), 1, "a page that was written is read");
        assert_eq!(independent(&[[1, 2], [3, 2]]), 1, "a page is written twice");
    }

    /// On the CPU memory counts once it is touched: a few tokens must not touch a place of their own for each layer.
    #[test]
    fn the_layers_of_a_page_lie_together_on_the_cpu() {
        let shape = KvShape { layers: 3, heads: 2, head_dim: 32 };
        let mut kv = KvCache::new(shape, 5, 8, DType::F32, Device::Cpu).unwrap();
        let page = shape.page_bytes(8, DType::F32);
        let mut places = Vec::new();
        for layer in 0..3 {
            let (keys, values) = kv.layer(layer).unwrap();
            for view in [keys.as_view(), values.as_view()] {
                assert_eq!(view.shape(), [5, 8, 2, 32]);
                assert_eq!(view.layout().strides()[0] as usize * 4, page);
                places.push(view.address());
            }
        }
        assert!(places.windows(2).all(|pair| pair[1] - pair[0] == page / 6), "{places:?}");
        assert!(kv.layer(3).is_err());
    }
}
