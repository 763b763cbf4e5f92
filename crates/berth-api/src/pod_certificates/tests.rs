//! Pod certificates against a fake server and a fake signer, under a paused clock.

use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::{sync::mpsc, time::timeout};

use super::*;
use crate::{
    api::{Call, Verb},
    certificates::pem,
    testing::{FakeApi, event, marker, refused},
};
use berth_metrics::Registry;
use berth_ports::EventRecord;

const EPOCH: i64 = 1_800_000_000;
const KIND: &str = "PodCertificateRequest";
const VERSION: &str = "certificates.k8s.io/v1beta1";
/// Longer than any test takes.
const EVER: Duration = Duration::from_secs(7 * 24 * 3600);

/// Wall clock that advances with tokio's.
struct Wall(Instant);

impl Clock for Wall {
    fn now(&self) -> Timestamp {
        let passed = i64::try_from(self.0.elapsed().as_secs()).expect("small");
        at(passed)
    }
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(EPOCH + second).expect("in range")
}

#[derive(Default)]
struct CertificateEventSink(Mutex<Vec<(String, String)>>);

impl EventSink for CertificateEventSink {
    fn record(&self, event: EventRecord) {
        self.0.lock().expect("no panic").push((event.reason.into_owned(), event.message));
    }
}

struct Bench {
    api: Arc<FakeApi>,
    watch: mpsc::UnboundedSender<Value>,
    events: Arc<CertificateEventSink>,
    notifier: ChangeNotifier,
    certificates: Arc<PodCertificates>,
    version: u32,
}

fn bench() -> Bench {
    let mut count = 0;
    let api = FakeApi::new(move |call| match (call.verb, call.resource.plural) {
        (Verb::Get, "serviceaccounts") => Ok(json!({"metadata": {"name": "sa", "uid": "s"}})),
        (Verb::Create, "podcertificaterequests") => {
            count += 1;
            match count {
                1 => Err(refused(500, "InternalError", "not yet")),
                _ => Ok(json!({"metadata": {"name": format!("req-{}", count - 1)}})),
            }
        }
        _ => Err(refused(404, "NotFound", "no")),
    });
    let watch = api.next_watch();
    watch.send(marker(VERSION, KIND, "1")).expect("kept");
    let (events, notifier) = (Arc::new(CertificateEventSink::default()), ChangeNotifier::default());
    let certificates = PodCertificates::new(CertificateDeps {
        api: api.clone(),
        metrics: ReflectorMetrics::new(&Registry::new()),
        clock: Arc::new(Wall(Instant::now())),
        events: events.clone(),
        node: "n".to_owned(),
        node_uid: watch::channel("m".to_owned()).1,
        notifier: notifier.clone(),
        tasks: TaskTracker::new(),
        stop: CancellationToken::new(),
    });
    Bench { api, watch, events, notifier, certificates: Arc::new(certificates), version: 1 }
}

fn pod() -> Pod {
    let object = json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u"},
        "spec": {"containers": [], "serviceAccountName": "sa"}});
    Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete")
}

fn ask() -> CertificateRequest {
    let projection = json!({"signerName": "a/b", "keyType": "ECDSAP256"});
    let projection = serde_json::from_value(projection).expect("a projection");
    CertificateRequest { volume: "v".to_owned(), source: 1, projection }
}

fn chain(number: u8) -> String {
    pem("CERTIFICATE", &[number; 60])
}

impl Bench {
    fn created(&self) -> Vec<Call> {
        self.api.calls().into_iter().filter(|call| call.verb == Verb::Create).collect()
    }

    /// Waits for that many calls.
    async fn until_asked(&self, count: usize) {
        let mut asked = self.api.asked.subscribe();
        let is_asked = async {
            while self.created().len() <= count {
                asked.changed().await.expect("it lives");
            }
        };
        timeout(EVER, is_asked).await.expect("the request arrives in time");
    }

