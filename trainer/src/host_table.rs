//! An n-gram table in host memory (`engram = "host"`), for more rows than a device holds.
//!
//! A batch of 4096 positions names at most 12,288 rows, whatever the table's size. So only they travel: [`HostTable::gather`]
//! copies them into a small table, the operation `engram` runs on that with places renamed by rank, and
//! [`HostTable::update`] moves the rows of the host by the small table's gradient with the operation `row_adam`. Ranks sort as
//! rows do, so every sum has the order, and every row the bits, that a table on the device would give it.
//!
//! The file of a checkpoint carries the step it belongs to, because it is written beside the tensors and not among them: a
//! table of another step would go unnoticed otherwise, since any table fits any weights.

use std::collections::TryReserveError;
use std::fs::File;
use std::io::{BufReader, BufWriter, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use dormouse_reference::engram_hash::Compact;
use dormouse_reference::row_adam::{self, RowAdam, Scalars, State, Touched};
use dormouse_reference::{DType, Reference, Tensors};
use ndarray::{Array1, Array2, ArrayD, ArrayView2, arr1};

use crate::checkpoint::FileEntry;

/// Version of the file's layout.
pub const FORMAT: u32 = 1;

const MAGIC: [u8; 8] = *b"dmtable\n";

/// Magic, format, rows, width, step, checksum.
const HEADER_BYTES: usize = 40;

/// Elements that are converted at a time.
const CHUNK: usize = 1 << 16;

/// What is wrong with a table's file.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum HostTableError {
    #[error("host table: cannot {operation} `{path}`: {cause}; see whether its folder is there and has room")]
    Io { operation: &'static str, path: PathBuf, cause: std::io::Error },
    #[error("host table: `{path}` is not the file of a table; resume from another checkpoint")]
    Foreign { path: PathBuf },
    #[error("host table: `{path}` has format {got}, expected {FORMAT}; use the version of dormouse that wrote it")]
    Format { path: PathBuf, got: u32 },
    #[error(
        "host table: `{path}` belongs to step {got}, the checkpoint to step {expected}; resume from another checkpoint"
    )]
    Step { path: PathBuf, got: u64, expected: u64 },
    #[error("host table: `{path}` is [{}, {}], expected [{}, {}]; resume with the configuration of the run", got[0], got[1], expected[0], expected[1])]
    Shape { path: PathBuf, got: [u64; 2], expected: [u64; 2] },
    #[error("host table: `{path}` is damaged: {problem}; resume from another checkpoint")]
    Damaged { path: PathBuf, problem: String },
    #[error("host table: `{path}` needs {bytes} bytes of memory, which this machine does not give; use one with more")]
    Memory { path: PathBuf, bytes: u64 },
}

/// The table, its moments and the counts of its rows.
#[derive(Clone, Debug, PartialEq)]
pub struct HostTable {
    width: usize,
    table: Vec<f32>,
    m: Vec<f32>,
    v: Vec<f32>,
    counts: Vec<u32>,
}

impl HostTable {
    /// A table before its first update, for tests. `table` is `[rows, width]`, row-major.
    ///
    /// # Panics
    /// If `table` is not made of whole rows.
    #[cfg(test)]
    pub fn new(width: usize, table: Vec<f32>) -> HostTable {
        assert!(width > 0 && table.len().is_multiple_of(width), "a table has whole rows of at least one number");
        let (rows, len) = (table.len() / width, table.len());
        HostTable { width, table, m: vec![0.0; len], v: vec![0.0; len], counts: vec![0; rows] }
    }

    /// A table before its first update, of numbers that come one by one, where the machine may refuse the memory.
    ///
    /// # Errors
    /// The bytes that the table and what belongs to it need.
    ///
    /// # Panics
    /// If `values` are not `rows` rows.
    pub fn create(rows: usize, width: usize, values: impl Iterator<Item = f64>) -> Result<HostTable, u64> {
        let (len, refused) = (rows * width, |_| 4 * (3 * rows * width + rows) as u64);
        let (m, v) = (zeros(len).map_err(refused)?, zeros(len).map_err(refused)?);
        let (counts, mut table) = (zeros(rows).map_err(refused)?, Vec::new());
        table.try_reserve_exact(len).map_err(refused)?;
        table.extend(values.map(|x| x as f32));
        assert!(width > 0 && table.len() == len, "a table has whole rows of at least one number");
        Ok(HostTable { width, table, m, v, counts })
    }

