//! OOM kill counters of container cgroups, deduplicated against the kernel log. Pure.
//!
//! Implements spec 05 §8. The log names the process and usually comes first; the counters serve where the log is not
//! readable or was overrun. A kill in both is reported once: the increase of a counter is compared with the kills that
//! the log reported within the same window.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use berth_sys::oom_events::OomKills;

/// Maximum delay between the log record and the counter increase of one kill.
pub const APART: Duration = Duration::from_secs(1);
/// Debounce of a cgroup's events: a cgroup at its limit raises one per page it charges. Not longer, because the
/// cgroup is removed soon after the kill that ended its container.
pub const CALM: Duration = Duration::from_millis(10);
/// How long a logged kill is kept for a container that is not watched yet.
const EARLY: Duration = Duration::from_secs(10);

/// Kill counters of container cgroups, by container id.
#[derive(Debug, Default)]
pub struct KillCounters(HashMap<Arc<str>, CgroupCounter>);

#[derive(Debug, Default)]
struct CgroupCounter {
    /// Counter value at the last settlement; `None` if the cgroup is not watched.
    settled: Option<OomKills>,
    /// Highest counter value read.
    latest: OomKills,
    /// Kills that the log reported since the last settlement.
    logged: u64,
    /// When the difference is settled.
    due: Option<Duration>,
    /// End of the debounce window.
    calm: Option<Duration>,
    /// Whether events arrived within the debounce window.
    is_stirred: bool,
}

impl KillCounters {
    /// Starts to watch a container. Its counter so far counts as already reported, unless the container started after
    /// the watcher did.
    pub fn watch(&mut self, id: Arc<str>, count: OomKills, is_new: bool, now: Duration) {
        let group = self.0.entry(id).or_default();
        if group.settled.is_some() {
            return;
        }
        group.settled = Some(if is_new { OomKills::default() } else { count });
        if !is_new {
            group.logged = 0;
        }
        group.latest = count;
        group.due = (is_new && count.processes > 0).then(|| now.saturating_add(APART));
    }

    /// Whether the container is watched.
    pub fn is_watched(&self, id: &str) -> bool {
        self.0.get(id).is_some_and(|group| group.settled.is_some())
    }

    /// Handles an event of the container's cgroup; returns whether its counter has to be read now.
    pub fn record_event(&mut self, id: &str, now: Duration) -> bool {
        let Some(group) = self.0.get_mut(id) else { return false };
        group.is_stirred = group.calm.is_some_and(|calm| now < calm);
        if !group.is_stirred {
            group.calm = Some(now.saturating_add(CALM));
        }
        !group.is_stirred
    }

    /// Containers whose debounce window ended and had further events: their counters have to be read now.
    pub fn due_reads(&mut self, now: Duration) -> Vec<Arc<str>> {
        let is_stirred = |group: &CgroupCounter| group.is_stirred && group.calm.is_some_and(|calm| calm <= now);
        let stirred = self.0.iter().filter(|(_, group)| is_stirred(group)).map(|(id, _)| id.clone());
        let stirred: Vec<Arc<str>> = stirred.collect();
        stirred.into_iter().filter(|id| self.record_event(id, now)).collect()
    }

    /// Records a counter value. If `is_ahead` (the kernel notifies before it kills), the counter is read again when
    /// due.
    pub fn record_count(&mut self, id: &str, count: Option<OomKills>, is_ahead: bool, now: Duration) {
        let Some(group) = self.0.get_mut(id) else { return };
        let count = count.unwrap_or_default();
        if is_ahead || count.processes > group.latest.processes {
            group.due.get_or_insert(now.saturating_add(APART));
        }
        group.latest.processes = group.latest.processes.max(count.processes);
        group.latest.groups = group.latest.groups.max(count.groups);
    }

    /// Records a kill that the log reported.
    pub fn record_logged_kill(&mut self, id: &str, now: Duration) {
        let group = self.0.entry(id.into()).or_default();
        group.logged = group.logged.saturating_add(1);
        let patience = if group.settled.is_some() { APART } else { EARLY };
        group.due.get_or_insert(now.saturating_add(patience));
    }

    /// Time of the next settlement or deferred counter read.
    pub fn next_deadline(&self) -> Option<Duration> {
        let stirs = |group: &CgroupCounter| group.calm.filter(|_| group.is_stirred);
        self.0.values().flat_map(|group| [group.due, stirs(group)]).flatten().min()
    }

    /// Containers whose settlement is due.
    pub fn due_settlements(&self, now: Duration) -> Vec<Arc<str>> {
        let is_due = |group: &CgroupCounter| group.due.is_some_and(|due| due <= now);
        self.0.iter().filter(|(_, group)| is_due(group)).map(|(id, _)| id.clone()).collect()
    }

    /// Settles a container; returns the number of kills that the log did not report.
    pub fn settle(&mut self, id: &str) -> u64 {
        let Some(group) = self.0.get_mut(id) else { return 0 };
        let Some(settled) = group.settled else {
            self.0.remove(id);
            return 0;
        };
        let processes = group.latest.processes.saturating_sub(settled.processes);
        let groups = group.latest.groups.saturating_sub(settled.groups);
        // The log has one record for all processes of a group kill (`memory.oom.group`).
        let is_logged = groups > 0 && group.logged >= groups;
        let unreported = if is_logged { 0 } else { processes.saturating_sub(group.logged) };
        (group.settled, group.logged, group.due) = (Some(group.latest), 0, None);
        unreported
    }

