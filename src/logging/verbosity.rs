//! Verbosity filter: the process-wide level and the levels of single files (`vmodule`).

use std::sync::atomic::{AtomicU32, Ordering};

use tracing::{Level, Metadata, level_filters::LevelFilter};

use berth_config::fields::VModuleItem;

/// Additional verbosity that records of other crates require.
const FOREIGN: u32 = 4;

/// Process-wide level, and levels of single files.
pub(super) struct Verbosity {
    level: AtomicU32,
    files: Vec<VModuleItem>,
}

impl Verbosity {
    pub(super) fn new(level: u32, files: &[VModuleItem]) -> Self {
        Self { level: AtomicU32::new(level), files: files.to_vec() }
    }

    pub(super) fn level(&self) -> u32 {
        self.level.load(Ordering::Relaxed)
    }

    pub(super) fn set_level(&self, level: u32) {
        self.level.store(level, Ordering::Relaxed);
    }

    /// Verbosity of a source file: that of the first matching pattern, otherwise the process-wide level.
    pub(super) fn of_file(&self, file: &str) -> u32 {
        let base = file.rsplit('/').next().unwrap_or(file);
        let stem = base.strip_suffix(".rs").unwrap_or(base);
        let fitting = self.files.iter().find(|item| glob(&item.file_pattern, stem));
        fitting.map_or_else(|| self.level(), |item| item.verbosity)
    }

    /// Maximum `tracing` level that the process may log.
    pub(super) fn ceiling(&self) -> LevelFilter {
        let most = self.files.iter().map(|item| item.verbosity).chain([self.level()]).max().unwrap_or(0);
        match most {
            0..3 => LevelFilter::INFO,
            // `debug!(v = 3)` is disabled at lower levels without cost.
            3..6 => LevelFilter::DEBUG,
            _ => LevelFilter::TRACE,
        }
    }
}

/// Verbosity level of a record without an explicit one; `None` for warnings and errors, which are always written.
pub(super) fn implied(metadata: &Metadata<'_>) -> Option<u32> {
    let ours = match *metadata.level() {
        Level::ERROR | Level::WARN => return None,
        Level::INFO => 0,
        Level::DEBUG => 4,
        Level::TRACE => 6,
    };
    Some(if is_ours(metadata) { ours } else { ours + FOREIGN })
}

/// True if the record or span comes from a crate of this workspace.
pub(super) fn is_ours(metadata: &Metadata<'_>) -> bool {
    is_of_workspace(metadata.target())
}

/// True if a target (a module path) begins with a crate of this workspace: `berth` or `berth_*`.
fn is_of_workspace(target: &str) -> bool {
    let root = target.split("::").next().unwrap_or_default();
    root == "berth" || root.starts_with("berth_")
}

/// Matches a `vmodule` pattern: `*`, `?`, and literal characters.
fn glob(pattern: &str, text: &str) -> bool {
    let (pattern, text): (Vec<char>, Vec<char>) = (pattern.chars().collect(), text.chars().collect());
    let (mut p, mut t) = (0, 0);
    // Position of the last star, and the end of the text it matches so far.
    let mut star: Option<(usize, usize)> = None;
    loop {
        match (pattern.get(p), text.get(t)) {
            (Some('*'), _) => {
                star = Some((p, t));
                p += 1;
            }
            (None, None) => return true,
            (Some(wanted), Some(found)) if *wanted == '?' || wanted == found => {
                p += 1;
                t += 1;
            }
            (_, None) => return false,
            _ => match star {
                Some((at, swallowed)) => {
                    star = Some((at, swallowed + 1));
                    p = at + 1;
                    t = swallowed + 1;
                }
                None => return false,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crates_of_the_workspace_are_ours() {
        let crates = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("crates");
        let names = std::fs::read_dir(crates).expect("the crates").map(|entry| entry.expect("an entry").file_name());
        let names: Vec<String> = names.map(|name| name.to_string_lossy().replace('-', "_")).collect();
        assert!(names.len() > 10, "{names:?}");
        for name in names {
            assert!(is_of_workspace(&name) && is_of_workspace(&format!("{name}::part")), "{name} is foreign");
        }
        assert!(is_of_workspace("berth") && is_of_workspace("berth::engine::worker"));
        assert!(["h2::codec", "berthold::a", "a::berth", ""].iter().all(|target| !is_of_workspace(target)));
    }

    #[test]
    fn patterns_match_file_names() {
        for (pattern, text, fits) in [
            ("worker", "worker", true),
            ("worker", "workers", false),
            ("work*", "worker", true),
            ("*", "", true),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("*r*rr", "worker", false),
            ("*r*r", "worker_r", true),
        ] {
            assert_eq!(glob(pattern, text), fits, "{pattern} {text}");
        }
    }

    #[test]
    fn the_first_fitting_file_pattern_wins_over_the_process() {
        let item = |file_pattern: &str, verbosity| VModuleItem { file_pattern: file_pattern.to_owned(), verbosity };
        let verbosity = Verbosity::new(2, &[item("work*", 5), item("worker", 9)]);
        assert_eq!((verbosity.of_file("src/engine/worker.rs"), verbosity.of_file("src/engine/mux.rs")), (5, 2));
        assert_eq!(verbosity.ceiling(), LevelFilter::TRACE);
    }
}
