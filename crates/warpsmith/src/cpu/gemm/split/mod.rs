//! f32 on AMX tiles: every number is the sum of three bf16, and six products of those are one of f32.

#[allow(dead_code)]
pub(super) mod planes;
