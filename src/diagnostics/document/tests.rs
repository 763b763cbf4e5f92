//! Table tests of the diagnostics document for pods in trouble.

use serde_json::json;

use super::*;
use crate::{engine::lifecycle::Lifecycle, probes::Run};
use berth_ports::{ConcurrentStep, PodProgress};

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + second).expect("a time")
}

const MINUTE: Duration = Duration::from_secs(60);

fn id() -> PodRef {
    PodRef { uid: "u".into(), name: "web".into(), namespace: "n".into() }
}

#[test]
fn the_document_has_all_known_facts() {
    let steady = Instant::now() + Duration::from_secs(1000);
    let ago = |seconds: u64| steady - Duration::from_secs(seconds);
    let standing = PodWorkerStatus { id: id(), life: Lifecycle::Syncing, progress: None, line: None };
    let status: api::PodStatus = serde_json::from_value(json!({
        "phase": "Pending",
        "conditions": [{"type": "Ready", "status": "False", "reason": "ContainersNotReady", "message": "m"},
                       {"type": "PodScheduled", "status": "True"}],
        "containerStatuses": [{
            "name": "main", "image": "i", "imageID": "", "ready": false, "restartCount": 3,
            "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
            "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
        }],
    }))
    .expect("a status");
    let run = Run { outcome: "failure", text: "404".into(), times: 7, first: at(-60), last: at(-1) };
    let known = DiagnosisInputs {
        pod: None,
        status: Some(&status),
        standing: Some(&standing),
        step: Some(StepView { name: "back-off".into(), since: ago(30), until: Some(steady + Duration::from_secs(10)) }),
        errors: vec![SyncError { text: "no".into(), times: 2, first: ago(20), last: ago(10) }],
        timings: vec![StepTiming {
            name: "volumes".into(),
            times: 2,
            first: Duration::from_micros(1_234_567),
            last: Duration::ZERO,
            longest: Duration::from_secs(2),
        }],
        probes: vec![ContainerProbeHistory {
            container: "main".into(),
            instance: Instance::Previous,
            history: History { kind: "Readiness", runs: vec![run] },
        }],
        refusal: None,
    };
    let why = document(&id(), &known, Now { wall: at(0), steady });
    let encoded = serde_json::to_value(&why).expect("JSON");
    assert_eq!(
        encoded,
        json!({
            "namespace": "n", "name": "web", "uid": "u", "source": "", "phase": "Pending", "reason": "", "message": "",
            "explanation": "", "life": "sync",
            "waits": {"stage": "back-off", "reason": "back_off", "since": "2027-01-15T07:59:30Z", "seconds": 30.0,
                      "until": "2027-01-15T08:00:10Z"},
            "errors": [{"text": "no", "times": 2, "first": "2027-01-15T07:59:40Z", "last": "2027-01-15T07:59:50Z"}],
            "containers": [{"name": "main", "state": "waiting", "reason": "CrashLoopBackOff",
                "message": "back-off 40s", "ready": false, "restarts": 3,
                "lastExit": {"code": 137, "reason": "OOMKilled", "at": null}}],
            "probes": [{"container": "main", "previous": true, "kind": "Readiness", "runs": [{"outcome": "failure", "text": "404",
                "times": 7, "first": "2027-01-15T07:59:00Z", "last": "2027-01-15T07:59:59Z"}]}],
            "unmet": [{"type": "Ready", "reason": "ContainersNotReady", "message": "m"}],
            "stages": [{"stage": "volumes", "times": 2, "firstSeconds": 1.235, "lastSeconds": 0.0,
                "longestSeconds": 2.0}],
        })
    );
    assert_eq!(serde_json::from_value::<PodDiagnosis>(encoded).expect("read back"), why);
}

