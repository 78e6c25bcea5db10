//! The n-gram rows of a batch, hashed and sorted on the host while a step runs.

use dormouse_reference::engram_hash;
use ndarray::{ArrayView2, Axis};

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
        let mut rows = Vec::with_capacity(ids.len() * engram_hash::ORDERS.len());
        for (b, ids) in ids.axis_iter(Axis(0)).enumerate() {
            let masked = |t: usize| mask.is_some_and(|mask| mask[[b, t]]);
            let symbol = |(t, &id): (usize, &u8)| if masked(t) { engram_hash::MASKED } else { u32::from(id) };
            let symbols: Vec<u32> = ids.iter().enumerate().map(symbol).collect();
            rows.extend(engram_hash::rows(&symbols, table_rows).into_iter().flatten());
        }
        let order = engram_hash::order(&rows);
        Keys { rows, order }
    }
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
}
