//! OOM classification of exits, idle exit of a shim, and id validation. Pure.

use std::time::{Duration, Instant};

/// Maximum time between an OOM kill and an exit attributed to it. Spec 09a §12.
pub const OOM_COUNTS: Duration = Duration::from_secs(10);
/// Time without containers before an abandoned shim exits.
const IDLE: Duration = Duration::from_secs(60);
/// Time without a connected agent before an idle shim exits.
const ALONE: Duration = Duration::from_secs(24 * 3600);

/// Facts about the exit of a container.
#[derive(Clone, Copy, Debug)]
pub struct ExitFacts {
    /// Exit code, 0 to 255; 128 plus the signal number for signals.
    pub code: i32,
    /// Whether the shim killed it on request.
    pub is_ours: bool,
    /// Time of the last OOM kill observed in its cgroup.
    pub last_kill: Option<Instant>,
    /// Whether the final read after the exit found another OOM kill.
    pub is_late_kill: bool,
}

impl ExitFacts {
    /// Whether it was OOM-killed: the strict rule of spec 09a §12.
    pub fn is_oom(self, now: Instant) -> bool {
        let is_fresh = self.last_kill.is_some_and(|at| now.saturating_duration_since(at) <= OOM_COUNTS);
        may_be_oom(self.code, self.is_ours) && (is_fresh || self.is_late_kill)
    }
}

/// Whether an exit with this code is consistent with an OOM kill. The shell around a killed program exits with
/// *status* 137, so the code matters and not the signal.
pub fn may_be_oom(code: i32, is_ours: bool) -> bool {
    code == 137 && !is_ours
}

/// When a shim exits by itself: nothing has run since `idle`, no agent was connected since `alone`.
pub fn idle_exit_at(idle: Option<Instant>, alone: Option<Instant>) -> Option<Instant> {
    Some((idle? + IDLE).max(alone? + ALONE))
}

/// Whether an id is valid as a file name.
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
            assert_eq!(ExitFacts { code, is_ours, last_kill, is_late_kill }.is_oom(now), expected, "{name}");
        }
    }

    #[test]
    fn a_shim_goes_when_idle_and_alone() {
        let start = Instant::now();
        assert_eq!(idle_exit_at(None, Some(start)), None);
        assert_eq!(idle_exit_at(Some(start), None), None);
        assert_eq!(idle_exit_at(Some(start), Some(start)), Some(start + ALONE));
        assert_eq!(idle_exit_at(Some(start + ALONE), Some(start)), Some(start + ALONE + IDLE));
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
