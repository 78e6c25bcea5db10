//! Mesa's software Vulkan driver, on which the kernels run where there is no GPU: `cargo xtask test` sees to it that it
//! is there, or says what to type.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;

/// What makes the driver.
const PACKAGES: [&str; 2] = ["mesa-vulkan-drivers", "libvulkan1"];

/// Where drivers are registered, and what a software one is called there.
const FOLDERS: [&str; 3] = ["/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d"];
const PREFIX: &str = "lvp_icd";

/// Variables by which a driver elsewhere is named.
const VARIABLES: [&str; 2] = ["VK_DRIVER_FILES", "VK_ICD_FILENAMES"];

/// What there is to do.
#[derive(Debug, PartialEq, Eq)]
enum Action {
    /// It is there.
    Nothing,
    /// It can be installed.
    Install,
    /// Somebody else has to.
    Say,
}

fn action(there: bool, root: bool, apt: bool) -> Action {
    match (there, root && apt) {
        (true, _) => Action::Nothing,
        (false, true) => Action::Install,
        (false, false) => Action::Say,
    }
}

/// Installs the driver where it is missing and that is allowed. Without it the gates that need it are NOTRUN, so what
/// goes wrong here is a line and no error.
pub fn provide() {
    let named = VARIABLES.iter().any(|name| std::env::var_os(name).is_some());
    let root = std::fs::metadata("/proc/self").is_ok_and(|of| of.uid() == 0);
    let apt = Path::new("/usr/bin/apt-get").exists();
    let line = format!("apt-get install -y {}", PACKAGES.join(" "));
    match action(named || FOLDERS.iter().any(|folder| has_driver(Path::new(folder))), root, apt) {
        Action::Nothing => {}
        Action::Say => {
            eprintln!("no software Vulkan driver, so kernels will not run (NOTRUN); install it: sudo {line}")
        }
        Action::Install => {
            eprintln!("no software Vulkan driver; installing it: {line}");
            let run = |arguments: &[&str]| Command::new("apt-get").args(arguments).status().is_ok_and(|s| s.success());
            if !(run(&["update", "-qq"]) && run(&[&["install", "-y", "-qq"][..], &PACKAGES[..]].concat())) {
                eprintln!("that failed, so kernels will not run (NOTRUN)");
            }
        }
    }
}

fn has_driver(folder: &Path) -> bool {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name()).any(|name| name.to_string_lossy().starts_with(PREFIX))
}

#[cfg(test)]
mod tests {
    use super::{Action, action, has_driver};

    #[test]
    fn a_missing_driver_is_installed_by_root_with_apt_and_named_to_others() {
        assert_eq!(action(true, false, false), Action::Nothing);
        assert_eq!(action(true, true, true), Action::Nothing);
        assert_eq!(action(false, true, true), Action::Install);
        assert_eq!(action(false, false, true), Action::Say);
        assert_eq!(action(false, true, false), Action::Say);
    }

    #[test]
    fn a_driver_is_found_by_the_name_it_registers() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!has_driver(folder.path()) && !has_driver(&folder.path().join("missing")));
        std::fs::write(folder.path().join("intel_icd.x86_64.json"), "{}").unwrap();
        assert!(!has_driver(folder.path()));
        std::fs::write(folder.path().join("lvp_icd.x86_64.json"), "{}").unwrap();
        assert!(has_driver(folder.path()));
    }
}
