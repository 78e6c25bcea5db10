//! [`Named`]: a few tensors with their names, in order.

use ndarray::ArrayD;

/// An ordered list of named things; operations have at most a dozen, so look-up is linear.
#[derive(Clone, Debug, PartialEq)]
pub struct Named<X> {
    entries: Vec<(&'static str, X)>,
}

/// Host values by name.
pub type Values = Named<ArrayD<f64>>;

impl<X> Default for Named<X> {
    fn default() -> Self {
        Self { entries: Vec::new() }
    }
}

impl<X> Named<X> {
    /// No entries.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an entry; a name that is there already is replaced.
    pub fn set(&mut self, name: &'static str, value: X) {
        match self.entries.iter_mut().find(|(n, _)| *n == name) {
            Some(entry) => entry.1 = value,
            None => self.entries.push((name, value)),
        }
    }

    /// The same list with one more entry.
    pub fn with(mut self, name: &'static str, value: X) -> Self {
        self.set(name, value);
        self
    }

    /// Drops an entry.
    pub fn remove(&mut self, name: &str) -> Option<X> {
        let at = self.entries.iter().position(|(n, _)| *n == name)?;
        Some(self.entries.remove(at).1)
    }

    /// The entry of that name.
    pub fn get(&self, name: &str) -> Option<&X> {
        self.entries.iter().find(|(n, _)| *n == name).map(|(_, x)| x)
    }

    /// The entry of that name, to change it.
    pub fn get_mut(&mut self, name: &str) -> Option<&mut X> {
        self.entries.iter_mut().find(|(n, _)| *n == name).map(|(_, x)| x)
    }

    /// The names in order.
    pub fn names(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.entries.iter().map(|(n, _)| *n)
    }

    /// Names and entries in order.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &X)> + '_ {
        self.entries.iter().map(|(n, x)| (*n, x))
    }

    /// Names and entries in order, to change them.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&'static str, &mut X)> + '_ {
        self.entries.iter_mut().map(|(n, x)| (*n, x))
    }

    /// Whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Applies `f` to every entry; the first error ends the walk.
    pub fn try_map<Y, E>(&self, mut f: impl FnMut(&'static str, &X) -> Result<Y, E>) -> Result<Named<Y>, E> {
        let entries = self.entries.iter().map(|(n, x)| Ok((*n, f(n, x)?))).collect::<Result<_, E>>()?;
        Ok(Named { entries })
    }

    /// Applies `f` to every entry.
    pub fn map<Y>(&self, mut f: impl FnMut(&'static str, &X) -> Y) -> Named<Y> {
        Named { entries: self.entries.iter().map(|(n, x)| (*n, f(n, x))).collect() }
    }
}

impl Values {
    /// The entry of that name.
    ///
    /// # Panics
    /// If it is absent: a mistake in an operation's description.
    pub fn at(&self, name: &str) -> &ArrayD<f64> {
        self.get(name).unwrap_or_else(|| panic!("the description draws `{name}`"))
    }
}

impl<X> Extend<(&'static str, X)> for Named<X> {
    fn extend<I: IntoIterator<Item = (&'static str, X)>>(&mut self, iter: I) {
        for (name, x) in iter {
            self.set(name, x);
        }
    }
}

impl<X> FromIterator<(&'static str, X)> for Named<X> {
    fn from_iter<I: IntoIterator<Item = (&'static str, X)>>(iter: I) -> Self {
        Self { entries: iter.into_iter().collect() }
    }
}
/// The nearest values that every backend holds, since devices compute in f32: for laws that compare results with inputs.
#[must_use]
pub fn held(values: &Values) -> Values {
    values.map(|_, array| array.mapv(|x| f64::from(x as f32)))
}
