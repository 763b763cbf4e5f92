//! The manager on real directories.

use std::{
    fs::Permissions,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
};

use serde_json::{Value, json};

use super::*;
use crate::{engine::ports::SystemClock, metrics::Registry};

struct Bench {
    dir: tempfile::TempDir,
    manager: Manager,
}

fn bench() -> Bench {
    let dir = tempfile::tempdir().expect("a directory");
    let facts = NodeFacts { allocatable: [("cpu".to_owned(), "4".to_owned())].into(), ..NodeFacts::default() };
    let (_, facts) = watch::channel(Arc::new(facts));
    let config = VolumesConfig { root: dir.path().to_owned() };
    let metrics = VolumeMetrics::new(&Registry::new());
    let deps = VolumesDeps { facts, clock: Arc::new(SystemClock), metrics };
    Bench { manager: Manager::new(config, deps), dir }
}

impl Bench {
    fn at(&self, path: &str) -> PathBuf {
        self.dir.path().join("pods/u").join(path)
    }

    async fn mount(&self, volumes: Value) -> Result<Arc<MountedVolumes>, String> {
        self.manager.mount(&pod(volumes)).await.map_err(|e| e.to_string())
    }
}

/// A pod that mounts each of these volumes at `/<name>`.
fn pod(volumes: Value) -> Arc<Pod> {
    let mounts: Vec<Value> = volumes
        .as_array()
        .expect("a list")
        .iter()
        .map(|v| json!({"name": v["name"], "mountPath": format!("/{}", v["name"].as_str().expect("a name"))}))
        .collect();
    let object = json!({
        "metadata": {"name": "p", "namespace": "n", "uid": "u", "labels": {"a": "1"}},
        "spec": {"volumes": volumes, "containers": [{"name": "c", "volumeMounts": mounts}]},
    });
    Arc::new(Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete"))
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).expect("metadata").mode() & 0o7777
}

fn downward(label: &str) -> Value {
    let items = json!([
        {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}},
        {"path": "sub/name", "mode": 256, "fieldRef": {"fieldPath": label}},
        {"path": "cpu", "resourceFieldRef": {"containerName": "c", "resource": "limits.cpu", "divisor": "1m"}}]);
    json!([{"name": "d", "downwardAPI": {"defaultMode": 420, "items": items}}])
}

#[tokio::test]
async fn an_empty_dir_is_made_marked_and_taken_down() {
    // AC-07-1
    let bench = bench();
    let mounted = bench.mount(json!([{"name": "v", "emptyDir": {}}])).await.expect("mounted");
    let volume = bench.at("volumes/kubernetes.io~empty-dir/v");
    let one = &mounted.by_name["v"];
    assert_eq!(one.host_path.as_deref().map(|p| p.ends_with("pods/u/volumes/kubernetes.io~empty-dir/v")), Some(true));
    assert_eq!((one.read_only, one.relabel, one.sub_path_mode), (false, true, 0o777));
    assert_eq!(mode(&volume), 0o777);
    let ready = bench.at("plugins/kubernetes.io~empty-dir/v/ready");
    assert!(ready.exists());
    for dir in ["", "volumes", "plugins"] {
        assert_eq!(mode(&bench.at(dir)), 0o750, "{dir}");
    }
    fs::write(volume.join("data"), "x").expect("a file");
    bench.mount(json!([{"name": "v", "emptyDir": {}}])).await.expect("again");
    assert!(volume.join("data").exists(), "a complete volume is left alone");
    fs::remove_dir_all(&volume).expect("removed");
    bench.mount(json!([{"name": "v", "emptyDir": {}}])).await.expect("made again");
    assert!(volume.is_dir() && ready.exists());

    symlink("/etc", volume.join("link")).expect("a link");
    bench.manager.unmount(&"u".into()).await.expect("unmounted");
    assert!(!volume.exists() && !ready.exists() && Path::new("/etc").is_dir());
    assert_eq!(bench.manager.pods_on_disk().await, [PodUid::from("u")]);
    bench.manager.remove_directory(&"u".into()).await.expect("removed");
    assert_eq!(bench.manager.pods_on_disk().await, []);
}

