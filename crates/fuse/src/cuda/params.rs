//! The parameters of a kernel: the twin of `FuseParams` in `support.cuh`, whose extents depend on the kernel.

use crate::error::{Error, Result};
use crate::geometry::Geometry;
use crate::kernel::Role;
use warpsmith::cuda::{Function, LaunchConfig, Stream, launch};

/// Words that parameters are filled up to. Launches take structs, so each length is one more function.
const LENGTHS: [usize; 8] = [24, 32, 48, 64, 96, 160, 256, 400];
/// Most words: a kernel's parameters have at most 4 KiB.
const MAX_WORDS: usize = LENGTHS[LENGTHS.len() - 1];

/// The extents of the parameters' arrays.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extents {
    tensors: usize,
    rank: usize,
    sizes: usize,
    words: usize,
}

impl Extents {
    pub fn new(tensors: usize, rank: usize, sizes: usize) -> Result<Extents> {
        let mut this = Extents { tensors, rank, sizes, words: 0 };
        let used = this.used();
        let fitting = LENGTHS.into_iter().find(|length| *length > used);
        this.words = fitting.ok_or_else(|| {
            Error::node("kernel", format!("has {tensors} tensors of {rank} dimensions, too many for a GPU"))
        })?;
        Ok(this)
    }

    fn outer(&self) -> usize {
        self.rank.max(1)
    }

    /// Sizes, two in a word.
    fn named(&self) -> usize {
        self.sizes.next_multiple_of(2).max(2)
    }

    /// Words before those that fill up.
    fn used(&self) -> usize {
        self.tensors * (3 + self.outer()) + self.outer() + 5 + self.named() / 2
    }

    pub fn defines(&self) -> Vec<(String, String)> {
        let numbers = [
            ("TENSORS", self.tensors),
            ("OUTER", self.outer()),
            ("RANK", self.rank),
            ("NAMED", self.named()),
            ("UNUSED", self.words - self.used()),
        ];
        numbers.iter().map(|(name, number)| (name.to_string(), number.to_string())).collect()
    }

    /// Where the address of the memory for pieces of sums is.
    pub fn partials(&self) -> usize {
        self.tensors * (3 + self.outer()) + self.outer() + 4
    }

    /// The parameters of a call, without addresses: those of the tensors are the first words.
    pub fn words(&self, geometry: &Geometry, kept: usize, pieces: usize, sizes: &[f32]) -> Vec<u64> {
        let mut words = vec![0u64; self.tensors];
        let signed = |number: isize| number as i64 as u64;
        for place in &geometry.places {
            let mut rows: Vec<isize> = place.rows.clone();
            rows.resize(self.outer(), 0);
            words.extend(rows.into_iter().map(signed));
        }
        words.extend(geometry.places.iter().map(|place| signed(place.step)));
        words.extend(geometry.tables.iter().map(|table| table.map_or(0, |table| table.rows as u64)));
        let mut outer: Vec<u64> = geometry.outer.iter().map(|&size| size as u64).collect();
        outer.resize(self.outer(), 1);
        words.extend(outer);
        for (t, (place, table)) in geometry.places.iter().zip(&geometry.tables).enumerate() {
            if let (Role::Table, Some(table)) = (place.role, table) {
                words[self.tensors + t * self.outer()] = signed(table.stride);
            }
        }
        words.extend([geometry.rows(), geometry.columns, kept, pieces].map(|number| number as u64));
        words.push(0);
        let mut sizes = sizes.to_vec();
        sizes.resize(self.named(), 0.0);
        let pair = |two: &[f32]| u64::from(two[0].to_bits()) | u64::from(two[1].to_bits()) << 32;
        words.extend(sizes.chunks_exact(2).map(pair));
        words.resize(self.words, 0);
        words
    }
}

/// Gives a kernel to a stream, with parameters in which some words are replaced.
///
/// # Safety
/// As [`launch`]; the words must be those of the kernel's [`Extents`].
pub(super) unsafe fn launch_words(
    function: &Function,
    stream: &Stream,
    config: &LaunchConfig,
    words: &[u64],
    replaced: impl Iterator<Item = (usize, u64)>,
) -> Result<()> {
    let mut all = [0u64; MAX_WORDS];
    all[..words.len()].copy_from_slice(words);
    replaced.for_each(|(at, word)| all[at] = word);
    macro_rules! of_length {
        ($($at:literal)*) => {
            match words.len() {
                $(length if length == LENGTHS[$at] => {
                    let params: &[u64; LENGTHS[$at]] = all.first_chunk().unwrap_or(&[0; LENGTHS[$at]]);
                    // SAFETY: passed on.
                    unsafe { launch(function, stream, config, params)? }
                })*
                _ => return Err(Error::node("kernel", "has parameters of an unknown length")),
            }
        };
    }
    of_length!(0 1 2 3 4 5 6 7);
    Ok(())
}
