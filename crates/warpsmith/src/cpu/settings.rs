//! What the environment says about the CPU.

use super::{Tier, configured_threads, gemm};
use crate::error::Result;

/// Whether the environment variables about the CPU have values that can be used. Calls ask when they are planned, so that a
/// setting with a mistake in it is an error, not ignored.
///
/// # Errors
/// Names the first variable that has not.
pub(crate) fn check_settings() -> Result<()> {
    configured_threads()?;
    Tier::configured()?;
    gemm::Isa::configured()?;
    Ok(())
}