#[tokio::test]
async fn downward_files_follow_the_pod() {
    let bench = bench();
    let mounted = bench.mount(downward("metadata.name")).await.expect("mounted");
    assert!(mounted.by_name["d"].read_only && mounted.by_name["d"].relabel);
    let volume = bench.at("volumes/kubernetes.io~downward-api/d");
    let read = |name: &str| fs::read_to_string(volume.join(name)).expect(name);
    assert_eq!((read("labels"), read("sub/name"), read("cpu")), ("a=\"1\"".into(), "p".into(), "4000".into()));
    assert_eq!((mode(&volume.join("labels")), mode(&volume.join("sub/name"))), (0o644, 0o400));
    assert!(bench.at("plugins/kubernetes.io~empty-dir/wrapped_d/ready").exists());
    let version = fs::read_link(volume.join("..data")).expect("a link");
    bench.mount(downward("metadata.name")).await.expect("again");
    assert_eq!(fs::read_link(volume.join("..data")).expect("a link"), version, "nothing changed");
    bench.mount(downward("metadata.uid")).await.expect("refreshed");
    assert_eq!(read("sub/name"), "u");
    let failed = bench.mount(downward("spec.nodeName")).await.expect_err("not a field for volumes");
    assert_eq!(
        failed,
        "unmounted volumes=[d], unattached volumes=[], failed to process volumes=[]: MountVolume.SetUp failed for \
         volume \"d\" : unsupported fieldPath: spec.nodeName"
    );
    assert_eq!(read("sub/name"), "u", "what was there stays");
    bench.manager.unmount(&"u".into()).await.expect("unmounted");
    assert!(!volume.exists());
}

#[tokio::test]
async fn other_kinds_are_refused_by_name() {
    let bench = bench();
    for (source, kind) in [
        (json!({"configMap": {"name": "x"}}), "configMap"),
        (json!({"persistentVolumeClaim": {"claimName": "x"}}), "persistentVolumeClaim"),
        (json!({"projected": {"sources": []}}), "projected"),
        (json!({"emptyDir": {"medium": "Memory"}}), "emptyDir medium Memory"),
        (json!({"emptyDir": {"medium": "HugePages-2Mi"}}), "emptyDir medium HugePages-2Mi"),
    ] {
        let mut volume = source;
        volume["name"] = "v".into();
        let refused = bench.mount(json!([{"name": "good", "emptyDir": {}}, volume])).await.expect_err(kind);
        assert_eq!(refused, format!("volume \"v\": {kind} volumes are not supported by this release"));
    }
    let refused = bench.mount(json!([{"name": "v", "emptyDir": {"medium": "Tape"}}])).await.expect_err("no medium");
    assert!(
        refused.ends_with("MountVolume.SetUp failed for volume \"v\" : unknown storage medium \"Tape\""),
        "{refused}"
    );
}

#[tokio::test]
async fn host_paths_are_checked_and_left_alone() {
    // AC-07-4
    let bench = bench();
    let here = bench.dir.path().join("here");
    fs::create_dir(&here).expect("a directory");
    fs::set_permissions(&here, Permissions::from_mode(0o701)).expect("a mode");
    let volume = |kind: &str| json!([{"name": "h", "hostPath": {"path": here, "type": kind}}]);
    let mounted = bench.mount(volume("Directory")).await.expect("mounted");
    let one = &mounted.by_name["h"];
    assert_eq!((one.host_path.as_ref(), one.relabel, one.sub_path_mode), (Some(&here), false, 0o701));
    let refused = bench.mount(volume("File")).await.expect_err("a directory");
    assert!(refused.ends_with(&format!("hostPath type check failed: {} is not a file", here.display())), "{refused}");
    let up = json!([{"name": "h", "hostPath": {"path": "/a/../b"}}]);
    let refused = bench.mount(up).await.expect_err("upwards");
    assert!(refused.ends_with("invalid HostPath `/a/../b`: must not contain '..'"), "{refused}");
    bench.manager.unmount(&"u".into()).await.expect("unmounted");
    assert!(here.is_dir());
}