    /// A table with its moments and counts, `[table, m, v]`; none if they do not fit each other.
    pub fn of(width: usize, [table, m, v]: [Vec<f32>; 3], counts: Vec<u32>) -> Option<HostTable> {
        let fits = width > 0 && [&table, &m, &v].iter().all(|values| values.len() == counts.len() * width);
        fits.then_some(HostTable { width, table, m, v, counts })
    }

    /// Rows of the table.
    pub fn rows(&self) -> usize {
        self.counts.len()
    }

    /// Numbers of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Table, first and second moment, each row-major.
    pub fn buffers(&self) -> [&[f32]; 3] {
        [&self.table, &self.m, &self.v]
    }

    /// Applied updates of every row.
    pub fn counts(&self) -> &[u32] {
        &self.counts
    }

    /// The table's numbers, row-major.
    pub fn values(&self) -> &[f32] {
        &self.table
    }

    /// The small table of a batch, `[max(U, 1), W]`: its unique rows in order. A batch without rows gets one row of zeros,
    /// since a table without rows is none.
    ///
    /// # Panics
    /// If a row is not in the table: rows are hashed modulo its size.
    pub fn gather(&self, compact: &Compact) -> Array2<f32> {
        let values = if compact.unique.is_empty() { vec![0.0; self.width] } else { self.pick(&self.table, compact) };
        let rows = values.len() / self.width;
        Array2::from_shape_vec((rows, self.width), values).expect("whole rows were copied")
    }

    /// Moves the batch's rows by `grads`, the gradient of the small table; nothing moves if `apply` is false.
    ///
    /// # Errors
    /// What `row_adam` refuses, or `Shape` if `grads` is not shaped as [`HostTable::gather`] gave it.
    pub fn update(
        &mut self,
        config: &row_adam::Config,
        compact: &Compact,
        grads: ArrayView2<'_, f32>,
        [lr, scale]: [f32; 2],
        apply: bool,
    ) -> dormouse_reference::Result<()> {
        if compact.unique.is_empty() {
            return Ok(());
        }
        let b = Reference::<f32>::new();
        let rows = compact.unique.len();
        let small = |values: Vec<f32>| {
            b.constant(ArrayD::from_shape_vec(vec![rows, self.width], values).expect("whole rows were copied"))
        };
        let ids = |ids: &mut dyn Iterator<Item = u32>| {
            let values: Array1<f64> = ids.map(f64::from).collect();
            let tensor = b.persistent(&[rows], DType::U32)?;
            b.upload(values.into_dyn().view(), &tensor)?;
            dormouse_reference::Result::Ok(tensor)
        };
        let state = State {
            table: small(self.pick(&self.table, compact)),
            grads: b.constant(grads.to_owned().into_dyn()),
            m: small(self.pick(&self.m, compact)),
            v: small(self.pick(&self.v, compact)),
            counts: ids(&mut compact.unique.iter().map(|&row| self.counts[row as usize]))?,
        };
        // Every row of the small table is touched, once, and their order is their rank.
        let ranks = ids(&mut (0..rows as u32))?;
        let one = |x: f32| b.constant(arr1(&[x]).into_dyn());
        let scalars = Scalars { lr: one(lr), scale: one(scale), apply: one(f32::from(u8::from(apply))) };
        let touched = Touched { rows: &ranks, order: &ranks };
        RowAdam::update(&b, config, state.as_ref(), touched, scalars.as_ref())?;
        for (into, tensor) in [(&mut self.table, &state.table), (&mut self.m, &state.m), (&mut self.v, &state.v)] {
            let values = b.values(tensor)?;
            for (&row, values) in compact.unique.iter().zip(values.rows()) {
                let start = row as usize * self.width;
                into[start..start + self.width].copy_from_slice(values.as_slice().expect("rows are contiguous"));
            }
        }
        for (&row, &count) in compact.unique.iter().zip(&b.download(&state.counts)?) {
            self.counts[row as usize] = count as u32;
        }
        Ok(())
    }

