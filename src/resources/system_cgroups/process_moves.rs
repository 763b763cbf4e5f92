//! Decisions of the system cgroups: settings, which processes move, and when a round ends. Pure.
//!
//! Implements spec 06a §8.5.

use std::time::Duration;

use berth_ports::ResourceError;
use berth_sys::cgroup::GroupPath;

/// Passes over the source cgroup in one round: processes fork while others move.
pub(super) const PASSES: u32 = 11;
/// Time from the end of a round to the next one.
const PERIOD: Duration = Duration::from_secs(60);
/// Maximum time of the moves into one cgroup.
const LIMIT: Duration = Duration::from_secs(30);

/// A configured cgroup that processes move into.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TargetCgroup {
    /// The configured text, for logs.
    pub text: String,
    /// The parsed path; a text without leading `/` starts at the root, too.
    pub group: GroupPath,
}

impl TargetCgroup {
    /// Parses the value of a setting; `None` if it is empty.
    fn parse(setting: &str, text: &str) -> Result<Option<Self>, ResourceError> {
        if text.is_empty() {
            return Ok(None);
        }
        let invalid = || ResourceError(format!("{setting}: invalid cgroup path {text:?}"));
        Ok(Some(Self { text: text.to_owned(), group: GroupPath::parse(text).ok_or_else(invalid)? }))
    }
}

/// Settings of the system cgroups.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SystemCgroupConfig {
    /// `kubeletCgroups`: cgroup of the agent; `None` leaves it where it was started.
    pub kubelet: Option<TargetCgroup>,
    /// `systemCgroups`: cgroup for the processes of `source`; `None` leaves them there.
    pub system: Option<TargetCgroup>,
    /// `oomScoreAdj`: written again in each round of the agent's cgroup.
    pub oom_score_adj: i32,
    /// Cgroup whose own processes move to `system`: the root.
    pub source: GroupPath,
    /// Time from the end of a round to the next one.
    pub period: Duration,
    /// Maximum time that a round waits for the moves into one cgroup.
    pub limit: Duration,
}

impl SystemCgroupConfig {
    /// Parses `kubeletCgroups` and `systemCgroups`; both are paths below the mount point with every cgroup driver.
    ///
    /// # Errors
    /// A path contains an empty name, `.`, or `..`, or the system cgroup is the root. The text names the setting.
    pub fn new(kubelet: &str, system: &str, oom_score_adj: i32) -> Result<Self, ResourceError> {
        let system = TargetCgroup::parse("systemCgroups", system)?;
        if system.as_ref().is_some_and(|system| system.group.is_root()) {
            return Err(ResourceError("systemCgroups: system container cannot be root (\"/\")".to_owned()));
        }
        let kubelet = TargetCgroup::parse("kubeletCgroups", kubelet)?;
        let source = GroupPath::default();
        Ok(Self { kubelet, system, oom_score_adj, source, period: PERIOD, limit: LIMIT })
    }

    /// Whether no process is to be moved.
    pub fn is_empty(&self) -> bool {
        self.kubelet.is_none() && self.system.is_none()
    }
}

/// Cgroup of a process, by its `/proc/<pid>/cgroup`; `None` if it is missing there, or the v1 hierarchies disagree.
pub(super) fn cgroup_of(table: &str, version: u8) -> Option<&str> {
    let of = |wanted: &str| {
        table.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            controllers.split(',').any(|controller| controller == wanted).then_some(path)
        })
    };
    if version == 2 {
        // Only the entry of cgroup v2 has no controller names.
        return of("");
    }
    let cpu = of("cpu").filter(|cpu| of("memory") == Some(*cpu))?;
    Some(of("name=systemd").unwrap_or(cpu))
}

/// The processes that move: all but PID 1, kernel threads, which have no executable, and processes of another PID
/// namespace, which are listed as 0.
pub(super) fn movable(listed: Vec<i32>, has_executable: impl Fn(i32) -> bool) -> Vec<i32> {
    listed.into_iter().filter(|&pid| pid > 1 && has_executable(pid)).collect()
}

/// One round: moves each listed process until `list` returns none, in at most [`PASSES`] passes.
///
/// # Errors
/// The last failure, if processes remain. A failure of an earlier pass does not count once none remain.
pub(super) fn sweep(
    mut list: impl FnMut() -> Result<Vec<i32>, ResourceError>,
    mut attach: impl FnMut(i32) -> Result<(), ResourceError>,
) -> Result<(), ResourceError> {
    let mut outcome = Ok(());
    for _ in 0..PASSES {
        match list() {
            Ok(pids) if pids.is_empty() => return Ok(()),
            Ok(pids) => {
                for pid in pids {
                    if let Err(error) = attach(pid) {
                        outcome = Err(error);
                    }
                }
            }
            Err(error) => outcome = Err(error),
        }
    }
    outcome
}

