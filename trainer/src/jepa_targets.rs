//! Teacher latents on a disk: what `jepa_targets = FILE` reads in place of running a teacher.
//!
//! A file belongs to one seed and one batch geometry, because a step's windows and masks are functions of them, and to one
//! teacher. It holds the latents of the masked positions alone, step by step:
//!
//! | bytes | header field | |
//! |---|---|---|
//! | 8 | `magic` | `dmjepat` and a newline |
//! | 4 | `version` | [`VERSION`] |
//! | 8 | `teacher_step` | the step of the teacher's checkpoint |
//! | 8 | `seed` | of the run that reads |
//! | 8 | `first_step` | the first step that is held |
//! | 8 | `steps` | how many are |
//! | 4, 4, 4 | `rows`, `len`, `width` | the batch: rows, positions a row, channels |
//! | 32 | `data` | BLAKE3 of the data that the batches are of |
//! | 32 | `source` | BLAKE3 of the teacher |
//! | 8 | `bytes` | length of the whole file; 0 until it is finished |
//! | 4 | `checksum` | CRC-32C of all of the above |
//!
//! Then for every step: `step` (8), the number of masked positions (4), CRC-32C of the mask (4), CRC-32C of those three and
//! the payload (4), and the payload, `width` numbers for each masked position in order. All numbers are little-endian, all
//! latents f32. A step is found by reading on; going back starts over.

mod ahead;
pub mod command;

pub use ahead::Ahead;

use std::fs::File;
use std::io::{BufReader, BufWriter, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use crate::config::Config;

/// Version of the file's layout.
pub const VERSION: u32 = 2;

const MAGIC: [u8; 8] = *b"dmjepat\n";

/// Names and sizes of the header's fields, in order.
const FIELDS: [(&str, usize); 13] = [
    ("magic", 8),
    ("version", 4),
    ("teacher_step", 8),
    ("seed", 8),
    ("first_step", 8),
    ("steps", 8),
    ("rows", 4),
    ("len", 4),
    ("width", 4),
    ("data", 32),
    ("source", 32),
    ("bytes", 8),
    ("checksum", 4),
];

/// Bytes of the header.
const HEADER_BYTES: usize = 132;

/// Bytes before a step's payload.
const RECORD_BYTES: usize = 20;

/// What is wrong with a file of targets.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum TargetsError {
    #[error(
        "jepa-targets: cannot {operation} `{path}`: {cause}; put the file back, or name it with --set jepa.targets=FILE"
    )]
    Io { operation: &'static str, path: PathBuf, cause: std::io::Error },
    #[error(
        "jepa-targets: cannot {operation} `{path}`: {cause}; give --out a name in a folder that exists, can be written and \
         has room"
    )]
    Unwritten { operation: &'static str, path: PathBuf, cause: std::io::Error },
    #[error("jepa-targets: `{path}` is not a file of JEPA targets; make one with `dormouse jepa-targets`")]
    Foreign { path: PathBuf },
    #[error(
        "jepa-targets: `{path}` has version {got}, expected {VERSION}; make it again with this version of dormouse"
    )]
    Version { path: PathBuf, got: u32 },
    #[error(
        "jepa-targets: `{path}` ends inside {place}: {got} bytes, expected {expected}; copy it again, or make it again"
    )]
    Truncated { path: PathBuf, place: String, got: u64, expected: u64 },
    #[error("jepa-targets: `{path}` has {got} bytes, expected {expected}; it is not the file that was written")]
    TooLong { path: PathBuf, got: u64, expected: u64 },
    #[error("jepa-targets: `{path}` was never finished; run `dormouse jepa-targets` again")]
    Unfinished { path: PathBuf },
    #[error(
        "jepa-targets: {place} of `{path}` has CRC-32C {got:08x}, expected {expected:08x}; copy it again, or make it again"
    )]
    Damaged { path: PathBuf, place: String, got: u32, expected: u32 },
    #[error(
        "jepa-targets: `{path}` was made for {field} {got}, this run has {expected}; make targets for this run, or change it"
    )]
    Mismatch { path: PathBuf, field: &'static str, got: String, expected: String },
    #[error(
        "jepa-targets: step {step} is not in `{path}`, which holds {held}; make targets of this step too, or train on less"
    )]
    NoStep { path: PathBuf, step: u64, held: String },
    #[error("jepa-targets: the targets of step {step} in `{path}` belong to another mask; make targets for this run")]
    Mask { path: PathBuf, step: u64 },
    #[error("jepa-targets: `{argument}` has {got} elements, expected {expected}")]
    Length { argument: &'static str, got: usize, expected: usize },
    #[error("jepa-targets: `{path}` got {got} steps, expected {expected}")]
    StepCount { path: PathBuf, got: u64, expected: u64 },
}

