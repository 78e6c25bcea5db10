//! The bytes: files read by position, and their identity.

use std::fs::{File, Metadata};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::DataError;

/// The text that is compiled into the binary; `trainer/text/README.md` gives its source and licence.
static SHIPPED_TEXT: &[u8] = include_bytes!("../../text/genesis-to-joshua.txt");

/// The name the shipped text has in manifests and messages.
pub const SHIPPED_TEXT_NAME: &str = "shipped:genesis-to-joshua.txt";

/// One stream of bytes: a file, the files of a folder in sorted order, or bytes in memory.
#[derive(Debug)]
pub struct Corpus {
    name: String,
    parts: Vec<Part>,
    len: u64,
    /// Entries of the folder that are not read.
    left_out: Vec<PathBuf>,
}

#[derive(Debug)]
struct Part {
    name: String,
    source: Source,
    /// Position of the part's first byte in the stream.
    start: u64,
    len: u64,
}

#[derive(Debug)]
enum Source {
    File(PathBuf, Stamp),
    Static(&'static [u8]),
    Owned(Vec<u8>),
}

/// What a file looked like when it was opened: whoever writes into it, or puts another in its place, changes this.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    len: u64,
    /// Seconds and nanoseconds of the last write.
    written: (i64, i64),
    device_inode: (u64, u64),
}

impl Stamp {
    fn of(metadata: &Metadata) -> Stamp {
        let written = (metadata.mtime(), metadata.mtime_nsec());
        Stamp { len: metadata.len(), written, device_inode: (metadata.dev(), metadata.ino()) }
    }

    /// Refuses a file that no longer is as it was.
    fn check(self, path: &Path, now: &Metadata) -> Result<(), DataError> {
        let show = |stamp: Stamp| {
            let ((seconds, nanoseconds), inode) = (stamp.written, stamp.device_inode.1);
            format!("{} bytes written at {seconds}.{nanoseconds:09} (inode {inode})", stamp.len)
        };
        let now = Stamp::of(now);
        if now == self {
            return Ok(());
        }
        Err(DataError::Changed { path: path.display().to_string(), expected: show(self), got: show(now) })
    }
}

impl Corpus {
    /// The text that ships with the binary.
    pub fn shipped() -> Corpus {
        Corpus::of_source(SHIPPED_TEXT_NAME, Source::Static(SHIPPED_TEXT), SHIPPED_TEXT.len())
    }

    /// A corpus in memory.
    pub fn from_bytes(name: &str, bytes: Vec<u8>) -> Corpus {
        let len = bytes.len();
        Corpus::of_source(name, Source::Owned(bytes), len)
    }

    fn of_source(name: &str, source: Source, len: usize) -> Corpus {
        let part = Part { name: name.to_owned(), source, start: 0, len: len as u64 };
        Corpus { name: name.to_owned(), parts: vec![part], len: len as u64, left_out: Vec::new() }
    }

