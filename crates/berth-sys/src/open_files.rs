//! Open file descriptors and file limits of processes.
//!
//! Blocks, and is expensive for many descriptors. Implements spec 04b §11.

use std::{fs, io, path::Path};

/// Maximum number of descriptors that are classified; further ones do not count as sockets.
const MAX_CLASSIFIED: u64 = 20_000;

/// Open files of a set of processes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OpenFiles {
    /// Number of descriptors.
    pub descriptors: u64,
    /// Number of sockets among them.
    pub sockets: u64,
    /// Soft limit of the first process, -1 for unlimited; `None` if unknown.
    pub soft_limit: Option<i64>,
}

/// Counts the open files of these processes, by their PIDs in `proc`. Processes that exit meanwhile count as none.
pub fn count(proc: &Path, processes: impl Iterator<Item = u32>) -> OpenFiles {
    let mut open = OpenFiles::default();
    for (place, pid) in processes.enumerate() {
        let process = proc.join(pid.to_string());
        if place == 0 {
            open.soft_limit = fs::read_to_string(process.join("limits")).ok().and_then(|limits| soft_limit(&limits));
        }
        let _ = of_process(&process, &mut open); // it may have ended meanwhile
    }
    open
}

fn of_process(process: &Path, open: &mut OpenFiles) -> io::Result<()> {
    for entry in fs::read_dir(process.join("fd"))? {
        open.descriptors = open.descriptors.saturating_add(1);
        if open.descriptors <= MAX_CLASSIFIED
            && fs::read_link(entry?.path())
                .is_ok_and(|target| target.as_os_str().as_encoded_bytes().starts_with(b"socket:"))
        {
            open.sockets = open.sockets.saturating_add(1);
        }
    }
    Ok(())
}

/// Parses the soft limit of open files in `/proc/<pid>/limits`; -1 for unlimited.
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
    fn limits_are_read() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units\n\
                      Max processes             7                    7                    processes\n\
                      Max open files            1024                 524288               files\n";
        assert_eq!(soft_limit(limits), Some(1024));
        assert_eq!(soft_limit("Max open files  unlimited  unlimited files\n"), Some(-1));
        assert_eq!(soft_limit("Max processes 7 7 processes\n"), None);
        assert_eq!(soft_limit("Max open files"), None);
    }

    #[test]
    fn our_own_files_are_open() {
        let _socket = std::os::unix::net::UnixDatagram::unbound().expect("a socket");
        let open = count(Path::new("/proc"), [std::process::id(), u32::MAX].into_iter());
        assert!(open.descriptors > 3 && open.sockets > 0 && open.soft_limit.is_some(), "{open:?}");
    }
}