    fn pick(&self, buffer: &[f32], compact: &Compact) -> Vec<f32> {
        let row = |&row: &u32| &buffer[row as usize * self.width..(row as usize + 1) * self.width];
        compact.unique.iter().flat_map(row).copied().collect()
    }

    /// Writes the table, its moments and counts as those after `step` steps. The file gets its name when it is complete.
    ///
    /// # Errors
    /// [`HostTableError::Io`].
    pub fn save(&self, path: &Path, step: u64) -> Result<(), HostTableError> {
        let mut unfinished = path.as_os_str().to_owned();
        unfinished.push(".tmp");
        let unfinished = PathBuf::from(unfinished);
        let write = || {
            let mut file = Checksummed { inner: BufWriter::new(File::create(&unfinished)?), crc: 0 };
            let mut header = MAGIC.to_vec();
            header.extend(FORMAT.to_le_bytes());
            for word in [self.rows() as u64, self.width as u64, step] {
                header.extend(word.to_le_bytes());
            }
            header.extend(crc32c::crc32c(&header).to_le_bytes());
            file.write(&header)?;
            for values in [&self.table, &self.m, &self.v] {
                for chunk in values.chunks(CHUNK) {
                    file.write(&chunk.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())?;
                }
            }
            for chunk in self.counts.chunks(CHUNK) {
                file.write(&chunk.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())?;
            }
            let crc = file.crc;
            file.write(&crc.to_le_bytes())?;
            file.inner.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()?;
            std::fs::rename(&unfinished, path)
        };
        write().map_err(|cause| HostTableError::Io { operation: "write", path: path.to_owned(), cause })
    }

    /// Bytes of the file that [`HostTable::save`] writes.
    pub fn file_bytes(&self) -> u64 {
        file_bytes(self.rows(), self.width).expect("the table is in memory")
    }

    /// Reads the table of a checkpoint after `step` steps; nothing is returned before the last checksum holds.
    ///
    /// # Errors
    /// Any [`HostTableError`]: another kind of file, another format, step or shape, or damage.
    pub fn load(path: &Path, step: u64, rows: usize, width: usize) -> Result<HostTable, HostTableError> {
        Self::read(path, step, Some([rows, width])).map(|(table, _)| table)
    }

    /// [`HostTable::load`] of a table of any shape, with the size of the file it came from and its checksum, that of all
    /// bytes before it.
    ///
    /// # Errors
    /// As [`HostTable::load`], but for the shape.
    pub fn open(path: &Path, step: u64) -> Result<(HostTable, FileEntry), HostTableError> {
        Self::read(path, step, None)
    }

