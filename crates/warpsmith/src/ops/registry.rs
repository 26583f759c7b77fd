//! Ops of other crates, which their programs add to the library's own while they run.

#[cfg(feature = "lab")]
use super::PROVABLE;
use super::{ALL, find};
use crate::error::{Error, Result};
#[cfg(feature = "lab")]
use crate::lab::AnyProvable;
use crate::op::{AnyOp, check_description};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

/// One op that was added.
struct Added {
    op: &'static dyn AnyOp,
    #[cfg(feature = "lab")]
    provable: Option<&'static dyn AnyProvable>,
}

static ADDED: RwLock<Vec<Added>> = RwLock::new(Vec::new());

fn added() -> RwLockReadGuard<'static, Vec<Added>> {
    ADDED.read().unwrap_or_else(PoisonError::into_inner)
}

/// Adds an op of another crate: [`find`] and [`all`] then know it like the library's own. It stays for the life of the
/// process. Its gradient, if it has one, is registered first.
///
/// # Errors
/// [`Error::Argument`] if the name is taken or not an identifier, a kernel's name is taken, the op has no kernels, or
/// its description is inconsistent.
pub fn register(op: &'static dyn AnyOp) -> Result<()> {
    add(Added {
        op,
        #[cfg(feature = "lab")]
        provable: None,
    })
}

/// As [`register`], with what proves the op: [`provable`] and the lab know it too.
///
/// # Errors
/// As [`register`].
#[cfg(feature = "lab")]
pub fn register_provable(op: &'static dyn AnyProvable) -> Result<()> {
    add(Added { op, provable: Some(op) })
}

fn add(new: Added) -> Result<()> {
    let spec = new.op.spec();
    check_description(spec)?;
    if let Some(gradient) = &spec.gradient
        && find(gradient.op).is_none()
    {
        let expected = format!("`{}` to be registered before it", gradient.op);
        return Err(Error::argument(spec.name, "gradient", expected, "an unknown op"));
    }
    let mut added = ADDED.write().unwrap_or_else(PoisonError::into_inner);
    let known = || ALL.iter().copied().chain(added.iter().map(|added| added.op));
    if known().any(|op| op.spec().name == spec.name) {
        return Err(Error::argument(spec.name, "name", "a name that no other op has", "that of a known op"));
    }
    let kernels = new.op.kernels();
    if kernels.is_empty() {
        return Err(Error::argument(spec.name, "kernels", "at least one", "none"));
    }
    for (at, kernel) in kernels.iter().enumerate() {
        let mut others = known().flat_map(AnyOp::kernels).chain(kernels[..at].iter().copied());
        if others.any(|other| other.name == kernel.name) {
            let got = format!("`{}` twice", kernel.name);
            return Err(Error::argument(spec.name, "kernels", "names that no other kernel has", got));
        }
    }
    added.push(new);
    Ok(())
}

/// Every op: the library's own, then those that were registered, in their order.
pub fn all() -> Vec<&'static dyn AnyOp> {
    ALL.iter().copied().chain(added().iter().map(|added| added.op)).collect()
}

/// As [`all`], of those with cases and a reference.
#[cfg(feature = "lab")]
pub fn provable() -> Vec<&'static dyn AnyProvable> {
    PROVABLE.iter().copied().chain(added().iter().filter_map(|added| added.provable)).collect()
}

/// The registered op of a name.
pub(super) fn registered(name: &str) -> Option<&'static dyn AnyOp> {
    added().iter().map(|added| added.op).find(|op| op.spec().name == name)
}
