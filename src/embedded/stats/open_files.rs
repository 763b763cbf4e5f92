//! Open files of a group's processes, and what its first process may open. Blocking; dear, so only for metrics.

use std::{fs, path::Path};

/// Processes of a group that are looked at.
const MOST_PROCESSES: usize = 1024;
/// Descriptors of a group that are told apart; the others count as no sockets.
const MOST_FILES: u64 = 20_000;

/// What a group's processes have open.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OpenFiles {
    /// Descriptors.
    pub descriptors: u64,
    /// Those of sockets.
    pub sockets: u64,
    /// The first process's soft limit of open files; -1: none.
    pub soft_limit: Option<i64>,
}

/// Counts what these processes have open. Those that end meanwhile have nothing.
pub fn of(proc: &Path, processes: &[u32]) -> OpenFiles {
    let mut open = OpenFiles::default();
    for (place, pid) in processes.iter().take(MOST_PROCESSES).enumerate() {
        let process = proc.join(pid.to_string());
        if place == 0 {
            open.soft_limit = fs::read_to_string(process.join("limits")).ok().and_then(|text| soft_limit(&text));
        }
        for entry in fs::read_dir(process.join("fd")).into_iter().flatten().flatten() {
            open.descriptors = open.descriptors.saturating_add(1);
            let is_told = open.descriptors <= MOST_FILES;
            if is_told && fs::read_link(entry.path()).is_ok_and(|to| to.to_string_lossy().starts_with("socket:")) {
                open.sockets = open.sockets.saturating_add(1);
            }
        }
    }
    open
}

/// `Max open files            1024                 524288               files`
fn soft_limit(limits: &str) -> Option<i64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(-1),
        number => number.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_own_files_are_open() {
        let _socket = std::os::unix::net::UnixDatagram::unbound().expect("a socket");
        let open = of(Path::new("/proc"), &[std::process::id(), u32::MAX]);
        assert!(open.descriptors > 3 && open.sockets > 0 && open.soft_limit.is_some(), "{open:?}");
        assert_eq!(soft_limit("Limit\nMax open files            unlimited  unlimited files\n"), Some(-1));
        assert_eq!(soft_limit("Max open files            1024  524288 files\n"), Some(1024));
        assert_eq!(soft_limit("Max open files"), None);
    }
}
