//! Tests of the probe scheduler, with a paused clock.

use std::{
    collections::VecDeque,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use async_trait::async_trait;
use jiff::Timestamp;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

use super::*;
use crate::probes::{ProbeManagerHandle, open, testing::status, time_grid::OFFSET};
use berth_cri::CriConfig;
use berth_metrics::{Registry, exposition::ExpositionFormat};
use berth_ports::{ProbeManager, ProbeResults, ProbedStatus, StateFile, SystemClock};
use berth_types::{ContainerId, api};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Behavior of an attempt.
#[derive(Clone)]
enum Act {
    Returns(Outcome),
    Hangs,
    Crashes,
}

/// Fakes of everything around the probes of one pod.
struct World {
    begun: Instant,
    acts: Mutex<VecDeque<Act>>,
    asked: Mutex<Vec<(u64, &'static str)>>,
    /// … as exact instants.
    exact: Mutex<Vec<Instant>>,
    /// … with the address.
    addresses: Mutex<Vec<Option<String>>>,
    status: Mutex<Option<api::PodStatus>>,
    shown: AtomicU64,
    status_reads: AtomicU64,
    /// Number of requests built.
    made: AtomicU64,
    log: Mutex<Vec<String>>,
    file: Mutex<Option<Vec<u8>>>,
    dropped: Mutex<u32>,
}

impl World {
    fn new(acts: impl IntoIterator<Item = Act>) -> Arc<Self> {
        Arc::new(Self {
            begun: Instant::now(),
            acts: Mutex::new(acts.into_iter().collect()),
            asked: Mutex::default(),
            exact: Mutex::default(),
            addresses: Mutex::default(),
            status: Mutex::new(Some(running(true, true))),
            shown: AtomicU64::default(),
            status_reads: AtomicU64::default(),
            made: AtomicU64::default(),
            log: Mutex::default(),
            file: Mutex::default(),
            dropped: Mutex::default(),
        })
    }

    fn show(&self, status: api::PodStatus) {
        *lock(&self.status) = Some(status);
        self.shown.fetch_add(1, Ordering::Relaxed);
    }

    /// Behavior of the next attempt; the last one repeats.
    fn next_act(&self) -> Act {
        let mut acts = lock(&self.acts);
        let act = if acts.len() > 1 { acts.pop_front() } else { acts.front().cloned() };
        act.unwrap_or(Act::Returns(Outcome::Success))
    }

    /// Whole seconds at which attempts were made.
    fn asked(&self) -> Vec<u64> {
        lock(&self.asked).iter().map(|(at, _)| *at).collect()
    }

    fn take_log(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&self.log))
    }

    fn append_log(&self, text: String) {
        lock(&self.log).push(text);
    }
}

struct Fake(Arc<World>);

struct DropCounter(Arc<World>);

impl Drop for DropCounter {
    fn drop(&mut self) {
        *lock(&self.0.dropped) += 1;
    }
}

#[async_trait]
impl Prober for Fake {
    async fn probe_once(&self, ask: &ProbeRequest) -> Outcome {
        lock(&self.0.asked).push((self.0.begun.elapsed().as_secs(), ask.kind.label()));
        lock(&self.0.exact).push(Instant::now());
        lock(&self.0.addresses).push(ask.ip.clone());
        if !ask.is_made() {
            self.0.made.fetch_add(1, Ordering::Relaxed);
            ask.resolved();
        }
        match self.0.next_act() {
            Act::Returns(outcome) => outcome,
            Act::Hangs => {
                let _hanging = DropCounter(self.0.clone());
                std::future::pending().await
            }
            Act::Crashes => panic!("an attempt that crashes"),
        }
    }
}

impl ProbedPods for Fake {
    fn status(&self, _pod: &PodUid) -> Option<ProbedStatus> {
        self.0.status_reads.fetch_add(1, Ordering::Relaxed);
        let status = lock(&self.0.status).clone()?;
        Some(ProbedStatus { status: Arc::new(status), restart_all: false })
    }
    fn changes(&self) -> u64 {
        self.0.shown.load(Ordering::Relaxed)
    }
    fn set_ready(&self, _pod: &Pod, container: &ContainerId, ready: bool) {
        self.0.append_log(format!("ready {container} {ready}"));
    }
    fn set_started(&self, _pod: &Pod, container: &ContainerId, started: bool) {
        self.0.append_log(format!("started {container} {started}"));
    }
    fn wake(&self, _pod: &PodUid) {
        self.0.append_log("wake".to_owned());
    }
}