    /// Drops containers that no longer run, except those with a pending settlement or read.
    pub fn retain(&mut self, running: &HashSet<Arc<str>>) {
        self.0.retain(|id, group| group.due.is_some() || group.is_stirred || running.contains(id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Processes, and groups: `4/1`.
    fn kills(text: &str) -> OomKills {
        let (processes, groups) = text.split_once('/').unwrap_or((text, "0"));
        OomKills { processes: processes.parse().expect("a number"), groups: groups.parse().expect("a number") }
    }

    /// Steps at their moment: `new 0`, `old 3`, `count 1`, `gone`, `record_logged_kill`; returns the settled counts.
    fn settled_counts(steps: &[(u64, &str)]) -> Vec<u64> {
        let (mut counts, mut settled) = (KillCounters::default(), Vec::new());
        let mut settle = |counts: &mut KillCounters, now: Duration| {
            for id in counts.due_settlements(now) {
                settled.extend(Some(counts.settle(&id)).filter(|count| *count > 0));
            }
        };
        for (at, step) in steps {
            let now = Duration::from_millis(*at);
            settle(&mut counts, now);
            match step.split_once(' ').unwrap_or((step, "0")) {
                ("new", count) => counts.watch("c".into(), kills(count), true, now),
                ("old", count) => counts.watch("c".into(), kills(count), false, now),
                ("count", count) => counts.record_count("c", Some(kills(count)), false, now),
                ("gone", _) => counts.record_count("c", None, false, now),
                ("logged", _) => counts.record_logged_kill("c", now),
                (other, _) => panic!("{other}"),
            }
        }
        settle(&mut counts, Duration::from_secs(3600));
        settled
    }

    #[test]
    fn a_kill_is_reported_once() {
        for (name, steps, expected) in [
            ("nothing was logged", [(0, "new 0"), (5, "count 1"), (9, "count 1")].as_slice(), vec![1]),
            ("the log came first", &[(0, "new 0"), (5, "logged"), (9, "count 1")], vec![]),
            ("the log came last", &[(0, "new 0"), (5, "count 1"), (900, "logged")], vec![]),
            ("the log only", &[(0, "new 0"), (5, "logged")], vec![]),
            ("the log lost some", &[(0, "new 0"), (5, "logged"), (6, "count 3")], vec![2]),
            ("again and again", &[(0, "new 0"), (5, "count 1"), (5000, "count 2"), (9000, "count 2")], vec![1, 1]),
            ("from before us", &[(0, "old 3"), (5, "count 3"), (5000, "count 4")], vec![1]),
            ("from before we looked", &[(0, "new 2")], vec![2]),
            ("logged before the first count", &[(0, "logged"), (2000, "new 1")], vec![]),
            ("counted for an earlier container", &[(0, "logged"), (10, "old 1"), (20, "count 2")], vec![1]),
            ("gone with its counter", &[(0, "new 0"), (5, "count 1"), (6, "gone")], vec![1]),
            ("gone before anybody read", &[(0, "new 0"), (5, "gone")], vec![]),
            ("watched twice", &[(0, "new 0"), (5, "count 1"), (6, "new 1")], vec![1]),
            ("all of a group", &[(0, "new 0"), (5, "logged"), (6, "count 4/1")], vec![]),
            ("all of a group, unheard of", &[(0, "new 0"), (6, "count 4/1")], vec![4]),
            ("all of two groups, one logged", &[(0, "new 0"), (5, "logged"), (6, "count 8/2")], vec![7]),
            ("nobody's", &[(0, "logged"), (1, "count 5")], vec![]),
        ] {
            assert_eq!(settled_counts(steps), expected, "{name}");
        }
    }

    #[test]
    fn events_of_a_cgroup_without_kills_are_debounced() {
        let at = Duration::from_millis;
        let mut counts = KillCounters::default();
        counts.watch("c".into(), kills("0"), true, at(0));
        assert!(counts.record_event("c", at(1)), "the first is heeded");
        counts.record_count("c", Some(kills("0")), false, at(1));
        assert_eq!(counts.next_deadline(), None, "no process was killed");
        assert!((2..11).all(|now| !counts.record_event("c", at(now))), "those that follow are not");
        counts.retain(&HashSet::new());
        assert!(counts.is_watched("c"), "its last word is still to be read");
        assert_eq!((counts.next_deadline(), counts.due_reads(at(10))), (Some(at(11)), Vec::new()));
        assert_eq!(counts.due_reads(at(11)), [Arc::<str>::from("c")], "but once, after a while");
        counts.record_count("c", Some(kills("1")), false, at(11));
        assert_eq!((counts.next_deadline(), counts.due_reads(at(900))), (Some(at(1011)), Vec::new()));
        counts.settle("c");
        counts.record_count("c", Some(kills("1")), true, at(2000));
        assert_eq!(counts.next_deadline(), Some(at(3000)), "an early log record is settled by a later count");
        assert!(!counts.record_event("other", at(1)));
    }

    #[test]
    fn what_runs_no_more_is_forgotten_when_it_is_settled() {
        let mut counts = KillCounters::default();
        counts.watch("a".into(), kills("0"), true, Duration::ZERO);
        counts.watch("b".into(), kills("0"), true, Duration::ZERO);
        counts.record_count("b", Some(kills("1")), false, Duration::ZERO);
        counts.retain(&HashSet::new());
        assert!(!counts.is_watched("a") && counts.is_watched("b"));
        assert_eq!((counts.next_deadline(), counts.settle("b")), (Some(APART), 1));
        counts.retain(&HashSet::new());
        assert!(!counts.is_watched("b") && counts.next_deadline().is_none());
    }
}
