//! Which update rule every parameter tensor follows: each is in exactly one [`Group`].

use dormouse_reference::{muon, retract_all};

use super::params::{Group, Param, Table};
use crate::config::Rule;

/// The group of a tensor.
///
/// Muon is for matrices that map a vector to a vector: the factors of experts and output map, the projections of the
/// n-gram memory, and, head by head, attention's queries, keys and values. The rows of the memory's table are looked up,
/// so only those that were touched move. All else is AdamW's, the head's factors among it, since every logit is a row
/// of its own.
pub fn group_of(rule: Rule, param: &Param) -> Group {
    match param.name {
        "engram.table" => Group::Rows,
        _ if rule == Rule::Adamw => param.group,
        "kda.q" | "kda.k" | "kda.v" => Group::MuonByHead,
        "expert.up_u" | "expert.up_v" | "expert.down_u" | "expert.down_v" | "out.u" | "out.v" => Group::Muon,
        "engram.key" | "engram.value" => Group::Muon,
        _ => param.group,
    }
}

impl Table {
    /// The same table with every tensor in its group under `rule`.
    #[must_use]
    pub fn grouped(mut self, rule: Rule) -> Self {
        for param in &mut self.params {
            param.group = group_of(rule, param);
        }
        self
    }

    /// What Muon moves, as its operation wants it.
    ///
    /// A matrix `[in, out]` gets the scale sqrt(max(1, out / in)); a spectral factor and a head's slice get 1. Weight
    /// decay leaves out the factors, whose size retraction fixes.
    pub fn muon(&self, heads: usize, weight_decay: f64) -> Vec<muon::Matrix> {
        let members = self.params.iter().filter(|p| matches!(p.group, Group::Muon | Group::MuonByHead));
        members
            .map(|param| {
                let shape @ [_, rows, columns] = matrices(param);
                let by_head = param.group == Group::MuonByHead;
                let plain = !(by_head || param.retracted);
                muon::Matrix {
                    start: param.start,
                    shape,
                    heads: if by_head { heads } else { 1 },
                    scale: if plain { (columns as f64 / rows as f64).max(1.0).sqrt() } else { 1.0 },
                    weight_decay: if param.retracted { 0.0 } else { weight_decay },
                }
            })
            .collect()
    }

    /// What retraction keeps orthonormal, as its operation wants it.
    pub fn factors(&self) -> Vec<retract_all::Factor> {
        let factor = |param: &Param| retract_all::Factor { start: param.start, shape: matrices(param) };
        self.params.iter().filter(|p| p.retracted).map(factor).collect()
    }
}

/// `[E, rows, columns]` of a tensor of matrices.
fn matrices(param: &Param) -> [usize; 3] {
    match param.shape[..] {
        [e, rows, columns] => [e, rows, columns],
        [rows, columns] => [1, rows, columns],
        _ => unreachable!("`{}` is {:?}, and only matrices are in these groups", param.name, param.shape),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Engram, preset};

    fn tiny(rule: Rule) -> Table {
        Table::new(&preset("tiny").expect("tiny is a preset").model).grouped(rule)
    }

    #[test]
    fn every_element_is_in_exactly_one_group_under_every_rule() {
        for (name, rule) in [("tiny", Rule::Adamw), ("tiny", Rule::Muon), ("small", Rule::Adamw), ("small", Rule::Muon)]
        {
            let model = preset(name).expect("it is a preset").model;
            let table = Table::new(&model).grouped(rule);
            let mut covered = vec![0; table.len()];
            for range in Group::ALL.iter().flat_map(|&group| table.ranges(group)) {
                covered[range].iter_mut().for_each(|n| *n += 1);
            }
            assert!(covered.iter().all(|&n| n == 1), "{name} {rule:?}");
            // What Muon's own table covers is what its groups say.
            let moved: usize = table.muon(model.heads, 0.1).iter().map(|matrix| matrix.range().len()).sum();
            let grouped = [Group::Muon, Group::MuonByHead].into_iter().flat_map(|group| table.ranges(group));
            assert_eq!(moved, grouped.map(|range| range.len()).sum::<usize>());
            assert_eq!(moved > 0, rule == Rule::Muon);
        }
    }

    #[test]
    fn the_rule_of_the_presets_changes_no_group() {
        let model = preset("nano").expect("nano is a preset").model;
        assert_eq!(Table::new(&model).grouped(Rule::Adamw), Table::new(&model));
    }

    #[test]
    fn muon_has_the_members_that_are_documented() {
        let table = tiny(Rule::Muon);
        let members =
            |group| -> Vec<&str> { table.params.iter().filter(|p| p.group == group).map(|p| p.name).collect() };
        assert_eq!(members(Group::MuonByHead), ["kda.q", "kda.k", "kda.v"]);
        let factors = ["expert.up_u", "expert.up_v", "expert.down_u", "expert.down_v", "out.u", "out.v"];
        assert_eq!(members(Group::Muon), factors);
        // With a memory its projections are among them, and its table is a group of its own under every rule.
        let small = |rule| Table::new(&preset("small").expect("small is a preset").model).grouped(rule);
        let of = |table: &Table, name: &str| table.get(name).group;
        let (muon, adamw) = (small(Rule::Muon), small(Rule::Adamw));
        for name in ["engram.key", "engram.value"] {
            assert_eq!((of(&muon, name), of(&adamw, name)), (Group::Muon, Group::Matrix), "{name}");
        }
        assert_eq!((of(&muon, "engram.table"), of(&adamw, "engram.table")), (Group::Rows, Group::Rows));
        assert_eq!(of(&muon, "dense"), Group::Matrix);
    }

    #[test]
    fn scales_heads_and_decay_follow_the_kind_of_matrix() {
        let mut model = preset("tiny").expect("tiny is a preset").model;
        (model.engram, model.width, model.heads) = (Engram::Device, 384, 6);
        let table = Table::new(&model).grouped(Rule::Muon);
        let start = table.get("engram.table").start;
        let matrices = table.muon(6, 0.1);
        assert!(matrices.iter().all(|matrix| matrix.start != start));
        let of = |name: &str| matrices.iter().find(|m| m.start == table.get(name).start).expect("it is Muon's");
        let (q, factor, key) = (of("kda.q"), of("expert.up_v"), of("engram.key"));
        assert_eq!((q.shape, q.heads, q.scale, q.weight_decay), ([1, 384, 384], 6, 1.0, 0.1));
        assert_eq!((factor.shape, factor.heads, factor.scale, factor.weight_decay), ([2, 256, 32], 1, 1.0, 0.0));
        assert_eq!((key.shape, key.heads, key.scale, key.weight_decay), ([1, 96, 384], 1, 2.0, 0.1));
    }
}
