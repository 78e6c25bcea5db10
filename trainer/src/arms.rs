//! Which arm of each operation runs, and why.
//!
//! An arm is asked for (`--arm STEM=plain|fused`) or follows from a receipt: `fused` where one vouches for the kernels
//! that this program holds, else `plain`. A fused arm without a receipt needs `--unverified`, which marks the log and
//! every checkpoint.

use std::collections::BTreeMap;

use dormouse_cuda::{Arm, catalogue};

use crate::config::{ConfigError, Math, RunConfig};

/// The arm of one operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The operation.
    pub stem: &'static str,
    /// Its arm.
    pub arm: Arm,
    /// Why this one.
    pub why: String,
    /// Whether it is fused and no receipt vouches for it.
    pub unverified: bool,
    /// Whether it is plain only because no receipt vouches for the fused kernels.
    pub declined: bool,
}

/// What the receipts say of an operation's fused kernels.
struct Verdict {
    verified: bool,
    why: String,
}

/// The receipt of an operation at a precision on a generation of GPUs (`sm_90`), if it still holds.
fn receipt(stem: &'static str, precision: Math, sm: &str) -> Verdict {
    // A software driver has no generation, and no gate writes a receipt for it.
    if !sm.starts_with("sm_") {
        let file = format!("{stem}.{}.{sm}.toml", precision.word());
        return Verdict { verified: false, why: format!("there is no {file}: receipts here are of NVIDIA GPUs alone") };
    }
    let verdict = dormouse_cuda::receipts::verdict(stem, precision.precision(), sm);
    Verdict { verified: verdict.is_valid(), why: verdict.to_string() }
}

/// `STEM=plain` or `STEM=fused`, taken apart; the stem is `all` or one that has kernels.
///
/// # Errors
/// What is wrong with it, for people.
pub fn parse(asked: &str) -> Result<(&str, Arm), String> {
    let (stem, word) = asked.split_once('=').ok_or_else(|| format!("holds `{asked}`, which has no `=`"))?;
    let arm = Arm::ALL.into_iter().find(|arm| arm.word() == word);
    let arm = arm.ok_or_else(|| format!("holds `{asked}`, whose arm is neither plain nor fused"))?;
    if stem != "all" && !catalogue().iter().any(|kernels| kernels.stem == stem) {
        return Err(format!("holds `{asked}`, and no operation with kernels is called `{stem}`"));
    }
    Ok((stem, arm))
}

/// The arm of every operation with kernels, in alphabetical order.
///
/// # Errors
/// `Invalid` for a fused arm that was asked for, has no receipt and is not admitted by `unverified`.
pub fn choose(run: &RunConfig, sm: &str) -> Result<Vec<Choice>, ConfigError> {
    let mut asked: BTreeMap<&str, Arm> = BTreeMap::new();
    for entry in &run.arms {
        let invalid = |problem| ConfigError::Invalid {
            key: "run.arms".into(),
            problem,
            fix: "give STEM=plain or STEM=fused".into(),
        };
        let (stem, arm) = parse(entry).map_err(invalid)?;
        if stem == "all" {
            asked = catalogue().iter().map(|kernels| (kernels.stem, arm)).collect();
        } else {
            asked.insert(stem, arm);
        }
    }
    catalogue().iter().map(|kernels| one(kernels.stem, asked.get(kernels.stem).copied(), run, sm)).collect()
}

fn one(stem: &'static str, asked: Option<Arm>, run: &RunConfig, sm: &str) -> Result<Choice, ConfigError> {
    let Verdict { verified, why } = receipt(stem, run.precision, sm);
    let (arm, why) = match asked {
        Some(Arm::Fused) if !verified && !run.unverified => {
            return Err(ConfigError::Invalid {
                key: "run.arms".into(),
                problem: format!("asks for {stem}=fused without a valid receipt: {why}"),
                fix: "add --unverified to run it all the same, or leave the arm out".into(),
            });
        }
        Some(arm) => (arm, format!("asked for; {why}")),
        None if verified => (Arm::Fused, why),
        None if run.unverified => (Arm::Fused, format!("--unverified; {why}")),
        None => (Arm::Plain, why),
    };
    let declined = arm == Arm::Plain && asked.is_none();
    Ok(Choice { stem, arm, why, unverified: arm == Arm::Fused && !verified, declined })
}

/// The table of `dormouse arms`.
pub fn table(choices: &[Choice]) -> String {
    let mut text = format!("{:<16} {:<6} why\n", "stem", "arm");
    for choice in choices {
        text.push_str(&format!("{:<16} {:<6} {}\n", choice.stem, choice.arm.word(), choice.why));
    }
    text
}

#[cfg(test)]
mod tests {
    use dormouse_cuda::Arm;

    use super::{choose, parse, table};
    use crate::config::{Backend, RunConfig};

    fn run(arms: &[&str], unverified: bool) -> RunConfig {
        let arms = arms.iter().map(|arm| (*arm).to_owned()).collect();
        RunConfig { backend: Backend::Cuda, arms, unverified, ..RunConfig::default() }
    }

    fn arm_of(run: &RunConfig, stem: &str) -> Arm {
        choose(run, "sm_00").unwrap().into_iter().find(|choice| choice.stem == stem).unwrap().arm
    }

    #[test]
    fn without_a_receipt_it_is_plain_until_the_user_insists() {
        // No GPU has this generation, so no receipt can be there.
        assert_eq!(arm_of(&run(&[], false), "rms_norm"), Arm::Plain);
        assert_eq!(arm_of(&run(&[], true), "rms_norm"), Arm::Fused);
        let error = choose(&run(&["rms_norm=fused"], false), "sm_00").unwrap_err().to_string();
        assert!(error.contains("rms_norm=fused") && error.contains("--unverified"), "{error}");
        assert_eq!(arm_of(&run(&["rms_norm=fused"], true), "rms_norm"), Arm::Fused);
        assert_eq!(arm_of(&run(&["rms_norm=plain"], true), "rms_norm"), Arm::Plain);
        let declined = |arms: &[&str], unverified| choose(&run(arms, unverified), "sm_00").unwrap()[0].declined;
        assert!(declined(&[], false) && !declined(&["all=plain"], false) && !declined(&[], true));
        assert_eq!(arm_of(&run(&["all=plain", "rms_norm=fused"], true), "rms_norm"), Arm::Fused);
        assert_eq!(arm_of(&run(&["all=plain", "rms_norm=fused"], true), "residual"), Arm::Plain);
    }

    #[test]
    fn nobody_is_sent_for_a_receipt_that_no_gate_writes() {
        let text = table(&choose(&run(&[], false), "lavapipe").unwrap());
        assert!(text.contains("receipts here are of NVIDIA GPUs alone") && !text.contains("cargo xtask"), "{text}");
        let error = choose(&run(&["rms_norm=fused"], false), "lavapipe").unwrap_err().to_string();
        assert!(error.contains("without a valid receipt") && error.contains("--unverified"), "{error}");
    }

    #[test]
    fn what_is_no_arm_is_named() {
        assert!(parse("rms_norm").unwrap_err().contains("no `=`"));
        assert!(parse("rms_norm=fast").unwrap_err().contains("neither plain nor fused"));
        assert!(parse("rms=plain").unwrap_err().contains("`rms`"));
    }

    #[test]
    fn every_operation_has_a_line_with_a_reason() {
        let text = table(&choose(&run(&[], false), "sm_00").unwrap());
        assert_eq!(text.lines().count(), dormouse_cuda::catalogue().len() + 1);
        assert!(text.lines().skip(1).all(|line| line.contains(".f32.sm_00.toml")), "{text}");
    }
}
