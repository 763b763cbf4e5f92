//! Event floods: few requests to the API server, and a bounded queue (spec 05 §13.1).

use std::{sync::Arc, time::Duration};

use berth_api::{EventDeps, EventRecorder, event_recorder};
use berth_metrics::{ApiWriteMetrics, Registry};
use berth_ports::{EventRecord, EventSink, SystemClock};
use berth_types::PodRef;
use serde_json::Value;
use tokio_util::sync::{CancellationToken, DropGuard};

use berth_testkit::{
    api_client::connect,
    api_server::{ApiServer, Effect, Fault, Requests},
};

const FLOOD: usize = 10_000;
/// Capacity of the event queue.
const WAITING: usize = 1000;
/// Timeout of a step.
const PATIENCE: Duration = Duration::from_secs(60);

struct Silent;

impl EventSink for Silent {
    fn record(&self, _event: EventRecord) {}
}

/// The agent's event recorder and a test API server.
struct Bench {
    server: ApiServer,
    recorder: EventRecorder,
    registry: Registry,
    _stop: DropGuard,
}

impl Bench {
    async fn new() -> Self {
        let (server, registry, stop) = (ApiServer::start().await, Registry::new(), CancellationToken::new());
        let (recorder, sender) = event_recorder(EventDeps {
            node: "n".to_owned(),
            api: connect(&server.kubeconfig()).await,
            log: Arc::new(Silent),
            clock: Arc::new(SystemClock),
            metrics: ApiWriteMetrics::new(&registry),
        });
        tokio::spawn(sender.run(stop.clone()));
        Self { server, recorder, registry, _stop: stop.drop_guard() }
    }

    /// Sum of a metric family's series.
    fn metric(&self, family: &str) -> f64 {
        let families = self.registry.gather();
        let series = families.iter().filter(|f| f.name() == family).flat_map(|f| f.get_metric());
        series.map(|metric| metric.get_counter().get_value() + metric.get_gauge().get_value()).sum()
    }

    /// Waits until at least that many events are dropped.
    async fn until_lost(&self, count: usize) {
        let lost = async {
            while self.metric("berth_events_dropped_total") < count as f64 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(PATIENCE, lost).await.expect("too many are given up");
    }

    /// Waits until the server's event counts add up to a number; returns the requests for that.
    async fn until_counted(&self, count: u64) -> Requests {
        let counted = |events: Vec<Arc<Value>>| events.iter().filter_map(|event| event["count"].as_u64()).sum::<u64>();
        self.server.wait_until("all is told", PATIENCE, |seen| counted(seen.all("events")) >= count).await;
        self.server.log().of("events")
    }
}

fn pod(name: &str) -> PodRef {
    PodRef { uid: format!("uid-{name}").into(), name: name.into(), namespace: "default".into() }
}

/// Message and count of the server's events, sorted.
fn counted_messages(server: &ApiServer) -> Vec<(String, u64)> {
    let one = |event: &Arc<Value>| {
        (event["message"].as_str().expect("a message").to_owned(), event["count"].as_u64().expect("a count"))
    };
    let mut counted: Vec<_> = server.all("events").iter().map(one).collect();
    counted.sort();
    counted
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_of_the_same_are_one_that_counts_to_a_burst() {
    // AC-05-34
    let bench = Bench::new().await;
    for _ in 0..FLOOD {
        bench.recorder.record(EventRecord::warning(&pod("p"), "BackOff", "Back-off restarting failed container"));
    }
    bench.until_lost(FLOOD - 25).await;
    let asked = bench.until_counted(25).await;
    assert_eq!((asked.verb("create").len(), asked.verb("patch").len()), (1, 24), "{asked}");
    assert_eq!(counted_messages(&bench.server), [("Back-off restarting failed container".to_owned(), 25)]);
    bench.recorder.record(EventRecord::normal(&pod("p"), "Started", "Container started"));
    bench.recorder.record(EventRecord::warning(&pod("q"), "BackOff", "Back-off restarting failed container"));
    let asked = bench.until_counted(27).await;
    assert_eq!(asked.verb("create").len(), 3, "neither another kind nor another pod is hidden\n{asked}");
    assert_eq!(bench.metric("berth_events_dropped_total"), (FLOOD - 25) as f64);
    assert_eq!(bench.metric("berth_events_queued"), 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_of_one_reason_become_one_from_the_tenth_on() {
    // AC-05-35
    let bench = Bench::new().await;
    for number in 0..FLOOD {
        bench.recorder.record(EventRecord::warning(&pod("p"), "Failed", format!("container {number} failed")));
    }
    bench.until_lost(FLOOD - 25).await;
    let asked = bench.until_counted(25).await;
    assert_eq!((asked.verb("create").len(), asked.verb("patch").len()), (10, 15), "{asked}");
    let events = counted_messages(&bench.server);
    let (combined, own): (Vec<_>, Vec<_>) =
        events.into_iter().partition(|(message, _)| message.starts_with("(combined from similar events): container "));
    assert_eq!(own.iter().map(|(_, count)| *count).collect::<Vec<_>>(), [1; 9], "{own:?}");
    assert_eq!(combined.iter().map(|(_, count)| *count).collect::<Vec<_>>(), [16], "{combined:?}");
    assert_eq!(bench.metric("berth_events_dropped_total"), (FLOOD - 25) as f64);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_events_do_not_pile_up_behind_a_hung_server() {
    let bench = Bench::new().await;
    bench.server.fault(Fault::new(Effect::Hang).on("create", "events").always());
    let begun = std::time::Instant::now();
    for number in 0..FLOOD {
        bench.recorder.record(EventRecord::warning(&pod(&format!("p{number}")), "Failed", "no"));
    }
    assert!(begun.elapsed() < Duration::from_secs(20), "who records never waits: {:?}", begun.elapsed());
    // 16 writes are in flight.
    bench.until_lost(FLOOD - WAITING - 16).await;
    assert!(bench.metric("berth_events_queued") <= WAITING as f64);
}