#[test]
fn an_idle_or_refused_pod_waits_for_nothing() {
    let now = Now { wall: at(0), steady: Instant::now() };
    let idle = StepView { name: "idle".into(), since: now.steady, until: None };
    let standing = PodWorkerStatus { id: id(), life: Lifecycle::Syncing, progress: None, line: None };
    let idles = DiagnosisInputs { standing: Some(&standing), step: Some(idle), ..DiagnosisInputs::default() };
    assert_eq!(document(&id(), &idles, now).waits, None);
    let refused = document(&id(), &DiagnosisInputs::default(), now);
    assert_eq!((refused.life.as_str(), refused.waits), ("refused", None));
}

/// Failing worker: wait stage, its label, whether its end is known, and the error.
#[tokio::test(start_paused = true)]
async fn troubles_have_their_words() {
    let soon = || Some(Instant::now() + MINUTE * 2);
    type Act<'a> = &'a dyn Fn(&PodProgress) -> Vec<ConcurrentStep>;
    let fails = |progress: &PodProgress, name: &'static str, text: &str, rest: &'static str| {
        progress.enter(name);
        progress.fail(text);
        progress.pause(rest, soon());
        Vec::new()
    };
    let volumes = "unmounted volumes=[c]: configmap \"c\" not found";
    let rows: [(Act<'_>, &str, &str, bool, &str); 9] = [
        (
            &|progress| vec![progress.start_concurrent("image a:1"), progress.start_concurrent("image b:1")],
            "image a:1",
            "image",
            false,
            "",
        ),
        (
            &|progress| {
                progress.start_concurrent("image a:1").fail();
                progress.fail("ErrImagePull");
                progress.pause("back-off", soon());
                Vec::new()
            },
            "back-off of image a:1",
            "back_off",
            true,
            "ErrImagePull",
        ),
        (&|progress| fails(progress, "volumes", volumes, "retry"), "retry of volumes", "retry", true, volumes),
        (&|progress| vec![progress.start_concurrent("RunPodSandbox")], "RunPodSandbox", "sandbox", false, ""),
        (
            &|progress| {
                let stops = progress.start_concurrent("preStop hook of main");
                stops.enter_until("StopContainer main", soon());
                vec![stops]
            },
            "StopContainer main",
            "stop",
            true,
            "",
        ),
        (&|progress| fails(progress, "runtime", "it hangs", "runtime"), "runtime", "runtime", true, "it hangs"),
        (&|progress| fails(progress, "network", "no CNI", "network"), "network", "network", true, "no CNI"),
        (
            &|progress| fails(progress, "runtime status", "no look", "retry"),
            "retry of runtime status",
            "retry",
            true,
            "no look",
        ),
        (
            &|progress| {
                progress.enter_frame("containers");
                Vec::new()
            },
            "containers",
            "other",
            false,
            "",
        ),
    ];
    for (act, expected, reason, ends, why) in rows {
        let progress = PodProgress::new();
        let _open = act(&progress);
        tokio::time::advance(MINUTE).await;
        let standing =
            PodWorkerStatus { id: id(), life: Lifecycle::Syncing, progress: Some(progress.clone()), line: None };
        let known = DiagnosisInputs {
            standing: Some(&standing),
            step: standing.view(),
            errors: progress.errors(),
            ..DiagnosisInputs::default()
        };
        let diagnosis = document(&id(), &known, Now { wall: at(0), steady: Instant::now() });
        let waits = diagnosis.waits.expect("it waits");
        let seen = (waits.stage.as_str(), waits.reason.as_str(), waits.seconds, waits.until.is_some());
        assert_eq!(seen, (expected, reason, 60.0, ends));
        assert_eq!(diagnosis.errors.last().map(|error| error.text.as_str()).unwrap_or_default(), why, "{expected}");
    }
}

/// Pods in the start queue, which no worker handles yet.
#[tokio::test(start_paused = true)]
async fn a_queued_pod_names_what_it_waits_for() {
    let begun = Instant::now();
    tokio::time::advance(Duration::from_secs(7)).await;
    for (line, life, stage, reason) in [
        (StartWait::Name, "sync", "termination of another pod of the same name", "full_name"),
        (StartWait::Runtime, "sync", "runtime pod list", "runtime"),
        (StartWait::Removal, "sync", "removal of leftovers of the pod", "removal"),
        (StartWait::Preemption, "preempting", "preemption of other pods", "preemption"),
        (StartWait::NodeLabels, "admission", "node labels", "node_labels"),
        (StartWait::Devices, "admission", "devices of device plugins", "devices"),
    ] {
        let standing =
            PodWorkerStatus { id: id(), life: Lifecycle::Syncing, progress: None, line: Some((line, begun)) };
        let known = DiagnosisInputs { standing: Some(&standing), step: standing.view(), ..DiagnosisInputs::default() };
        let diagnosis = document(&id(), &known, Now { wall: at(0), steady: Instant::now() });
        let waits = diagnosis.waits.expect("it waits");
        assert_eq!((diagnosis.life.as_str(), waits.stage.as_str(), waits.reason.as_str()), (life, stage, reason));
        assert_eq!((waits.seconds, waits.since), (7.0, Some(at(-7))));
    }
}

#[test]
fn termination_messages_are_not_truncated() {
    let text = "panic: x\n\tat main.rs:1\n".repeat(50);
    let status: api::PodStatus = serde_json::from_value(json!({
        "phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory.",
        "conditions": [{"type": "Ready", "status": "False"}],
        "containerStatuses": [{"name": "main", "image": "i", "imageID": "", "ready": false, "restartCount": 0,
            "state": {"terminated": {"exitCode": 2, "reason": "Error", "message": text}}}],
    }))
    .expect("a status");
    let known = DiagnosisInputs { status: Some(&status), ..DiagnosisInputs::default() };
    let diagnosis = document(&id(), &known, Now { wall: at(0), steady: Instant::now() });
    assert_eq!((diagnosis.life.as_str(), diagnosis.reason.as_str(), diagnosis.waits), ("refused", "Evicted", None));
    assert_eq!(diagnosis.containers[0].message, text);
    assert!(diagnosis.unmet.is_empty(), "a pod that has ended need not be ready");
}

/// The status has the reference's fixed text, the explanation what was missing.
#[test]
fn a_pod_refused_for_cpus_or_memory_has_an_explanation() {
    let topology = "Pod was rejected: Resources cannot be allocated with Topology locality";
    let memory = "Pod was rejected: Allocate failed due to [memorymanager] x, which is unexpected";
    let cpu = "Pod was rejected: Allocate failed due to not enough cpus, which is unexpected";
    for (reason, message, refusal, expected) in [
        ("TopologyAffinityError", topology, Some("cpu: on nodes 0,1"), "cpu: on nodes 0,1"),
        ("SMTAlignmentError", "Pod was rejected: SMT", Some("cores 1"), "cores 1"),
        ("UnexpectedAdmissionError", memory, Some("node 0: 1Gi free"), "node 0: 1Gi free"),
        // The message has it all.
        ("UnexpectedAdmissionError", cpu, Some("not enough cpus"), ""),
        // Devices: the CPU and memory managers have not refused the pod.
        ("UnexpectedAdmissionError", "Pod was rejected: x", None, ""),
        // It failed later, for another reason.
        ("Evicted", "The node was low on resource: memory.", Some("cpu: on nodes 0,1"), ""),
    ] {
        let status = api::PodStatus {
            phase: Some("Failed".to_owned()),
            reason: Some(reason.to_owned()),
            message: Some(message.to_owned()),
            ..api::PodStatus::default()
        };
        let refusal = refusal.map(str::to_owned);
        let known = DiagnosisInputs { status: Some(&status), refusal, ..DiagnosisInputs::default() };
        let diagnosis = document(&id(), &known, Now { wall: at(0), steady: Instant::now() });
        assert_eq!((diagnosis.explanation.as_str(), diagnosis.message.as_str()), (expected, message), "{reason}");
    }
    let known = DiagnosisInputs { refusal: Some("x".to_owned()), ..DiagnosisInputs::default() };
    let diagnosis = document(&id(), &known, Now { wall: at(0), steady: Instant::now() });
    assert_eq!(diagnosis.explanation, "", "no status yet");
}
