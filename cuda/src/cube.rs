//! The sum over the units of one cube, in one fixed order: the end of a fused reduction to a single number.

use cubecl::prelude::*;

/// Units of a cube.
pub(crate) const UNITS: u32 = 256;

/// The sum of `value` over all units of the cube, given to the first one; the others get parts of it. Every unit of the
/// cube must call it. `shared` has [`UNITS`] elements.
#[cube]
pub(crate) fn sum(value: f32, shared: &mut SharedMemory<f32>) -> f32 {
    let me = UNIT_POS as usize;
    shared[me] = value;
    sync_cube();
    #[unroll]
    for level in 0..8u32 {
        let half = comptime!(128usize >> level as usize);
        if me < half {
            shared[me] = shared[me] + shared[me + half];
        }
        sync_cube();
    }
    let total = shared[me];
    // The next call writes the same memory.
    sync_cube();
    total
}

/// [`sum`], given to every unit.
#[cube]
pub(crate) fn total(value: f32, shared: &mut SharedMemory<f32>) -> f32 {
    let me = UNIT_POS as usize;
    shared[me] = value;
    sync_cube();
    #[unroll]
    for level in 0..8u32 {
        let half = comptime!(128usize >> level as usize);
        if me < half {
            shared[me] = shared[me] + shared[me + half];
        }
        sync_cube();
    }
    let all = shared[0];
    // The next call writes the same memory.
    sync_cube();
    all
}

/// The sums of two values over all units of the cube, given to every unit, behind the barriers of one sum. Every unit of
/// the cube must call it. `shared` has twice [`UNITS`] elements.
#[cube]
pub(crate) fn totals(first: f32, second: f32, shared: &mut SharedMemory<f32>) -> (f32, f32) {
    let me = UNIT_POS as usize;
    let other = me + comptime!(UNITS as usize);
    shared[me] = first;
    shared[other] = second;
    sync_cube();
    #[unroll]
    for level in 0..8u32 {
        let half = comptime!(128usize >> level as usize);
        if me < half {
            shared[me] = shared[me] + shared[me + half];
            shared[other] = shared[other] + shared[other + half];
        }
        sync_cube();
    }
    let one = shared[0];
    let two = shared[comptime!(UNITS as usize)];
    // The next call writes the same memory.
    sync_cube();
    (one, two)
}

/// The larger of two numbers that are not NaN, written out because devices differ about NaN.
#[cube]
pub(crate) fn larger(a: f32, b: f32) -> f32 {
    let mut most = a;
    if b > a {
        most = b;
    }
    most
}

/// The largest of `value` over the units of the cube, given to all. Every unit must call it.
#[cube]
pub(crate) fn largest(value: f32, shared: &mut SharedMemory<f32>) -> f32 {
    let me = UNIT_POS as usize;
    shared[me] = value;
    sync_cube();
    #[unroll]
    for level in 0..8u32 {
        let half = comptime!(128usize >> level as usize);
        if me < half {
            shared[me] = larger(shared[me], shared[me + half]);
        }
        sync_cube();
    }
    let most = shared[0];
    // The next call writes the same memory.
    sync_cube();
    most
}