    /// Sets the status of a request, as the signer does.
    fn decide(&mut self, number: usize, status: Value) {
        self.version += 1;
        let name = format!("req-{number}");
        let object = json!({"apiVersion": VERSION, "kind": KIND, "status": status, "spec": {},
            "metadata": {"name": name, "namespace": "ns", "uid": name, "resourceVersion": self.version.to_string()}});
        self.watch.send(event("ADDED", object)).expect("it listens");
    }

    fn issue(&mut self, number: usize, refresh: i64, end: i64) {
        let status = json!({"conditions": [condition("Issued")], "certificateChain": chain(u8::try_from(number).expect("few")),
            "beginRefreshAt": at(refresh).to_string(), "notBefore": at(0).to_string(), "notAfter": at(end).to_string()});
        self.decide(number, status);
    }

    async fn get(&self) -> Result<Arc<Credential>, String> {
        self.certificates.of(&pod(), &ask()).await.map_err(|error| error.to_string())
    }

    /// Waits until the pod is notified.
    async fn until_notified(&self) {
        timeout(EVER, self.notifier.subscribe().next()).await.expect("received");
    }

    fn recorded_events(&self) -> Vec<(String, String)> {
        self.events.0.lock().expect("no panic").clone()
    }

    fn now(&self) -> i64 {
        self.certificates.deps.clock.now().as_second() - EPOCH
    }
}

fn condition(kind: &str) -> Value {
    json!({"type": kind, "status": "True", "reason": "R", "message": "m \"q\"", "lastTransitionTime": at(0).to_string()})
}

fn states(bench: &Bench) -> Vec<(String, &'static str, i64)> {
    bench.certificates.states()
}

fn one(state: &'static str) -> Vec<(String, &'static str, i64)> {
    vec![("a/b".to_owned(), state, 1)]
}

#[tokio::test(start_paused = true)]
async fn a_certificate_is_asked_for_once_and_renewed_in_time() {
    let mut bench = bench();
    assert_eq!(bench.get().await, Err("credential bundle is not issued yet".to_owned()));
    assert_eq!(bench.get().await, Err("credential bundle is not issued yet".to_owned()), "and waits no longer");
    assert_eq!((bench.now(), states(&bench)), (5, one("not_yet_issued")));
    bench.until_asked(1).await;
    let call = bench.created().remove(1);
    assert_eq!(call.path(), "/apis/certificates.k8s.io/v1beta1/namespaces/ns/podcertificaterequests");
    let body: Value = serde_json::from_slice(&call.body.expect("a body").bytes).expect("JSON");
    let spec = &body["spec"];
    assert_eq!(
        (&spec["serviceAccountUID"], &spec["nodeName"], &spec["nodeUID"]),
        (&json!("s"), &json!("n"), &json!("m"))
    );
    bench.issue(1, 3600, 7200);
    bench.until_notified().await;
    let first = bench.get().await.expect("issued");
    assert!(first.key.starts_with("-----BEGIN PRIVATE KEY-----\n"));
    assert_eq!((&first.chain, states(&bench)), (&chain(1), one("fresh")));

    bench.until_asked(2).await;
    let after = bench.now() - 3600;
    assert!((0..=300).contains(&after), "renewal requested after {after} s");
    assert_eq!(bench.get().await.expect("it serves on").key, first.key);
    // The first watch has ended by now; the next one starts.
    bench.watch = bench.api.next_watch();
    bench.issue(2, 90_000, 99_000);
    bench.watch.send(marker(VERSION, KIND, "9")).expect("it listens");
    bench.until_notified().await;
    let second = bench.get().await.expect("issued");
    assert!(second.key != first.key && second.chain == chain(2), "another key for another certificate");
    assert!(bench.recorded_events().is_empty(), "all went well");
}

