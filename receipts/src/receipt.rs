//! What the gate writes down when an operation's fused kernels are green.
//!
//! A receipt holds no date and no duration: with the recorded seed, on the same device, driver and commit, the gate
//! writes the same bytes again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The version of the format.
pub const VERSION: u32 = 1;

/// One file: an operation at one precision on one GPU generation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Receipt {
    /// [`VERSION`].
    pub version: u32,
    /// The operation.
    pub stem: String,
    /// The precision of its matrix products: `f32`, `tf32`, `bf16`.
    pub precision: String,
    /// The GPU generation, such as `sm_90`, or `lavapipe`.
    pub target: String,
    /// What the precision means for this operation.
    pub arithmetic: String,
    /// The hash of the sources that were gated, see [`mod@crate::fingerprint`].
    pub fingerprint: String,
    /// The commit that was built, with `-dirty` behind it if files were changed.
    pub commit: String,
    /// The command that gives the same figures again.
    pub command: String,
    /// The seed of inputs and random cases.
    pub seed: u64,
    /// Random cases besides the table's.
    pub random: u32,
    /// Cases of gate `diff`.
    pub cases: usize,
    /// Where it ran.
    pub device: Device,
    /// Cases of each gate; for `bite`, mutants.
    pub gates: BTreeMap<String, usize>,
    /// Every output and gradient, at its worst over all cases of gate `diff`.
    #[serde(rename = "tensor")]
    pub tensors: Vec<Tensor>,
}

/// The machine that a receipt comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// The product's name.
    pub name: String,
    /// The driver's release.
    pub driver: String,
    /// The run-time compiler's version.
    pub nvrtc: String,
    /// The matrix library's version.
    pub cublaslt: String,
}

/// One tensor's worst figures.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tensor {
    /// Its name; gradients start with `d`.
    pub name: String,
    /// The worst measure over its bound; 1 is the edge.
    pub worst: f64,
    /// Relative rms error.
    pub rms: f64,
    /// Worst row's rms error over the tensor's rms.
    pub token: f64,
    /// Worst element's error over the largest element.
    pub element: f64,
    /// `|<got, want> / <want, want> - 1|`.
    pub slope: f64,
    /// Bound of `rms`; ten times as much of `token` and `element`.
    pub tolerance: f64,
    /// Bound of `slope`.
    pub slope_tolerance: f64,
}

/// Why a receipt cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read or written.
    #[error("{path}: {source}")]
    File {
        /// Its path.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The text is no receipt.
    #[error("{name}: no receipt: {reason}; write it anew with `{}`", crate::renew("<stem>"))]
    Format {
        /// The file's name.
        name: String,
        /// The parser's words.
        reason: String,
    },
}

impl Receipt {
    /// The file's name.
    #[must_use]
    pub fn file_name(&self) -> String {
        crate::file_name(&self.stem, &self.precision, &self.target)
    }

    /// Reads the text of a file with this name. What the file is called and what it says must agree, so that a copied
    /// receipt proves nothing.
    ///
    /// # Errors
    /// `Format` for anything that the gate has not written like this.
    pub fn parse(name: &str, text: &str) -> Result<Self, Error> {
        let fault = |reason: String| Error::Format { name: name.to_owned(), reason };
        let receipt: Self = toml::from_str(text).map_err(|e| fault(e.to_string()))?;
        if receipt.version != VERSION {
            return Err(fault(format!("format version {}, expected {VERSION}", receipt.version)));
        }
        if receipt.file_name() != name {
            return Err(fault(format!("it says that it is {}", receipt.file_name())));
        }
        let figures = |t: &Tensor| [t.worst, t.rms, t.token, t.element, t.slope, t.tolerance, t.slope_tolerance];
        if let Some(bad) = receipt.tensors.iter().find(|t| t.worst > 1.0 || !figures(t).iter().all(|f| f.is_finite())) {
            return Err(fault(format!("`{}` is {} of its tolerance", bad.name, bad.worst)));
        }
        if receipt.tensors.is_empty() || receipt.cases == 0 {
            return Err(fault("it compares nothing".to_owned()));
        }
        Ok(receipt)
    }

