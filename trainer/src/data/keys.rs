//! The n-gram rows of a batch, hashed and sorted on the host while a step runs.

use dormouse_reference::engram_hash;
use ndarray::{ArrayView2, Axis};

use crate::config::{Config, Engram, JepaMode};

/// The table's rows of a batch, and their order for the adjoint and the optimiser.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys {
    /// `[b, t, 3]`, row-major: one row of the table for each order.
    pub rows: Vec<u32>,
    /// `[b t 3]`: the places of `rows` sorted by row, and by place within a row.
    pub order: Vec<u32>,
}

impl Keys {
    /// The keys of `ids` (`[b, t]`) in a table of `table_rows` rows an order: a pure function of the bytes. A masked byte
    /// is symbol 256 to every key that reaches it.
    pub fn new(ids: ArrayView2<'_, u8>, mask: Option<ArrayView2<'_, bool>>, table_rows: usize) -> Keys {
        let rows = rows_of(ids, mask, table_rows);
        let order = engram_hash::order(&rows);
        Keys { rows, order }
    }
}

/// [`Keys::rows`] alone.
pub fn rows_of(ids: ArrayView2<'_, u8>, mask: Option<ArrayView2<'_, bool>>, table_rows: usize) -> Vec<u32> {
    let mut rows = Vec::with_capacity(ids.len() * engram_hash::ORDERS.len());
    for (b, ids) in ids.axis_iter(Axis(0)).enumerate() {
        let masked = |t: usize| mask.is_some_and(|mask| mask[[b, t]]);
        let symbol = |(t, &id): (usize, &u8)| if masked(t) { engram_hash::MASKED } else { u32::from(id) };
        let symbols: Vec<u32> = ids.iter().enumerate().map(symbol).collect();
        rows.extend(engram_hash::rows(&symbols, table_rows).into_iter().flatten());
    }
    rows
}

/// How the keys of a training batch are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyPlan {
    /// Rows of the table for each order.
    pub table_rows: usize,
    /// Parts that a step's rows are computed in, one after the other.
    pub parts: usize,
    /// With an objective on masked bytes there are two sets of keys: of what the student sees, and of the bytes.
    pub jepa: JepaMode,
}

impl KeyPlan {
    /// The plan of a configuration; none without a memory.
    pub fn of(config: &Config) -> Option<KeyPlan> {
        let on = config.model.engram != Engram::Off;
        on.then_some(KeyPlan {
            table_rows: config.model.engram_rows,
            parts: config.train.accumulate,
            jepa: config.jepa.mode,
        })
    }

    /// Sets of keys that a batch has.
    pub fn sets(&self) -> usize {
        if self.jepa == JepaMode::Off { 1 } else { 2 }
    }

    /// Sets whose rows get a gradient, the first ones: the bytes themselves only where the student reads them, too.
    pub fn touched(&self) -> usize {
        if self.jepa == JepaMode::Separate { 2 } else { 1 }
    }

    /// The keys of a batch's bytes, `[b, t]`, and of what is left of them under `mask`, which goes with an objective.
    ///
    /// # Panics
    /// If the parts do not divide the rows, since the configuration was checked; if a mask is there without an objective, or
    /// missing with one.
    pub fn keys(&self, ids: ArrayView2<'_, u8>, mask: Option<ArrayView2<'_, bool>>) -> BatchKeys {
        assert!(ids.nrows().is_multiple_of(self.parts), "{} parts of {} rows", self.parts, ids.nrows());
        assert_eq!(mask.is_some(), self.jepa != JepaMode::Off, "a mask goes with an objective");
        let mut rows = rows_of(ids, mask, self.table_rows);
        let places = rows.len();
        if mask.is_some() {
            rows.extend(rows_of(ids, None, self.table_rows));
        }
        let parts = rows.chunks((places / self.parts).max(1)).flat_map(engram_hash::order).collect();
        let order = engram_hash::order(&rows[..self.touched() * places]);
        BatchKeys { rows, order, parts }
    }
}

