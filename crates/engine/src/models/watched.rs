//! How far the weights of a model are loaded.

use super::names::Naming;
use super::source::WeightSource;
use crate::error::Result;
use std::cell::RefCell;
use std::collections::HashSet;
use std::path::Path;
use warpsmith::ops::QuantFormat;
use warpsmith::{DType, Tensor};

/// Weights that tell how many of their numbers were read.
pub struct Watched<'a> {
    source: &'a dyn WeightSource,
    total: usize,
    state: RefCell<WatchState<'a>>,
}

struct WatchState<'a> {
    read: HashSet<String>,
    numbers: usize,
    tell: &'a mut dyn FnMut(LoadProgress),
}

/// How far the weights of a model are loaded, in numbers that they consist of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadProgress {
    /// Those that were read.
    pub done: usize,
    /// All that there are. A model may need fewer.
    pub total: usize,
}

impl<'a> Watched<'a> {
    /// `tell` is called for each tensor that is read; `total` is the count of all numbers.
    pub fn new(
        source: &'a dyn WeightSource,
        total: usize,
        tell: &'a mut dyn FnMut(LoadProgress),
    ) -> Watched<'a> {
        let state = WatchState { read: HashSet::new(), numbers: 0, tell };
        Watched { source, total, state: RefCell::new(state) }
    }

    /// Tensors are counted once: tied ones are read twice.
    fn note(&self, name: &str) {
        let mut state = self.state.borrow_mut();
        if state.read.insert(name.into()) {
            state.numbers += self.source.shape(name).map_or(0, |shape| shape.iter().product());
            let progress = LoadProgress { done: state.numbers, total: self.total };
            (state.tell)(progress);
        }
    }
}

impl WeightSource for Watched<'_> {
    fn naming(&self) -> Naming {
        self.source.naming()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.source.shape(name)
    }

    fn names(&self) -> Vec<String> {
        self.source.names()
    }

    fn stored_dtype(&self, name: &str) -> Option<DType> {
        self.source.stored_dtype(name)
    }

    fn file(&self, name: &str) -> Option<&Path> {
        self.source.file(name)
    }

    fn blocks(&self, name: &str) -> Result<Option<(Tensor, QuantFormat)>> {
        let blocks = self.source.blocks(name)?;
        if blocks.is_some() {
            self.note(name);
        }
        Ok(blocks)
    }

    fn tensor(&self, name: &str, dtype: DType) -> Result<Tensor> {
        let tensor = self.source.tensor(name, dtype)?;
        self.note(name);
        Ok(tensor)
    }

    fn release(&self) {
        self.source.release();
    }
}
