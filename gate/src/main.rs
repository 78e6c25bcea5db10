//! The gates.
fn main() {}