    fn read(path: &Path, step: u64, shape: Option<[usize; 2]>) -> Result<(HostTable, FileEntry), HostTableError> {
        let io = |cause| HostTableError::Io { operation: "read", path: path.to_owned(), cause };
        let damaged = |problem: String| HostTableError::Damaged { path: path.to_owned(), problem };
        let file = File::open(path).map_err(io)?;
        let got = file.metadata().map_err(io)?.len();
        let mut file = Checksummed { inner: BufReader::new(file), crc: 0 };
        let mut header = [0; HEADER_BYTES];
        let short = |cause: std::io::Error, place: &str| match cause.kind() {
            ErrorKind::UnexpectedEof => damaged(format!("it ends inside {place}, after {got} bytes")),
            _ => io(cause),
        };
        file.read(&mut header).map_err(|cause| short(cause, "its header"))?;
        let word = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"));
        let half = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
        if header[..8] != MAGIC {
            return Err(HostTableError::Foreign { path: path.to_owned() });
        }
        if half(8) != FORMAT {
            return Err(HostTableError::Format { path: path.to_owned(), got: half(8) });
        }
        if crc32c::crc32c(&header[..HEADER_BYTES - 4]) != half(HEADER_BYTES - 4) {
            return Err(damaged("its header does not match its checksum".into()));
        }
        if word(28) != step {
            return Err(HostTableError::Step { path: path.to_owned(), got: word(28), expected: step });
        }
        let found = [word(12), word(20)];
        if let Some(expected) = shape.map(|shape| shape.map(|len| len as u64)).filter(|expected| *expected != found) {
            return Err(HostTableError::Shape { path: path.to_owned(), got: found, expected });
        }
        let [rows, width] = found.map(|len| len as usize);
        if width == 0 {
            return Err(damaged("its rows have no width".into()));
        }
        // Before anything is allocated: its header alone is not believed.
        if Some(got) != file_bytes(rows, width) {
            let expected = file_bytes(rows, width).map_or("more than there can be".into(), |bytes| bytes.to_string());
            return Err(damaged(format!("it has {got} bytes, expected {expected}")));
        }
        let memory = |_| HostTableError::Memory { path: path.to_owned(), bytes: got };
        let values = || zeros(rows * width).map_err(memory);
        let mut table =
            HostTable { width, table: values()?, m: values()?, v: values()?, counts: zeros(rows).map_err(memory)? };
        let mut raw = vec![0; 4 * CHUNK];
        for values in [&mut table.table, &mut table.m, &mut table.v] {
            for chunk in values.chunks_mut(CHUNK) {
                let raw = &mut raw[..4 * chunk.len()];
                file.read(raw).map_err(|cause| short(cause, "its numbers"))?;
                for (x, bytes) in chunk.iter_mut().zip(raw.as_chunks::<4>().0) {
                    *x = f32::from_le_bytes(*bytes);
                }
            }
        }
        for chunk in table.counts.chunks_mut(CHUNK) {
            let raw = &mut raw[..4 * chunk.len()];
            file.read(raw).map_err(|cause| short(cause, "its counts"))?;
            for (x, bytes) in chunk.iter_mut().zip(raw.as_chunks::<4>().0) {
                *x = u32::from_le_bytes(*bytes);
            }
        }
        let (crc, mut written) = (file.crc, [0; 4]);
        file.read(&mut written).map_err(|cause| short(cause, "its checksum"))?;
        if u32::from_le_bytes(written) != crc {
            return Err(damaged(format!("it has CRC-32C {crc:08x}, expected {:08x}", u32::from_le_bytes(written))));
        }
        Ok((table, FileEntry { bytes: got, crc32c: crc }))
    }
}

/// Zeros, or an error where the machine gives no memory for them; what `vec!` does then is the end of the process.
fn zeros<T: Clone + Default>(len: usize) -> Result<Vec<T>, TryReserveError> {
    let mut values = Vec::new();
    values.try_reserve_exact(len)?;
    values.resize(len, T::default());
    Ok(values)
}

/// Bytes of the file of a table; none if that is no number, as after damage.
fn file_bytes(rows: usize, width: usize) -> Option<u64> {
    let numbers = rows.checked_mul(width)?.checked_mul(3)?.checked_add(rows)?;
    Some((numbers.checked_mul(4)?.checked_add(HEADER_BYTES + 4)?) as u64)
}

/// A file and the checksum of all that went through.
struct Checksummed<F> {
    inner: F,
    crc: u32,
}

impl<F: Write> Checksummed<F> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.crc = crc32c::crc32c_append(self.crc, bytes);
        self.inner.write_all(bytes)
    }
}