impl TargetsError {
    /// Whether a file that is read is to blame. What could not be written, or was called wrongly, is no fault of the data.
    pub fn is_of_data(&self) -> bool {
        use TargetsError::{Length, StepCount, Unwritten};
        !matches!(self, Unwritten { .. } | Length { .. } | StepCount { .. })
    }
}

type Result<T> = std::result::Result<T, TargetsError>;

/// What a file of targets is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The step of the teacher's checkpoint.
    pub teacher_step: u64,
    /// The seed of the run that reads.
    pub seed: u64,
    /// The first step that is held.
    pub first_step: u64,
    /// How many steps are held.
    pub steps: u64,
    /// Rows of a batch.
    pub rows: u32,
    /// Positions a row.
    pub len: u32,
    /// Channels of a latent.
    pub width: u32,
    /// BLAKE3 of the data, as its manifest has it.
    pub data: [u8; 32],
    /// BLAKE3 of the teacher.
    pub source: [u8; 32],
}

impl Header {
    fn positions(&self) -> usize {
        self.rows as usize * self.len as usize
    }

    fn require_step(&self, step: u64, path: &Path) -> Result<()> {
        let (first, steps) = (self.first_step, self.steps);
        if step >= first && step - first < steps {
            return Ok(());
        }
        let held = match steps {
            0 => "no step".to_owned(),
            _ => format!("steps {first} to {}", first.saturating_add(steps - 1)),
        };
        Err(TargetsError::NoStep { path: path.to_owned(), step, held })
    }

    /// The bytes of the header for a file of `bytes` bytes.
    fn encode(&self, bytes: u64) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEADER_BYTES);
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        for word in [self.teacher_step, self.seed, self.first_step, self.steps] {
            out.extend(word.to_le_bytes());
        }
        for word in [self.rows, self.len, self.width] {
            out.extend(word.to_le_bytes());
        }
        out.extend(self.data);
        out.extend(self.source);
        out.extend(bytes.to_le_bytes());
        out.extend(crc32c::crc32c(&out).to_le_bytes());
        out
    }

    /// The header and the length it promises. Magic and version come first, so that another kind of file is not called
    /// damaged; then the checksum, so that nothing else is believed before it holds.
    fn decode(raw: &[u8; HEADER_BYTES], path: &Path) -> Result<(Header, u64)> {
        let field = |name: &str| {
            let at = FIELDS.iter().position(|(field, _)| *field == name).expect("the name is in the table");
            let start: usize = FIELDS[..at].iter().map(|(_, size)| size).sum();
            &raw[start..start + FIELDS[at].1]
        };
        let u32_of = |name: &str| u32::from_le_bytes(field(name).try_into().expect("the field has four bytes"));
        let u64_of = |name: &str| u64::from_le_bytes(field(name).try_into().expect("the field has eight bytes"));
        if field("magic") != MAGIC {
            return Err(TargetsError::Foreign { path: path.to_owned() });
        }
        if u32_of("version") != VERSION {
            return Err(TargetsError::Version { path: path.to_owned(), got: u32_of("version") });
        }
        let (expected, got) = (u32_of("checksum"), crc32c::crc32c(&raw[..HEADER_BYTES - 4]));
        if got != expected {
            return Err(TargetsError::Damaged { path: path.to_owned(), place: "the header".into(), got, expected });
        }
        let header = Header {
            teacher_step: u64_of("teacher_step"),
            seed: u64_of("seed"),
            first_step: u64_of("first_step"),
            steps: u64_of("steps"),
            rows: u32_of("rows"),
            len: u32_of("len"),
            width: u32_of("width"),
            data: field("data").try_into().expect("the field has 32 bytes"),
            source: field("source").try_into().expect("the field has 32 bytes"),
        };
        Ok((header, u64_of("bytes")))
    }
}

/// Writes a file of targets, step after step. One that is dropped before it is finished is removed.
pub struct Writer {
    path: PathBuf,
    unfinished: PathBuf,
    file: BufWriter<File>,
    header: Header,
    written: u64,
    bytes: u64,
}

