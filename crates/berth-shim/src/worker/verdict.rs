//! What an end means, and when a shim may go. Pure.

use std::time::{Duration, Instant};

/// A kill for want of memory counts for that long. Spec 09a §12.
pub const OOM_COUNTS: Duration = Duration::from_secs(10);
/// Nothing runs for that long before a forgotten shim goes.
const IDLE: Duration = Duration::from_secs(60);
/// No daemon for that long before an idle shim goes.
const ALONE: Duration = Duration::from_secs(24 * 3600);

/// What is known when a container has ended.
#[derive(Clone, Copy, Debug)]
pub struct Ending {
    /// 0 to 255; 128 and more for signals.
    pub code: i32,
    /// Whether we killed it.
    pub is_ours: bool,
    /// When the kernel was last seen to kill in it.
    pub last_kill: Option<Instant>,
    /// Whether it killed more when looked at after the end.
    pub is_late_kill: bool,
}

impl Ending {
    /// Whether it ended for want of memory: the strict rule of spec 09a §12.
    pub fn is_oom(self, now: Instant) -> bool {
        let is_fresh = self.last_kill.is_some_and(|at| now.saturating_duration_since(at) <= OOM_COUNTS);
        may_be_oom(self.code, self.is_ours) && (is_fresh || self.is_late_kill)
    }
}

/// Whether who ended with that code may have ended for want of memory. The shell around a killed program exits with
/// *status* 137, so the code counts and not the signal.
pub fn may_be_oom(code: i32, is_ours: bool) -> bool {
    code == 137 && !is_ours
}

/// When a shim goes by itself: nothing has run since `idle`, no daemon was there since `alone`.
pub fn goes_at(idle: Option<Instant>, alone: Option<Instant>) -> Option<Instant> {
    Some((idle? + IDLE).max(alone? + ALONE))
}

/// Whether an id can be a file's name.
pub fn is_name(id: &str) -> bool {
    let is_fine = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'_' | b'.');
    (1..=128).contains(&id.len()) && !id.starts_with('.') && id.bytes().all(is_fine)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_kill_that_explains_the_end_is_oom() {
        let start = Instant::now();
        let now = start + Duration::from_secs(60);
        let ago = |seconds| Some(now - Duration::from_secs(seconds));
        for (name, code, is_ours, last_kill, is_late_kill, expected) in [
            ("killed just now", 137, false, ago(0), false, true),
            ("seen at the end only", 137, false, None, true, true),
            ("ten seconds ago", 137, false, ago(10), false, true),
            ("long ago", 137, false, ago(11), false, false),
            ("long ago and again", 137, false, ago(11), true, true),
            ("never", 137, false, None, false, false),
            ("we killed it", 137, true, ago(0), true, false),
            ("it coped", 0, false, ago(0), true, false),
            ("another signal", 143, false, ago(0), true, false),
        ] {
            assert_eq!(Ending { code, is_ours, last_kill, is_late_kill }.is_oom(now), expected, "{name}");
        }
    }

    #[test]
    fn a_shim_goes_when_idle_and_alone() {
        let start = Instant::now();
        assert_eq!(goes_at(None, Some(start)), None);
        assert_eq!(goes_at(Some(start), None), None);
        assert_eq!(goes_at(Some(start), Some(start)), Some(start + ALONE));
        assert_eq!(goes_at(Some(start + ALONE), Some(start)), Some(start + ALONE + IDLE));
    }

    #[test]
    fn ids_are_names() {
        for (id, expected) in [
            ("a1-b_c.d", true),
            ("", false),
            (".", false),
            ("..", false),
            (".x", false),
            ("a/b", false),
            ("a\0", false),
        ] {
            assert_eq!(is_name(id), expected, "{id:?}");
        }
        assert!(!is_name(&"a".repeat(129)));
    }
}
