//! Facts about the machine, the process and the time.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

/// Most memory the process has used so far.
pub fn peak_memory_bytes() -> Option<u64> {
    kib_field("/proc/self/status", "VmHWM:")
}

/// Memory the process uses now.
pub fn memory_bytes() -> Option<u64> {
    kib_field("/proc/self/status", "VmRSS:")
}

/// Memory of the machine.
pub fn machine_memory_bytes() -> Option<u64> {
    kib_field("/proc/meminfo", "MemTotal:")
}

/// Memory that the process can still get: what the machine has left, or what its own limit (`ulimit -v`) leaves.
pub fn free_memory_bytes() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: getrlimit writes two numbers into a place that lives.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut limit) } == 0 && limit.rlim_cur != libc::RLIM_INFINITY;
    let own = known.then(|| kib_field("/proc/self/status", "VmSize:").map(|used| limit.rlim_cur.saturating_sub(used)));
    let machine = kib_field("/proc/meminfo", "MemAvailable:");
    own.flatten().into_iter().chain(machine).min()
}

fn kib_field(file: &str, field: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let rest = text.lines().find_map(|line| line.strip_prefix(field))?;
    Some(rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

fn cpu_model() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// UTC now, as RFC 3339 to the second.
pub fn now_rfc3339() -> String {
    rfc3339(unix_seconds())
}

/// UTC now, as `20261129-193520`.
pub fn now_compact() -> String {
    rfc3339(unix_seconds()).replace(['-', ':', 'Z'], "").replace('T', "-")
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}

/// Seconds since 1970 as a date of the Gregorian calendar.
fn rfc3339(seconds: u64) -> String {
    let (mut days, rest) = (seconds / 86_400, seconds % 86_400);
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{:02}-{:02}T{hour:02}:{minute:02}:{second:02}Z", month + 1, days + 1)
}

/// Which program this is and where it runs: what a number needs beside it to be believed later.
///
/// The commit is that of the tree the binary lies in, else DORMOUSE_COMMIT; an installed binary has neither, and says so by
/// `null`.
pub fn provenance(command: &[String], seed: u64) -> Value {
    let binary = std::env::current_exe().ok();
    let (commit, dirty) = commit(binary.as_deref().and_then(Path::parent), std::env::var("DORMOUSE_COMMIT").ok());
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "commit": commit,
        "dirty": dirty,
        "binary_blake3": binary.and_then(|path| std::fs::read(path).ok()).map(|b| blake3::hash(&b).to_hex().to_string()),
        "command": command,
        "seed": seed,
        "started": now_rfc3339(),
        "host": {
            "system": std::env::consts::OS,
            "architecture": std::env::consts::ARCH,
            "cpu": cpu_model(),
            "threads": std::thread::available_parallelism().map(usize::from).ok(),
            "memory_bytes": machine_memory_bytes(),
        },
    })
}

/// The commit of the tree around a folder, and whether the tree has changes.
///
/// A binary that was copied to another machine lies in no tree. There `told` (the variable DORMOUSE_COMMIT) may name the
/// commit it was built from, and nobody knows about changes. An installed binary has neither, and says so by `null`.
fn commit(folder: Option<&Path>, told: Option<String>) -> (Option<String>, Option<bool>) {
    let git = |arguments: &[&str]| {
        let output = std::process::Command::new("git").arg("-C").arg(folder?).args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    match git(&["rev-parse", "HEAD"]) {
        Some(head) => (Some(head), git(&["status", "--porcelain"]).map(|changes| !changes.is_empty())),
        None => (told.filter(|commit| !commit.is_empty()), None),
    }
}

/// Asks the allocator to keep memory that was freed instead of giving it back to the system.
///
/// A step allocates and frees the same few hundred megabytes again and again. By default glibc maps and unmaps each
/// large block, and every step pays a page fault for every page it touches.
pub fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: mallopt only sets parameters of the allocator, before other threads exist.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, i32::MAX);
        libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::{commit, memory_bytes, now_compact, peak_memory_bytes, provenance, rfc3339};

    #[test]
    fn dates_are_gregorian() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00Z");
        assert_eq!(rfc3339(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(rfc3339(1_709_251_199), "2024-02-29T23:59:59Z");
        assert_eq!(rfc3339(4_107_542_400), "2100-03-01T00:00:00Z");
        assert_eq!(now_compact().len(), "20261129-193520".len());
    }

    #[test]
    fn a_commit_is_told_only_where_no_tree_knows_it() {
        let told = || Some("0123abc".to_owned());
        let outside = tempfile::tempdir().unwrap();
        assert_eq!(commit(Some(outside.path()), told()), (told(), None));
        assert_eq!(commit(Some(outside.path()), Some(String::new())), (None, None));
        assert_eq!(commit(None, None), (None, None));
        // A tree knows better.
        let git = |arguments: &[&str]| {
            let identity = ["-c", "user.name=a", "-c", "user.email=a@b"];
            let mut command = std::process::Command::new("git");
            let done = command.arg("-C").arg(outside.path()).args(identity).args(arguments).output().unwrap();
            assert!(done.status.success(), "git {arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
        };
        git(&["init", "--quiet"]);
        git(&["commit", "--quiet", "--allow-empty", "--message", "first"]);
        let (head, dirty) = commit(Some(outside.path()), told());
        assert!(head.is_some_and(|head| head.len() == 40) && dirty == Some(false));
        std::fs::write(outside.path().join("new"), "").unwrap();
        assert_eq!(commit(Some(outside.path()), told()).1, Some(true));
    }

    #[test]
    fn memory_is_read() {
        let (peak, now) = (peak_memory_bytes().unwrap(), memory_bytes().unwrap());
        assert!(now > 1 << 20 && peak >= now / 2, "{peak} {now}");
    }

    #[test]
    fn provenance_has_what_a_reader_needs() {
        let facts = provenance(&["dormouse".into(), "train".into()], 7);
        assert_eq!(facts["command"][1], "train");
        assert_eq!(facts["seed"], 7);
        assert!(facts["binary_blake3"].is_string() && facts["host"]["threads"].is_number(), "{facts}");
    }
}
