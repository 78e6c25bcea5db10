//! Files that are on the disk when a function returns, and errors that say what to do.

use std::ffi::CString;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::{CheckpointError, FileEntry};

/// Space that must be left beside a checkpoint, for the manifest, the logs and the file system's own blocks.
const SLACK_BYTES: u64 = 1 << 20;

pub(super) fn io_error(operation: &'static str, path: &Path, cause: std::io::Error) -> CheckpointError {
    let fix = match cause.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "free some space on that disk",
        ErrorKind::FileTooLarge => "raise the file size limit (ulimit -f)",
        ErrorKind::ReadOnlyFilesystem => "use a folder on a disk that can be written",
        ErrorKind::PermissionDenied if matches!(operation, "read" | "list") => "make it readable for this user",
        ErrorKind::PermissionDenied => "make the folder writable, or use another with --runs",
        ErrorKind::NotFound => "it was removed, or never written",
        ErrorKind::AlreadyExists | ErrorKind::NotADirectory => "remove the file that is in its place",
        _ => "see whether the disk is healthy",
    };
    CheckpointError::Io { operation, path: path.to_owned(), cause, fix }
}

pub(super) fn create_folder(path: &Path) -> Result<(), CheckpointError> {
    std::fs::create_dir_all(path).map_err(|cause| io_error("create", path, cause))
}

pub(super) fn read(path: &Path) -> Result<Vec<u8>, CheckpointError> {
    std::fs::read(path).map_err(|cause| io_error("read", path, cause))
}

pub(super) fn rename(from: &Path, to: &Path) -> Result<(), CheckpointError> {
    std::fs::rename(from, to).map_err(|cause| io_error("rename", from, cause))
}

/// Writes a file and waits until its bytes are on the disk.
pub(super) fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(|cause| io_error("write", path, cause))
}

/// Size and checksum of a file that may be larger than what should be in memory at once.
fn entry(path: &Path) -> Result<FileEntry, CheckpointError> {
    let read = || {
        let mut file = File::open(path)?;
        let mut chunk = vec![0; 1 << 20];
        let mut entry = FileEntry { bytes: 0, crc32c: 0 };
        loop {
            match file.read(&mut chunk)? {
                0 => return Ok(entry),
                len => {
                    entry.bytes += len as u64;
                    entry.crc32c = crc32c::crc32c_append(entry.crc32c, &chunk[..len]);
                }
            }
        }
    };
    read().map_err(|cause| io_error("read", path, cause))
}

/// CRC-32C of any bytes that end in their own CRC-32C.
const RESIDUE: u32 = 0x4867_4bc7;

/// The same of a file that ends in its own checksum: that one is what tells it from others, since the CRC of the whole is
/// one number whatever such a file holds. Of a damaged file it is the CRC of the whole.
pub(super) fn sealed_entry(path: &Path) -> Result<FileEntry, CheckpointError> {
    let entry = entry(path)?;
    if entry.crc32c != RESIDUE {
        return Ok(entry);
    }
    let mut seal = [0; 4];
    let read = File::open(path).and_then(|file| file.read_exact_at(&mut seal, entry.bytes.saturating_sub(4)));
    read.map_err(|cause| io_error("read", path, cause))?;
    Ok(FileEntry { crc32c: u32::from_le_bytes(seal), ..entry })
}

/// Waits until a folder's entries are on the disk.
pub(super) fn sync_folder(path: &Path) -> Result<(), CheckpointError> {
    File::open(path).and_then(|folder| folder.sync_all()).map_err(|cause| io_error("sync", path, cause))
}

pub(super) fn check_space(folder: &Path, bytes: u64) -> Result<(), CheckpointError> {
    let needed = bytes + SLACK_BYTES;
    match free_bytes(folder) {
        Some(free) if free < needed => Err(CheckpointError::NoSpace { path: folder.to_owned(), needed, free }),
        // An unknown amount is no reason to refuse: the write itself will say if it does not fit.
        _ => Ok(()),
    }
}

/// Bytes an ordinary user may still write on the disk of `path`; `None` if the system does not say.
pub fn free_bytes(path: &Path) -> Option<u64> {
    let path = CString::new(path.as_os_str().as_bytes()).ok()?;
    // SAFETY: statvfs is plain numbers, for which all zeroes is a value; the call writes it only while it lives.
    let (result, facts) = unsafe {
        let mut facts: libc::statvfs = std::mem::zeroed();
        let result = libc::statvfs(path.as_ptr(), &mut facts);
        (result, facts)
    };
    (result == 0).then(|| facts.f_bavail.saturating_mul(facts.f_frsize))
}
