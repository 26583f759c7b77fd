//! Where the tensors of a call are in memory.

/// Where the tokens of a request are.
#[derive(Clone, Copy)]
pub(crate) struct Request {
    /// Its number in the call.
    pub number: usize,
    /// Index of the batch, or of the row of the page table.
    pub batch: usize,
    pub first_query: usize,
    pub q_len: usize,
    pub first_key: usize,
    pub kv_len: usize,
}

/// Heads of tokens in memory: the address of the first, and distances in elements.
#[derive(Clone, Copy)]
pub(crate) struct Heads {
    pub data: usize,
    /// From one batch to the next; of keys in pages, from one page to the next.
    pub batch: isize,
    /// From one token to the next.
    pub token: isize,
    /// From one head to the next.
    pub head: isize,
    /// From one element of a head to the next.
    pub dim: isize,
}

impl Heads {
    /// Address of a head, whose elements take `size` bytes.
    pub(crate) fn at(&self, size: usize, [batch, token, head]: [usize; 3]) -> usize {
        let offset = batch as isize * self.batch + token as isize * self.token + head as isize * self.head;
        self.data.wrapping_add_signed(offset * size as isize)
    }
}

/// A float for each of some heads, `step` apart; for all of them the same if that is zero.
#[derive(Clone, Copy)]
pub(crate) struct PerHead {
    pub data: usize,
    pub step: isize,
}

impl PerHead {
    /// # Safety
    /// The head's must be there.
    pub(super) unsafe fn at(&self, head: usize) -> f32 {
        // SAFETY: passed on.
        unsafe { *(self.data as *const f32).offset(head as isize * self.step) }
    }
}

/// A mask or bias: address and distances in elements, zero along what all share.
#[derive(Clone, Copy)]
pub(crate) struct Grid {
    pub data: usize,
    pub batch: isize,
    pub head: isize,
    pub query: isize,
    pub key: isize,
}