    /// Opens a file, or every file below a folder (sorted by path, links to files followed).
    ///
    /// A file without bytes inside a folder adds nothing; alone it is an error. What is no file and no folder (a pipe, a
    /// link to a folder) is left out, and [`Corpus::left_out`] names it.
    ///
    /// # Errors
    /// [`DataError`] if the path is missing, unreadable, or holds fewer than 2 bytes (one to read, one to predict); if a
    /// link in a folder leads nowhere.
    pub fn open(path: &Path) -> Result<Corpus, DataError> {
        let unreadable = |cause| DataError::Unreadable { path: path.to_owned(), cause };
        let root = match std::fs::canonicalize(path) {
            Ok(root) => root,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(dangling(path).unwrap_or(DataError::Missing { path: path.to_owned() }));
            }
            Err(error) => return Err(unreadable(error)),
        };
        let metadata = std::fs::metadata(&root).map_err(unreadable)?;
        let (mut files, mut left_out) = (Vec::new(), Vec::new());
        if metadata.is_dir() {
            collect_files(&root, &mut files, &mut left_out)?;
            files.sort();
            left_out.sort();
        } else if metadata.is_file() {
            files.push(root.clone());
        } else {
            return Err(DataError::NotAFile { path: path.to_owned() });
        }
        let mut parts = Vec::new();
        let mut len = 0;
        for file in files {
            let metadata = File::open(&file)
                .and_then(|open| open.metadata())
                .map_err(|cause| DataError::Unreadable { path: file.clone(), cause })?;
            let (name, size) = (file.display().to_string(), metadata.len());
            parts.push(Part { name, source: Source::File(file, Stamp::of(&metadata)), start: len, len: size });
            len += size;
        }
        if metadata.is_dir() && len == 0 {
            return Err(DataError::EmptyFolder { path: path.to_owned() });
        }
        if len < 2 {
            return Err(DataError::TooSmall {
                path: path.display().to_string(),
                bytes: len,
                needed: 2,
                why: "one byte to read and one to predict".into(),
                fix: "leave --data out to use the text that ships with dormouse".into(),
            });
        }
        Ok(Corpus { name: root.display().to_string(), parts, len, left_out })
    }

    /// Bytes in the stream.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The path, or the name of the shipped text.
    pub fn name(&self) -> String {
        self.name.clone()
    }

    /// Files in the stream.
    pub fn files(&self) -> usize {
        self.parts.len()
    }

    /// Entries of a folder that are neither files nor folders, and links to folders.
    pub fn left_out(&self) -> &[PathBuf] {
        &self.left_out
    }

    /// Checks that every file still is what it was when it was opened, by its length and times; no byte is read.
    ///
    /// # Errors
    /// [`DataError::Changed`] if one is not, [`DataError::Unreadable`] if it is gone.
    pub fn check_unchanged(&self) -> Result<(), DataError> {
        for part in &self.parts {
            if let Source::File(path, stamp) = &part.source {
                let now = std::fs::metadata(path);
                let now = now.map_err(|cause| DataError::Unreadable { path: path.clone(), cause })?;
                stamp.check(path, &now)?;
            }
        }
        Ok(())
    }

    /// Reads `len` bytes from position `start` of the stream, across files where they meet.
    ///
    /// # Errors
    /// [`DataError::Changed`] if a file was written to or replaced since it was opened, [`DataError::Unreadable`] if it
    /// cannot be read.
    pub fn read(&self, start: u64, len: usize) -> Result<Vec<u8>, DataError> {
        assert!(start + len as u64 <= self.len, "read of {len} bytes at {start} in a corpus of {}", self.len);
        let mut bytes = vec![0; len];
        let mut filled = 0;
        // The last part that starts at or before `start`; parts without bytes start where the next one does.
        let mut index = self.parts.partition_point(|part| part.start <= start).saturating_sub(1);
        while filled < len {
            let part = &self.parts[index];
            let offset = start + filled as u64 - part.start;
            let take = ((part.len - offset) as usize).min(len - filled);
            let target = &mut bytes[filled..filled + take];
            match &part.source {
                Source::File(path, stamp) => {
                    let unreadable = |cause| DataError::Unreadable { path: path.clone(), cause };
                    let file = File::open(path).map_err(unreadable)?;
                    file.read_exact_at(target, offset).map_err(|cause| match cause.kind() {
                        ErrorKind::UnexpectedEof => DataError::Changed {
                            path: path.display().to_string(),
                            expected: format!("{} bytes", part.len),
                            got: format!("an end before byte {}", offset + take as u64),
                        },
                        _ => unreadable(cause),
                    })?;
                    // Asked after the bytes were read, so that a change in between is noticed.
                    stamp.check(path, &file.metadata().map_err(unreadable)?)?;
                }
                Source::Static(all) => target.copy_from_slice(&all[offset as usize..offset as usize + take]),
                Source::Owned(all) => target.copy_from_slice(&all[offset as usize..offset as usize + take]),
            }
            filled += take;
            index += 1;
        }
        Ok(bytes)
    }

    fn manifest_files(&self) -> Result<Vec<ManifestFile>, DataError> {
        self.parts.iter().map(Part::fingerprint).collect()
    }
}

impl Part {
    fn fingerprint(&self) -> Result<ManifestFile, DataError> {
        let (hash, len, device_inode) = match &self.source {
            Source::Static(bytes) => (blake3::hash(bytes), bytes.len() as u64, None),
            Source::Owned(bytes) => (blake3::hash(bytes), bytes.len() as u64, None),
            Source::File(path, stamp) => {
                let unreadable = |cause| DataError::Unreadable { path: path.clone(), cause };
                let (hash, len, now) = hash_file(path).map_err(unreadable)?;
                stamp.check(path, &now)?;
                (hash, len, Some(stamp.device_inode))
            }
        };
        Ok(ManifestFile { path: self.name.clone(), bytes: len, blake3: hash.to_hex().to_string(), device_inode })
    }
}

/// The hash of a file's bytes, how many they are, and what the file is after they were read.
fn hash_file(path: &Path) -> std::io::Result<(blake3::Hash, u64, Metadata)> {
    let mut file = File::open(path)?;
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    let mut len = 0;
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            break;
        }
        hasher.update(&buffer[..read]);
        len += read as u64;
    }
    Ok((hasher.finalize(), len, file.metadata()?))
}

/// What is wrong with a link, if it leads to something that does not exist.
fn dangling(link: &Path) -> Option<DataError> {
    let mut target = link.to_owned();
    // A link may lead to a link; the system follows forty at most.
    for _ in 0..40 {
        let Ok(next) = std::fs::read_link(&target) else { break };
        // What a link says is as seen from where it lies.
        target = target.parent().unwrap_or(Path::new("")).join(next);
    }
    let missing = std::fs::symlink_metadata(&target).is_err_and(|cause| cause.kind() == std::io::ErrorKind::NotFound);
    (target != *link && missing).then(|| DataError::Dangling { link: link.to_owned(), target })
}

