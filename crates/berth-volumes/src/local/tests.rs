//! Local directories as volumes. Tests that mount need root.

use std::sync::Mutex;

use serde_json::json;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::{attachable::Class, layout::PodLayout, operation::OperationDeps, spec::UniqueName, testing::may_mount};

#[derive(Default)]
struct Events(Mutex<Vec<String>>);

impl EventSink for Events {
    fn record(&self, event: EventRecord) {
        self.0.lock().expect("not poisoned").push(event.reason.to_string());
    }
}

struct Bench {
    dir: tempfile::TempDir,
    plugin: LocalPlugin,
}

fn bench() -> Bench {
    let dir = tempfile::tempdir().expect("a directory");
    fs::create_dir(dir.path().join("data")).expect("a directory");
    let plugin = LocalPlugin::new(dir.path(), Arc::new(Events::default()));
    Bench { dir, plugin }
}

impl Bench {
    fn usage(&self, path: &str, group: Option<u32>) -> Usage {
        let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {"containers": []}});
        let pod = Arc::new(Pod::new(serde_json::from_value(pod).expect("a pod")).expect("complete"));
        let path = self.dir.path().join(path);
        let volume = json!({"metadata": {"name": "pv"}, "spec": {"local": {"path": path}}});
        let volume = serde_json::from_value(volume).expect("a volume");
        let spec = Arc::new(VolumeSpec::persistent(Arc::new(volume), Arc::default(), false));
        let layout = PodLayout::new(self.dir.path(), pod.uid()).expect("a good UID");
        Usage {
            unique: UniqueName::shared(NAME, "pv"),
            target: layout.volume("kubernetes.io~local-volume", "pv"),
            pod,
            spec,
            mode: Mode::Filesystem,
            layout,
            device: String::new(),
            group: group.map(|group| FsGroup { group, on_root_mismatch: false }),
            user: None,
            label: None,
            has_other_users: false,
            is_republish: false,
            was_rebuilt: false,
            operation: Operation::default(),
        }
    }

    fn removal(&self, usage: &Usage) -> Removal {
        Removal {
            spec: usage.spec.clone(),
            unique: usage.unique.clone(),
            mode: usage.mode,
            pod: Some((usage.pod.uid().clone(), usage.target.clone())),
            device: String::new(),
            operation: Operation::default(),
        }
    }
}

#[tokio::test]
async fn a_path_that_cannot_be_read_is_a_transient_error() {
    let bench = bench();
    for path in ["gone", "data/../../x"] {
        let error = bench.plugin.publish(&bench.usage(path, None)).await.expect_err("not there");
        assert_eq!(error.class, Class::Transient, "{error}");
    }
    fs::write(bench.dir.path().join("file"), "x").expect("written");
    let error = bench.plugin.publish(&bench.usage("file", None)).await.expect_err("a file");
    assert_eq!(error, OpError::transient("only directory and block device are supported"));
}

#[tokio::test]
async fn a_walk_that_fails_leaves_the_volume_mounted() {
    if !may_mount() {
        return;
    }
    let bench = bench();
    // Deeper than the maximum depth of a walk.
    let mut at = bench.dir.path().join("data");
    for _ in 0..1_100 {
        at.push("d");
    }
    fs::create_dir_all(&at).expect("directories");
    let usage = bench.usage("data", Some(4_711));
    let error = bench.plugin.publish(&usage).await.expect_err("too deep");
    assert!(error.class == Class::Uncertain && error.text.starts_with("applying fsGroup to "), "{error}");
    assert!(is_mounted(&usage.target).expect("readable"), "it is used like what is not there, and undone like what is");
    // The next attempt walks again, and a later agent does not take the tree for finished.
    for again in [usage.clone(), Usage { was_rebuilt: true, ..usage.clone() }] {
        assert!(bench.plugin.publish(&again).await.is_err());
    }
    // A child process of another test may keep inherited descriptors open for a while.
    let undone = async {
        while bench.plugin.unpublish(&bench.removal(&usage)).await.is_err() {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(10), undone).await.expect("unmounted");
    assert!(!is_mounted(&usage.target).expect("readable") && at.exists());
}

#[tokio::test]
async fn the_ownership_walk_is_canceled_when_the_pod_is_deleted() {
    if !may_mount() {
        return;
    }
    let bench = bench();
    for number in 0..600 {
        fs::write(bench.dir.path().join("data").join(number.to_string()), "").expect("written");
    }
    let (turn, unwanted) = (Arc::new(Semaphore::new(1)), CancellationToken::new());
    unwanted.cancel();
    let deps = OperationDeps { canceled: unwanted, ..OperationDeps::default() };
    let operation = Operation::new(turn.try_acquire_owned().expect("free"), deps);
    let usage = Usage { operation: operation.clone(), ..bench.usage("data", Some(4_711)) };
    let error = bench.plugin.publish(&usage).await.expect_err("cancelled");
    assert!(error.text.ends_with("the ownership change was canceled"), "{error}");
    assert!(operation.progress() > 0, "a walk shows that it lives");
    let usage = bench.usage("data", Some(4_711));
    bench.plugin.publish(&usage).await.expect("published and given");
    let root = fs::metadata(bench.dir.path().join("data")).expect("metadata");
    assert_eq!(std::os::unix::fs::MetadataExt::gid(&root), 4_711);
    bench.plugin.unpublish(&bench.removal(&usage)).await.expect("unmounted");
}

#[tokio::test]
async fn what_was_mounted_for_all_pods_is_found_again() {
    let bench = bench();
    assert!(bench.plugin.staged().expect("readable").is_empty());
    let global = bench.plugin.mounts.join("pv");
    fs::create_dir_all(&global).expect("made");
    let staged = bench.plugin.staged().expect("readable");
    let [(Mode::Filesystem, rebuilt)] = staged.as_slice() else { panic!("one: {staged:?}") };
    assert_eq!((rebuilt.spec.name.as_str(), rebuilt.traits.volume.as_str()), ("pv", "pv"));
    let removal =
        Removal { spec: Arc::new(rebuilt.spec.clone()), pod: None, ..bench.removal(&bench.usage("data", None)) };
    bench.plugin.unstage(&removal).await.expect("undone");
    assert!(!global.exists());
    fs::create_dir_all(bench.plugin.devices.join("raw")).expect("made");
    let staged = bench.plugin.staged().expect("readable");
    let [(Mode::Block, rebuilt)] = staged.as_slice() else { panic!("one: {staged:?}") };
    assert_eq!((rebuilt.spec.name.as_str(), rebuilt.spec.mode()), ("raw", Mode::Block));
    assert_eq!(bench.plugin.map_dir(bench.dir.path(), &rebuilt.spec), bench.plugin.devices.join("raw"));
    fs::remove_dir(&bench.plugin.mounts).expect("removed");
    std::os::unix::fs::symlink("mounts", &bench.plugin.mounts).expect("a link to itself");
    assert!(bench.plugin.staged().is_err(), "what cannot be read is not empty");
}
