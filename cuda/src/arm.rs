//! [`Arm`]: which of an operation's two sets of kernels runs, and the faults that can be planted in them.
//!
//! Arm `plain` is the obvious kernel, easy to trust; `fused` is the one for production. A device starts with `plain`
//! everywhere: whoever holds a receipt asks for `fused`. The arm that forward took is kept with what it saved, and
//! backward takes the same.
//!
//! A mutant is a number that kernels get at compile time, 0 in production, so the binary that the gates test is the one
//! that ships. [`catalogue`] lists them by name, each with the gate that must turn red. A name that starts with `null`
//! changes how a kernel is written and not what it computes; every gate must stay green.

use std::collections::BTreeMap;
use std::fmt;

use dormouse_reference::{Error, Result};

/// One of the two sets of kernels of an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Arm {
    /// One unit does the obvious thing.
    #[default]
    Plain,
    /// Few launches, each near the floor of its bytes or products.
    Fused,
}

impl Arm {
    /// Both, the trusted one first.
    pub const ALL: [Arm; 2] = [Arm::Plain, Arm::Fused];

    /// The word in tables and on the command line.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Arm::Plain => "plain",
            Arm::Fused => "fused",
        }
    }
}

impl fmt::Display for Arm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// A fault that can be planted in an operation's kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mutant {
    /// What is broken, such as `mean-dropped`.
    pub name: &'static str,
    /// The arm whose kernels have it.
    pub arm: Arm,
    /// The gate that must turn red: `diff`, `meta`, `poison` or `det`. A `null` mutant keeps it green.
    pub gate: &'static str,
}

impl Mutant {
    /// A fault of the fused kernels that gate `diff` must see.
    pub(crate) const fn fused(name: &'static str) -> Self {
        Self { name, arm: Arm::Fused, gate: "diff" }
    }

    /// Whether it changes nothing that is computed.
    #[must_use]
    pub fn is_null(&self) -> bool {
        self.name.starts_with("null")
    }
}

/// What there is of an operation on a device.
#[derive(Clone, Copy, Debug)]
pub struct Kernels {
    /// The operation's stem.
    pub stem: &'static str,
    /// Its mutants; number `i` is `i + 1` to the kernels.
    pub mutants: &'static [Mutant],
}

/// Every operation with its mutants, in alphabetical order of stems.
#[must_use]
pub fn catalogue() -> &'static [Kernels] {
    const ALL: &[Kernels] = &[
        Kernels { stem: "adamw", mutants: crate::adamw::MUTANTS },
        Kernels { stem: "blend", mutants: crate::blend::MUTANTS },
        Kernels { stem: "controller", mutants: crate::controller::MUTANTS },
        Kernels { stem: "cross_entropy", mutants: crate::cross_entropy::MUTANTS },
        Kernels { stem: "decay_gate", mutants: crate::decay_gate::MUTANTS },
        Kernels { stem: "ema", mutants: crate::ema::MUTANTS },
        Kernels { stem: "embedding", mutants: crate::embedding::MUTANTS },
        Kernels { stem: "engram", mutants: crate::engram::MUTANTS },
        Kernels { stem: "engram_hash", mutants: crate::engram_hash::MUTANTS },
        Kernels { stem: "expert", mutants: crate::expert::MUTANTS },
        Kernels { stem: "gated_rms_norm", mutants: crate::gated_rms_norm::MUTANTS },
        Kernels { stem: "jepa", mutants: crate::jepa::MUTANTS },
        Kernels { stem: "kda", mutants: crate::kda::MUTANTS },
        Kernels { stem: "koleo", mutants: crate::koleo::MUTANTS },
        Kernels { stem: "l2_norm", mutants: crate::l2_norm::MUTANTS },
        Kernels { stem: "layer_norm", mutants: crate::layer_norm::MUTANTS },
        Kernels { stem: "linear", mutants: crate::linear::MUTANTS },
        Kernels { stem: "mask_vector", mutants: crate::mask_vector::MUTANTS },
        Kernels { stem: "muon", mutants: crate::muon::MUTANTS },
        Kernels { stem: "record", mutants: crate::record::MUTANTS },
        Kernels { stem: "residual", mutants: crate::residual::MUTANTS },
        Kernels { stem: "retract", mutants: crate::retract::MUTANTS },
        Kernels { stem: "retract_all", mutants: crate::retract_all::MUTANTS },
        Kernels { stem: "rms_norm", mutants: crate::rms_norm::MUTANTS },
        Kernels { stem: "row_adam", mutants: crate::row_adam::MUTANTS },
        Kernels { stem: "sanitise", mutants: crate::sanitise::MUTANTS },
        Kernels { stem: "short_conv", mutants: crate::short_conv::MUTANTS },
        Kernels { stem: "spectral", mutants: crate::spectral::MUTANTS },
    ];
    ALL
}

