//! `record`: ring[step mod R] = values_0 ++ values_1 ++ ...

use burn_tensor::Tensor;
use burn_tensor::backend::Backend;
use dormouse_reference::record::Record;
use dormouse_reference::{Dims, Result, Tensors};

use crate::handle::{Burn, Handle};
use crate::shapes::check;

impl<B: Backend> Record for Burn<B> {
    #[inline(never)]
    fn update(&self, values: &[&Handle<B>], step: &Handle<B>, ring: &Handle<B>) -> Result<()> {
        const OP: &str = "record::update";
        let dims = check(OP, &[("ring", ring)], |_| &["R", "width"])?;
        dims.positive(&["R"])?;
        let (rows, width) = (dims.get("R"), dims.get("width"));
        let mut parts = Vec::new();
        for value in values {
            check(OP, &[("values", *value)], |_| &["n"])?;
            parts.push(if self.dtype(value).is_float() {
                self.read(OP, "values", value)?
            } else {
                self.tensor_of(self.peek(OP, "values", value)?)
            });
        }
        let all = Tensor::cat(parts, 0);
        let mut lengths = Dims::new(OP);
        lengths.set("width", width, "ring");
        lengths.bind("values", &all.dims(), &["width"])?;
        self.read_integers(OP, "step", step)?;
        let row = self.peek_one(OP, "step", step)? as usize % rows;
        self.write(OP, "ring", &self.view(ring, row * width, &[width])?, all)
    }
}
