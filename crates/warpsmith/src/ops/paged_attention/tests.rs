//! What the cases of `paged_attention` cannot say.
