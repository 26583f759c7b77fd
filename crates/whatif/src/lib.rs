//! How long ops and decode steps take, from a few measured rates, and how long they would take on other hardware.
//!
//! The ops are divided into [families](families). Each has a formula with at most three parameters: launch, memory, products
//! and exponentials, in waves of blocks over the multiprocessors. The parameters are [fitted](fit) to the times in the
//! evidence of one GPU by the least absolute relative error, and [judged](judge) on rows that were held back from the fit.
//! What other hardware changes is worth no more than that error, so the two are always shown together.

pub mod change;
pub mod families;
pub mod fit;
pub mod judge;
pub mod machine;
pub mod model;
pub mod picture;
pub mod step;
pub mod work;

pub use change::{Change, Comparison, Outcome, standard_changes};
pub use families::{FAMILIES, Family, Parts};
pub use judge::Errors;
pub use machine::{CARDS, Card, Machine};
pub use model::{FittedFamily, Model, Row};
pub use step::{Layers, Step};
pub use work::Work;