#[tokio::test(start_paused = true)]
async fn data_of_others_is_never_deleted() {
    // AC-07-29
    let bench = bench();
    fs::create_dir_all(bench.at("volumes/kubernetes.io~nfs/v")).expect("directories");
    fs::write(bench.at("volumes/kubernetes.io~nfs/v/file"), "x").expect("a file");
    fs::create_dir_all(bench.at("volumes/kubernetes.io~empty-dir/w")).expect("directories");
    fs::write(bench.at("volumes/kubernetes.io~empty-dir/w/no-marker"), "x").expect("a file");
    let uid = PodUid::from("u");
    let refused = bench.manager.remove_directory(&uid).await.expect_err("not empty").to_string();
    assert!(refused.starts_with("orphaned pod \"u\" found, but failed to rmdir() volume at path "), "{refused}");
    fs::remove_file(bench.at("volumes/kubernetes.io~empty-dir/w/no-marker")).expect("removed");
    assert_eq!(
        bench.manager.remove_directory(&uid).await.map_err(|e| e.to_string()),
        Err(refused.clone()),
        "not looked at again before the pause is over"
    );
    tokio::time::advance(PAUSE.0).await;
    let refused = bench.manager.remove_directory(&uid).await.expect_err("still not empty").to_string();
    assert!(refused.contains("kubernetes.io~nfs/v"), "{refused}");
    assert!(bench.at("volumes/kubernetes.io~nfs/v/file").exists());
    assert!(bench.manager.unmount(&uid).await.is_err(), "nor by taking down");
    fs::remove_file(bench.at("volumes/kubernetes.io~nfs/v/file")).expect("removed");
    tokio::time::advance(PAUSE.1).await;
    bench.manager.remove_directory(&uid).await.expect("empty now");
    assert_eq!(bench.manager.pods_on_disk().await, []);
}

#[tokio::test]
async fn the_rest_of_a_pod_goes_with_its_directory() {
    let bench = bench();
    bench.mount(json!([{"name": "v", "emptyDir": {}}])).await.expect("mounted");
    fs::write(bench.at("volumes/kubernetes.io~empty-dir/v/data"), "x").expect("a file");
    fs::create_dir_all(bench.at("containers/c")).expect("directories");
    fs::write(bench.at("containers/c/12345678"), "x").expect("a file");
    fs::write(bench.at("etc-hosts"), "x").expect("a file");
    fs::create_dir_all(bench.at("volume-subpaths/v/c/0")).expect("directories");
    fs::write(bench.at("volume-subpaths/v/c/1"), "").expect("a file");
    bench.manager.remove_directory(&"u".into()).await.expect("removed: the volume is our own");
    assert_eq!(bench.manager.pods_on_disk().await, []);
    bench.manager.remove_directory(&"u".into()).await.expect("nothing there");
    bench.manager.unmount(&"u".into()).await.expect("nothing there");
}

#[tokio::test]
async fn a_uid_leads_nowhere_else() {
    let bench = bench();
    fs::write(bench.dir.path().join("keep"), "x").expect("a file");
    for uid in ["..", "../pods", "a/b", ""] {
        assert!(bench.manager.remove_directory(&uid.into()).await.is_err(), "{uid}");
        assert!(bench.manager.unmount(&uid.into()).await.is_err(), "{uid}");
    }
    assert!(bench.dir.path().join("keep").exists());
}

#[tokio::test]
async fn mounts_below_stop_the_removal() {
    // Needs root: mounts a tmpfs.
    let bench = bench();
    bench.mount(json!([{"name": "v", "emptyDir": {}}])).await.expect("mounted");
    let target = bench.at("volumes/kubernetes.io~empty-dir/v");
    if rustix::mount::mount("none", &target, "tmpfs", rustix::mount::MountFlags::empty(), None).is_err() {
        eprintln!("skipped: no permission to mount");
        return;
    }
    fs::write(target.join("data"), "x").expect("a file");
    let refused = bench.manager.remove_directory(&"u".into()).await.expect_err("mounted").to_string();
    assert!(refused.starts_with("mounted volumes=["), "{refused}");
    assert!(target.join("data").exists());
    assert!(crate::volumes::remove::tree(&target).is_err(), "a mount is not crossed");
    assert!(target.join("data").exists());
    bench.manager.unmount(&"u".into()).await.expect("a tmpfs of ours is unmounted");
    assert!(!target.exists());
}
