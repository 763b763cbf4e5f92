//! Parser of OOM kills in kernel log records (`/dev/kmsg`). Pure.
//!
//! Implements spec 05 §8.

/// The root cgroup.
const ROOT: &str = "/";
/// Kernel text in front of the victim when a cgroup was out of memory.
const OF_GROUP: &str = "Memory cgroup out of memory";
/// Maximum records between the start and the end of a kill; beyond that its end is taken as lost.
const PATIENCE: u32 = 10_000;
/// Maximum length of a cgroup or process name, in characters; longer ones are truncated.
const NAME: usize = 512;

/// Line of `/dev/kmsg` with its sequence number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KmsgRecord {
    /// Sequence number since boot.
    pub sequence: u64,
    /// First line of the text.
    pub text: String,
}

impl KmsgRecord {
    /// Parses `priority,sequence,microseconds,flags;text`; `None` if malformed. Continuation lines (key-value pairs for
    /// programs) are dropped.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let whole = String::from_utf8_lossy(bytes);
        let (head, text) = whole.split_once(';')?;
        let sequence = head.split(',').nth(1)?.parse().ok()?;
        Some(Self { sequence, text: text.lines().next().unwrap_or_default().to_owned() })
    }
}

/// An OOM-killed process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kill {
    /// Cgroup that was out of memory; `/` for the whole machine.
    pub exhausted_cgroup: String,
    /// Cgroup of the process; `/` if the kernel did not log it.
    pub cgroup: String,
    /// Process name; empty if the kernel did not log it.
    pub process: String,
    /// Process id; 0 if the kernel did not log it.
    pub pid: u32,
}

impl Kill {
    /// Whether the whole machine was out of memory.
    pub fn is_of_system(&self) -> bool {
        self.exhausted_cgroup == ROOT
    }

    /// Event message of a system OOM.
    pub fn message(&self) -> String {
        let text = "System OOM encountered";
        if self.process.is_empty() || self.pid == 0 {
            return text.to_owned();
        }
        format!("{text}, victim process: {}, pid: {}", self.process, self.pid)
    }

    /// Whether the process was in a cgroup of that pod, as named by the systemd or the cgroupfs driver.
    pub fn is_of_pod(&self, uid: &str) -> bool {
        self.below(uid).is_some()
    }

    /// Id of the pod's container that the process was in, taken from the cgroup's name: the container need not be
    /// observed yet.
    pub fn container_of(&self, uid: &str) -> Option<&str> {
        self.below(uid)?.next().map(container_id).filter(|id| !id.is_empty())
    }

    /// Path components below the cgroup of that pod.
    fn below(&self, uid: &str) -> Option<impl Iterator<Item = &str>> {
        let plain = format!("pod{uid}");
        let slice = format!("pod{}.slice", uid.replace('-', "_"));
        let is_it = |name: &str| {
            name == plain
                || name.strip_suffix(slice.as_str()).is_some_and(|rest| rest.is_empty() || rest.ends_with('-'))
        };
        let mut names = self.cgroup.split('/');
        (!uid.is_empty() && names.any(is_it)).then_some(names)
    }

    /// Whether the process was in the cgroup of that container.
    pub fn is_of_container(&self, id: &str) -> bool {
        let is_it = |name: &str| {
            let name = name.strip_suffix(".scope").unwrap_or(name);
            name.strip_suffix(id).is_some_and(|rest| rest.is_empty() || rest.ends_with('-'))
        };
        !id.is_empty() && self.cgroup.split('/').any(is_it)
    }
}

/// Container id in a cgroup name, whatever prefix precedes it.
fn container_id(name: &str) -> &str {
    let name = name.strip_suffix(".scope").unwrap_or(name);
    name.rsplit_once('-').map_or(name, |(_, id)| id)
}

/// Assembles a kill from the several records that the kernel logs for it.
#[derive(Debug, Default)]
pub struct KillAssembler {
    begun: Option<PartialKill>,
    /// Sequence number of the last record.
    last: Option<u64>,
}

#[derive(Debug)]
struct PartialKill {
    /// Sequence number of its first record.
    at: u64,
    kill: Kill,
    records: u32,
}

impl KillAssembler {
    /// Sequence number of the first record of a kill whose last record is still missing.
    pub fn pending_since(&self) -> Option<u64> {
        self.begun.as_ref().map(|begun| begun.at)
    }

