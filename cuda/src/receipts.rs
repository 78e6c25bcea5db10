//! Which fused kernels have been shown to be right: the receipts in the repository, held against this build's sources.
//!
//! The build script computes the fingerprint of every operation (see `dormouse_receipts::fingerprint`) and embeds
//! `golden/receipts`, so a shipped binary knows what was shown about its own kernels.

use dormouse_receipts::Verdict;
use dormouse_reference::Precision;

include!(concat!(env!("OUT_DIR"), "/receipts.rs"));

/// The fingerprint of the sources that this build's kernels of an operation were made from; `None` for a stem without
/// kernels.
#[must_use]
pub fn fingerprint(stem: &str) -> Option<&'static str> {
    FINGERPRINTS.iter().find(|(known, _)| *known == stem).map(|(_, fingerprint)| *fingerprint)
}

/// Whether an operation's fused kernels may be the default at a precision on a GPU generation, which is
/// [`Hardware::target`](crate::Hardware::target), such as `sm_90`. What it displays says why, and the command that would
/// renew the receipt.
pub fn verdict(stem: &str, precision: Precision, target: &str) -> Verdict {
    dormouse_receipts::judge(RECEIPTS.iter().copied(), stem, word(precision), target, fingerprint(stem))
}

/// A precision's word in receipts and on the command line.
#[must_use]
pub fn word(precision: Precision) -> &'static str {
    match precision {
        Precision::Full => "f32",
        Precision::Tf32 => "tf32",
        Precision::Bf16 => "bf16",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    use dormouse_receipts::{PRECISIONS, Sources};

    #[test]
    fn every_operation_of_the_catalogue_has_the_fingerprint_of_its_sources() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let sources = Sources::of(root);
        for kernels in crate::catalogue() {
            assert_eq!(fingerprint(kernels.stem), Some(sources.fingerprint(kernels.stem).unwrap().as_str()));
        }
        assert_eq!(fingerprint("rows"), None);
    }

    #[test]
    fn every_receipt_in_the_repository_reads_and_belongs_to_an_operation() {
        for (name, text) in RECEIPTS {
            let receipt = dormouse_receipts::Receipt::parse(name, text).unwrap();
            assert!(crate::catalogue().iter().any(|k| k.stem == receipt.stem), "{name}");
            assert!(receipt.target.starts_with("sm_"), "{name}: only a GPU's receipts belong here");
        }
    }

    #[test]
    fn a_gpu_that_nobody_has_tried_has_no_receipt() {
        let verdict = verdict("rms_norm", Precision::Full, "sm_1");
        assert!(matches!(verdict, Verdict::Missing { .. }), "{verdict}");
        assert!(verdict.to_string().contains("rms_norm.f32.sm_1.toml"), "{verdict}");
        assert_eq!([Precision::Full, Precision::Tf32, Precision::Bf16].map(word), PRECISIONS);
    }
}
