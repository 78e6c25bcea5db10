//! Whether an operation's fused kernels may run by default: is there a receipt for exactly these sources?

use std::fmt;

use crate::receipt::Receipt;
use crate::{file_name, renew};

/// What the receipts say about one operation at one precision on one GPU generation.
#[derive(Clone, Debug, PartialEq)]
#[must_use = "an arm without a receipt is not to run by default"]
pub enum Verdict {
    /// The fused kernels of these sources have been equal to the reference.
    Valid(Box<Receipt>),
    /// There is a receipt, and it is for other sources or cannot be read.
    Stale {
        /// The receipt's file.
        file: String,
        /// What is wrong with it.
        reason: String,
        /// The command that writes it anew.
        renew: String,
    },
    /// There is no receipt.
    Missing {
        /// The file that would be one.
        file: String,
        /// The command that writes it.
        renew: String,
    },
}

impl Verdict {
    /// Whether the fused arm may be the default.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        matches!(self, Self::Valid(_))
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Valid(receipt) => {
                let worst = receipt.tensors.iter().map(|t| t.worst).fold(0.0, f64::max);
                let (file, device) = (receipt.file_name(), &receipt.device.name);
                write!(f, "{file}: {} cases on {device}, worst {worst:.2} of tolerance", receipt.cases)
            }
            Self::Stale { file, reason, renew } => write!(f, "{file} is stale: {reason}; renew it with `{renew}`"),
            Self::Missing { file, renew } => write!(f, "there is no {file}; write it with `{renew}`"),
        }
    }
}

/// Looks an operation's receipt up among `files`, names with texts, and holds it against the fingerprint of the sources.
pub fn judge<'a>(
    files: impl IntoIterator<Item = (&'a str, &'a str)>,
    stem: &str,
    precision: &str,
    target: &str,
    fingerprint: Option<&str>,
) -> Verdict {
    let file = file_name(stem, precision, target);
    let renew = renew(stem);
    let Some((_, text)) = files.into_iter().find(|(name, _)| *name == file) else {
        return Verdict::Missing { file, renew };
    };
    let stale = |reason: String| Verdict::Stale { file: file.clone(), reason, renew: renew.clone() };
    let receipt = match Receipt::parse(&file, text) {
        Ok(receipt) => receipt,
        Err(error) => return stale(error.to_string()),
    };
    match fingerprint {
        None => stale(format!("these sources have no fingerprint for `{stem}`")),
        Some(now) if receipt.fingerprint != now => {
            let short = |hash: &str| hash.chars().take(12).collect::<String>();
            stale(format!(
                "it is for sources {}, and these are {}: kernels, cases, tolerances or the reference have changed since",
                short(&receipt.fingerprint),
                short(now)
            ))
        }
        Some(_) => Verdict::Valid(Box::new(receipt)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::receipt::sample;

    #[test]
    fn only_a_receipt_for_these_sources_is_valid() {
        let (receipt, text) = (sample(), sample().text().unwrap());
        let name = receipt.file_name();
        let files = [("other.tf32.sm_90.toml", "x"), (name.as_str(), text.as_str())];
        let now = receipt.fingerprint.clone();
        let ask =
            |precision: &str, target: &str, print: Option<&str>| judge(files, "rms_norm", precision, target, print);
        assert!(ask("tf32", "sm_90", Some(&now)).is_valid());
        assert!(ask("tf32", "sm_90", Some(&now)).to_string().contains("24 cases on NVIDIA H200"));
        let stale = ask("tf32", "sm_90", Some("11".repeat(32).as_str()));
        assert!(matches!(stale, Verdict::Stale { .. }));
        let says = stale.to_string();
        assert!(says.contains("00ff00ff00ff") && says.contains("111111111111"), "{says}");
        assert!(says.contains("cargo xtask gate rms_norm --backend cuda"), "{says}");
        assert!(matches!(ask("tf32", "sm_90", None), Verdict::Stale { .. }));
        // What was shown at one precision or on one GPU says nothing about another.
        for (precision, target) in [("bf16", "sm_90"), ("tf32", "sm_100")] {
            let missing = ask(precision, target, Some(&now));
            assert!(
                matches!(&missing, Verdict::Missing { file, .. } if file.contains(precision) && file.contains(target))
            );
        }
    }

    #[test]
    fn a_damaged_receipt_is_stale_and_not_missing() {
        let name = sample().file_name();
        let verdict = judge([(name.as_str(), "nothing")], "rms_norm", "tf32", "sm_90", Some("1"));
        assert!(matches!(verdict, Verdict::Stale { .. }), "{verdict}");
    }
}
