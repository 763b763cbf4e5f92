//! Benchmark of reading the initial pod list of a node from the API server.
//!
//! The list has 500 pods of 8 KiB each, half of that managed fields, as a streaming list (spec 10 §8.6). A second
//! figure is the share of JSON parsing, which is all that another encoding could save.
//!
//! `cargo bench --bench pod_list`

use std::{
    hint::black_box,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use async_trait::async_trait;
use berth_api::{
    ReflectorDeps, Selection,
    api::{ApiClient, ApiError, Call, Resource, WatchStream},
    reflect,
};
use berth_metrics::{ReflectorMetrics, Registry};
use berth_types::api::Pod;
use bytes::Bytes;
use nix::time::{ClockId, clock_gettime};
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

const PODS: usize = 500;
/// Size of one pod, in bytes.
const SIZE: usize = 8 << 10;
const ROUNDS: u32 = 20;

/// One pod of [`SIZE`] bytes, as a v1.36 server sends it.
fn pod(number: usize) -> Value {
    let name = format!("web-7d4b9c6f5-{number:05}");
    let container = |name: &str| {
        json!({"name": name, "image": format!("registry.example.com/team/{name}:v1.2.3"), "imagePullPolicy": "IfNotPresent",
            "ports": [{"containerPort": 8080, "name": "http", "protocol": "TCP"}],
            "env": (0..8).map(|i| json!({"name": format!("VARIABLE_{i}"), "value": format!("value of {i}")})).collect::<Vec<_>>(),
            "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "256Mi"}},
            "livenessProbe": {"httpGet": {"path": "/healthz", "port": 8080, "scheme": "HTTP"}, "timeoutSeconds": 1,
                "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3},
            "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File",
            "volumeMounts": [{"name": "kube-api-access-abcde", "readOnly": true,
                "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}]})
    };
    let condition = |kind: &str| {
        json!({"type": kind, "status": "True", "lastProbeTime": null, "lastTransitionTime": "2026-01-01T00:00:00Z",
            "observedGeneration": 1})
    };
    let state = |name: &str| {
        json!({"name": name, "ready": true, "started": true, "restartCount": 0, "imageID": format!("sha256:{number:064x}"),
            "image": format!("registry.example.com/team/{name}:v1.2.3"), "containerID": format!("containerd://{number:064x}"),
            "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}, "lastState": {}})
    };
    let conditions =
        ["PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled"].map(condition);
    let mut pod = json!({"kind": "Pod", "apiVersion": "v1",
        "metadata": {"name": name, "namespace": "production", "uid": format!("{number:08x}-0000-4000-8000-000000000000"),
            "resourceVersion": (1_000_000 + number).to_string(), "creationTimestamp": "2026-01-01T00:00:00Z", "generation": 1,
            "labels": {"app": "web", "pod-template-hash": "7d4b9c6f5"},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-7d4b9c6f5",
                "uid": "00000000-0000-4000-8000-000000000001", "controller": true, "blockOwnerDeletion": true}]},
        "spec": {"containers": [container("web"), container("sidecar")], "restartPolicy": "Always", "nodeName": "n",
            "terminationGracePeriodSeconds": 30, "dnsPolicy": "ClusterFirst", "serviceAccountName": "default",
            "securityContext": {}, "schedulerName": "default-scheduler", "priority": 0, "enableServiceLinks": true,
            "preemptionPolicy": "PreemptLowerPriority",
            "tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute",
                "tolerationSeconds": 300}],
            "volumes": [{"name": "kube-api-access-abcde", "projected": {"defaultMode": 420, "sources": [
                {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
                {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}}]}}]},
        "status": {"phase": "Running", "hostIP": "10.0.0.1", "podIP": "10.1.0.1", "podIPs": [{"ip": "10.1.0.1"}],
            "qosClass": "Burstable", "startTime": "2026-01-01T00:00:00Z",
            "conditions": conditions,
            "containerStatuses": [state("web"), state("sidecar")]}});
    let missing = SIZE.saturating_sub(pod.to_string().len());
    let fields: serde_json::Map<String, Value> =
        (0..missing / 24).map(|i| (format!("f:field{i:03}"), json!({"f:name": {}}))).collect();
    pod["metadata"]["managedFields"] = json!([{"manager": "kubelet", "operation": "Update", "apiVersion": "v1",
        "time": "2026-01-01T00:00:00Z", "fieldsType": "FieldsV1", "fieldsV1": {"f:status": fields}}]);
    pod
}

fn events() -> Vec<Bytes> {
    let mut events: Vec<Bytes> =
        (0..PODS).map(|number| json!({"type": "ADDED", "object": pod(number)}).to_string().into()).collect();
    let marker = json!({"type": "BOOKMARK", "object": {"kind": "Pod", "apiVersion": "v1", "metadata": {
        "resourceVersion": "2000000", "annotations": {"k8s.io/initial-events-end": "true"}}}});
    events.push(marker.to_string().into());
    events
}

/// A server that sends its pods, then no further event.
struct ScriptedServer(Mutex<Vec<Bytes>>);

struct ScriptedWatch {
    events: Vec<Bytes>,
    next: AtomicUsize,
}

#[async_trait]
impl ApiClient for ScriptedServer {
    async fn call(&self, _: Call) -> Result<Bytes, ApiError> {
        Err(ApiError::Unreachable("there are only watches".to_owned()))
    }

    async fn watch(&self, _: Call) -> Result<Box<dyn WatchStream>, ApiError> {
        let events = std::mem::take(&mut *self.0.lock().expect("whole"));
        Ok(Box::new(ScriptedWatch { events, next: AtomicUsize::new(0) }))
    }
}

impl WatchStream for ScriptedWatch {
    fn poll_next(&mut self, _: &mut Context<'_>) -> Poll<Option<Result<Bytes, ApiError>>> {
        match self.events.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            Some(event) => Poll::Ready(Some(Ok(event.clone()))),
            None => Poll::Pending,
        }
    }
}

/// CPU time of this process.
fn spent() -> Duration {
    clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).expect("a clock").into()
}

fn resident() -> u64 {
    let page = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    page.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or_default() * 4096
}

async fn take_in(events: Vec<Bytes>) -> (Duration, Box<dyn std::any::Any>) {
    let stop = CancellationToken::new();
    let deps = ReflectorDeps::new(ReflectorMetrics::new(&Registry::new()), stop.clone());
    let selection = Selection::matching(Resource::PODS, "spec.nodeName=n");
    let begun = spent();
    let (mut store, follow) = reflect::<Pod>(Arc::new(ScriptedServer(Mutex::new(events))), selection, deps);
    tokio::spawn(follow);
    store.synced().await;
    let took = spent() - begun;
    assert_eq!(store.snapshot().objects.len(), PODS);
    stop.cancel();
    (took, Box::new(store))
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let events = events();
    let bytes: usize = events.iter().map(Bytes::len).sum();
    let before = resident();
    let (_, kept) = take_in(events.clone()).await;
    let grown = resident().saturating_sub(before);
    drop(kept);
    let (mut whole, mut text) = (Duration::MAX, Duration::MAX);
    for _ in 0..ROUNDS {
        let (took, kept) = take_in(events.clone()).await;
        whole = whole.min(took);
        drop(kept);
        let begun = spent();
        for event in &events {
            black_box(serde_json::from_slice::<IgnoredAny>(event).expect("JSON"));
        }
        text = text.min(spent() - begun);
    }
    println!(
        "list of {PODS} pods of {} KiB processed: {:.1} ms of CPU",
        bytes / PODS / 1024,
        whole.as_secs_f64() * 1e3
    );
    println!("  of which JSON parsing: {:.1} ms", text.as_secs_f64() * 1e3);
    println!("  memory per pod afterwards: {:.1} KiB", grown as f64 / PODS as f64 / 1024.0);
}