#[tokio::test(start_paused = true)]
async fn an_unrenewed_certificate_is_served_and_each_warning_is_recorded_once() {
    let mut bench = bench();
    let _began = bench.get().await;
    bench.until_asked(1).await;
    bench.issue(1, 3600, 7200);
    bench.until_notified().await;
    let credential = bench.get().await.expect("issued");
    for (second, state, reasons) in [
        (3600 + 599, "fresh", &[][..]),
        (3600 + 661, "overdue_for_refresh", &["CertificateOverdueForRefresh"][..]),
        (7261, "expired", &["CertificateOverdueForRefresh", "CertificateExpired"][..]),
        (90_000, "expired", &["CertificateOverdueForRefresh", "CertificateExpired"][..]),
    ] {
        tokio::time::sleep(Duration::from_secs(u64::try_from(second - bench.now()).expect("later"))).await;
        assert_eq!(states(&bench), one(state), "{second}");
        let recorded: Vec<String> = bench.recorded_events().into_iter().map(|(reason, _)| reason).collect();
        assert_eq!(recorded, reasons, "{second}");
        assert_eq!(bench.get().await.expect("it serves").key, credential.key);
    }
    // The renewal's request never appears in the watch: it counts as deleted, and is created again after ten minutes.
    assert!(bench.created().len() > 3, "{}", bench.created().len());
}

#[tokio::test(start_paused = true)]
async fn who_is_refused_does_not_ask_again() {
    for (kind, reason, words) in [("Denied", "Denied", "was denied"), ("Failed", "Failed", "failed")] {
        let mut bench = bench();
        let _began = bench.get().await;
        bench.until_asked(1).await;
        bench.decide(1, json!({"conditions": [condition(kind)]}));
        bench.until_notified().await;
        let state = kind.to_lowercase();
        let text = format!(r#"PodCertificateRequest was permanently {state}: reason="R" message="m \"q\"""#);
        assert_eq!(bench.get().await, Err(text));
        let message = format!(r#"PodCertificateRequest ns/req-1 {words}, reason="R", message="m \"q\"""#);
        assert_eq!(bench.recorded_events(), [(reason.to_owned(), message)]);
        tokio::time::sleep(EVER).await;
        assert_eq!((bench.created().len(), bench.recorded_events().len()), (2, 1));
        assert_eq!(states(&bench).into_iter().map(|(_, state, _)| state).collect::<Vec<_>>(), [state.as_str()]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_gone_is_made_again() {
    let bench = bench();
    let _began = bench.get().await;
    bench.until_asked(1).await;
    let began = bench.now();
    bench.until_asked(2).await;
    let after = bench.now() - began;
    // Ten minutes, up to five of jitter, and the check after that.
    assert!((590..=960).contains(&after), "after {after} s");
}

#[tokio::test(start_paused = true)]
async fn what_is_issued_to_a_pod_goes_with_it() {
    let mut bench = bench();
    let _began = bench.get().await;
    bench.until_asked(1).await;
    bench.issue(1, 3600, 7200);
    bench.until_notified().await;
    let credential = bench.get().await.expect("issued");
    let key = Arc::downgrade(&credential);
    drop(credential);
    bench.certificates.forget(&"other".into());
    assert!(key.upgrade().is_some());
    bench.certificates.forget(&"u".into());
    tokio::time::sleep(EVER).await;
    assert!(key.upgrade().is_none(), "the key is dropped");
    assert_eq!((bench.created().len(), states(&bench)), (2, vec![]), "no other certificate is requested");
}

#[tokio::test(start_paused = true)]
async fn an_unknown_key_type_is_an_error() {
    let bench = bench();
    let mut ask = ask();
    ask.projection.key_type = "DSA".to_owned();
    let result = bench.certificates.of(&pod(), &ask).await.map_err(|error| error.to_string());
    let text =
        r#"PodCertificateRequest was permanently failed: reason="UnknownKeyType" message="unknown key type \"DSA\"""#;
    assert_eq!(result, Err(text.to_owned()));
    assert!(bench.created().is_empty());
}