impl Writer {
    /// Starts a file. It grows as `FILE.tmp` (or `FILE.1.tmp` and so on where that is taken: whatever has that name may be
    /// somebody's) and gets its name when it is finished.
    ///
    /// # Errors
    /// [`TargetsError::Unwritten`] if the file cannot be created.
    pub fn create(path: &Path, header: Header) -> Result<Writer> {
        let names = (0u64..).map(|n| {
            let mut name = path.as_os_str().to_owned();
            name.push(if n == 0 { ".tmp".to_owned() } else { format!(".{n}.tmp") });
            PathBuf::from(name)
        });
        let mut opened = names.map(|name| (File::create_new(&name), name));
        let taken = |file: &std::io::Result<File>| {
            file.as_ref().is_err_and(|cause| cause.kind() == std::io::ErrorKind::AlreadyExists)
        };
        let (file, unfinished) = opened.find(|(file, _)| !taken(file)).expect("one of endless names is free");
        let file = file.map_err(|cause| unwritten("create", &unfinished, cause))?;
        let mut writer = Writer {
            path: path.to_owned(),
            unfinished,
            file: BufWriter::new(file),
            header,
            written: 0,
            bytes: HEADER_BYTES as u64,
        };
        let header = writer.header.encode(0);
        writer.write(&header)?;
        Ok(writer)
    }

    /// Adds the next step: its mask (`rows * len`) and the teacher's latents of all positions (`rows * len * width`), of which
    /// the masked ones are kept.
    ///
    /// # Errors
    /// [`TargetsError::Length`] if an argument does not fit the header, [`TargetsError::StepCount`] if all steps are there,
    /// [`TargetsError::Unwritten`] if the file cannot be written.
    pub fn add(&mut self, mask: &[bool], latents: &[f32]) -> Result<()> {
        let (positions, width) = (self.header.positions(), self.header.width as usize);
        check_length("mask", mask.len(), positions)?;
        check_length("latents", latents.len(), positions * width)?;
        if self.written == self.header.steps {
            return Err(self.step_count(self.written + 1));
        }
        let mut record = Vec::new();
        record.extend((self.header.first_step + self.written).to_le_bytes());
        record.extend((mask.iter().filter(|masked| **masked).count() as u32).to_le_bytes());
        record.extend(mask_checksum(mask).to_le_bytes());
        let mut payload = Vec::new();
        for (_, row) in mask.iter().zip(latents.chunks(width.max(1))).filter(|(masked, _)| **masked) {
            payload.extend(row.iter().flat_map(|x| x.to_le_bytes()));
        }
        record.extend(crc32c::crc32c_append(crc32c::crc32c(&record), &payload).to_le_bytes());
        self.write(&record)?;
        self.write(&payload)?;
        self.bytes += (record.len() + payload.len()) as u64;
        self.written += 1;
        Ok(())
    }

    /// Completes the header, waits until the bytes are on the disk and gives the file its name.
    ///
    /// # Errors
    /// [`TargetsError::StepCount`] if steps are missing, [`TargetsError::Unwritten`] if the file cannot be written.
    pub fn finish(mut self) -> Result<()> {
        if self.written != self.header.steps {
            return Err(self.step_count(self.written));
        }
        let header = self.header.encode(self.bytes);
        let mut write = || {
            self.file.seek(SeekFrom::Start(0))?;
            self.file.write_all(&header)?;
            self.file.flush()?;
            self.file.get_ref().sync_all()
        };
        write().map_err(|cause| unwritten("write", &self.unfinished, cause))?;
        std::fs::rename(&self.unfinished, &self.path).map_err(|cause| unwritten("rename", &self.unfinished, cause))
    }

    /// Bytes so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn step_count(&self, got: u64) -> TargetsError {
        TargetsError::StepCount { path: self.path.clone(), got, expected: self.header.steps }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|cause| unwritten("write", &self.unfinished, cause))
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // A finished file has another name by now. Whatever cannot be removed was never finished, and its header says so.
        let _ = std::fs::remove_file(&self.unfinished);
    }
}

/// Reads a file of targets, step after step.
#[derive(Debug)]
pub struct Reader {
    path: PathBuf,
    file: BufReader<File>,
    header: Header,
    /// The step whose record comes next.
    next: u64,
}

