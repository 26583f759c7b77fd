//! Where tokens go in a paged cache: what ops that store keys and values share.

use crate::cpu::rows::index_at;
use crate::error::{Error, Result};
use crate::op::{Args, Matcher};
use crate::tensor::DType;

/// The slots of a call's tokens, and the pages that they number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Slots {
    /// Type and distance of the numbers.
    pub dtype: DType,
    pub stride: isize,
    pub num_tokens: usize,
    pub num_pages: usize,
    pub page_size: usize,
}

impl Slots {
    /// Those that are argument `index` of a call.
    pub fn of(args: &Args<'_>, index: usize, sizes: &Matcher<'_>) -> Slots {
        let slots = args.at(index);
        Slots {
            dtype: slots.dtype(),
            stride: slots.layout().step(),
            num_tokens: sizes.size("num_tokens"),
            num_pages: sizes.size("num_pages"),
            page_size: sizes.size("page_size"),
        }
    }

    /// How many there are in a cache.
    pub fn count(&self) -> usize {
        self.num_pages * self.page_size
    }

    /// The slot of a token.
    ///
    /// # Safety
    /// `address` must be that of the call's numbers, in the host's memory, and there must be such a token.
    pub unsafe fn at(&self, address: usize, token: usize) -> i64 {
        // SAFETY: passed on.
        unsafe { index_at(address, self.dtype, token * self.stride as usize) }
    }

    /// Requires every slot to exist, or to be -1 for a token that is not stored.
    ///
    /// # Safety
    /// `address` must be that of the call's numbers, in the host's memory.
    pub unsafe fn check(&self, op: &'static str, address: usize) -> Result<()> {
        for token in 0..self.num_tokens {
            // SAFETY: passed on.
            let slot = unsafe { self.at(address, token) };
            if !(-1..self.count() as i64).contains(&slot) {
                let expected = format!("slots from 0 to below num_pages*page_size={}, or -1", self.count());
                return Err(Error::argument(op, "slots", expected, format!("{slot} for token {token}")));
            }
        }
        Ok(())
    }

    /// Elements from the start of a cache to the first head of a slot, with the distances of the cache.
    #[inline(always)]
    pub fn place(&self, slot: usize, [page, place, _, _]: [isize; 4]) -> isize {
        (slot / self.page_size) as isize * page + (slot % self.page_size) as isize * place
    }
}
