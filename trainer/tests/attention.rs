//! Attention learns: the same run with no gradient through the recurrence stays where counting short contexts stays.
//!
//! A model whose attention is dead can still match an n-gram of order 3, so a falling loss proves nothing about the
//! recurrence's adjoint. This test trains `nano` on the shipped text twice, once with the gradient cut behind the
//! recurrence, and asks for the difference. `DORMOUSE_ATTENTION_STEPS=900` runs it at the default run's length.

use std::f64::consts::LN_2;

use dormouse::config::preset;
use dormouse::data::Data;
use dormouse::learner::ModelLearner;
use dormouse::model::Ablation;
use dormouse::train::Learner;
use dormouse_reference::Reference;

#[test]
fn without_a_gradient_through_the_recurrence_the_bar_is_not_reached() {
    let steps: u64 = match std::env::var("DORMOUSE_ATTENTION_STEPS") {
        Ok(steps) => steps.parse().expect("DORMOUSE_ATTENTION_STEPS is a number"),
        Err(_) => 160,
    };
    let healthy = held_out_bits(steps, Ablation::None);
    let dead = held_out_bits(steps, Ablation::DetachRecurrence);
    println!("{steps} steps: healthy {healthy:.4}, recurrence detached {dead:.4} bits per byte");
    // Measured at 240 steps: 2.215 and 2.852. Runs that differ in their seed alone lie within a few hundredths.
    assert!(dead - healthy > 0.25, "healthy {healthy}, recurrence detached {dead}");
}

/// Bits per byte on held-out windows after the whole schedule of a run of `steps`.
fn held_out_bits(steps: u64, ablation: Ablation) -> f64 {
    let mut config = preset("nano").expect("nano is a preset");
    config.train.total_steps = steps;
    config.data.eval_windows = 32;
    let data = Data::open(&config).expect("the shipped text opens");
    let mut learner = ModelLearner::new(Reference::<f32>::new(), &config).expect("nano builds");
    learner.set_ablation(ablation);
    for step in 0..steps {
        let batch = data.batch(step, config.train.batch_rows).expect("a batch");
        learner.step(&batch, config.schedule().lr_at(step, steps)).expect("a step");
    }
    let nats = learner.evaluate(&data.eval_windows().expect("windows")).expect("an evaluation");
    nats.iter().sum::<f64>() / nats.len() as f64 / LN_2
}
