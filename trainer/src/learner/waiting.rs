//! Row gradients on their way to a table in host memory.
//!
//! The host's Adam may wait for several steps (`optimizer.host_adam_every_steps`), so that the host waits for the device
//! once in so many. Until then each step's gradients are kept on the device, outside the graph, since how many rows a
//! batch names changes from step to step. Then all of them come down at once, with the record that says by how much each
//! step was scaled and whether it applied, and are summed in the order of the steps. A checkpoint in between holds the
//! sums so far, and the sums of a resumed run go on from there, so that it has the bits of one that was never stopped.

use anyhow::{Result, bail, ensure};
use dormouse_reference::Backend;
use ndarray::{ArrayView2, Axis};

use super::memory::Names;
use crate::checkpoint::{State, Tensor};

/// The rows that wait in a checkpoint, `[U]` of `u32`, and the sums of their gradients, `[U, W]`.
const WAITING: [&str; 2] = ["engram.waiting_rows", "engram.waiting"];

/// Sums of row gradients, by row.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Sums {
    /// Ascending, each once.
    rows: Vec<u32>,
    /// `[U, W]`, row-major.
    grads: Vec<f32>,
}

impl Sums {
    /// Adds `scale` times the gradients `[U, W]` of rows that ascend.
    fn add(&mut self, rows: &[u32], grads: ArrayView2<'_, f32>, scale: f32) {
        let width = grads.ncols();
        let mut sums = Self { rows: Vec::with_capacity(rows.len()), grads: Vec::with_capacity(rows.len() * width) };
        let (mut old, mut new) = (0, 0);
        while old < self.rows.len() || new < rows.len() {
            let row = self.rows.get(old).into_iter().chain(rows.get(new)).min().copied().expect("one of them is left");
            let held = self.rows.get(old) == Some(&row);
            let before = held.then(|| &self.grads[old * width..(old + 1) * width]);
            if rows.get(new) == Some(&row) {
                let scaled = grads.row(new).into_iter().map(|g| scale * g);
                match before {
                    Some(before) => sums.grads.extend(before.iter().zip(scaled).map(|(sum, g)| sum + g)),
                    None => sums.grads.extend(scaled),
                }
                new += 1;
            } else {
                sums.grads.extend_from_slice(before.expect("the row is of one of them"));
            }
            old += usize::from(held);
            sums.rows.push(row);
        }
        *self = sums;
    }

    /// The rows and the sums of their gradients, `[U, W]`.
    pub fn take(self, width: usize) -> Result<(Vec<u32>, ndarray::Array2<f32>)> {
        let grads = ndarray::Array2::from_shape_vec((self.rows.len(), width), self.grads)?;
        Ok((self.rows, grads))
    }

    /// Adds them to a checkpoint, where there are some.
    pub fn export(self, width: usize, state: &mut State) {
        if !self.rows.is_empty() {
            let [rows, grads] = WAITING.map(str::to_owned);
            state.optimizer.insert(grads, Tensor::f32(&[self.rows.len(), width], self.grads));
            state.optimizer.insert(rows, Tensor::u32(&[self.rows.len()], self.rows));
        }
    }

    /// Those of a checkpoint, for a table of this shape.
    pub fn import(state: &State, [table_rows, width]: [usize; 2]) -> Result<Self> {
        let [rows, grads] = WAITING.map(|name| state.optimizer.get(name));
        let (rows, grads) = match (rows, grads) {
            (None, None) => return Ok(Self::default()),
            (Some(rows), Some(grads)) => (rows, grads),
            _ => bail!("checkpoint: `{}` and `{}` belong together, and one is missing", WAITING[0], WAITING[1]),
        };
        let (Some(ids), Some(values)) = (rows.as_u32(), grads.as_f32()) else {
            bail!("checkpoint: `{}` is not u32, or `{}` not f32", WAITING[0], WAITING[1])
        };
        ensure!(
            grads.shape == [ids.len(), width]
                && ids.is_sorted_by(|a, b| a < b)
                && ids.iter().all(|&id| (id as usize) < table_rows),
            "checkpoint: `{}` is {:?} for {} rows of a table [{table_rows}, {width}]; resume from another checkpoint",
            WAITING[1],
            grads.shape,
            ids.len()
        );
        Ok(Self { rows: ids.to_vec(), grads: values.to_vec() })
    }

    /// Refuses a checkpoint with gradients that only a table on the host waits for.
    pub fn refuse(state: &State) -> Result<()> {
        ensure!(
            !state.optimizer.contains_key(WAITING[0]),
            "checkpoint: gradients of its last steps wait for a table on the host; go on with model.engram=host until a \
             multiple of optimizer.host_adam_every_steps, and move the table then"
        );
        Ok(())
    }
}

