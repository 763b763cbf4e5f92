//! Tests of the OOM watcher: events, metrics, and the checkpoint.

use std::{
    collections::VecDeque,
    path::Path,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use serde_json::json;

use super::*;
use berth_metrics::Registry;
use berth_ports::{EventTarget, PodView, RuntimePods};
use berth_types::{PodRef, PodUid, observation::Generation};

const BEGINS: &str = "stress invoked oom-killer: gfp_mask=0x100cca(GFP_HIGHUSER_MOVABLE), order=0";

#[test]
fn old_news_is_no_news() {
    let place = LogCheckpoint { boot_id: "a".to_owned(), sequence: 7 };
    for (saved, boot_id, sequence, is_old) in [
        (None, "a", 1, true),
        (Some(&place), "a", 7, true),
        (Some(&place), "a", 8, false),
        (Some(&place), "b", 1, false),
    ] {
        assert_eq!(SkippedRecords::of(saved, boot_id).contains(sequence), is_old, "{saved:?} {boot_id} {sequence}");
    }
}

/// Long log: first large unrelated records, then system OOM kills with truncated summary records.
struct Flood {
    sequence: u64,
    story: u64,
    kills: u64,
    record: Vec<u8>,
}

impl RecordSource for Flood {
    fn take(&mut self) -> io::Result<Option<&[u8]>> {
        let at = self.sequence;
        if at == self.story + 3 * self.kills {
            return Ok(None);
        }
        self.sequence += 1;
        let text = match at.checked_sub(self.story).map(|at| at % 3) {
            None => "a".repeat(8000),
            Some(0) => BEGINS.to_owned(),
            Some(1) => "oom-kill:constraint=CONSTR".to_owned(),
            Some(_) => "Out of memory: Killed process 2003 (stress) total-vm:1kB".to_owned(),
        };
        self.record = format!("6,{at},{at},-;{text}\n").into_bytes();
        Ok(Some(&self.record))
    }

    async fn wait(&self) -> io::Result<()> {
        std::future::pending().await
    }
}

/// Log with a fixed list of records.
#[derive(Clone, Default)]
struct Lines {
    left: VecDeque<(u64, &'static str)>,
    record: Vec<u8>,
}

impl Lines {
    /// Records with consecutive sequence numbers from `from` on.
    fn new(from: u64, lines: &[&'static str]) -> Self {
        Self { left: (from..).zip(lines.iter().copied()).collect(), record: Vec::new() }
    }
}

impl RecordSource for Lines {
    fn take(&mut self) -> io::Result<Option<&[u8]>> {
        let Some((at, text)) = self.left.pop_front() else { return Ok(None) };
        self.record = format!("6,{at},{at},-;{text}\n").into_bytes();
        Ok(Some(&self.record))
    }

    async fn wait(&self) -> io::Result<()> {
        std::future::pending().await
    }
}

/// Fake checkpoint file: its content, number of writes, and whether writes succeed.
#[derive(Default)]
struct FakeStateFile {
    content: Mutex<Option<Vec<u8>>>,
    writes: AtomicUsize,
    is_full: Mutex<bool>,
}

impl FakeStateFile {
    fn place(&self) -> Option<LogCheckpoint> {
        let content = self.content.lock().expect("whole");
        content.as_ref().map(|content| serde_json::from_slice(content).expect("a place"))
    }
}

#[async_trait::async_trait]
impl StateFile for FakeStateFile {
    fn path(&self) -> &Path {
        Path::new("/kept")
    }
    async fn read(&self) -> io::Result<Option<Vec<u8>>> {
        Ok(self.content.lock().expect("whole").clone())
    }
    async fn replace(&self, content: Vec<u8>) -> io::Result<()> {
        self.writes.fetch_add(1, Ordering::AcqRel);
        if *self.is_full.lock().expect("whole") {
            return Err(io::ErrorKind::StorageFull.into());
        }
        *self.content.lock().expect("whole") = Some(content);
        Ok(())
    }
}

/// File on a disk that hangs.
struct Hung;

#[async_trait::async_trait]
impl StateFile for Hung {
    fn path(&self) -> &Path {
        Path::new("/hung")
    }
    async fn read(&self) -> io::Result<Option<Vec<u8>>> {
        std::future::pending().await
    }
    async fn replace(&self, _content: Vec<u8>) -> io::Result<()> {
        std::future::pending().await
    }
}

pub(super) struct NoPods;

#[async_trait::async_trait]
impl PodObserver for NoPods {
    fn view(&self, _: &PodRef) -> PodView {
        unreachable!("nobody runs")
    }
    fn action_completed(&self, _: &PodUid) -> Generation {
        Generation::default()
    }
    fn known(&self) -> Option<RuntimePods> {
        None
    }
    async fn list(&self) -> Result<RuntimePods, String> {
        Err("nobody runs".to_owned())
    }
    fn health(&self) -> Option<String> {
        None
    }
}

#[derive(Default)]
struct RecordedEvents(Mutex<Vec<EventRecord>>);

impl EventSink for RecordedEvents {
    fn record(&self, event: EventRecord) {
        self.0.lock().expect("whole").push(event);
    }
}

impl RecordedEvents {
    /// Events since the last call, with their objects: `Node SystemOOM: message`.
    fn take(&self) -> Vec<String> {
        let events = std::mem::take(&mut *self.0.lock().expect("whole"));
        let whom = |event: &EventRecord| match &event.target {
            EventTarget::Pod { pod, .. } => format!("Pod {}", pod.name),
            EventTarget::Node => "Node".to_owned(),
            EventTarget::Storage { kind, .. } => (*kind).to_owned(),
        };
        events.iter().map(|event| format!("{} {}: {}", whom(event), event.reason, event.message)).collect()
    }
}

struct House {
    events: Arc<RecordedEvents>,
    registry: Registry,
    reporter: KillReporter,
}

/// Fixture with one desired pod, `web`, with the UID `aa-bb`.
fn house() -> House {
    let (events, registry) = (Arc::new(RecordedEvents::default()), Registry::new());
    let object =
        json!({"metadata": {"uid": "aa-bb", "name": "web", "namespace": "default"}, "spec": {"containers": []}});
    let object = serde_json::from_value(object).expect("a pod");
    let pods = vec![Arc::new(Pod::new(object).expect("complete"))];
    let reporter = KillReporter {
        pods: PodReader::fixed(pods),
        observer: Arc::new(NoPods),
        events: events.clone(),
        metrics: OomMetrics::new(&registry),
        flow: ReportLimiter::new(Instant::now()),
    };
    House { events, registry, reporter }
}

fn counted(registry: &Registry, scope: &str) -> f64 {
    let families = registry.gather();
    let family = families.iter().find(|family| family.name() == "berth_oom_kills_total");
    let mut series = family.into_iter().flat_map(|family| family.get_metric());
    series.find(|one| one.get_label()[0].value() == scope).map_or(0.0, |one| one.get_counter().get_value())
}

/// Journal that reads a log from its start.
fn journal<L: RecordSource>(log: L) -> LogReader<L> {
    let (boot_id, assembler) = ("this".to_owned(), KillAssembler::default());
    LogReader { log, boot_id, old: SkippedRecords::None, assembler, last: 0, is_dirty: false, pause: None }
}

#[tokio::test(start_paused = true)]
async fn a_flood_of_records_yields_to_other_work_and_is_summarized() {
    let mut house = house();
    let (story, kills) = (10_000, 1000);
    let mut journal = journal(Flood { sequence: 0, story, kills, record: Vec::new() });
    let mut breaks = 0;
    while !journal.read(&mut house.reporter, None).expect("readable") {
        breaks += 1;
    }
    assert_eq!(breaks, (story + 3 * kills) / BATCH as u64, "others have their turn in between");
    let events = house.events.take();
    assert_eq!(events.len(), MAX_REPORTED as usize, "{:?}", events.first());
    assert!(events.iter().all(|event| event.contains("victim process: stress, pid: 2003")), "{:?}", events.first());
    assert_eq!((journal.last, journal.is_dirty), (story + 3 * kills - 1, true), "and read to its end");
}

#[tokio::test]
async fn a_log_that_never_ends_keeps_neither_counters_nor_the_end_waiting() {
    let root = tempfile::tempdir().expect("a folder");
    let House { reporter, registry, .. } = house();
    let file = Arc::new(FakeStateFile::default());
    let listener = OomLoop {
        reporter,
        groups: Some(CgroupWatcher::listening(root.path())),
        changes: watch::channel(0).1,
        file: OneWrite::new(file.clone(), WRITE),
    };
    let stop = CancellationToken::new();
    let endless = journal(Flood { sequence: 0, story: 0, kills: u64::MAX / 4, record: Vec::new() });
    let task = tokio::spawn(listener.run(Some(endless), stop.clone()));
    std::fs::write(root.path().join("a/memory.events"), "oom_kill 1\noom_group_kill 0\n").expect("written");
    let patience = Duration::from_secs(60);
    let counted = async {
        while counted(&registry, "pod") < 1.0 || file.place().is_none() {
            yield_now().await;
        }
    };
    tokio::time::timeout(patience, counted).await.expect("counters are read, and the place is kept");
    stop.cancel();
    tokio::time::timeout(patience, task).await.expect("it ends").expect("no panic");
}

#[tokio::test(start_paused = true)]
async fn a_kill_of_the_system_is_the_nodes_and_one_of_a_group_the_pods() {
    const GLOBAL: &str = "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/user.slice,task=stress,pid=2003,uid=0";
    const OF_POD: &str = "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=c,mems_allowed=0,oom_memcg=/kubepods/burstable/podaa-bb,task_memcg=/kubepods/burstable/podaa-bb/c1,task=stress,pid=7,uid=0";
    const OF_OTHER: &str = "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=c,mems_allowed=0,oom_memcg=/system.slice,task_memcg=/system.slice/x,task=stress,pid=8,uid=0";
    const KILLED: &str = "Memory cgroup out of memory: Killed process 7 (stress) total-vm:1kB";
    let system = "Node SystemOOM: System OOM encountered, victim process: stress, pid: 2003";
    let pod = "Pod web OOMKilled: Process stress (pid 7) was killed: a memory limit was reached";
    for (lines, expected, scopes) in [
        // AC-05-31
        (&[BEGINS, GLOBAL][..], &[system][..], [1.0, 0.0, 0.0]),
        // AC-05-32: no event on the node.
        (&[BEGINS, OF_POD, KILLED], &[pod], [0.0, 1.0, 0.0]),
        (&[BEGINS, OF_OTHER, KILLED], &[], [0.0, 0.0, 1.0]),
        (&[BEGINS, OF_POD, KILLED, BEGINS, GLOBAL], &[pod, system], [1.0, 1.0, 0.0]),
    ] {
        let mut house = house();
        assert!(journal(Lines::new(1, lines)).read(&mut house.reporter, None).expect("readable"));
        assert_eq!(house.events.take(), expected, "{lines:?}");
        assert_eq!(["system", "pod", "other"].map(|scope| counted(&house.registry, scope)), scopes, "{lines:?}");
    }
}

const KILL: [&str; 2] = [BEGINS, "Out of memory: Killed process 2003 (stress) total-vm:1kB"];
const HOUR: Duration = Duration::from_secs(3600);
const SYSTEM_OOM_EVENT: &str = "Node SystemOOM: System OOM encountered, victim process: stress, pid: 2003";

#[tokio::test(start_paused = true)]
async fn records_from_before_the_agent_or_already_reported_are_skipped() {
    let mut house = house();
    let file = Arc::new(FakeStateFile::default());
    let mut write = OneWrite::new(file.clone(), WRITE);
    let ring: Vec<&str> = KILL.into_iter().chain(KILL).collect();
    // The first agent on this machine: all existing records are old.
    let mut first = LogReader::of(Lines::new(1, &ring), "this".to_owned(), &*file).await;
    assert!(first.read(&mut house.reporter, None).expect("readable"));
    assert_eq!(house.events.take(), [""; 0]);
    first.save(&mut write).await;
    assert_eq!(file.place(), Some(LogCheckpoint { boot_id: "this".to_owned(), sequence: 4 }));
    first.log = Lines::new(5, &KILL);
    assert!(first.read(&mut house.reporter, None).expect("readable"));
    assert_eq!(house.events.take(), [SYSTEM_OOM_EVENT], "what comes then is not");
    first.save_at_last(&mut write).await;
    // The next agent reads from the same start.
    let ring: Vec<&str> = ring.into_iter().chain(KILL).chain(KILL).collect();
    let mut second = LogReader::of(Lines::new(1, &ring), "this".to_owned(), &*file).await;
    assert_eq!(second.old, SkippedRecords::UpTo(6));
    assert!(second.read(&mut house.reporter, None).expect("readable"));
    assert_eq!(house.events.take(), [SYSTEM_OOM_EVENT], "kills between two agents are reported once");
    second.save(&mut write).await;
    // The machine has rebooted, and sequence numbers restart at one.
    let mut third = LogReader::of(Lines::new(1, &KILL), "that".to_owned(), &*file).await;
    assert!(third.read(&mut house.reporter, None).expect("readable"));
    assert_eq!(house.events.take(), [SYSTEM_OOM_EVENT]);
    third.save(&mut write).await;
    assert_eq!(file.place(), Some(LogCheckpoint { boot_id: "that".to_owned(), sequence: 2 }));
}

#[tokio::test(start_paused = true)]
async fn how_far_was_read_is_not_kept_before_all_that_is_old_was() {
    let mut house = house();
    let file = Arc::new(FakeStateFile::default());
    let mut write = OneWrite::new(file.clone(), WRITE);
    let story = BATCH as u64;
    let old = Flood { sequence: 0, story, kills: 1, record: Vec::new() };
    let mut first = LogReader::of(old, "this".to_owned(), &*file).await;
    assert!(!first.read(&mut house.reporter, None).expect("readable"));
    first.save(&mut write).await;
    first.save_at_last(&mut write).await;
    assert_eq!(file.place(), None, "the rest would be news to the next agent");
    assert!(first.read(&mut house.reporter, None).expect("readable"));
    first.save(&mut write).await;
    assert_eq!(file.place().map(|place| place.sequence), Some(story + 2));
    assert_eq!(house.events.take(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_partially_read_kill_is_reported_by_the_next_agent() {
    let mut house = house();
    let file = Arc::new(FakeStateFile::default());
    let mut write = OneWrite::new(file.clone(), WRITE);
    let ring: Vec<&str> = KILL.into_iter().chain(KILL).collect();
    let mut first = journal(Lines::new(1, &ring[..3]));
    assert!(first.read(&mut house.reporter, None).expect("readable"));
    assert_eq!(house.events.take(), [SYSTEM_OOM_EVENT]);
    first.save_at_last(&mut write).await;
    let mut second = LogReader::of(Lines::new(1, &ring), "this".to_owned(), &*file).await;
    assert!(second.read(&mut house.reporter, None).expect("readable"));
    assert_eq!(house.events.take(), [SYSTEM_OOM_EVENT], "the second one, and the first one not again");
    second.save_at_last(&mut write).await;
    assert_eq!(file.place().map(|place| place.sequence), Some(4));
}

#[tokio::test(start_paused = true)]
async fn a_hanging_disk_does_not_block_reading_the_log() {
    let mut house = house();
    let opened = timeout(HOUR, LogReader::of(Lines::new(1, &KILL), "this".to_owned(), &Hung)).await;
    let mut journal = opened.expect("it is not waited for for ever");
    assert!(journal.read(&mut house.reporter, None).expect("readable"));
    assert_eq!(house.events.take(), [""; 0], "maybe that was told of already");
    journal.log = Lines::new(3, &KILL);
    assert!(journal.read(&mut house.reporter, None).expect("readable"));
    assert_eq!(house.events.take(), [SYSTEM_OOM_EVENT]);
}

#[tokio::test(start_paused = true)]
async fn a_place_that_could_not_be_kept_is_kept_later() {
    let mut house = house();
    let file = Arc::new(FakeStateFile::default());
    let mut write = OneWrite::new(file.clone(), WRITE);
    let writes = || file.writes.load(Ordering::Acquire);
    let mut journal = journal(Lines::new(1, &KILL));
    assert!(journal.read(&mut house.reporter, None).expect("readable"));
    *file.is_full.lock().expect("whole") = true;
    for _ in 0..3 {
        journal.save(&mut write).await;
    }
    journal.save_at_last(&mut write).await;
    assert_eq!(writes(), 1, "a disk that takes nothing is left alone");
    *file.is_full.lock().expect("whole") = false;
    let failed = Instant::now();
    timeout(HOUR, journal.wait()).await.expect("it is tried again").expect("the log has no new entry");
    assert_eq!(failed.elapsed().as_secs(), KEEP_AGAIN.as_secs());
    journal.save(&mut write).await;
    assert_eq!((writes(), file.place().map(|place| place.sequence)), (2, Some(2)));
    // Another kill right after: writes are rate limited.
    journal.log = Lines::new(3, &KILL);
    assert!(journal.read(&mut house.reporter, None).expect("readable"));
    journal.save(&mut write).await;
    assert_eq!(writes(), 2);
    let kept = Instant::now();
    timeout(HOUR, journal.wait()).await.expect("it is kept in time").expect("the log has no new entry");
    assert_eq!(kept.elapsed().as_secs(), KEEP.as_secs());
    journal.save(&mut write).await;
    assert_eq!((writes(), file.place().map(|place| place.sequence)), (3, Some(4)));
    let nothing = timeout(HOUR, journal.wait()).await;
    assert!(nothing.is_err(), "there is nothing to keep");
}

#[tokio::test(start_paused = true)]
async fn a_kill_with_overwritten_records_is_not_reported() {
    let mut house = house();
    let mut journal = journal(Lines::new(1, &[BEGINS]));
    // Without the missing record, the next line would read as a system OOM.
    journal.log.left.extend([(3, "Out of memory: Killed process 7 (x) total-vm:1kB")]);
    assert!(journal.read(&mut house.reporter, None).expect("readable"));
    assert_eq!((house.events.take(), counted(&house.registry, "system")), (Vec::new(), 0.0));
}

#[test]
fn a_flood_of_kills_is_counted_and_not_reported() {
    let now = Instant::now();
    let mut flow = ReportLimiter::new(now);
    let reported = (0..1000).filter(|_| flow.try_acquire(now).0).count();
    assert_eq!(reported, MAX_REPORTED as usize);
    assert_eq!(flow.try_acquire(now + WHILE), (true, Some(980)));
    assert_eq!(flow.try_acquire(now + WHILE * 2), (true, None));
}
