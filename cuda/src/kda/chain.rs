//! Where the chains of a call lie. All kernels ask [`whole_chain`] or [`piece_of_chain`] and nothing else.
//!
//! Without `cu_seqlens` a sequence is a batch entry. With it, a cube reads where its sequence starts and ends; how many
//! cubes there are and how large the scratch is follows from T and N alone, since the host does not read the offsets.
//! Cut into pieces of `size` tokens, sequence n has `ceil(length / size)` of them. Its pieces have the slots from
//! `start / size + n` on, which end where those of sequence n + 1 begin or before, so a value head has `T / size + N` slots
//! and some are not used. A cube that works on one slot finds the sequence with a binary search.
//!
//! Offsets are clamped: into 0..T, and the end of a sequence is not before its start. So whatever `cu_seqlens` holds, no
//! memory outside the tensors is touched.

use cubecl::prelude::*;
use dormouse_reference::Result;
use dormouse_reference::kda::Grads;

use super::{CHUNK, Call, SPAN, bytes};
use crate::device::Device;
use crate::launch::Grid;
use crate::runtime::Engine;
use crate::tensor::{Floats, Tensor, Words};

/// `cu_seqlens` in a kernel.
#[derive(CubeType, CubeLaunch)]
pub struct Cuts {
    offsets: Words,
    sequences: u32,
}

#[cube]
impl Cuts {
    /// Where sequence `n` starts, and sequence `n - 1` ends.
    fn at(&self, n: usize, time: usize) -> usize {
        (self.offsets.at(n) as usize).min(time)
    }
}

/// `cu_seqlens` as an argument of a kernel.
pub(super) fn cuts<R: Engine>(b: &Device<R>, call: &Call<'_>) -> ComptimeOptionArgs<Cuts, R> {
    let sequences = call.sizes.sequences as u32;
    call.inputs.cu_seqlens.map(|offsets| CutsLaunch::new(b.words(offsets), sequences)).into()
}

/// HV / H in a kernel, where that is not 1.
#[derive(CubeType, CubeLaunch)]
pub struct Group {
    size: u32,
}

/// HV / H as an argument of a kernel. Not compiled in, so that all calls with groups share their kernels.
pub(super) fn group<R: Engine>(call: &Call<'_>) -> ComptimeOptionArgs<Group, R> {
    (call.sizes.group > 1).then(|| GroupLaunch::new(call.sizes.group as u32)).into()
}

/// One sequence of one value head.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Chain {
    /// sequence * HV + head: its place among the states.
    pub index: usize,
    /// How many tokens it has.
    pub length: usize,
    /// Its head, out of `heads`: HV, or H where [`chain_of_keys`] gave it.
    pub head: usize,
    heads: usize,
    /// Its first token among all B * T.
    first: usize,
    /// Its first chunk and its first span among those of all chains.
    chunk: usize,
    span: usize,
}

#[cube]
impl Chain {
    /// First element of token `t` in a `[B, T, heads, width]` tensor.
    pub fn at(&self, t: usize, width: usize) -> usize {
        ((self.first + t) * self.heads + self.head) * width
    }

    /// From one token to the next in a `[B, T, heads, width]` tensor.
    pub fn step(&self, width: usize) -> usize {
        self.heads * width
    }

    /// The number of its chunk `n`.
    pub fn chunk(&self, n: usize) -> usize {
        self.chunk + n
    }

    /// The number of its span `n`.
    pub fn span(&self, n: usize) -> usize {
        self.span + n
    }
}

/// Chain `index` = sequence * HV + head.
#[cube]
pub(crate) fn whole_chain(index: usize, time: usize, heads: usize, cuts: &ComptimeOption<Cuts>) -> Chain {
    let sequence = index / heads;
    let head = index % heads;
    let mut first = sequence * time;
    let mut length = time;
    let mut chunk = index * time.div_ceil(comptime!(CHUNK));
    let mut span = index * time.div_ceil(comptime!(SPAN));
    #[comptime]
    match cuts {
        ComptimeOption::Some(cuts) => {
            let sequences = cuts.sequences as usize;
            first = cuts.at(sequence, time);
            length = cuts.at(sequence + 1, time).max(first) - first;
            chunk = head * (time / comptime!(CHUNK) + sequences) + first / comptime!(CHUNK) + sequence;
            span = head * (time / comptime!(SPAN) + sequences) + first / comptime!(SPAN) + sequence;
        }
        ComptimeOption::None => {}
    }
    Chain { index, length, head, heads, first, chunk, span }
}