impl EventSink for Fake {
    fn record(&self, event: EventRecord) {
        self.0.append_log(format!("{}: {}", event.reason, event.message));
    }
}

#[async_trait]
impl StateFile for Fake {
    fn path(&self) -> &std::path::Path {
        std::path::Path::new("/state")
    }
    async fn read(&self) -> std::io::Result<Option<Vec<u8>>> {
        Ok(lock(&self.0.file).clone())
    }
    async fn replace(&self, content: Vec<u8>) -> std::io::Result<()> {
        *lock(&self.0.file) = Some(content);
        Ok(())
    }
}

/// One run of the agent.
struct Life {
    manager: Arc<ProbeManagerHandle>,
    registry: Registry,
    stop: CancellationToken,
}

impl Life {
    async fn begin(world: &Arc<World>) -> Self {
        let fake = || Arc::new(Fake(world.clone()));
        let (registry, stop) = (Registry::new(), CancellationToken::new());
        let deps = ProbeDeps {
            asker: fake(),
            pods: fake(),
            events: fake(),
            clock: Arc::new(SystemClock),
            metrics: ProbeMetrics::new(&registry),
            paces: ProbeTimelinessMetrics::new(&registry),
            started_at: Timestamp::now(),
            liveness: TaskLiveness::default(),
        };
        let (manager, probing, saving) = open(deps, fake(), stop.clone()).await;
        tokio::spawn(probing);
        tokio::spawn(saving);
        Self { manager, registry, stop }
    }

    /// Starts long after the agent, so that no probe is spread, and on a grid point of all periods.
    async fn settled(world: &Arc<World>) -> Self {
        let life = Self::begin(world).await;
        tokio::time::sleep_until(world.begun + Duration::from_secs(3600) + OFFSET).await;
        life
    }

    fn page(&self) -> String {
        let mut out = Vec::new();
        ExpositionFormat::negotiate(None).encode(self.registry.gather(), &mut out);
        String::from_utf8(out).expect("text")
    }

    fn results(&self) -> ProbeResults {
        self.manager.results(&"c-0".into())
    }
}

/// Advances the clock by whole seconds, and runs everything that is due.
async fn pass(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds) + Duration::from_millis(1)).await;
}

/// Status of a container that has run for a while: its failures count.
fn running(started: bool, ready: bool) -> api::PodStatus {
    let at = Timestamp::now() - jiff::SignedDuration::from_secs(5);
    instance("c-0", json!({"running": {"startedAt": at.to_string()}}), started, ready)
}

/// Status of a container that has just started.
fn just_started(started: bool) -> api::PodStatus {
    instance("c-0", json!({"running": {"startedAt": Timestamp::now().to_string()}}), started, false)
}

fn instance(id: &str, state: serde_json::Value, started: bool, ready: bool) -> api::PodStatus {
    status(json!({"phase": "Running", "podIP": "10.0.0.1", "containerStatuses": [{"name": "c",
        "containerID": format!("fake://{id}"), "state": state, "started": started, "ready": ready,
        "image": "", "imageID": "", "restartCount": 0}]}))
}

fn pod_with(probes: serde_json::Value) -> Arc<Pod> {
    let mut container = probes;
    container["name"] = json!("c");
    crate::probes::testing::pod(json!({"restartPolicy": "Always", "containers": [container]}))
}

fn tcp(period: u64) -> serde_json::Value {
    json!({"tcpSocket": {"port": 1}, "periodSeconds": period})
}

fn failure() -> Act {
    Act::Returns(Outcome::Failure("no".to_owned()))
}

fn success() -> Act {
    Act::Returns(Outcome::Success)
}

