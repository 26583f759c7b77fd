//! What is done to elements before they are rounded to 8 bits.

/// What is done to elements before they are rounded, correctly rounded itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaled {
    /// Multiplied by this.
    Times(f32),
    /// Divided by this.
    Over(f32),
}
