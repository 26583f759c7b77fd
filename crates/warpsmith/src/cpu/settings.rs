//! What the environment says about the CPU.

use super::{Tier, configured_threads, gemm};
use crate::error::Result;

/// Whether the environment variables about the CPU have valid values. Checked when a call is planned, so that a
/// mistyped setting is an error and not ignored.
///
/// # Errors
/// Names the first variable with an invalid value.
pub(crate) fn check_settings() -> Result<()> {
    configured_threads()?;
    Tier::configured()?;
    gemm::Isa::configured()?;
    Ok(())
}