/// The chain whose rows hold a chain's keys and queries: that of its key head in `[B, T, H, K]` tensors.
#[cube]
pub(crate) fn chain_of_keys(chain: &Chain, group: &ComptimeOption<Group>) -> Chain {
    let mut heads = chain.heads;
    let mut head = chain.head;
    #[comptime]
    match group {
        ComptimeOption::Some(group) => {
            heads = chain.heads / group.size as usize;
            head = chain.head / group.size as usize;
        }
        ComptimeOption::None => {}
    }
    Chain {
        index: chain.index,
        length: chain.length,
        head,
        heads,
        first: chain.first,
        chunk: chain.chunk,
        span: chain.span,
    }
}

/// Some neighbouring tokens of a chain.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Piece {
    pub chain: Chain,
    /// Its first token in the chain; from the chain's length on there is nothing to do.
    pub start: usize,
}

/// Piece `number` of `size` tokens, numbered as chunks and spans are.
#[cube]
pub(crate) fn piece_of_chain(
    number: usize,
    time: usize,
    heads: usize,
    cuts: &ComptimeOption<Cuts>,
    #[comptime] size: usize,
) -> Piece {
    let pieces = time.div_ceil(size);
    let mut index = number / pieces;
    let mut start = number % pieces * size;
    #[comptime]
    match cuts {
        ComptimeOption::Some(cuts) => {
            let sequences = cuts.sequences as usize;
            let slots = time / size + sequences;
            let slot = number % slots;
            // The last sequence whose slots begin at this one or before.
            let mut low = 0usize;
            let mut high = sequences;
            while low + 1 < high {
                let middle = (low + high) / 2;
                if cuts.at(middle, time) / size + middle <= slot {
                    low = middle;
                } else {
                    high = middle;
                }
            }
            let first_slot = cuts.at(low, time) / size + low;
            index = low * heads + number / slots;
            // Before the first sequence there is nothing, should it not start at 0.
            start = select(first_slot <= slot, (slot.max(first_slot) - first_slot) * size, time);
        }
        ComptimeOption::None => {}
    }
    Piece { chain: whole_chain(index, time, heads, cuts), start }
}

/// dq and dk of every key head: the sums of `[B, T, HV, K]` over the value heads of its group, first to last.
pub(super) fn sum_groups<R: Engine>(
    b: &Device<R>,
    call: &Call<'_>,
    by_value_head: [&Tensor; 2],
    grads: Grads<&Tensor>,
) -> Result<()> {
    const NAME: &str = "kda::sum_groups";
    let [dq_parts, dk_parts] = by_value_head;
    let uses = [dq_parts, dk_parts, grads.dq, grads.dk];
    let (len, key, group) = (grads.dq.len() as u32, call.sizes.key, call.sizes.group);
    let mutant = super::mutant(b, &[15]);
    b.launch(NAME, Grid::units(grads.dq.len()), bytes(uses), &uses, |client, count, dim| {
        let [dq_parts, dk_parts, dq, dk] = uses.map(|t| b.floats(t));
        // SAFETY: the parts have `group` rows for each row of the sums; units past `len` do nothing.
        unsafe {
            sum_groups_kernel::launch_unchecked::<R>(
                client, count, dim, dq_parts, dk_parts, dq, dk, len, key, group, mutant,
            )
        }
    })
}

/// One unit is one channel of a token's key head. Mutant 15 misses the last value head of a group.
#[cube(launch_unchecked)]
fn sum_groups_kernel(
    dq_parts: &Floats,
    dk_parts: &Floats,
    dq: &mut Floats,
    dk: &mut Floats,
    len: u32,
    key: usize,
    group: usize,
    #[comptime] mutant: u32,
) {
    let i = ABSOLUTE_POS;
    if i < len as usize {
        let first = i / key * (group * key) + i % key;
        let mut dq_sum = dq_parts.at(first);
        let mut dk_sum = dk_parts.at(first);
        let mut parts = group;
        if comptime!(mutant == 15) {
            parts = group - 1;
        }
        for n in 1..parts {
            dq_sum += dq_parts.at(first + n * key);
            dk_sum += dk_parts.at(first + n * key);
        }
        dq.set(i, dq_sum);
        dk.set(i, dk_sum);
    }
}