/// The files below a folder, and the entries that are none.
fn collect_files(folder: &Path, files: &mut Vec<PathBuf>, left_out: &mut Vec<PathBuf>) -> Result<(), DataError> {
    let unreadable = |cause| DataError::Unreadable { path: folder.to_owned(), cause };
    for entry in std::fs::read_dir(folder).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let path = entry.path();
        let kind = entry.file_type().map_err(unreadable)?;
        if kind.is_dir() {
            collect_files(&path, files, left_out)?;
            continue;
        }
        let file = match kind.is_symlink() {
            // A link that leads nowhere was meant to be data.
            true => {
                let lost = |cause| dangling(&path).unwrap_or(DataError::Unreadable { path: path.clone(), cause });
                std::fs::metadata(&path).map_err(lost)?.is_file()
            }
            false => kind.is_file(),
        };
        // A link to a folder is not followed: it could lead back to where it stands.
        if file { &mut *files } else { &mut *left_out }.push(path);
    }
    Ok(())
}

/// One file of a corpus, as it was when the run began.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ManifestFile {
    /// Absolute path, or the name of bytes that are not in a file.
    pub path: String,
    /// Length.
    pub bytes: u64,
    /// BLAKE3 of the contents, hexadecimal.
    pub blake3: String,
    /// Device and inode, to notice one file under two names; never stored.
    #[serde(skip)]
    device_inode: Option<(u64, u64)>,
}

/// Identity of the data of a run: every file with its length and hash, in stream order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Files of the training corpus.
    pub train: Vec<ManifestFile>,
    /// Files of `--eval`; empty if blocks of the training corpus are held out.
    pub eval: Vec<ManifestFile>,
}

impl Manifest {
    /// Hashes every file of both corpora.
    pub fn of(corpus: &Corpus, eval: Option<&Corpus>) -> Result<Manifest, DataError> {
        let eval = eval.map(Corpus::manifest_files).transpose()?.unwrap_or_default();
        Ok(Manifest { train: corpus.manifest_files()?, eval })
    }

    /// Checks that no held-out file is a training file, by path, by inode and by contents.
    pub fn check_overlap(&self) -> Result<(), DataError> {
        for eval in self.eval.iter().filter(|file| file.bytes > 0) {
            let same = |train: &&ManifestFile| {
                let same_file = train.device_inode.is_some() && train.device_inode == eval.device_inode;
                train.path == eval.path || same_file || train.blake3 == eval.blake3
            };
            if let Some(train) = self.train.iter().find(same) {
                return Err(DataError::Overlap { path: eval.path.clone(), train: train.path.clone() });
            }
        }
        Ok(())
    }

    /// Checks that `now` holds the bytes this manifest was made of; an error names the first file that does not.
    pub fn check_unchanged(&self, now: &Manifest) -> Result<(), DataError> {
        same_files(&self.train, &now.train)?;
        same_files(&self.eval, &now.eval)
    }

    /// BLAKE3 over the contents' hashes and lengths, hexadecimal. Paths are left out: moved data is the same data.
    pub fn hash(&self) -> String {
        self.digest().to_hex().to_string()
    }

    /// [`Manifest::hash`] as it is computed.
    pub fn digest(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        for (name, files) in [("train", &self.train), ("eval", &self.eval)] {
            hasher.update(name.as_bytes());
            for file in files {
                hasher.update(&file.bytes.to_le_bytes());
                hasher.update(file.blake3.as_bytes());
            }
        }
        hasher.finalize()
    }
}

fn same_files(then: &[ManifestFile], now: &[ManifestFile]) -> Result<(), DataError> {
    let describe = |file: &ManifestFile| {
        let prefix = file.blake3.get(..16).unwrap_or(&file.blake3);
        format!("{} bytes with BLAKE3 {prefix}", file.bytes)
    };
    let changed =
        |path: &str, expected: String, got: String| Err(DataError::Changed { path: path.to_owned(), expected, got });
    for (index, old) in then.iter().enumerate() {
        match now.get(index) {
            // The order of files is the order of the stream, so the contents are compared place by place.
            Some(new) if (new.bytes, &new.blake3) == (old.bytes, &old.blake3) => {}
            Some(new) if new.path == old.path => return changed(&old.path, describe(old), describe(new)),
            Some(new) => return changed(&old.path, describe(old), format!("`{}` in its place", new.path)),
            None => return changed(&old.path, describe(old), "no file".into()),
        }
    }
    match now.get(then.len()) {
        Some(extra) => changed(&extra.path, "no file".into(), describe(extra)),
        None => Ok(()),
    }
}
