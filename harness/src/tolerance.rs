//! The tolerances that fit any well-conditioned operation, each with its derivation.

use crate::compare::Tolerance;
use crate::description::Tolerances;

/// Central differences with the best of a step sweep lose about eps^(2/3) = 4e-11 of the derivative to rounding and
/// truncation together; a sum over a few thousand terms and a curvature of order ten cost three more digits.
pub const FD: Tolerance = Tolerance::new(2e-7, "central difference in f64, best step: eps^(2/3) times 5000");

/// Both sides are exact derivatives in f64; sums of up to 1e5 products round by at most 1e5 eps = 2e-11, and in practice
/// by its square root.
pub const ADJ: Tolerance = Tolerance::new(1e-11, "two exact derivatives in f64, sums of up to 1e5 terms");

/// The same formula in another order of operations, f64.
pub const FORM: Tolerance = Tolerance::new(1e-12, "one formula in two orders of operation, f64: 5000 eps");

/// f32 against f64 on the same inputs: eps is 1.2e-7 (6e-8 by rounding), times the square root of a few hundred terms.
pub const DIFF_F32: Tolerance = Tolerance { slope: 2e-6, ..Tolerance::new(2e-6, "f32 rounding 6e-8 times sqrt(1000)") };

/// All of the above.
pub const WELL_CONDITIONED: Tolerances = Tolerances { fd: FD, adj: ADJ, form: FORM, diff_f32: DIFF_F32 };