/// The keys of a training batch.
///
/// Every position has three rows, those at the start of a row with their shorter keys too, so there is nothing to pad.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchKeys {
    /// `[sets, b, t, 3]`, row-major: one row of the table for each order.
    pub rows: Vec<u32>,
    /// The places of those sets of `rows` that get a gradient sorted by row, for the optimiser, which moves a row once a step.
    pub order: Vec<u32>,
    /// `[sets b t 3]`: part after part, the places of the part's own rows sorted by row, for its backward pass.
    pub parts: Vec<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use dormouse_reference::engram_hash::{Config, EngramHash, Inputs};
    use dormouse_reference::{DType, Reference, Tensors};
    use ndarray::Array2;

    #[test]
    fn the_data_worker_and_the_operation_name_the_same_rows() {
        let b = Reference::<f32>::new();
        let ids = Array2::from_shape_fn((3, 21), |(b, t)| ((b * 71 + t * 29) % 256) as u8);
        let mask = Array2::from_shape_fn((3, 21), |(b, t)| (b + t) % 5 == 0);
        let upload = |values: Array2<f64>, dtype| {
            let tensor = b.persistent(&[3, 21], dtype).unwrap();
            b.upload(values.into_dyn().view(), &tensor).unwrap();
            tensor
        };
        let id_tensor = upload(ids.mapv(f64::from), DType::U8);
        let mask_tensor = upload(mask.mapv(|m| f64::from(u8::from(m))), DType::F32);
        for mask in [None, Some(&mask)] {
            let keys = Keys::new(ids.view(), mask.map(|mask| mask.view()), 4096);
            let inputs = Inputs { ids: &id_tensor, mask: mask.map(|_| &mask_tensor) };
            let rows = EngramHash::forward(&b, &Config { rows: 4096 }, inputs).unwrap().rows;
            let rows: Vec<u32> = b.download(&rows).unwrap().iter().map(|&row| row as u32).collect();
            assert_eq!(keys.rows, rows);
            assert!(keys.order.windows(2).all(|w| rows[w[0] as usize] <= rows[w[1] as usize]));
            assert_eq!(keys.order.len(), rows.len());
        }
    }

    #[test]
    fn what_a_masked_byte_was_reaches_no_key() {
        let mut ids = Array2::from_elem((1, 12), 7u8);
        let mut mask = Array2::from_elem((1, 12), false);
        mask[[0, 5]] = true;
        let before = Keys::new(ids.view(), Some(mask.view()), 1 << 20);
        ids[[0, 5]] = 200;
        assert_eq!(Keys::new(ids.view(), Some(mask.view()), 1 << 20), before);
        assert_ne!(Keys::new(ids.view(), None, 1 << 20), before);
    }

    #[test]
    fn every_part_of_a_batch_has_the_keys_it_would_have_alone() {
        let ids = Array2::from_shape_fn((6, 9), |(b, t)| ((b * 71 + t * 29) % 7) as u8);
        for parts in [1, 2, 3, 6] {
            let keys = KeyPlan { table_rows: 50, parts, jepa: JepaMode::Off }.keys(ids.view(), None);
            let whole = Keys::new(ids.view(), None, 50);
            assert_eq!((&keys.rows, &keys.order), (&whole.rows, &whole.order));
            let len = keys.rows.len() / parts;
            for (part, rows) in ids.axis_chunks_iter(Axis(0), 6 / parts).enumerate() {
                let alone = Keys::new(rows, None, 50);
                assert_eq!(keys.rows[part * len..][..len], alone.rows);
                assert_eq!(keys.parts[part * len..][..len], alone.order);
            }
        }
    }

    /// The student's keys know nothing of a masked byte, the teacher's know all, and only what the student reads moves.
    #[test]
    fn masked_and_plain_keys_lie_side_by_side() {
        let ids = Array2::from_shape_fn((4, 9), |(b, t)| ((b * 71 + t * 29) % 7) as u8);
        let mask = Array2::from_shape_fn((4, 9), |(b, t)| (b + t) % 4 == 0);
        let (student, plain) = (Keys::new(ids.view(), Some(mask.view()), 50), Keys::new(ids.view(), None, 50));
        for (jepa, touched) in [(JepaMode::Shared, 1), (JepaMode::Separate, 2)] {
            let keys = KeyPlan { table_rows: 50, parts: 2, jepa }.keys(ids.view(), Some(mask.view()));
            assert_eq!(keys.rows, [&student.rows[..], &plain.rows].concat());
            assert_eq!(keys.order, engram_hash::order(&keys.rows[..touched * student.rows.len()]));
            let last = Keys::new(ids.slice(ndarray::s![2.., ..]), None, 50);
            assert_eq!(keys.parts[keys.parts.len() - last.order.len()..], last.order);
        }
    }
}