impl<F: Read> Checksummed<F> {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<()> {
        self.inner.read_exact(bytes)?;
        self.crc = crc32c::crc32c_append(self.crc, bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dormouse_reference::engram_hash::{compact, order};

    const CONFIG: row_adam::Config = row_adam::Config { beta1: 0.9, beta2: 0.95, eps: 1e-8 };
    const WIDTH: usize = 3;

    fn numbers(len: usize, salt: usize) -> Vec<f32> {
        (0..len).map(|i| (((i + salt) * 7919 % 1009) as f32 - 504.0) / 300.0).collect()
    }

    /// Steps of a table on the host, and of the same table kept whole beside the operation.
    #[test]
    fn the_table_has_the_bits_of_one_on_the_device() {
        const ROWS: usize = 40;
        let mut host = HostTable::new(WIDTH, numbers(ROWS * WIDTH, 1));
        let b = Reference::<f32>::new();
        let full = |values: Vec<f32>| b.constant(ArrayD::from_shape_vec(vec![ROWS, WIDTH], values).unwrap());
        let state = State {
            table: full(numbers(ROWS * WIDTH, 1)),
            grads: full(vec![0.0; ROWS * WIDTH]),
            m: full(vec![0.0; ROWS * WIDTH]),
            v: full(vec![0.0; ROWS * WIDTH]),
            counts: b.persistent(&[ROWS], DType::U32).unwrap(),
        };
        let ids = |ids: &[u32]| {
            let tensor = b.persistent(&[ids.len()], DType::U32).unwrap();
            let values: Array1<f64> = ids.iter().map(|&x| f64::from(x)).collect();
            b.upload(values.into_dyn().view(), &tensor).unwrap();
            tensor
        };
        for step in 0..6 {
            let rows: Vec<u32> = (0..12).map(|i| ((i * i * 5 + step * 17) % ROWS) as u32).collect();
            let order = order(&rows);
            let compact = compact(&rows, &order);
            // Values travel as they are.
            let small = host.gather(&compact);
            let table = b.values(&state.table).unwrap();
            for (rank, &row) in compact.unique.iter().enumerate() {
                for d in 0..WIDTH {
                    assert_eq!(small[[rank, d]].to_bits(), table[[row as usize, d]].to_bits());
                }
            }
            let grads = Array2::from_shape_vec(small.raw_dim(), numbers(small.len(), step)).unwrap();
            let mut whole = ArrayD::zeros(vec![ROWS, WIDTH]);
            for (rank, &row) in compact.unique.iter().enumerate() {
                for d in 0..WIDTH {
                    whole[[row as usize, d]] = f64::from(grads[[rank, d]]);
                }
            }
            b.upload(whole.view(), &state.grads).unwrap();
            // One of the steps is skipped.
            let apply = step != 3;
            let one = |x: f32| b.constant(arr1(&[x]).into_dyn());
            let scalars = Scalars { lr: one(0.1), scale: one(0.5), apply: one(f32::from(u8::from(apply))) };
            let (rows, order) = (ids(&rows), ids(&order));
            let touched = Touched { rows: &rows, order: &order };
            RowAdam::update(&b, &CONFIG, state.as_ref(), touched, scalars.as_ref()).unwrap();
            host.update(&CONFIG, &compact, grads.view(), [0.1, 0.5], apply).unwrap();
        }
        let bits = |tensor| b.values(tensor).unwrap().iter().map(|x: &f32| x.to_bits()).collect::<Vec<_>>();
        let host_bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(host_bits(&host.table), bits(&state.table));
        assert_eq!(host_bits(&host.m), bits(&state.m));
        assert_eq!(host_bits(&host.v), bits(&state.v));
        let counts: Vec<u32> = b.download(&state.counts).unwrap().iter().map(|&x| x as u32).collect();
        assert_eq!(host.counts, counts);
        assert!(counts.contains(&0) && counts.iter().any(|&n| n > 1), "{counts:?}");
    }

    #[test]
    fn a_batch_without_rows_moves_nothing() {
        let mut table = HostTable::new(WIDTH, numbers(6, 0));
        let before = table.clone();
        let compact = Compact::default();
        assert_eq!(table.gather(&compact), Array2::<f32>::zeros((1, WIDTH)));
        table.update(&CONFIG, &compact, Array2::<f32>::zeros((1, WIDTH)).view(), [0.1, 1.0], true).unwrap();
        assert_eq!(table, before);
    }

    fn moved() -> HostTable {
        let mut table = HostTable::new(WIDTH, numbers(4 * WIDTH, 0));
        let rows = [2, 0, 2];
        let compact = compact(&rows, &order(&rows));
        let grads = Array2::from_shape_vec((2, WIDTH), numbers(2 * WIDTH, 5)).unwrap();
        table.update(&CONFIG, &compact, grads.view(), [0.1, 1.0], true).unwrap();
        table
    }

    #[test]
    fn what_is_saved_comes_back_for_its_own_step_and_shape_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table");
        let table = moved();
        table.save(&path, 70).unwrap();
        assert_eq!(HostTable::load(&path, 70, 4, WIDTH).unwrap(), table);
        let bytes = std::fs::read(&path).unwrap();
        let entry = FileEntry { bytes: table.file_bytes(), crc32c: crc32c::crc32c(&bytes[..bytes.len() - 4]) };
        assert_eq!(HostTable::open(&path, 70).unwrap(), (table.clone(), entry));
        assert_eq!(std::fs::metadata(&path).unwrap().len(), table.file_bytes());
        let error = HostTable::load(&path, 71, 4, WIDTH).unwrap_err();
        assert!(matches!(error, HostTableError::Step { got: 70, expected: 71, .. }), "{error}");
        assert!(
            error
                .to_string()
                .ends_with("belongs to step 70, the checkpoint to step 71; resume from another checkpoint")
        );
        let error = HostTable::load(&path, 70, 5, WIDTH).unwrap_err();
        assert!(matches!(error, HostTableError::Shape { got: [4, 3], expected: [5, 3], .. }), "{error}");
        assert!(matches!(HostTable::load(&folder.path().join("none"), 70, 4, WIDTH), Err(HostTableError::Io { .. })));
    }

