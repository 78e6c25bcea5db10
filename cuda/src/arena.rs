//! Where a step's intermediates lie: bump allocation in chunks that never move.
//!
//! A step's first run lays its intermediates out one after the other; every later run of the same key must ask for
//! the same sizes in the same order, and so gets the same addresses, which is what a captured graph needs. All keys
//! share the chunks, since one step runs at a time and its scratch dies with it.

use crate::runtime::Error;

/// Every intermediate starts at a multiple of this many bytes.
pub const ALIGNMENT: u64 = 512;

/// The smallest chunk.
const SMALLEST_CHUNK: u64 = 16 << 20;

/// A place in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Which chunk.
    pub chunk: usize,
    /// Bytes from its start.
    pub offset: u64,
    /// Bytes asked for.
    pub bytes: u64,
}

/// The arithmetic of the arena; the memory itself is the device's.
#[derive(Debug, Default)]
pub struct Arena {
    /// Bytes of every chunk.
    chunks: Vec<u64>,
    chunk: usize,
    used: u64,
    layout: Vec<Place>,
}

impl Arena {
    /// Starts over at the first chunk.
    pub fn restart(&mut self) {
        self.chunk = 0;
        self.used = 0;
        self.layout.clear();
    }

    /// The next place for `bytes`. A chunk that has to be added is announced by its size before the place is given.
    pub fn place<E>(&mut self, bytes: u64, mut add_chunk: impl FnMut(u64) -> Result<(), E>) -> Result<Place, E> {
        // An empty tensor still gets an address of its own.
        let step = bytes.max(1).next_multiple_of(ALIGNMENT);
        while self.chunk < self.chunks.len() && self.used + step > self.chunks[self.chunk] {
            self.chunk += 1;
            self.used = 0;
        }
        if self.chunk == self.chunks.len() {
            // Doubling keeps the number of chunks small whatever the model.
            let size = step.max(self.chunks.iter().sum::<u64>()).max(SMALLEST_CHUNK);
            add_chunk(size)?;
            self.chunks.push(size);
        }
        let place = Place { chunk: self.chunk, offset: self.used, bytes };
        self.used += step;
        self.layout.push(place);
        Ok(place)
    }

    /// Everything placed since the last restart.
    pub fn layout(&self) -> &[Place] {
        &self.layout
    }

    /// Bytes of all chunks.
    pub fn bytes(&self) -> u64 {
        self.chunks.iter().sum()
    }
}

/// Refuses a run of a step that asked for other memory than the first.
pub fn check_same(step: &'static str, first: &[Place], now: &[Place]) -> Result<(), Error> {
    let say = |place: Option<&Place>| match place {
        Some(p) => format!("{} B at chunk {} + {}", p.bytes, p.chunk, p.offset),
        None => "absent".to_owned(),
    };
    let differs = (0..first.len().max(now.len())).find(|&i| first.get(i) != now.get(i));
    match differs {
        None => Ok(()),
        Some(index) => {
            Err(Error::StepChanged { step, index, expected: say(first.get(index)), got: say(now.get(index)) })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(arena: &mut Arena, bytes: u64, added: &mut Vec<u64>) -> Place {
        arena
            .place(bytes, |size| {
                added.push(size);
                Ok::<(), ()>(())
            })
            .unwrap()
    }

    #[test]
    fn places_are_aligned_disjoint_and_the_same_every_time() {
        let mut arena = Arena::default();
        let mut added = Vec::new();
        let sizes = [4, 513, 0, 1024, 20 << 20, 100];
        let first: Vec<Place> = sizes.iter().map(|&s| place(&mut arena, s, &mut added)).collect();
        assert_eq!(first.iter().map(|p| p.offset).collect::<Vec<_>>(), [0, 512, 1536, 2048, 0, 0]);
        assert_eq!(first.iter().map(|p| p.chunk).collect::<Vec<_>>(), [0, 0, 0, 0, 1, 2]);
        assert_eq!(added, [16 << 20, 20 << 20, 36 << 20]);
        assert_eq!(arena.bytes(), 72 << 20);
    }

    #[test]
    fn a_restart_gives_the_same_places_and_no_new_chunk() {
        let mut arena = Arena::default();
        let mut added = Vec::new();
        let sizes = [700, 17 << 20, 3];
        let first: Vec<Place> = sizes.iter().map(|&s| place(&mut arena, s, &mut added)).collect();
        assert_eq!(arena.layout(), first);
        let chunks = added.len();
        arena.restart();
        let second: Vec<Place> = sizes.iter().map(|&s| place(&mut arena, s, &mut added)).collect();
        assert_eq!(second, first);
        assert_eq!(added.len(), chunks);
        assert_eq!(check_same("train", &first, &second), Ok(()));
    }

    #[test]
    fn a_refused_chunk_changes_nothing() {
        let mut arena = Arena::default();
        assert_eq!(arena.place(8, |_| Err("no memory")), Err("no memory"));
        let mut added = Vec::new();
        assert_eq!(place(&mut arena, 8, &mut added), Place { chunk: 0, offset: 0, bytes: 8 });
        assert_eq!(added.len(), 1);
    }

    #[test]
    fn another_layout_is_an_error_that_names_the_place() {
        let first = [Place { chunk: 0, offset: 0, bytes: 8 }, Place { chunk: 0, offset: 512, bytes: 8 }];
        let error = check_same("train", &first, &first[..1]).unwrap_err().to_string();
        assert!(error.contains("allocation 1 is absent, expected 8 B at chunk 0 + 512"), "{error}");
        let other = [Place { bytes: 12, ..first[0] }, first[1]];
        let error = check_same("train", &first, &other).unwrap_err().to_string();
        assert!(error.contains("allocation 0 is 12 B at chunk 0 + 0, expected 8 B"), "{error}");
    }
}