/// The steps since a table on the host was moved.
pub(super) struct Window<B: Backend> {
    every: u64,
    /// `[every room, W]`, the gradients of the steps one after another; absent where no step waits for another.
    kept: Option<B::Tensor>,
    /// What they name, oldest first, and which steps they are.
    steps: Vec<(Names, u64)>,
    /// Sums of steps before these, from a checkpoint.
    sums: Sums,
}

impl<B: Backend> Window<B> {
    /// Moves a table of rows of `width` every so many steps; a batch has `room` rows at most.
    pub fn new(b: &B, every: u64, [room, width]: [usize; 2]) -> Result<Self> {
        let kept = (every > 1).then(|| b.persistent(&[every as usize * room, width], b.float())).transpose()?;
        Ok(Self { every, kept, steps: Vec::new(), sums: Sums::default() })
    }

    /// Goes on from the sums of a checkpoint.
    pub fn restart(&mut self, sums: Sums) {
        (self.steps, self.sums) = (Vec::new(), sums);
    }

    /// Rows that are kept.
    fn resident(&self) -> usize {
        self.steps.iter().map(|(names, _)| names.resident).sum()
    }

    /// Takes the step that has just run, with `grads` its gradients `[resident, W]`; whether the table is to move now.
    pub fn note(&mut self, b: &B, grads: &B::Tensor, names: Names, step: u64) -> Result<bool> {
        if let Some(kept) = &self.kept {
            let shape = b.shape(grads);
            b.keep(grads, &b.view(kept, self.resident() * shape[1], shape)?)?;
        }
        self.steps.push((names, step));
        Ok((step + 1).is_multiple_of(self.every))
    }

    /// The steps that wait.
    pub fn steps(&self) -> impl Iterator<Item = u64> {
        self.steps.iter().map(|(_, step)| *step)
    }

    /// The sums of all steps that wait; `grads` are the flat gradients' rows `[room, W]`, and `records` the scale and the
    /// flag of every step.
    pub fn sums(&self, b: &B, grads: &B::Tensor, records: &[[f64; 2]]) -> Result<Sums> {
        let mut sums = self.sums.clone();
        let (all, width) = (self.resident(), b.shape(grads)[1]);
        if all == 0 {
            return Ok(sums);
        }
        let kept = b.view(self.kept.as_ref().unwrap_or(grads), 0, &[all, width])?;
        let kept = b.download(&kept)?.mapv(|x| x as f32).into_shape_with_order((all, width))?;
        let mut first = 0;
        for ((names, _), [scale, apply]) in self.steps.iter().zip(records) {
            if *apply == 1.0 {
                let ranks: Vec<usize> = names.ranks.iter().map(|rank| first + rank).collect();
                sums.add(&names.moved, kept.select(Axis(0), &ranks).view(), *scale as f32);
            }
            first += names.resident;
        }
        Ok(sums)
    }
}

#[cfg(test)]
mod tests {
    use ndarray::arr2;

    use super::{State, Sums};

    #[test]
    fn sums_are_by_row_in_the_order_of_steps() {
        let mut sums = Sums::default();
        sums.add(&[2, 5], arr2(&[[1.0, -0.0], [3.0, 4.0]]).view(), 1.0);
        // What a single step has is its own to the bit.
        assert_eq!(sums.grads[1].to_bits(), (-0.0f32).to_bits());
        sums.add(&[0, 5, 9], arr2(&[[7.0, 7.0], [1.0, 2.0], [8.0, 8.0]]).view(), 0.5);
        sums.add(&[], ndarray::Array2::zeros((0, 2)).view(), 1.0);
        let expected = Sums { rows: vec![0, 2, 5, 9], grads: vec![3.5, 3.5, 1.0, 0.0, 3.5, 5.0, 4.0, 4.0] };
        assert_eq!(sums, expected);
        let mut state = State::default();
        Sums::refuse(&state).expect("nothing waits");
        sums.clone().export(2, &mut state);
        assert_eq!(Sums::import(&state, [10, 2]).expect("it fits"), sums);
        for shape in [[9, 2], [10, 4]] {
            let error = Sums::import(&state, shape).expect_err("another table").to_string();
            assert!(error.contains("`engram.waiting` is [4, 2] for 4 rows of a table"), "{error}");
        }
        assert!(Sums::refuse(&state).expect_err("it waits").to_string().contains("model.engram=host"));
        state.optimizer.remove("engram.waiting");
        assert!(Sums::import(&state, [10, 2]).is_err());
    }
}