    /// Consumes a record and returns the kill that it completes. A gap in sequence numbers discards an incomplete kill:
    /// the missing records may have named the cgroup.
    pub fn push(&mut self, record: &KmsgRecord) -> Option<Kill> {
        let is_next = self.last.is_none_or(|last| last.checked_add(1) == Some(record.sequence));
        self.last = Some(record.sequence);
        if !is_next {
            self.begun = None;
        }
        let text = record.text.as_str();
        if text.contains("invoked oom-killer:") {
            let kill =
                Kill { exhausted_cgroup: ROOT.to_owned(), cgroup: ROOT.to_owned(), process: String::new(), pid: 0 };
            self.begun = Some(PartialKill { at: record.sequence, kill, records: 0 });
            return None;
        }
        let begun = self.begun.as_mut()?;
        begun.records += 1;
        if begun.records > PATIENCE {
            self.begun = None;
            return None;
        }
        if let Some(kill) = summary(text) {
            self.begun = None;
            return Some(kill);
        }
        if let Some((of, short)) = limit(text) {
            (begun.kill.cgroup, begun.kill.exhausted_cgroup) = (of, short);
        } else if text.contains(OF_GROUP) && begun.kill.is_of_system() {
            // The cgroup was not logged: its counter reports the kill.
            self.begun = None;
        } else if let Some((pid, process)) = killed(text) {
            (begun.kill.pid, begun.kill.process) = (pid, process);
            return self.begun.take().map(|begun| begun.kill);
        }
        None
    }
}

/// Parses the one-line summary (kernel 5.0 and later) of a cgroup at its limit or of a system OOM; names may contain
/// commas.
fn summary(text: &str) -> Option<Kill> {
    let rest = text.split_once("oom-kill:constraint=")?.1;
    let (before, rest) = rest.split_once(",task_memcg=")?;
    let short = match before.split_once(",oom_memcg=") {
        Some((_, short)) => short,
        None => before.ends_with(",global_oom").then_some(ROOT)?,
    };
    let (of, rest) = rest.split_once(",task=")?;
    let (rest, _) = rest.rsplit_once(",uid=")?;
    let (process, pid) = rest.rsplit_once(",pid=")?;
    Some(Kill {
        exhausted_cgroup: sanitize(short),
        cgroup: sanitize(of),
        process: sanitize(process),
        pid: pid.parse().ok()?,
    })
}

/// Parses the line of kernels before 5.0: `Task in A killed as a result cgroup limit cgroup B`.
fn limit(text: &str) -> Option<(String, String)> {
    let (of, short) = text.split_once("Task in ")?.1.split_once(" killed as a result of limit of ")?;
    Some((sanitize(of), sanitize(short)))
}

/// Parses `Killed process 7 (name) total-vm:…`.
fn killed(text: &str) -> Option<(u32, String)> {
    let (pid, rest) = text.split_once("Killed process ")?.1.split_once(" (")?;
    let (name, _) = rest.split_once(") total-vm").or_else(|| rest.rsplit_once(')'))?;
    Some((pid.trim_end_matches(',').parse().ok()?, sanitize(name)))
}

