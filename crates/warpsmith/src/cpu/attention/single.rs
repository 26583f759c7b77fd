//! Rows that see one key.
//!
//! The score of that key is their log-sum-exp, so cancellation in its sum shows directly. Over more keys the errors of
//! scores average out, and what is left is small beside the sum of exponentials.

use super::band::{Band, View};
use super::work::Work;
use crate::cpu::gemm::{Blocks, Matrix};

impl Work<'_> {
    /// Computes the scores of rows that see one key again, in f64. This depends on what a row sees alone, so that it has
    /// the same bits in any call.
    ///
    /// # Safety
    /// The scores must be in the view's scratch, and the tensors be as the call says.
    pub(super) unsafe fn refine_single_scores(&self, blocks: &Blocks, band: &Band<'_>, view: &View) {
        for r in 0..band.rows() {
            if let Some((key, score)) = band.single_score(view, r) {
                let (head, query) = band.place(r);
                // SAFETY: the row sees the key, so both exist; the score is the caller's.
                unsafe {
                    let key = self.key(key, band.kv_head());
                    *score = blocks.multiply_finely(&self.queries(head, query, 1), &key);
                }
            }
        }
    }

    /// A key of the job's request, as a row.
    ///
    /// # Safety
    /// The key must exist, and its page in the table.
    unsafe fn key(&self, key: usize, kv_head: usize) -> Matrix {
        let cache = &self.call.cache;
        // SAFETY: passed on.
        let (address, _) = unsafe { cache.find(&cache.k, &self.job.request, key, kv_head) };
        Matrix {
            data: address as *const u8,
            dtype: cache.dtype,
            rows: 1,
            k: self.call.head_dim,
            row_stride: cache.k.token,
            k_stride: cache.k.dim,
        }
    }
}