impl Reader {
    /// Opens a file and checks its header and its length; every step is checked when it is read.
    ///
    /// # Errors
    /// Any [`TargetsError`] that a file of another kind, version or length, or a damaged header, gives.
    pub fn open(path: &Path) -> Result<Reader> {
        // Asked before it is opened: a device may have no end, and a pipe no beginning.
        if !std::fs::metadata(path).map_err(|cause| io("open", path, cause))?.is_file() {
            return Err(TargetsError::Foreign { path: path.to_owned() });
        }
        let mut file = File::open(path).map_err(|cause| io("open", path, cause))?;
        let got = file.metadata().map_err(|cause| io("read", path, cause))?.len();
        let mut raw = [0; HEADER_BYTES];
        if got < HEADER_BYTES as u64 {
            return Err(Self::short_header(&mut file, path, got));
        }
        file.read_exact(&mut raw).map_err(|cause| io("read", path, cause))?;
        let (header, expected) = Header::decode(&raw, path)?;
        let path = path.to_owned();
        if expected == 0 {
            return Err(TargetsError::Unfinished { path });
        }
        if got < expected {
            return Err(TargetsError::Truncated { path, place: "its steps".into(), got, expected });
        }
        if got > expected {
            return Err(TargetsError::TooLong { path, got, expected });
        }
        Ok(Reader { path, file: BufReader::with_capacity(1 << 20, file), next: header.first_step, header })
    }

    /// Why a file that is too short for a header is refused: as foreign if even its beginning is another's.
    fn short_header(file: &mut File, path: &Path, got: u64) -> TargetsError {
        let mut start = Vec::new();
        if let Err(cause) = file.read_to_end(&mut start) {
            return io("read", path, cause);
        }
        let magic = start.len().min(MAGIC.len());
        if start[..magic] != MAGIC[..magic] {
            return TargetsError::Foreign { path: path.to_owned() };
        }
        let mut end = 0;
        let field = FIELDS.iter().find(|(_, size)| {
            end += size;
            end > start.len()
        });
        let (name, _) = field.expect("a short header ends inside a field");
        let place = format!("header field `{name}`");
        TargetsError::Truncated { path: path.to_owned(), place, got, expected: HEADER_BYTES as u64 }
    }

    /// What the file is for.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Refuses a file that is not for this run. `steps` may be more than the run needs, and `teacher_step` and `source` are
    /// the file's own.
    ///
    /// # Errors
    /// [`TargetsError::Mismatch`] naming the first field that differs.
    pub fn require(&self, seed: u64, rows: u32, len: u32, width: u32) -> Result<()> {
        let header = &self.header;
        let pairs = [
            ("seed", header.seed, seed),
            ("rows", header.rows.into(), rows.into()),
            ("len", header.len.into(), len.into()),
            ("width", header.width.into(), width.into()),
        ];
        match pairs.into_iter().find(|(_, got, expected)| got != expected) {
            Some((field, got, expected)) => Err(TargetsError::Mismatch {
                path: self.path.clone(),
                field,
                got: got.to_string(),
                expected: expected.to_string(),
            }),
            None => Ok(()),
        }
    }

    /// [`Reader::require`] with a run's configuration, and that the file reaches to the run's last step.
    ///
    /// # Errors
    /// As [`Reader::require`]; [`TargetsError::NoStep`].
    pub fn require_for(&self, config: &Config) -> Result<()> {
        let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let (rows, len) = (number(config.train.batch_rows), number(config.data.seq_bytes));
        self.require(config.seed, rows, len, number(config.model.width))?;
        self.require_step(config.train.total_steps - 1)
    }

    fn require_step(&self, step: u64) -> Result<()> {
        self.header.require_step(step, &self.path)
    }

    /// Refuses a file that was made of other data than `data`, or that does not hold step `next`.
    ///
    /// # Errors
    /// [`TargetsError::Mismatch`], [`TargetsError::NoStep`].
    pub fn require_data(&self, data: [u8; 32], next: u64) -> Result<()> {
        // A run that is done asks for no step, and may be scored again.
        if next < self.header.first_step {
            self.require_step(next)?;
        }
        let word = |hash: [u8; 32]| format!("BLAKE3 {}", &blake3::Hash::from(hash).to_hex()[..16]);
        if self.header.data == data {
            return Ok(());
        }
        let (got, expected) = (word(self.header.data), word(data));
        Err(TargetsError::Mismatch { path: self.path.clone(), field: "data", got, expected })
    }

    /// The latents of step `step` into `into` (`rows * len * width`): the masked positions' as written, 0 elsewhere.
    ///
    /// # Errors
    /// [`TargetsError::NoStep`], [`TargetsError::Mask`] if they were written under another mask, [`TargetsError::Damaged`] or
    /// [`TargetsError::Truncated`] if the bytes are not what was written.
    pub fn read(&mut self, step: u64, mask: &[bool], into: &mut [f32]) -> Result<()> {
        let (positions, width) = (self.header.positions(), self.header.width as usize);
        check_length("mask", mask.len(), positions)?;
        check_length("into", into.len(), positions * width)?;
        self.require_step(step)?;
        let record = self.record(step)?;
        record.check(mask, &self.path)?;
        into.fill(0.0);
        record.spread(mask, width, into);
        Ok(())
    }