fn sanitize(text: &str) -> String {
    text.chars().take(NAME).map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kills parsed from lines; `...` stands for lost records.
    fn parse_kills(lines: &[&str]) -> Vec<Kill> {
        let mut assembler = KillAssembler::default();
        let records = (100..).zip(lines).filter(|(_, line)| **line != "...");
        records
            .filter_map(|(sequence, line)| assembler.push(&KmsgRecord { sequence, text: (*line).to_owned() }))
            .collect()
    }

    const BEGINS: &str =
        "stress invoked oom-killer: gfp_mask=0x1100cca(GFP_HIGHUSER_MOVABLE), order=0, oom_score_adj=985";

    #[test]
    fn a_machine_without_memory() {
        // AC-05-31
        let kills = parse_kills(&[
            BEGINS,
            "CPU: 1 PID: 2001 Comm: stress Not tainted",
            "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/user.slice,task=stress,pid=2003,uid=0",
            "Out of memory: Killed process 2003 (stress) total-vm:1kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:4kB oom_score_adj:0",
            "oom_reaper: reaped process 2003 (stress), now anon-rss:0kB",
        ]);
        assert_eq!(kills.len(), 1);
        assert!(kills[0].is_of_system());
        assert_eq!(kills[0].cgroup, "/user.slice", "the cgroup whose counters increased, too");
        assert!(
            parse_kills(&[
                BEGINS,
                "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),task_memcg=/a,task=x,pid=7,uid=0"
            ])
            .is_empty()
        );
        assert_eq!(kills[0].message(), "System OOM encountered, victim process: stress, pid: 2003");
        let nameless = Kill { process: String::new(), ..kills[0].clone() };
        assert_eq!(nameless.message(), "System OOM encountered");
    }

    #[test]
    fn a_group_at_its_limit() {
        // AC-05-32
        let kills = parse_kills(&[
            BEGINS,
            "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=c1,mems_allowed=0,oom_memcg=/kubepods/burstable/pod1-2/c1,task_memcg=/kubepods/burstable/pod1-2/c1,task=a,b,pid=7,uid=1000",
            "Memory cgroup out of memory: Killed process 7 (a,b) total-vm:1kB",
        ]);
        let group = "/kubepods/burstable/pod1-2/c1".to_owned();
        let expected = Kill { exhausted_cgroup: group.clone(), cgroup: group, process: "a,b".to_owned(), pid: 7 };
        assert_eq!(kills, [expected]);
        assert!(!kills[0].is_of_system());
        let old = parse_kills(&[
            BEGINS,
            "Task in /kubepods/pod1/c killed as a result of limit of /kubepods/pod1",
            "Memory cgroup out of memory: Kill process 9 (x) score 1 or sacrifice child",
            "Killed process 9 (x) total-vm:1kB",
        ]);
        assert_eq!(
            (old[0].exhausted_cgroup.as_str(), old[0].cgroup.as_str(), old[0].pid),
            ("/kubepods/pod1", "/kubepods/pod1/c", 9)
        );
    }

    #[test]
    fn a_partially_read_kill_is_not_a_system_oom() {
        const SUMMARY: &str =
            "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg=/a,task_memcg=/a,task=x,pid=7,uid=0";
        const KILLED: &str = "Killed process 7 (x) total-vm:1kB";
        const OF_ONE: &str = "Memory cgroup out of memory: Killed process 7 (x) total-vm:1kB";
        const OLD: &str = "Memory cgroup out of memory: Kill process 7 (x) score 1 or sacrifice child";
        const GLOBAL: &str = "Out of memory: Killed process 7 (x) total-vm:1kB";
        let (none, group, system): (&[&str], &[&str], &[&str]) = (&[], &["/a"], &["/"]);
        for (lines, expected) in [
            // AC-05-32: the records that name the group were overwritten.
            (&[BEGINS, "...", OF_ONE][..], none),
            (&[BEGINS, "...", KILLED], none),
            (&[BEGINS, "...", GLOBAL], none),
            (&[BEGINS, "...", SUMMARY], none),
            (&["...", OF_ONE], none),
            (&[BEGINS, "...", BEGINS, SUMMARY, OF_ONE], group),
            (&[BEGINS, SUMMARY, "...", OF_ONE, BEGINS, "noise", GLOBAL], &["/a", "/"]),
            // Not lost, but truncated or in an unknown format.
            (&[BEGINS, "oom-kill:constraint=CONSTR", OF_ONE], none),
            (&[BEGINS, "noise", OLD, KILLED], none),
            (&[BEGINS, "Task in /b killed as a result of limit of /a", OLD, KILLED], group),
            (&[BEGINS, "oom-kill:constraint=CONSTR", GLOBAL], system),
        ] {
            let shorts: Vec<String> = parse_kills(lines).into_iter().map(|kill| kill.exhausted_cgroup).collect();
            assert_eq!(shorts, expected, "{lines:?}");
        }
    }

    #[test]
    fn whose_process_it_was() {
        let of = |of: &str| Kill {
            exhausted_cgroup: "/x".to_owned(),
            cgroup: of.to_owned(),
            process: "p".to_owned(),
            pid: 1,
        };
        let (uid, id) = ("aa-bb", "0123abcd");
        for (group, pod, container) in [
            ("/kubepods/burstable/podaa-bb/0123abcd", true, true),
            (
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podaa_bb.slice/cri-containerd-0123abcd.scope",
                true,
                true,
            ),
            ("/kubepods/podaa-bb/0123abcd/inner", true, true),
            ("/kubepods/podaa-bbb/x0123abcd", false, false),
            ("/kubepods/aa-bb", false, false),
            ("/", false, false),
        ] {
            let kill = of(group);
            assert_eq!((kill.is_of_pod(uid), kill.is_of_container(id)), (pod, container), "{group}");
            assert_eq!(kill.container_of(uid), container.then_some(id), "{group}");
        }
        assert_eq!(of("/kubepods/podaa-bb").container_of(uid), None);
        assert!(!of("/pod").is_of_pod("") && !of("/").is_of_container(""));
    }

    #[test]
    fn what_has_no_begin_or_no_end_is_no_kill() {
        assert!(parse_kills(&["Killed process 7 (x) total-vm:1kB"]).is_empty());
        assert!(parse_kills(&[BEGINS, "Killed process x (x)", "Killed process 7", "oom-kill:constraint="]).is_empty());
        let lines = |noise: u32| {
            let noise = (0..noise).map(|_| "noise");
            [BEGINS].into_iter().chain(noise).chain(["Killed process 7 (x) total-vm:1kB"]).collect::<Vec<_>>()
        };
        assert_eq!((parse_kills(&lines(PATIENCE - 1)).len(), parse_kills(&lines(PATIENCE)).len()), (1, 0));
        let twice = parse_kills(&[BEGINS, BEGINS, "Killed process 7 (\u{1b}x) total-vm:1kB"]);
        assert_eq!(twice[0].process, "\u{fffd}x");
    }

    #[test]
    fn records_have_numbers() {
        let record = |text: &str| KmsgRecord::parse(text.as_bytes());
        let expected = KmsgRecord { sequence: 1234, text: "a; b".to_owned() };
        assert_eq!(record("6,1234,5678,-;a; b\n SUBSYSTEM=x\n"), Some(expected));
        for garbage in ["", ";", "6;x", "6,x,1,-;t", "no record"] {
            assert_eq!(record(garbage), None, "{garbage}");
        }
    }
}