/// All failures of one step as one error: a single one as it is, several as `[first, second]`.
pub(super) fn combined(failures: &[String]) -> Result<(), ResourceError> {
    match failures {
        [] => Ok(()),
        [failure] => Err(ResourceError(failure.clone())),
        several => Err(ResourceError(format!("[{}]", several.join(", ")))),
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, collections::VecDeque};

    use super::*;

    #[test]
    fn settings_are_paths_below_the_mount_point() {
        for (kubelet, system, expected) in [
            ("", "", Ok((None, None))),
            ("kubelet", "", Ok((Some("/kubelet"), None))),
            ("/", "/system.slice/", Ok((Some("/"), Some("/system.slice")))),
            ("", "/", Err("systemCgroups: system container cannot be root (\"/\")")),
            ("", "//", Err("systemCgroups: system container cannot be root (\"/\")")),
            ("", "/a/../b", Err("systemCgroups: invalid cgroup path \"/a/../b\"")),
            ("..", "", Err("kubeletCgroups: invalid cgroup path \"..\"")),
        ] {
            let config = SystemCgroupConfig::new(kubelet, system, -999);
            let path = |target: &Option<TargetCgroup>| target.as_ref().map(|target| target.group.to_string());
            let found = config.as_ref().map(|config| (path(&config.kubelet), path(&config.system)));
            let expected = expected.map(|(kubelet, system)| (kubelet.map(str::to_owned), system.map(str::to_owned)));
            assert_eq!(found.map_err(|error| error.0.as_str()), expected, "{kubelet} {system}");
            if let Ok(config) = config {
                assert_eq!(config.is_empty(), kubelet.is_empty() && system.is_empty());
                assert!(config.source.is_root());
            }
        }
    }

    #[test]
    fn the_cgroup_of_a_process_depends_on_the_version() {
        let hybrid = "3:name=systemd:/s\n2:memory:/a\n1:cpu,cpuacct:/a\n0::/u:x\n";
        for (table, version, expected) in [
            (hybrid, 2, Some("/u:x")),
            (hybrid, 1, Some("/s")),
            ("2:memory:/a\n1:cpu,cpuacct:/a\n", 1, Some("/a")),
            ("2:memory:/a\n1:cpu,cpuacct:/b\n", 1, None),
            ("1:cpu:/a\n", 1, None),
            ("0::/\n", 2, Some("/")),
            ("0::/a (deleted)\n", 2, Some("/a (deleted)")),
            ("2:memory:/a\n", 2, None),
            ("", 1, None),
        ] {
            assert_eq!(cgroup_of(table, version), expected, "{table:?} version {version}");
        }
    }

    #[test]
    fn kernel_threads_and_the_first_process_stay() {
        assert_eq!(movable(vec![0, 1, 2, 7, -3, 9], |pid| pid != 2), [7, 9]);
    }

    fn error(text: &str) -> ResourceError {
        ResourceError(text.to_owned())
    }

    #[test]
    fn a_round_ends_when_none_remain() {
        let lists = RefCell::new(VecDeque::from([
            Ok(vec![7, 8]),
            // 8 has refused, and 9 was forked meanwhile.
            Err(error("unreadable")),
            Ok(vec![8, 9]),
            Ok(vec![]),
            Err(error("never listed again")),
        ]));
        let mut moved = Vec::new();
        let attach = |pid| {
            moved.push(pid);
            if moved.len() == 2 { Err(error("refused")) } else { Ok(()) }
        };
        let list = || lists.borrow_mut().pop_front().expect("a list");
        assert_eq!(sweep(list, attach), Ok(()));
        assert_eq!((moved, lists.borrow().len()), (vec![7, 8, 8, 9], 1));
    }

    #[test]
    fn a_round_ends_after_eleven_passes() {
        for (list, attach, expected) in [
            // Always new processes, all of which move.
            (Ok(vec![7]), Ok(()), Ok(())),
            (Ok(vec![7]), Err(error("refused")), Err(error("refused"))),
            (Err(error("unreadable")), Ok(()), Err(error("unreadable"))),
        ] {
            let mut passes = 0;
            let counted = || {
                passes += 1;
                list.clone()
            };
            assert_eq!(sweep(counted, |_| attach.clone()), expected);
            assert_eq!(passes, PASSES);
        }
    }

    #[test]
    fn several_failures_are_one_error() {
        assert_eq!(combined(&[]), Ok(()));
        assert_eq!(combined(&["a".to_owned()]), Err(error("a")));
        assert_eq!(combined(&["a".to_owned(), "b".to_owned()]), Err(error("[a, b]")));
    }
}
