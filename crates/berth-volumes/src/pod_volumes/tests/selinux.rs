//! SELinux labels, on a simulated SELinux node. Spec 07 §11.

use super::*;
use crate::{OpError, SelinuxPolicy};
use berth_metrics::SelinuxMetrics;

const FILES: &str = "system_u:object_r:container_file_t:s0";

/// Simulated node with SELinux.
struct Node {
    bench: Bench,
    registry: Registry,
}

fn node(all_modes: bool, takes_label: bool) -> Node {
    let registry = Registry::new();
    let policy = SelinuxPolicy::new(FILES, all_modes).expect("a context");
    let labels = LabelPolicy::new(policy, SelinuxMetrics::new(&registry));
    let traits = VolumeTraits { supports_mount_label: takes_label, ..staged() };
    Node { bench: bench_with(tempfile::tempdir().expect("a directory"), traits, Some(labels)), registry }
}

impl Node {
    /// Mounts a pod with that level that uses the claim.
    async fn mount(&self, name: &str, level: Value) -> Result<(), VolumeError> {
        let object = json!({"metadata": {"name": name, "namespace": "n", "uid": name}, "spec": {
            "securityContext": {"seLinuxOptions": {"level": level}},
            "containers": [{"name": "c", "volumeMounts": [{"name": "disk", "mountPath": "/v"}]}],
            "volumes": [{"name": "disk", "persistentVolumeClaim": {"claimName": "cv"}}]}});
        let pod = Arc::new(Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete"));
        self.bench.manager.mount(&pod).await.map(drop)
    }

    async fn unmount(&self, name: &str) {
        self.bench.manager.unmount(&name.into()).await.expect("unmounted");
    }

    /// Sums of the metric families by the suffix of their names.
    fn counted(&self) -> Vec<(String, f64)> {
        let of = |family: &prometheus::proto::MetricFamily| {
            let name = family.name().trim_start_matches("volume_manager_selinux_").to_owned();
            (name, family.get_metric().iter().map(|one| one.get_gauge().get_value()).sum())
        };
        self.registry.gather().iter().map(of).collect()
    }
}

fn counts(all: &[(&str, f64)]) -> Vec<(String, f64)> {
    all.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
}

#[tokio::test(start_paused = true)]
async fn a_volume_for_one_pod_is_mounted_with_its_label() {
    let node = node(false, true);
    node.bench.storage.put("v", &json!({"accessModes": ["ReadWriteOncePod"]}));
    node.mount("a", json!("s0:c1")).await.expect("mounted");
    node.mount("a", json!("s0:c1")).await.expect("still");
    let label = "system_u:object_r:container_file_t:s0:c1";
    assert_eq!(node.bench.plugin.calls(), [format!("stage a {label}"), format!("publish a {label}")]);
    assert_eq!(node.counted(), counts(&[("volumes_admitted_total", 1.0)]), "once");

    // Another label: refused while the first pod needs the volume.
    let refused = node.mount("b", json!("s0:c2")).await.expect_err("another label").to_string();
    let text = "unmounted volumes=[disk], unattached volumes=[], failed to process volumes=[disk]: conflicting SELinux \
                labels of volume v: \"system_u:object_r:container_file_t:s0:c1\" and \
                \"system_u:object_r:container_file_t:s0:c2\"";
    assert_eq!(refused, text);
    node.mount("a", json!("s0:c1")).await.expect("who has it keeps it");
    node.unmount("a").await;
    node.mount("b", json!("s0:c2")).await.expect("mounted again");
    let other = "system_u:object_r:container_file_t:s0:c2";
    let again =
        ["unpublish a".to_owned(), "unstage".to_owned(), format!("stage b {other}"), format!("publish b {other}")];
    assert_eq!(node.bench.plugin.calls()[2..], again);
    let expected = [("volume_context_mismatch_errors_total", 1.0), ("volumes_admitted_total", 2.0)];
    assert_eq!(node.counted(), counts(&expected));
}

#[tokio::test(start_paused = true)]
async fn a_pod_with_another_label_reports_that_it_waits_for_the_unmount() {
    let node = node(true, true);
    node.bench.storage.put("v", &json!({"accessModes": ["ReadWriteOnce"]}));
    node.mount("a", json!("s0:c1")).await.expect("mounted");
    let (release, until) = std::sync::mpsc::channel();
    node.bench.plugin.next("unpublish", Answer::Fails(OpError::uncertain("busy")));
    node.bench.plugin.next("unpublish", Answer::Blocks(Arc::new(Mutex::new(until))));
    let a = PodUid::from("a");
    let going = node.bench.manager.unmount(&a);
    let coming = async {
        // From here on the pod no longer needs the volume, but still has it.
        while !node.bench.plugin.calls().iter().any(|call| call == "unpublish a") {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let refused = node.mount("b", json!("s0:c2")).await.expect_err("it is there still").to_string();
        let text = "unmounted volumes=[disk], unattached volumes=[], failed to process volumes=[]: waiting for unmount of \
                    volume \"kubernetes.io/fake/v\", because it is already mounted to a different pod with a different \
                    SELinux label";
        assert_eq!(refused, text);
        drop(release);
    };
    let (gone, ()) = tokio::join!(going, coming);
    gone.expect("unmounted");
    node.mount("b", json!("s0:c2")).await.expect("mounted again");
}

#[tokio::test(start_paused = true)]
async fn a_volume_whose_labels_are_not_enforced_is_mounted_without_a_label() {
    let node = node(false, true);
    node.bench.storage.put("v", &json!({"accessModes": ["ReadWriteOnce"]}));
    node.mount("a", json!("s0:c1")).await.expect("mounted");
    node.mount("b", json!("s0:c2")).await.expect("mounted");
    assert_eq!(node.bench.plugin.calls(), ["stage a", "publish a", "publish b"]);
    assert_eq!(node.counted(), counts(&[("volume_context_mismatch_warnings_total", 1.0)]));
    node.mount("bad", json!("s0\",exec,x=\"")).await.expect("mounted");
    assert!(node.counted().contains(&("container_warnings_total".to_owned(), 1.0)), "{:?}", node.counted());
}

#[tokio::test(start_paused = true)]
async fn a_plugin_that_mounts_without_labels_is_not_asked_for_them() {
    let node = node(true, false);
    node.bench.storage.put("v", &json!({"accessModes": ["ReadWriteOncePod"]}));
    node.mount("a", json!("s0:c1")).await.expect("mounted");
    assert_eq!(node.bench.plugin.calls(), ["stage a", "publish a"]);
    assert!(node.counted().is_empty());
}

#[tokio::test(start_paused = true)]
async fn an_invalid_label_never_reaches_the_plugin() {
    let node = node(false, true);
    node.bench.storage.put("v", &json!({"accessModes": ["ReadWriteOncePod"]}));
    let refused = node.mount("bad", json!("s0\",exec,x=\"")).await.expect_err("no label").to_string();
    assert!(refused.contains("failed to construct SELinux label from context"), "{refused}");
    assert!(node.bench.plugin.calls().is_empty());
    assert_eq!(node.counted(), counts(&[("container_errors_total", 1.0)]));
}

#[tokio::test(start_paused = true)]
async fn a_node_without_selinux_knows_no_labels() {
    let bench = bench(VolumeTraits { supports_mount_label: true, ..staged() });
    bench.storage.put("v", &json!({"accessModes": ["ReadWriteOncePod"]}));
    let object = json!({"metadata": {"name": "a", "namespace": "n", "uid": "a"}, "spec": {
        "securityContext": {"seLinuxOptions": {"level": "s0:c1"}},
        "containers": [{"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}], "volumes": [claim("v")]}});
    let pod = Arc::new(Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete"));
    bench.manager.mount(&pod).await.expect("mounted");
    assert_eq!(bench.plugin.calls(), ["stage a", "publish a"]);
}