    /// The text of the file.
    ///
    /// # Errors
    /// `Format` for a number that TOML does not hold.
    pub fn text(&self) -> Result<String, Error> {
        let body =
            toml::to_string(self).map_err(|e| Error::Format { name: self.file_name(), reason: e.to_string() })?;
        Ok(format!("# Written by the gate, never by hand; docs/verification.md says what it means.\n{body}"))
    }

    /// Writes the file into a folder, which is made if it is not there, and gives its path.
    ///
    /// # Errors
    /// `File` where the folder refuses it.
    pub fn write(&self, folder: &Path) -> Result<PathBuf, Error> {
        let path = folder.join(self.file_name());
        let fault = |source| Error::File { path: path.clone(), source };
        std::fs::create_dir_all(folder).map_err(fault)?;
        // Written aside and renamed, so that a receipt is whole or not there.
        let aside = path.with_extension("toml.new");
        std::fs::write(&aside, self.text()?).map_err(fault)?;
        std::fs::rename(&aside, &path).map_err(fault)?;
        Ok(path)
    }
}

/// A receipt as tests want it.
#[cfg(test)]
pub(crate) fn sample() -> Receipt {
    let tensor = |name: &str| Tensor {
        name: name.to_owned(),
        worst: 0.0625,
        rms: 1.25e-7,
        token: 3e-7,
        element: 2.5e-7,
        slope: 1e-8,
        tolerance: 2e-6,
        slope_tolerance: 2e-6,
    };
    Receipt {
        version: VERSION,
        stem: "rms_norm".to_owned(),
        precision: "tf32".to_owned(),
        target: "sm_90".to_owned(),
        arithmetic: "f32".to_owned(),
        fingerprint: "00ff".repeat(16),
        commit: "0123abc".to_owned(),
        command: "cargo xtask gate rms_norm".to_owned(),
        seed: 1 << 40,
        random: 16,
        cases: 24,
        device: Device {
            name: "NVIDIA H200".to_owned(),
            driver: "580.65.06".to_owned(),
            nvrtc: "13.0".to_owned(),
            cublaslt: "13.0.2".to_owned(),
        },
        gates: [("diff", 24), ("bite", 7)].map(|(gate, n)| (gate.to_owned(), n)).into(),
        tensors: vec![tensor("y"), tensor("dx")],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_the_same_bytes_every_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = sample().write(&folder.path().join("receipts")).unwrap();
        assert_eq!(path.file_name().unwrap(), "rms_norm.tf32.sm_90.toml");
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(Receipt::parse("rms_norm.tf32.sm_90.toml", &text).unwrap(), sample());
        assert_eq!(text, sample().text().unwrap());
    }

    #[test]
    fn a_receipt_that_the_gate_has_not_written_is_refused() {
        let name = sample().file_name();
        let text = sample().text().unwrap();
        let refused = |name: &str, text: &str| Receipt::parse(name, text).unwrap_err().to_string();
        assert!(refused("rms_norm.f32.sm_90.toml", &text).contains("says that it is rms_norm.tf32"));
        assert!(refused(&name, &text.replacen("version = 1", "version = 2", 1)).contains("version 2"));
        assert!(refused(&name, &text.replacen("worst = 0.0625", "worst = 1.5", 1)).contains("1.5 of its tolerance"));
        assert!(refused(&name, &text.replacen("worst = 0.0625", "worst = nan", 1)).contains("tolerance"));
        assert!(refused(&name, &text.replacen("cases = 24", "cases = 0", 1)).contains("nothing"));
        assert!(refused(&name, &text.replacen("seed", "sead", 1)).contains("sead"));
        assert!(refused(&name, "").contains("no receipt"));
    }
}
