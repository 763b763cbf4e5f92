//! Retention plan of rotated logs: which to keep, compress, and remove. Pure.
//!
//! `<log>` is being written; `<log>.<YYYYMMDD-HHMMSS>` was rotated; `….gz` was compressed; `….tmp` is
//! the leftover of an interrupted compression (spec 03b §11).

use std::collections::HashSet;

use jiff::{ToSpan, civil::DateTime};

/// Format of the rotation time in a name, in local time.
pub const MOMENT: &str = "%Y%m%d-%H%M%S";

/// Actions before the next rotation; file names.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Plan {
    /// Files to delete.
    pub remove: Vec<String>,
    /// Files to compress.
    pub compress: Vec<String>,
}

/// Plans the files that match `<log>.*`, so that after one more rotation there are at most `max_files`,
/// including the current one.
pub fn plan(names: Vec<String>, max_files: usize) -> Plan {
    let all: HashSet<&str> = names.iter().map(String::as_str).collect();
    let is_leftover = |name: &str| name.ends_with(".tmp") || all.contains(format!("{name}.gz").as_str());
    let leftovers: HashSet<String> = names.iter().filter(|n| is_leftover(n)).cloned().collect();
    let (mut remove, mut rest): (Vec<String>, Vec<String>) = names.into_iter().partition(|n| leftovers.contains(n));
    remove.sort();
    rest.sort();
    let keep = max_files.saturating_sub(2);
    let kept = rest.split_off(rest.len().saturating_sub(keep));
    remove.extend(rest);
    Plan { remove, compress: kept.into_iter().filter(|n| !n.ends_with(".gz")).collect() }
}

/// The next rotated file to compress, excluding the newest; `None` if there is none.
pub fn to_compress(names: Vec<String>, max_files: usize) -> Option<String> {
    let newest = oldest_first(names.clone()).pop()?;
    let older: Vec<String> = names.into_iter().filter(|name| !name.starts_with(newest.as_str())).collect();
    plan(older, max_files).compress.into_iter().next()
}

/// Rotation time for the next name: later than all existing names, even if the clock was set back or
/// daylight saving time ended. Files are removed in the order of their names.
pub fn moment(log: &str, names: &[String], now: DateTime) -> DateTime {
    let of = |name: &String| {
        let at = name.strip_prefix(log)?.strip_prefix('.')?;
        DateTime::strptime(MOMENT, at.strip_suffix(".gz").unwrap_or(at)).ok()
    };
    let newest = names.iter().filter_map(of).max();
    newest.and_then(|newest| newest.checked_add(1.second()).ok()).map_or(now, |next| next.max(now))
}

/// Rotated files of a log, oldest first, without leftovers.
pub fn oldest_first(mut names: Vec<String>) -> Vec<String> {
    names.retain(|name| !name.ends_with(".tmp"));
    names.sort_by(|a, b| a.trim_end_matches(".gz").cmp(b.trim_end_matches(".gz")).then_with(|| a.cmp(b)));
    names.dedup_by(|a, b| a.trim_end_matches(".gz") == b.trim_end_matches(".gz"));
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_newest_stay_and_are_compressed() {
        for (have, max, remove, compress) in [
            (&[][..], 5, &[][..], &[][..]),
            (&["0.log.1"], 3, &[], &["0.log.1"]),
            (&["0.log.2", "0.log.1.gz"], 3, &["0.log.1.gz"], &["0.log.2"]),
            (&["0.log.2", "0.log.1.gz"], 4, &[], &["0.log.2"]),
            (&["0.log.2", "0.log.1.gz"], 2, &["0.log.1.gz", "0.log.2"], &[]),
            (&["0.log.1", "0.log.1.gz", "0.log.2.tmp"], 5, &["0.log.1", "0.log.2.tmp"], &[]),
        ] {
            let wanted = Plan { remove: names(remove), compress: names(compress) };
            assert_eq!(plan(names(have), max), wanted, "{have:?} {max}");
        }
    }

    #[test]
    fn all_but_the_newest_are_compressed() {
        for (have, expected) in [
            (&[][..], None),
            (&["0.log.1"], None),
            (&["0.log.2", "0.log.1"], Some("0.log.1")),
            (&["0.log.3", "0.log.2", "0.log.1.gz"], Some("0.log.2")),
            (&["0.log.3", "0.log.2", "0.log.1"], Some("0.log.2")),
            (&["0.log.2", "0.log.1", "0.log.1.tmp"], Some("0.log.1")),
            (&["0.log.2", "0.log.1", "0.log.1.gz"], None),
        ] {
            assert_eq!(to_compress(names(have), 3).as_deref(), expected, "{have:?}");
        }
    }

    #[test]
    fn what_was_rotated_last_has_the_latest_name() {
        for (have, expected) in [
            (&[][..], "20261025-020000"),
            (&["0.log.20261025-015959.gz"], "20261025-020000"),
            (&["0.log.20261025-020000"], "20261025-020001"),
            // Daylight saving time has ended, or the clock was set back.
            (&["0.log.20261025-023000", "0.log.20261025-025959.gz"], "20261025-030000"),
            (&["0.log.20991231-235959"], "21000101-000000"),
            // Foreign names, and a name without a later time.
            (&["0.log.old", "0.log.20261025-023000.tmp", "1.log.20270101-000000"], "20261025-020000"),
            (&["0.log.99991231-235959"], "20261025-020000"),
        ] {
            let now = jiff::civil::date(2026, 10, 25).at(2, 0, 0, 0);
            let at = moment("0.log", &names(have), now).strftime(MOMENT).to_string();
            assert_eq!(at, expected, "{have:?}");
        }
    }

    #[test]
    fn all_of_a_log_in_order_of_time() {
        let have = names(&["0.log.3", "0.log.1.gz", "0.log.2.gz", "0.log.2", "0.log.4.tmp"]);
        assert_eq!(oldest_first(have), names(&["0.log.1.gz", "0.log.2", "0.log.3"]));
    }
}
