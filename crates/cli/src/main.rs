//! The `warpsmith` workbench.
fn main() {}
