//! The checks on the reference, which must pass them all, and on the software device where there is one.

use dormouse_reference::Reference;

use super::{Lab, Outcome, run};
use crate::config::Math;

#[test]
fn the_reference_in_f32_passes_every_check_it_has() {
    let open = |_| Ok(Reference::<f32>::new());
    let lab = Lab {
        open: &open,
        math: Math::F32,
        graphs: false,
        preset: "tiny",
        quick: true,
        arm: None,
        whole: Default::default(),
    };
    let lines = run(&lab, "", &mut |_| {});
    let red: Vec<_> = lines.iter().filter(|line| matches!(line.outcome, Outcome::Fail(_))).collect();
    assert!(red.is_empty(), "{red:#?}");
    let not_run: Vec<_> =
        lines.iter().filter(|l| matches!(l.outcome, Outcome::NotRun(_))).map(|line| line.check).collect();
    assert_eq!(not_run, ["gradients nano", "graph", "graph fp8", "engagement", "captures", "memory", "attention"]);
}