    /// The record of step `step`, which the file has, held against its own checksum.
    fn record(&mut self, step: u64) -> Result<Record> {
        if step < self.next {
            self.rewind()?;
        }
        let found = self.read_on(step);
        if found.is_err() {
            // Whatever the file's position is now, the next reader starts from a known one.
            self.rewind()?;
        }
        found
    }

    fn rewind(&mut self) -> Result<()> {
        self.next = self.header.first_step;
        let start = SeekFrom::Start(HEADER_BYTES as u64);
        self.file.seek(start).map(|_| ()).map_err(|cause| io("read", &self.path, cause))
    }

    fn read_on(&mut self, step: u64) -> Result<Record> {
        let width = self.header.width as usize;
        loop {
            let at = self.next;
            let mut raw = [0; RECORD_BYTES];
            self.fill(&mut raw, at)?;
            let word = |from: usize| u32::from_le_bytes(raw[from..from + 4].try_into().expect("four bytes"));
            let (masked, of_mask, expected) = (word(8) as usize, word(12), word(16));
            let written = u64::from_le_bytes(raw[..8].try_into().expect("eight bytes"));
            if written != at || masked > self.header.positions() {
                let (got, place) = (crc32c::crc32c(&raw[..16]), format!("step {at}"));
                return Err(TargetsError::Damaged { path: self.path.clone(), place, got, expected });
            }
            let bytes = masked * width * 4;
            self.next = at + 1;
            if at < step {
                self.file.seek_relative(bytes as i64).map_err(|cause| io("read", &self.path, cause))?;
                continue;
            }
            let mut payload = vec![0; bytes];
            self.fill(&mut payload, at)?;
            let got = crc32c::crc32c_append(crc32c::crc32c(&raw[..16]), &payload);
            if got != expected {
                let place = format!("step {at}");
                return Err(TargetsError::Damaged { path: self.path.clone(), place, got, expected });
            }
            let latents = payload.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
            return Ok(Record { step, masked, of_mask, latents });
        }
    }

    fn fill(&mut self, buffer: &mut [u8], step: u64) -> Result<()> {
        self.file.read_exact(buffer).map_err(|cause| match cause.kind() {
            // The length was right when the file was opened, so it has been cut since, or a skipped count is wrong.
            ErrorKind::UnexpectedEof => TargetsError::Truncated {
                path: self.path.clone(),
                place: format!("step {step}"),
                got: self.file.get_ref().metadata().map_or(0, |facts| facts.len()),
                expected: self.file.stream_position().unwrap_or(0) + buffer.len() as u64,
            },
            _ => io("read", &self.path, cause),
        })
    }
}

/// What the file has of one step.
#[derive(Debug)]
struct Record {
    step: u64,
    /// Masked positions.
    masked: usize,
    /// CRC-32C of the mask.
    of_mask: u32,
    /// Theirs, one after another.
    latents: Vec<f32>,
}

impl Record {
    /// Refuses latents that were written under another mask.
    fn check(&self, mask: &[bool], path: &Path) -> Result<()> {
        if mask_checksum(mask) != self.of_mask || mask.iter().filter(|masked| **masked).count() != self.masked {
            return Err(TargetsError::Mask { path: path.to_owned(), step: self.step });
        }
        Ok(())
    }

    /// Writes the rows of the masked positions and no other.
    fn spread(&self, mask: &[bool], width: usize, into: &mut [f32]) {
        let width = width.max(1);
        let rows = into.chunks_mut(width).zip(mask).filter(|(_, masked)| **masked);
        for ((row, _), latents) in rows.zip(self.latents.chunks(width)) {
            row.copy_from_slice(latents);
        }
    }
}

fn io(operation: &'static str, path: &Path, cause: std::io::Error) -> TargetsError {
    TargetsError::Io { operation, path: path.to_owned(), cause }
}

fn unwritten(operation: &'static str, path: &Path, cause: std::io::Error) -> TargetsError {
    TargetsError::Unwritten { operation, path: path.to_owned(), cause }
}

fn check_length(argument: &'static str, got: usize, expected: usize) -> Result<()> {
    if got == expected { Ok(()) } else { Err(TargetsError::Length { argument, got, expected }) }
}

fn mask_checksum(mask: &[bool]) -> u32 {
    let bytes: Vec<u8> = mask.iter().map(|&masked| u8::from(masked)).collect();
    crc32c::crc32c(&bytes)
}

#[cfg(test)]
mod tests;