    /// A header that promises more than the file has, with a checksum that is right.
    #[test]
    fn no_memory_is_asked_for_on_the_word_of_a_header() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table");
        moved().save(&path, 70).unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        for (rows, words) in
            [(1u64 << 50, "expected 45035996273705004"), (u64::MAX / 2, "expected more than there can be")]
        {
            bytes[12..20].copy_from_slice(&rows.to_le_bytes());
            let crc = crc32c::crc32c(&bytes[..HEADER_BYTES - 4]);
            bytes[HEADER_BYTES - 4..HEADER_BYTES].copy_from_slice(&crc.to_le_bytes());
            std::fs::write(&path, &bytes).unwrap();
            let error = HostTable::open(&path, 70).unwrap_err();
            assert!(matches!(error, HostTableError::Damaged { .. }) && error.to_string().contains(words), "{error}");
        }
        // More than any address space has.
        assert!(zeros::<f32>(1 << 60).is_err());
    }

    #[test]
    fn no_cut_and_no_flipped_byte_goes_unseen() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table");
        moved().save(&path, 70).unwrap();
        let whole = std::fs::read(&path).unwrap();
        let load = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            HostTable::load(&path, 70, 4, WIDTH).unwrap_err()
        };
        for cut in 0..whole.len() {
            let error = load(&whole[..cut]);
            assert!(matches!(error, HostTableError::Damaged { .. }), "cut at {cut}: {error}");
        }
        let longer: Vec<u8> = whole.iter().copied().chain([0]).collect();
        assert!(matches!(load(&longer), HostTableError::Damaged { .. }));
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            let error = load(&bytes);
            match at {
                0..8 => {
                    assert!(matches!(error, HostTableError::Foreign { .. }), "byte {at}: {error}");
                    assert!(error.to_string().ends_with("; resume from another checkpoint"), "{error}");
                }
                8..12 => assert!(matches!(error, HostTableError::Format { .. }), "byte {at}: {error}"),
                _ => assert!(matches!(error, HostTableError::Damaged { .. }), "byte {at}: {error}"),
            }
        }
    }
}