#[tokio::test(start_paused = true)]
async fn it_is_asked_at_once_and_then_every_period() {
    let world = World::new([success()]);
    let life = Life::settled(&world).await;
    life.manager.add(&pod_with(json!({"livenessProbe": tcp(7)})));
    pass(22).await;
    assert_eq!(world.asked(), [3600, 3607, 3614, 3621]);
    life.manager.add(&pod_with(json!({"livenessProbe": tcp(7)})));
    pass(7).await;
    assert_eq!(world.asked().len(), 5, "added once");
    assert_eq!(world.take_log(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn an_unchanged_pod_is_not_observed_again() {
    let world = World::new([success()]);
    let life = Life::settled(&world).await;
    life.manager.add(&pod_with(json!({"livenessProbe": tcp(10)})));
    pass(31).await;
    assert_eq!((world.asked().len(), world.status_reads.load(Ordering::Relaxed)), (4, 1));
    let ended = json!({"terminated": {"exitCode": 1, "finishedAt": Timestamp::now().to_string()}});
    world.show(instance("c-0", ended, true, true));
    pass(30).await;
    assert_eq!((world.asked().len(), world.status_reads.load(Ordering::Relaxed)), (4, 2), "it does not run any more");
    world.show(running(true, true));
    pass(10).await;
    assert_eq!((world.asked().len(), world.status_reads.load(Ordering::Relaxed)), (5, 3));
    world.show(api::PodStatus { pod_ip: Some("10.0.0.2".to_owned()), ..running(true, true) });
    pass(10).await;
    let (here, there) = (Some("10.0.0.1".to_owned()), Some("10.0.0.2".to_owned()));
    assert_eq!(lock(&world.addresses)[..], [&here, &here, &here, &here, &here, &there].map(Clone::clone));
}

#[tokio::test(start_paused = true)]
async fn what_is_asked_is_made_once_for_as_long_as_its_container_stays_as_it_is() {
    let world = World::new([success()]);
    let life = Life::settled(&world).await;
    life.manager.add(&pod_with(json!({"livenessProbe": tcp(10)})));
    pass(21).await;
    let seen = || (world.asked().len(), world.made.load(Ordering::Relaxed));
    assert_eq!(seen(), (3, 1));
    let same = lock(&world.status).clone().expect("a status");
    world.show(same.clone()); // another pod's change
    pass(20).await;
    assert_eq!((seen(), world.status_reads.load(Ordering::Relaxed)), ((5, 1), 2));
    world.show(api::PodStatus { pod_ip: Some("10.0.0.2".to_owned()), ..same });
    pass(20).await;
    assert_eq!(seen(), (7, 2), "another address");
    world.show(instance("c-1", json!({"running": {}}), true, true));
    pass(20).await;
    assert_eq!(seen(), (9, 3), "another instance");
}

#[tokio::test(start_paused = true)]
async fn soon_after_the_agents_start_the_first_moment_is_spread() {
    let mut first = Vec::new();
    for _ in 0..8 {
        let world = World::new([success()]);
        let life = Life::begin(&world).await;
        life.manager.add(&pod_with(json!({"livenessProbe": tcp(1000)})));
        pass(1001).await;
        first.push(world.asked()[0]);
    }
    first.sort_unstable();
    first.dedup();
    assert!(first.len() > 1, "{first:?}");
}

#[tokio::test(start_paused = true)]
async fn soon_after_the_agents_start_there_are_few_moments_to_wake_up_for() {
    let world = World::new([success()]);
    let life = Life::begin(&world).await;
    for number in 0..50 {
        let mut object = pod_with(json!({"livenessProbe": tcp(10)})).to_object();
        object.metadata.uid = Some(format!("u{number}"));
        life.manager.add(&Arc::new(Pod::new(object).expect("complete")));
    }
    pass(10).await;
    let after: Vec<_> = lock(&world.exact).iter().map(|at| *at - world.begun - OFFSET).collect();
    assert_eq!(after.len(), 50, "none begins later than by a period: {after:?}");
    assert!(after.iter().all(|at| at.subsec_millis() <= 1), "whole seconds, by a timer of milliseconds: {after:?}");
}

#[tokio::test(start_paused = true)]
async fn probes_that_begin_at_different_times_are_asked_together_from_their_second_turn_on() {
    let world = World::new([success()]);
    let life = Life::settled(&world).await;
    let at = |world: &World| lock(&world.exact).clone();
    tokio::time::sleep(Duration::from_millis(20)).await; // after a grid point
    for uid in ["u", "v"] {
        let mut object = pod_with(json!({"readinessProbe": tcp(10)})).to_object();
        object.metadata.uid = Some(uid.to_owned());
        life.manager.add(&Arc::new(Pod::new(object).expect("complete")));
        tokio::time::sleep(Duration::from_millis(70)).await;
    }
    let first = at(&world);
    assert_eq!(first[1] - first[0], Duration::from_millis(70), "at once");
    pass(11).await;
    let both = at(&world);
    assert_eq!((both.len(), both[2]), (4, both[3]));
    let longer = both[2] - both[0] - Duration::from_secs(10);
    assert!(longer <= Duration::from_secs(1), "{longer:?}");
    pass(10).await;
    assert_eq!(at(&world)[4..], [both[2] + Duration::from_secs(10); 2]);
}

#[tokio::test(start_paused = true)]
async fn attempts_start_in_batches_and_hanging_ones_do_not_block_others() {
    let world = World::new([Act::Hangs]);
    let life = Life::settled(&world).await;
    let count = 2 * PERMITS + 1;
    for number in 0..count {
        let mut object = pod_with(json!({"readinessProbe": tcp(10)})).to_object();
        object.metadata.uid = Some(format!("u{number}"));
        life.manager.add(&Arc::new(Pod::new(object).expect("complete")));
    }
    pass(1).await;
    let at = lock(&world.exact).clone();
    let first = *at.first().expect("one");
    assert_eq!((at.len(), &at[..PERMITS]), (count, &[first; PERMITS][..]));
    let of_round = |round: u32| PERMIT_TIME * round..PERMIT_TIME * (round + 1);
    assert!(at[PERMITS..2 * PERMITS].iter().all(|at| of_round(1).contains(&(*at - first))), "{at:?}");
    assert!(of_round(2).contains(&(at[2 * PERMITS] - first)), "{at:?}");
}

/// AC-08-9, AC-08-10
#[tokio::test(start_paused = true)]
async fn ac_05_6_readiness_is_reported_at_once() {
    let world = World::new([success(), success(), failure(), failure(), failure(), success()]);
    let life = Life::settled(&world).await;
    life.manager.add(&pod_with(json!({"readinessProbe": tcp(10)})));
    pass(0).await;
    assert_eq!(world.take_log(), ["ready c-0 true", "wake"]);
    let failed = "Unhealthy: Readiness probe failed: no";
    for expected in [vec![], vec![failed], vec![failed], vec![failed, "ready c-0 false", "wake"]] {
        pass(10).await;
        assert_eq!(world.take_log(), expected);
    }
    pass(10).await;
    assert_eq!(world.take_log(), ["ready c-0 true", "wake"]);
    let page = life.page();
    let count = |result: &str, n: u32| {
        let line = format!(
            r#"prober_probe_total{{container="c",namespace="n",pod="p",pod_uid="u",probe_type="Readiness",result="{result}"}} {n}"#
        );
        assert!(page.contains(&line), "{line} in {page}");
    };
    count("successful", 3);
    count("failed", 3);
    let durations =
        r#"prober_probe_duration_seconds_count{container="c",namespace="n",pod="p",probe_type="Readiness"} 3"#;
    assert!(page.contains(durations), "{page}");
    life.manager.remove(&"u".into());
    pass(0).await;
    assert!(!life.page().contains("container=\"c\",namespace=\"n\",pod=\"p\""), "a series ends with its probe");
    assert_eq!(life.results(), ProbeResults::default());
}

#[tokio::test(start_paused = true)]
async fn ac_05_5_a_warning_makes_ready_and_is_reported() {
    let world = World::new([Act::Returns(Outcome::Warning("moved".to_owned()))]);
    let life = Life::settled(&world).await;
    life.manager.add(&pod_with(json!({"readinessProbe": tcp(10)})));
    pass(0).await;
    assert_eq!(world.take_log(), ["ProbeWarning: Readiness probe warning: moved", "ready c-0 true", "wake"]);
    assert!(life.page().contains(r#"result="successful"} 1"#));
}

#[tokio::test(start_paused = true)]
async fn what_is_under_way_and_how_late_it_began_is_shown() {
    let world = World::new([Act::Hangs]);
    let life = Life::settled(&world).await;
    for number in 0..=8 {
        let mut object = pod_with(json!({"readinessProbe": tcp(10)})).to_object();
        object.metadata.uid = Some(format!("u{number}"));
        life.manager.add(&Arc::new(Pod::new(object).expect("complete")));
    }
    pass(0).await;
    let shown = |life: &Life, line: &str| life.page().lines().any(|shown| shown == line);
    assert!(shown(&life, r#"berth_probe_inflight{handler="tcp"} 9"#), "{}", life.page());
    assert!(shown(&life, r#"berth_probe_schedule_lag_seconds_count{probe_type="Readiness"} 9"#));
    for number in 0..=8 {
        life.manager.remove(&format!("u{number}").as_str().into());
    }
    pass(0).await;
    assert!(shown(&life, r#"berth_probe_inflight{handler="tcp"} 0"#));
}

/// Two servers: one floods its clients, the other one is healthy. Uses the real clock, because sockets do.
#[tokio::test]
async fn a_server_that_floods_keeps_no_other_from_being_asked() {
    let flood = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let well = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let ports = [&flood, &well].map(|server| server.local_addr().expect("bound").port());
    let stop = CancellationToken::new();
    let flooding = stop.clone();
    let _stops = stop.drop_guard();
    // A thread of its own: it must never wait for the probes.
    let flood = flood.into_std().expect("a socket");
    flood.set_nonblocking(true).expect("a socket");
    std::thread::spawn(move || {
        let promises = b"HTTP/1.1 100 Continue\r\n\r\n".repeat(1000);
        let mut victims = Vec::new();
        while !flooding.is_cancelled() {
            if victims.is_empty() {
                std::thread::yield_now();
            }
            while let Ok((victim, _)) = flood.accept() {
                victims.push(victim);
            }
            victims.retain_mut(|victim| match std::io::Write::write(victim, &promises) {
                Ok(_) => true,
                Err(error) => error.kind() == std::io::ErrorKind::WouldBlock,
            });
        }
    });
    let world = World::new([success()]);
    let fake = || Arc::new(Fake(world.clone()));
    let registry = Registry::new();
    let config = CriConfig {
        endpoint: "unix:///nowhere.sock".to_owned(),
        image_endpoint: String::new(),
        request_timeout: Duration::from_secs(1),
        list_streaming: false,
    };
    let runtime = berth_cri::connect(&config, &registry).expect("lazily").runtime;
    let deps = ProbeDeps {
        asker: Arc::new(crate::probes::Handlers::new(runtime).expect("TLS")),
        pods: fake(),
        events: fake(),
        clock: Arc::new(SystemClock),
        metrics: ProbeMetrics::new(&registry),
        paces: ProbeTimelinessMetrics::new(&registry),
        started_at: Timestamp::now(),
        liveness: TaskLiveness::default(),
    };
    let (manager, probing, _saving) = open(deps, fake(), CancellationToken::new()).await;
    let probing = tokio::spawn(probing);
    tokio::time::sleep(Duration::from_millis(1001)).await; // past the spread of the agent's start
    let get =
        |port: u16| json!({"httpGet": {"host": "127.0.0.1", "port": port}, "periodSeconds": 1, "timeoutSeconds": 60});
    manager.add(&pod_with(json!({"livenessProbe": get(ports[0]), "readinessProbe": get(ports[1])})));
    let begun = Instant::now();
    for _ in 0..4 {
        let (mut client, _) =
            tokio::time::timeout(Duration::from_secs(20), well.accept()).await.expect("asked").expect("a client");
        assert!(client.read(&mut [0; 4096]).await.expect("it asks") > 0);
        client.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await.expect("it listens");
    }
    assert!(begun.elapsed() < Duration::from_secs(8), "each period, and not each minute: {:?}", begun.elapsed());
    let is_logged = |text: &str| lock(&world.log).iter().any(|entry| entry.contains(text));
    let until = Instant::now() + Duration::from_secs(20);
    while !is_logged("response exceeds the size limit") && Instant::now() < until {
        tokio::task::yield_now().await;
    }
    assert!(is_logged("response exceeds the size limit"), "{:?}", world.take_log());
    probing.abort();
}

#[tokio::test(start_paused = true)]
async fn a_liveness_failure_wakes_and_then_waits_for_another_instance() {
    let world = World::new([failure()]);
    let life = Life::settled(&world).await;
    life.manager.add(&pod_with(json!({"livenessProbe": tcp(1)})));
    pass(10).await;
    assert_eq!(world.asked().len(), 3);
    assert_eq!(world.take_log().last().map(String::as_str), Some("wake"));
    assert_eq!(life.results().liveness, Some(ProbeResult::Failure));
    world.show(instance("c-1", json!({"running": {}}), true, true));
    pass(1).await;
    assert_eq!(
        (life.results(), life.manager.results(&"c-1".into()).liveness),
        (ProbeResults::default(), Some(ProbeResult::Success))
    );
    world.take_log();
    pass(3).await;
    assert_eq!(
        world.take_log().last().map(String::as_str),
        Some("wake"),
        "results of the previous instance do not count"
    );
    assert_eq!(life.manager.results(&"c-1".into()).liveness, Some(ProbeResult::Failure));
    let history = life.manager.history(&"c-1".into());
    assert_eq!((history.len(), history[0].runs[0].times), (1, 3));
}

#[tokio::test(start_paused = true)]
async fn ac_05_7_the_others_wait_for_startup_and_readiness_follows_at_once() {
    let world = World::new([failure(), success()]);
    world.show(running(false, false));
    let life = Life::settled(&world).await;
    life.manager.add(&pod_with(json!({"startupProbe": tcp(5), "readinessProbe": tcp(100), "livenessProbe": tcp(3)})));
    pass(6).await;
    let kinds = |world: &World| lock(&world.asked).iter().map(|(_, kind)| *kind).collect::<Vec<_>>();
    assert_eq!(kinds(&world), ["Startup", "Startup"]);
    assert_eq!(world.take_log(), ["Unhealthy: Startup probe failed: no", "started c-0 true", "wake"]);
    world.show(running(true, false));
    life.manager.trigger(&"u".into(), "c");
    pass(0).await;
    assert_eq!(kinds(&world), ["Startup", "Startup", "Readiness"], "not only at its next moment");
}

#[tokio::test(start_paused = true)]
async fn a_server_that_listens_soon_after_its_start_is_ready_soon_at_any_period() {
    for (kind, expected) in
        [("readinessProbe", ["ready c-0 true", "wake"]), ("startupProbe", ["started c-0 true", "wake"])]
    {
        let world = World::new([failure(), failure(), success()]);
        world.show(status(json!({"phase": "Pending"})));
        let life = Life::settled(&world).await;
        life.manager.add(&pod_with(json!({kind: tcp(600)})));
        pass(1).await;
        assert_eq!(world.asked(), [0; 0], "nothing runs");
        world.show(just_started(kind == "readinessProbe"));
        life.manager.trigger(&"u".into(), "c");
        tokio::time::sleep(Duration::from_millis(310)).await;
        assert_eq!(world.take_log(), expected, "{kind}: within a second, and without an event");
        let page = life.page();
        assert!(!page.contains(r#"result="failed""#), "{page}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_container_that_stays_unready_counts_from_its_first_second_on() {
    let world = World::new([failure()]);
    world.show(just_started(false));
    let life = Life::settled(&world).await;
    life.manager.add(&pod_with(
        json!({"startupProbe": {"tcpSocket": {"port": 1}, "periodSeconds": 10, "failureThreshold": 3}}),
    ));
    pass(1).await;
    assert_eq!(world.take_log(), ["Unhealthy: Startup probe failed: no"]);
    for _ in 0..10 {
        life.manager.trigger(&"u".into(), "c");
        pass(0).await;
    }
    assert_eq!(world.take_log(), [""; 0], "triggered probes do not use up the threshold");
    pass(18).await;
    assert_eq!(world.take_log(), ["Unhealthy: Startup probe failed: no"], "its period");
}

#[tokio::test(start_paused = true)]
async fn what_is_asked_out_of_turn_is_asked_once_a_second_and_restarts_the_period() {
    let world = World::new([failure()]);
    let life = Life::settled(&world).await;
    life.manager.add(&pod_with(json!({"readinessProbe": tcp(10)})));
    pass(4).await;
    for _ in 0..30 {
        life.manager.trigger(&"u".into(), "c");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    pass(0).await;
    assert_eq!(world.asked(), [3600, 3604, 3605, 3606, 3607]);
    life.manager.trigger(&"u".into(), "no such");
    life.manager.trigger(&"nobody".into(), "c");
    pass(9).await;
    assert_eq!(world.asked().len(), 5);
    pass(2).await;
    assert_eq!(world.asked()[5..], [3618], "a period later, on the next mark");
}

#[tokio::test(start_paused = true)]
async fn errors_are_tried_again_at_once_and_never_counted() {
    let error = Act::Returns(Outcome::unknown("broken"));
    let world = World::new([error.clone(), error.clone(), success(), error]);
    let life = Life::settled(&world).await;
    life.manager.add(&pod_with(json!({"readinessProbe": tcp(10)})));
    pass(0).await;
    assert_eq!(
        (world.asked(), world.take_log()),
        (vec![3600; 3], vec!["ready c-0 true".to_owned(), "wake".to_owned()])
    );
    pass(100).await;
    assert_eq!(life.results().readiness, Some(ProbeResult::Success));
    let log = world.take_log();
    assert_eq!((world.asked().len(), log.len()), (33, 10), "one event for three attempts");
    assert_eq!(log[0], "Unhealthy: Readiness probe errored and resulted in unknown state: broken");
    assert!(life.page().contains(r#"result="successful"} 1"#));
}

#[tokio::test(start_paused = true)]
async fn a_probe_that_hangs_costs_itself_and_ends_with_its_pod() {
    let world = World::new([Act::Hangs]);
    let life = Life::settled(&world).await;
    life.manager.add(&pod_with(json!({"livenessProbe": tcp(1)})));
    pass(100).await;
    assert_eq!(world.asked(), [3600], "never two of one probe");
    life.manager.stop_liveness(&"u".into());
    pass(0).await;
    assert_eq!(*lock(&world.dropped), 1);
    life.manager.add(&pod_with(json!({"livenessProbe": tcp(1)})));
    pass(10).await;
    assert_eq!(world.asked(), [3600], "a pod that ends begins nothing");
}

#[tokio::test(start_paused = true)]
async fn moments_that_have_passed_are_dropped() {
    struct Slow(Arc<World>);
    #[async_trait]
    impl Prober for Slow {
        async fn probe_once(&self, ask: &ProbeRequest) -> Outcome {
            let outcome = Fake(self.0.clone()).probe_once(ask).await;
            tokio::time::sleep(Duration::from_millis(25_500)).await;
            outcome
        }
    }
    let world = World::new([success()]);
    let fake = || Arc::new(Fake(world.clone()));
    let registry = Registry::new();
    let deps = ProbeDeps {
        asker: Arc::new(Slow(world.clone())),
        pods: fake(),
        events: fake(),
        clock: Arc::new(SystemClock),
        metrics: ProbeMetrics::new(&registry),
        paces: ProbeTimelinessMetrics::new(&registry),
        started_at: Timestamp::now(),
        liveness: TaskLiveness::default(),
    };
    let (manager, probing, _saving) = open(deps, fake(), CancellationToken::new()).await;
    tokio::spawn(probing);
    pass(100).await;
    manager.add(&pod_with(json!({"livenessProbe": tcp(10)})));
    pass(70).await;
    assert_eq!(world.asked(), [100, 130, 160]);
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_crashes_is_followed_by_the_next() {
    let world = World::new([Act::Crashes, success()]);
    let life = Life::settled(&world).await;
    life.manager.add(&pod_with(json!({"readinessProbe": tcp(10)})));
    pass(10).await;
    assert_eq!(world.take_log(), ["ready c-0 true", "wake"]);
}

#[tokio::test(start_paused = true)]
async fn ac_05_12_a_pod_that_ends_is_asked_only_whether_it_is_ready() {
    let world = World::new([success()]);
    let life = Life::settled(&world).await;
    life.manager.add(&pod_with(json!({"readinessProbe": tcp(10), "livenessProbe": tcp(10)})));
    pass(0).await;
    life.manager.stop_liveness(&"u".into());
    *lock(&world.acts) = VecDeque::from([failure()]);
    world.take_log();
    pass(30).await;
    let log = world.take_log();
    assert_eq!(log.last().map(String::as_str), Some("wake"));
    assert!(log.contains(&"ready c-0 false".to_owned()) && !log.iter().any(|t| t.contains("Liveness")), "{log:?}");
    life.manager.remove(&"u".into());
    pass(30).await;
    assert_eq!(world.take_log(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_container_that_comes_back_after_all_is_probed_again() {
    let world = World::new([success()]);
    let life = Life::settled(&world).await;
    let mut object = pod_with(json!({"readinessProbe": tcp(10)})).to_object();
    object.spec.as_mut().expect("a spec").restart_policy = Some("Never".to_owned());
    let pod = Arc::new(Pod::new(object).expect("complete"));
    life.manager.add(&pod);
    pass(0).await;
    world.show(instance("c-0", json!({"terminated": {"exitCode": 1}}), false, false));
    pass(10).await;
    assert_eq!(life.results(), ProbeResults::default(), "it ended for good");
    world.show(instance("c-1", json!({"running": {}}), true, false));
    life.manager.add(&pod);
    pass(0).await;
    assert_eq!(life.manager.results(&"c-1".into()).readiness, Some(ProbeResult::Success));
}

#[tokio::test(start_paused = true)]
async fn ac_05_11_results_outlive_the_agent() {
    let world = World::new([success()]);
    let life = Life::settled(&world).await;
    life.manager.add(&pod_with(json!({"readinessProbe": tcp(30)})));
    pass(2).await;
    life.stop.cancel();
    let asked = world.asked().len();
    *lock(&world.acts) = VecDeque::from([Act::Hangs]);
    world.take_log();
    let life = Life::begin(&world).await;
    assert_eq!(life.results().readiness, Some(ProbeResult::Success), "before any probe runs");
    life.manager.add(&pod_with(json!({"readinessProbe": tcp(30)})));
    pass(31).await;
    assert_eq!((world.asked().len(), life.results().readiness), (asked + 1, Some(ProbeResult::Success)));
    assert_eq!(world.take_log(), [""; 0]);
    // results of pods that are no longer probed are dropped, in the file as well
    life.manager.remove(&"u".into());
    pass(601).await;
    life.stop.cancel();
    pass(1).await;
    assert_eq!(lock(&world.file).as_deref(), Some(&br#"{"containers":{}}"#[..]));
}

#[tokio::test(start_paused = true)]
async fn ac_05_11_results_wait_for_the_first_moment_however_late_that_is() {
    let world = World::new([success()]);
    let life = Life::settled(&world).await;
    life.manager.add(&pod_with(json!({"readinessProbe": tcp(3000)})));
    pass(2).await;
    life.stop.cancel();
    let asked = world.asked().len();
    let mut late = 0;
    // The first attempt is at a random point of the period.
    for _ in 0..20 {
        let life = Life::begin(&world).await;
        life.manager.add(&pod_with(json!({"readinessProbe": tcp(3000)})));
        pass(1300).await;
        assert_eq!(life.results().readiness, Some(ProbeResult::Success));
        late += usize::from(world.asked().len() == asked);
        life.stop.cancel();
        pass(1).await;
        lock(&world.asked).truncate(asked);
    }
    assert!(late > 0, "none of them was late");
}

#[tokio::test(start_paused = true)]
async fn a_damaged_file_is_none() {
    let world = World::new([success()]);
    *lock(&world.file) = Some(b"{\"containers\":[".to_vec());
    let life = Life::begin(&world).await;
    assert_eq!(life.results(), ProbeResults::default());
}
