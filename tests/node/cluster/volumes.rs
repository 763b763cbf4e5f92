//! ConfigMap and Secret volumes follow their API objects (spec 07 §8, §9, §17).

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use crate::cluster::{ClusterFixture, NAMESPACE, pod_of};
use berth_testkit::process::{Agent, skips};

/// A pod whose container mounts these volumes.
fn mounting(name: &str, volumes: Value) -> Value {
    let all = volumes.as_array().expect("a list").iter();
    let mounts: Vec<Value> =
        all.map(|volume| json!({"name": volume["name"], "mountPath": format!("/{}", volume["name"].as_str().expect("a name"))})).collect();
    let mut pod = pod_of(name, json!({"volumes": volumes, "containers": [{"name": "main", "volumeMounts": mounts}]}));
    pod["spec"]["automountServiceAccountToken"] = false.into();
    pod
}

fn settings(data: Value) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings", "namespace": NAMESPACE}, "data": data})
}

fn folder(world: &ClusterFixture, pod: &Value, volume: &str) -> PathBuf {
    let uid = pod["metadata"]["uid"].as_str().expect("a UID");
    world.home.root().join("pods").join(uid).join("volumes/kubernetes.io~configmap").join(volume)
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

async fn until_content(agent: &Agent, file: &Path, text: &str) {
    agent.until(&format!("{} says {text:?}", file.display()), async || read(file) == text).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_reaches_all_who_mount_it_and_a_deletion_takes_nothing_away() {
    // AC-07-5, AC-07-6
    if skips("a_change_reaches_all_who_mount_it_and_a_deletion_takes_nothing_away") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    world.api.create(settings(json!({"colour": "red", "size": "large"})));
    let volumes = || json!([{"name": "files", "configMap": {"name": "settings"}}]);
    let mut pods = Vec::new();
    for name in ["one", "two", "three"] {
        world.run(mounting(name, volumes()));
        pods.push(world.until_ready(&agent, name).await);
    }
    let folders: Vec<PathBuf> = pods.iter().map(|pod| folder(&world, pod, "files")).collect();
    let before: Vec<PathBuf> = folders.iter().map(|at| fs::read_link(at.join("..data")).expect("a version")).collect();
    world.api.patch("configmaps", NAMESPACE, "settings", json!({"data": {"colour": "green"}}));
    for (at, old) in folders.iter().zip(&before) {
        until_content(&agent, &at.join("colour"), "green").await;
        assert_eq!(read(&at.join("size")), "large");
        agent.until("the old version goes", async || !at.join(old).exists()).await;
        let names = fs::read_dir(at).expect("listable").count();
        assert_eq!(names, 4, "colour, size, ..data and its version: {}", at.display());
    }

    let started = world.runtime.cri.count("start_container");
    world.api.delete("configmaps", NAMESPACE, "settings", None);
    let text = "MountVolume.SetUp failed for volume \"files\" : configmap \"settings\" not found";
    world.until_event(&agent, "FailedMount", text).await;
    for at in &folders {
        assert_eq!((read(&at.join("colour")), read(&at.join("size"))), ("green".to_owned(), "large".to_owned()));
    }
    for name in ["one", "two", "three"] {
        world.until_ready(&agent, name).await;
    }
    world.api.create(settings(json!({"colour": "blue"})));
    for at in &folders {
        until_content(&agent, &at.join("colour"), "blue").await;
        assert!(!at.join("size").exists(), "and what is not in it any more goes");
    }
    assert_eq!(world.runtime.cri.count("start_container"), started, "nothing is restarted");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_config_map_of_ten_thousand_keys_is_mounted() {
    if skips("a_config_map_of_ten_thousand_keys_is_mounted") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    // With the keys, this is 1 MiB but for a few bytes, the maximum size of a ConfigMap.
    let value = "v".repeat(95);
    let data = |first: &str| {
        let all = (0..10_000).map(|n| (format!("key-{n:05}"), json!(if n == 0 { first } else { value.as_str() })));
        Value::Object(all.collect())
    };
    world.api.create(settings(data("before")));
    world.run(mounting("many", json!([{"name": "files", "configMap": {"name": "settings"}}])));
    let pod = world.until_ready(&agent, "many").await;
    let at = folder(&world, &pod, "files");
    assert_eq!(fs::read_dir(&at).expect("listable").count(), 10_002, "a link each, ..data and its version");
    assert_eq!(read(&at.join("key-09999")), value);
    world.api.patch("configmaps", NAMESPACE, "settings", json!({"data": {"key-00000": "after"}}));
    until_content(&agent, &at.join("key-00000"), "after").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_goes_while_it_is_mounted_holds_up_its_pod_only() {
    // Spec 07 §7.3: missing, created later, optional.
    if skips("what_goes_while_it_is_mounted_holds_up_its_pod_only") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    let missing = |optional: bool| json!([{"name": "files", "configMap": {"name": "settings", "optional": optional}}]);
    world.run(mounting("waits", missing(false)));
    let text = "MountVolume.SetUp failed for volume \"files\" : configmap \"settings\" not found";
    world.until_event(&agent, "FailedMount", text).await;
    world.run(mounting("goes-on", missing(true)));
    let optional = world.until_ready(&agent, "goes-on").await;
    let at = folder(&world, &optional, "files");
    assert!(at.join("..data").is_dir() && !at.join("colour").exists(), "empty, but a version");
    world.api.create(settings(json!({"colour": "red"})));
    let pod = world.until_ready(&agent, "waits").await;
    assert_eq!(read(&folder(&world, &pod, "files").join("colour")), "red");
    until_content(&agent, &at.join("colour"), "red").await;
    // Deleted during or right after the setup of its volumes: nothing is left behind.
    world.api.delete("configmaps", NAMESPACE, "settings", None);
    world.run(mounting("never", missing(false)));
    world.api.delete("pods", NAMESPACE, "never", Some(0));
    for name in ["waits", "goes-on", "never"] {
        if world.pod(name).is_some() {
            world.api.delete("pods", NAMESPACE, name, Some(1));
        }
        world.until_gone(&agent, name).await;
    }
    let pods = world.home.root().join("pods");
    let left = || fs::read_dir(&pods).map_or(0, Iterator::count);
    agent.until("no directory of a pod is left", async || left() == 0).await;
}