/// The arms of one device.
#[derive(Debug, Default)]
pub(crate) struct Arms {
    general: Arm,
    chosen: BTreeMap<&'static str, Arm>,
    mutant: Option<(&'static str, u32)>,
}

impl Arms {
    pub fn get(&self, stem: &str) -> Arm {
        self.chosen.get(stem).copied().unwrap_or(self.general)
    }

    pub fn set_all(&mut self, arm: Arm) {
        self.general = arm;
        self.chosen.clear();
    }

    pub fn set(&mut self, stem: &str, arm: Arm) -> Result<()> {
        self.chosen.insert(find(stem)?.stem, arm);
        Ok(())
    }

    pub fn mutant(&self, stem: &str) -> u32 {
        self.mutant.filter(|(of, _)| *of == stem).map_or(0, |(_, number)| number)
    }

    pub fn plant(&mut self, stem: &str, name: &str) -> Result<()> {
        let kernels = find(stem)?;
        let at = kernels.mutants.iter().position(|mutant| mutant.name == name);
        let at = at.ok_or_else(|| Error::Config {
            op: "plant",
            field: "mutant",
            expected: format!("one of {:?}", kernels.mutants.iter().map(|m| m.name).collect::<Vec<_>>()),
            got: name.to_owned(),
        })?;
        self.mutant = Some((kernels.stem, at as u32 + 1));
        Ok(())
    }
}

fn find(stem: &str) -> Result<&'static Kernels> {
    catalogue().iter().find(|kernels| kernels.stem == stem).ok_or_else(|| Error::Config {
        op: "arm",
        field: "stem",
        expected: format!("one of {:?}", catalogue().iter().map(|k| k.stem).collect::<Vec<_>>()),
        got: stem.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arms_are_plain_until_someone_asks_and_stems_have_to_exist() {
        let mut arms = Arms::default();
        assert_eq!(arms.get("rms_norm"), Arm::Plain);
        arms.set("rms_norm", Arm::Fused).unwrap();
        assert_eq!((arms.get("rms_norm"), arms.get("linear")), (Arm::Fused, Arm::Plain));
        arms.set_all(Arm::Fused);
        assert_eq!(arms.get("linear"), Arm::Fused);
        assert!(arms.set("rmsnorm", Arm::Fused).unwrap_err().to_string().contains("rms_norm"));
    }

    #[test]
    fn a_mutant_belongs_to_one_operation() {
        let mut arms = Arms::default();
        let name = crate::rms_norm::MUTANTS[1].name;
        arms.plant("rms_norm", name).unwrap();
        assert_eq!((arms.mutant("rms_norm"), arms.mutant("linear")), (2, 0));
        assert!(arms.plant("rms_norm", "no such").is_err());
    }

    #[test]
    fn the_catalogue_is_sorted_and_its_names_are_unique() {
        let stems: Vec<_> = catalogue().iter().map(|k| k.stem).collect();
        assert!(stems.is_sorted());
        for kernels in catalogue() {
            let mut names: Vec<_> = kernels.mutants.iter().map(|m| m.name).collect();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), kernels.mutants.len(), "{}", kernels.stem);
        }
    }
}
