//! `dormouse inspect`: what a configuration makes, without making it.

use crate::checkpoint;
use crate::cli::InspectArgs;
use crate::config::{Config, Engram, Sources, resolve};
use crate::data::Data;
use crate::learner::{parameters, resident};
use crate::model::{MemoryClasses, Products};
use crate::progress::say;
use crate::run::RunFolder;
use crate::train::group_table;

/// Prints configuration, parameters, memory, arithmetic, schedule, data and checkpoints. No model is built and no device
/// is opened, so a preset that this machine could not train can be looked at.
///
/// # Errors
/// The configuration or the data are wrong.
pub fn command(arguments: &InspectArgs) -> anyhow::Result<()> {
    let run = arguments.run.as_deref().map(RunFolder::open).transpose()?;
    let base = run.as_ref().map(RunFolder::config).transpose()?;
    let mut sources = arguments.device.over(Sources { base, ..arguments.config.sources() });
    if let Some(preset) = &arguments.start {
        sources.preset = Some(preset.clone());
    }
    let config = resolve(&sources)?;
    say(config.to_toml().trim_end());
    say("");
    say(&model(&config));
    let schedule = config.schedule();
    let total = config.train.total_steps;
    say(&format!(
        "schedule: {} steps of warm-up, {} of decay, {} in all; {} bytes a step",
        schedule.warmup_steps(total),
        schedule.decay_steps(total),
        total,
        config.bytes_per_step()
    ));
    let data = Data::open(&config)?;
    say(&format!(
        "data: {}, {} bytes, {} windows an epoch, {} held-out windows; the run sees {:.2} epochs",
        data.corpus.name(),
        data.corpus.len(),
        data.train.windows_per_epoch(),
        data.eval.windows().len(),
        data.train.epochs(total, config.train.batch_rows as u64)
    ));
    if let Some(line) = data.left_out() {
        say(&line);
    }
    if let Some(run) = run {
        let stored = run.config()?.data;
        let then = run.data_manifest()?;
        if (&stored.path, &stored.eval_path) == (&config.data.path, &config.data.eval_path) {
            then.check_unchanged(&data.manifest)?;
        }
        for (path, outcome) in checkpoint::list(&run.checkpoints())? {
            let text = match outcome {
                Ok(manifest) => match manifest.eval_bpb {
                    Some(bpb) => format!("good, held-out bpb {bpb:.4}"),
                    None => "good, not scored".into(),
                },
                Err(error) => error.to_string(),
            };
            say(&format!("{}: {text}", path.display()));
        }
    }
    Ok(())
}

/// The parameter table with its sum and groups, the memory and the arithmetic of a step.
fn model(config: &Config) -> String {
    let mut lines = Vec::new();
    let all = parameters(config);
    for parameter in &all {
        let shape: Vec<String> = parameter.shape.iter().map(usize::to_string).collect();
        let count: usize = parameter.shape.iter().product();
        let shape = format!("[{}]", shape.join(", "));
        lines.push(format!("{:24} {shape:>18} {count:>12}  {}", parameter.name, parameter.group));
    }
    let sum: usize = all.iter().map(|parameter| parameter.shape.iter().product::<usize>()).sum();
    lines.push(format!("{:24} {:>18} {sum:>12}", "sum", ""));
    lines.push(group_table(all));
    let table = resident(config);
    let memory = MemoryClasses::of(config, &table);
    let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
    let place = match config.model.engram {
        Engram::Off => "no n-gram table".to_owned(),
        Engram::Device => {
            format!("n-gram table {} with gradient, moments and counts, on the device", mib(memory.table))
        }
        Engram::Host => format!(
            "n-gram table {} with moments and counts, on the host, {} on the device for a batch's rows",
            mib(memory.table),
            mib(memory.room)
        ),
    };
    let teacher = match memory.teacher {
        0 => String::new(),
        bytes => format!("teacher {}, ", mib(bytes)),
    };
    lines.push(format!(
        "memory: weights {}, gradients {}, moments {}, {teacher}{place}",
        mib(memory.weights),
        mib(memory.gradients),
        mib(memory.moments)
    ));
    let products = Products::of(config, &table);
    lines.push(format!(
        "matmul FLOPs a step: {:.3e}: forward {:.3e}, teacher {:.3e}, backward {:.3e}, muon {:.3e}, retraction {:.3e}; the recurrence of \
         the attention is not counted",
        products.sum() as f64,
        products.forward as f64,
        products.teacher as f64,
        products.backward as f64,
        products.muon as f64,
        products.retraction as f64
    ));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::preset;

    #[test]
    fn the_benchmark_model_has_its_sum_its_groups_and_its_classes() {
        let text = model(&preset("small").unwrap());
        for words in [
            "engram.table                    [98304, 32]      3145728  adam by row",
            "sum                                              8996429\n",
            "8996429 parameters",
            "\n  adam by row: 1 tensors, 3145728 values: engram.table",
            "engram.key engram.value",
            "memory: weights 22.3 MiB, gradients 22.3 MiB, moments 44.6 MiB, teacher 22.3 MiB, n-gram table 48.4 MiB with gradient",
            "matmul FLOPs a step: ",
        ] {
            assert!(text.contains(words), "`{words}` is not in:\n{text}");
        }
        let mut host = preset("small").unwrap();
        host.model.engram = Engram::Host;
        let text = model(&host);
        assert!(text.contains("[98304, 32]") && text.contains("on the host, 12.0 MiB on the device"), "{text}");
        assert!(model(&preset("tiny").unwrap()).contains("no n-gram table"));
    }
}
