//! Formats of spectral factors and options of the gates in the whole model.

use super::*;
use crate::config::{Format, Gate};

fn with_format(format: Format) -> Config {
    let mut config = tiny(2, 16);
    config.model.format = format;
    config
}

/// Forward and the gradient of everything but the masters use the rounded factors, and the masters get the gradient of
/// the rounded factors as it is. So all gradients are those of a model in f32 whose factors are the rounded ones, to the
/// bit: the operations do the same arithmetic on the same numbers.
#[test]
fn a_format_gives_the_gradient_at_the_rounded_factors_straight_through() {
    for format in Format::ALL {
        let config = with_format(format);
        let rounded = learner::<f64>(&config);
        let plain = learner::<f64>(&with_format(Format::F32));
        let mut flat = perturb(&rounded);
        let gradient =
            |learner: &ModelLearner<Reference<f64>>| learner.gradient(&batch(&config, 0)).expect("a gradient");
        let got = gradient(&rounded);
        plain.upload(&plain.model.params, &flat).expect("parameters upload");
        assert_eq!(gradient(&plain) == got, format == Format::F32, "{format:?}");
        for param in plain.model.table.params.iter().filter(|param| param.retracted) {
            let (rows, columns) = (param.shape[param.shape.len() - 2], param.shape[param.shape.len() - 1]);
            for matrix in flat[param.range()].chunks_mut(rows * columns) {
                for column in 0..columns {
                    let mut values: Vec<f64> = (0..rows).map(|row| matrix[row * columns + column]).collect();
                    format.factor().round_column(&mut values);
                    (0..rows).for_each(|row| matrix[row * columns + column] = values[row]);
                }
            }
        }
        plain.upload(&plain.model.params, &flat).expect("parameters upload");
        assert_eq!(gradient(&plain), got, "{format:?}");
    }
}

/// A system that this one replaces lost its format when it resumed.
#[test]
fn a_format_trains_to_other_weights_and_a_resumed_run_has_it() {
    let run = |learner: &mut ModelLearner<Reference<f32>>, config: &Config, steps: std::ops::Range<u64>| {
        for s in steps {
            learner.step(&batch(config, s), 1e-3).expect("a step");
        }
        learner.export().expect("it exports")
    };
    let mut all: Vec<State> = Vec::new();
    for format in Format::ALL {
        let config = with_format(format);
        let straight = run(&mut learner::<f32>(&config), &config, 0..4);
        let half = run(&mut learner::<f32>(&config), &config, 0..2);
        // The format comes back with the configuration of the checkpoint.
        let stored = Config::from_toml(&config.to_toml(), "config.toml".as_ref()).expect("it is TOML");
        let mut resumed = learner::<f32>(&stored);
        resumed.import(&half).expect("it imports");
        assert_eq!(run(&mut resumed, &stored, 2..4), straight, "{format:?}");
        assert!(all.iter().all(|other| *other != straight), "{format:?} trains as another format does");
        all.push(straight);
    }
}

#[test]
fn a_format_is_asked_of_scoring_too() {
    let windows = vec![batch(&tiny(1, 16), 0).bytes];
    let mut scores: Vec<Vec<f64>> = Vec::new();
    for format in Format::ALL {
        let score = learner::<f32>(&with_format(format)).evaluate(&windows).expect("scores");
        assert!(!scores.contains(&score), "{format:?}");
        scores.push(score);
    }
}

#[test]
fn the_whole_gradient_equals_central_differences_with_the_other_gates() {
    let mut config = tiny(2, 19);
    (config.model.gate, config.model.beta_scale) = (Gate::Softplus, 2);
    central_differences(&config, |name| name.starts_with("kda."));
}

#[test]
fn the_other_gates_give_other_losses_and_still_start_near_guessing() {
    let loss = |change: fn(&mut ModelConfig)| {
        let mut config = tiny(2, 16);
        change(&mut config.model);
        first_loss(&config);
        let mut learner = learner::<f32>(&config);
        learner.step(&batch(&config, 0), 0.0).expect("a step");
        learner.drain().expect("records")[0].loss
    };
    let [usual, softplus, beta] = [loss(|_| {}), loss(|m| m.gate = Gate::Softplus), loss(|m| m.beta_scale = 2)];
    assert!(usual != softplus && usual != beta && softplus != beta, "{usual} {softplus} {beta}");
}
