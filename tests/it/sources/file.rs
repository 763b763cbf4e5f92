//! The file source of static pods (AC-02a-1, 4, 22), and invalid directory content of every kind.

use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::symlink,
    path::Path,
    time::Duration,
};

use berth_types::{Operation, PodSource};
use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::fixture::{Fixture, NEVER, manifest};

const OFTEN: Duration = Duration::from_millis(20);

fn put(directory: &Path, name: &str, content: impl AsRef<[u8]>) {
    fs::write(directory.join(name), content).expect("written");
}

/// Puts a complete file in place atomically, by rename.
fn place(directory: &Path, name: &str, content: &str) {
    let hidden = directory.join(format!(".{name}.new"));
    fs::write(&hidden, content).expect("written");
    fs::rename(hidden, directory.join(name)).expect("renamed");
}

fn fifo(path: &Path) {
    mknodat(CWD, path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).expect("a pipe");
}

#[tokio::test]
async fn a_manifest_becomes_a_pod_of_this_node() {
    // AC-02a-1
    let dir = tempfile::tempdir().expect("a directory");
    put(dir.path(), "web.yaml", manifest("web"));
    let mut house = Fixture::of_path(dir.path(), NEVER);
    assert_eq!(house.registered(), [PodSource::File]);
    let pods = house.pods(Operation::Add).await;
    let pod = &pods[0];
    assert_eq!((pod.name(), pod.namespace()), ("web-node-a", "default"));
    assert_eq!(pod.spec().node_name.as_deref(), Some("Node-A"));
    assert_eq!(pod.uid().as_str().len(), 32);
    assert_eq!(pod.annotation("kubernetes.io/config.hash"), Some(pod.uid().as_str()));
    assert_eq!(pod.annotation("kubernetes.io/config.source"), Some("file"));
    assert!(pod.annotation("kubernetes.io/config.seen").expect("seen").contains("1970-01-01T00:00:00.000000000"));
    let toleration = &pod.spec().tolerations.as_ref().expect("tolerations")[0];
    assert_eq!((toleration.operator.as_deref(), toleration.effect.as_deref()), (Some("Exists"), Some("NoExecute")));
    assert!(pod.is_static());
    house.stop().await;
}

#[tokio::test]
async fn bad_files_do_not_spoil_the_good_ones() {
    // AC-02a-4
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path();
    put(at, "good.yaml", manifest("good"));
    put(
        at,
        "good.json",
        r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"json"},"spec":{"containers":[{"name":"c","image":"b"}]}}"#,
    );
    put(at, "broken.yaml", "kind: [");
    put(at, "invalid.yaml", manifest("no-image").replace("    image: busybox\n", ""));
    put(at, "secret.yaml", manifest("s") + "  serviceAccountName: x\n");
    put(at, "list.yaml", "apiVersion: v1\nkind: PodList\nitems: [{metadata: {name: x}}]");
    put(at, "list2.yaml", "apiVersion: v1\nkind: List\nitems: []");
    put(at, "kind.yaml", "apiVersion: v1\nkind: Teapot");
    put(at, "binary", [0xff, 0x00, 0xfe, 0x01]);
    put(at, "empty.yaml", "");
    put(at, ".hidden.yaml", manifest("hidden"));
    for backup in ["good.yaml~", "x.swp", "x.bak"] {
        put(at, backup, manifest("backup"));
    }
    put(at, "huge.yaml", manifest("huge") + &"# filler\n".repeat(11 * 1024 * 1024 / 9));
    fs::create_dir(at.join("sub")).expect("a directory");
    put(&at.join("sub"), "deep.yaml", manifest("deep"));
    symlink("nowhere", at.join("dangling.yaml")).expect("a link");
    symlink("loop-b.yaml", at.join("loop-a.yaml")).expect("a link");
    symlink("loop-a.yaml", at.join("loop-b.yaml")).expect("a link");
    symlink("/dev/zero", at.join("zero.yaml")).expect("a link");
    symlink("/proc/self/mem", at.join("unreadable.yaml")).expect("a link"); // even for root
    fifo(&at.join("pipe.yaml"));
    let elsewhere = tempfile::tempdir().expect("a directory");
    put(elsewhere.path(), "linked.yaml", manifest("linked"));
    symlink(elsewhere.path().join("linked.yaml"), at.join("link.yaml")).expect("a link");

    let mut house = Fixture::of_path(at, NEVER);
    assert_eq!(house.next_operation().await, "Add json-node-a good-node-a linked-node-a");
    let rejected = |reason: &str| house.metrics.rejected.with_label_values(&["file", reason]).get();
    assert_eq!(rejected("read"), 5, "huge, dangling, unreadable, two of a loop");
    assert_eq!(rejected("parse"), 6, "broken, two lists, kind, binary, empty");
    assert_eq!(rejected("invalid"), 2, "no image, service account");
    house.stop().await;
}

#[tokio::test]
async fn a_path_that_does_not_exist_is_an_empty_set_until_it_does() {
    // AC-02a-22, and a directory that is removed and created again.
    let parent = tempfile::tempdir().expect("a directory");
    let at = parent.path().join("manifests");
    let mut house = Fixture::of_path(&at, NEVER);
    assert_eq!(house.next_operation().await, "Add");
    fs::create_dir(&at).expect("a directory");
    put(&at, "a.yaml", manifest("a"));
    assert_eq!(house.next_operation().await, "Add a-node-a");
    fs::remove_dir_all(&at).expect("removed");
    assert_eq!(house.next_operation().await, "Remove a-node-a");
    fs::create_dir(&at).expect("a directory");
    place(&at, "b.yaml", &manifest("b"));
    assert_eq!(house.next_operation().await, "Add b-node-a");
    let moved = parent.path().join("moved");
    fs::rename(&at, &moved).expect("renamed");
    assert_eq!(house.next_operation().await, "Remove b-node-a");
    house.stop().await;
}

#[tokio::test]
async fn the_watch_sees_what_happens_in_the_directory() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path();
    let mut house = Fixture::of_path(at, NEVER);
    assert_eq!(house.next_operation().await, "Add", "a source without pods answers too");
    place(at, "a.yaml", &manifest("a"));
    assert_eq!(house.next_operation().await, "Add a-node-a");
    put(at, "b.yaml", manifest("b"));
    assert_eq!(house.next_operation().await, "Add b-node-a");
    place(at, "a.yaml", &(manifest("a") + "  restartPolicy: Never\n"));
    // AC-02a-16 starts here: the old UID is removed before the new one is added.
    assert_eq!(house.next_operation().await, "Remove a-node-a", "another content is another UID");
    assert_eq!(house.next_operation().await, "Add a-node-a");
    // The reference ignores all of these; the next operation shows that they had no effect.
    place(at, "x.yaml~", &manifest("x"));
    fs::create_dir(at.join("sub.yaml")).expect("a directory");
    put(at, "broken.yaml", "kind: [");
    fs::rename(at.join("b.yaml"), at.join("b.yaml.bak")).expect("renamed");
    assert_eq!(house.next_operation().await, "Remove b-node-a");
    fs::rename(at.join("b.yaml.bak"), at.join("c.yaml")).expect("renamed");
    assert_eq!(house.next_operation().await, "Add b-node-a");
    fs::remove_file(at.join("c.yaml")).expect("removed");
    assert_eq!(house.next_operation().await, "Remove b-node-a");
    let elsewhere = tempfile::tempdir().expect("a directory");
    put(elsewhere.path(), "l.yaml", manifest("l"));
    symlink(elsewhere.path().join("l.yaml"), at.join("l.yaml")).expect("a link");
    assert_eq!(house.next_operation().await, "Add l-node-a");
    house.stop().await;
}

#[tokio::test]
async fn a_manifest_that_is_being_written_is_not_read() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path();
    let mut house = Fixture::of_path(at, NEVER);
    assert_eq!(house.next_operation().await, "Add");
    let mut slow = File::create(at.join("slow.yaml")).expect("created");
    slow.write_all(manifest("half").as_bytes()).expect("written");
    slow.sync_all().expect("synced");
    place(at, "other.yaml", &manifest("other"));
    assert_eq!(house.next_operation().await, "Add other-node-a");
    slow.write_all(b"  restartPolicy: Never\n").expect("written");
    drop(slow);
    let pods = house.pods(Operation::Add).await;
    assert_eq!(pods[0].spec().restart_policy.as_deref(), Some("Never"));
    house.stop().await;
}

#[tokio::test]
async fn a_file_that_turns_bad_keeps_its_pod_until_the_next_list() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path();
    place(at, "a.yaml", &manifest("a"));
    let mut house = Fixture::of_path(at, NEVER);
    assert_eq!(house.next_operation().await, "Add a-node-a");
    place(at, "a.yaml", "kind: [");
    let parse = |metrics: &berth_metrics::SourceMetrics| metrics.rejected.with_label_values(&["file", "parse"]).get();
    house.counted("the rejection", parse, 1).await;
    place(at, "b.yaml", &manifest("b"));
    assert_eq!(house.next_operation().await, "Add b-node-a");
    house.stop().await;

    place(at, "a.yaml", &manifest("a"));
    let mut house = Fixture::of_path(at, OFTEN);
    assert_eq!(house.next_operation().await, "Add a-node-a b-node-a");
    place(at, "a.yaml", "kind: [");
    assert_eq!(house.next_operation().await, "Remove a-node-a", "the list drops it");
    house.stop().await;
}

#[tokio::test]
async fn of_two_pods_with_one_name_the_running_one_stays() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path();
    place(at, "m.yaml", &manifest("web"));
    let mut house = Fixture::of_path(at, NEVER);
    let running = house.pods(Operation::Add).await[0].uid().clone();
    // Sorts before the running pod's file.
    place(at, "a.yaml", &(manifest("web") + "  restartPolicy: Never\n"));
    place(at, "z.yaml", &manifest("other"));
    assert_eq!(house.next_operation().await, "Add other-node-a");
    let events = house.events.all();
    assert_eq!(events.len(), 1, "{events:?}");
    assert!(
        events[0].starts_with("web-node-a FailedValidation: Error validating pod web-node-a_default("),
        "{events:?}"
    );
    assert!(events[0].ends_with(") from file due to duplicate pod name \"web-node-a\", ignoring"), "{events:?}");
    assert_eq!(house.metrics.duplicates.with_label_values(&["file"]).get(), 1);
    fs::remove_file(at.join("m.yaml")).expect("removed");
    let removed = house.pods(Operation::Remove).await;
    assert_eq!(removed[0].uid(), &running);
    assert_eq!(house.next_operation().await, "Add web-node-a", "the other one takes its place");
    house.stop().await;
}

#[tokio::test]
async fn a_pod_with_its_own_uid_is_updated_in_place() {
    let dir = tempfile::tempdir().expect("a directory");
    let fixed =
        |image: &str| manifest("web").replace("name: web\n", "name: web\n  uid: mine\n").replace("busybox", image);
    place(dir.path(), "web.yaml", &fixed("one"));
    let mut house = Fixture::of_path(dir.path(), NEVER);
    assert_eq!(house.next_operation().await, "Add web-node-a");
    place(dir.path(), "web.yaml", &fixed("two"));
    let pods = house.pods(Operation::Update).await;
    assert_eq!((pods[0].uid().as_str(), pods[0].containers()[0].image.as_deref()), ("mine", Some("two")));
    house.stop().await;
}

#[tokio::test]
async fn the_path_may_be_one_file() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path();
    place(at, ".one.yaml", &manifest("one"));
    let mut house = Fixture::of_path(&at.join(".one.yaml"), NEVER);
    assert_eq!(house.next_operation().await, "Add one-node-a");
    place(at, "beside.yaml", &manifest("beside"));
    place(at, ".one.yaml", "apiVersion: v1\nkind: PodList\nitems: []\n");
    let failures = |metrics: &berth_metrics::SourceMetrics| metrics.failures.with_label_values(&["file"]).get();
    house.counted("the refusal", failures, 1).await;
    place(at, ".one.yaml", &manifest("two"));
    assert_eq!(house.next_operation().await, "Remove one-node-a");
    assert_eq!(house.next_operation().await, "Add two-node-a");
    fs::remove_file(at.join(".one.yaml")).expect("removed");
    assert_eq!(house.next_operation().await, "Remove two-node-a");
    place(at, ".one.yaml", &manifest("three"));
    assert_eq!(house.next_operation().await, "Add three-node-a");
    house.stop().await;
}

#[tokio::test]
async fn the_path_may_be_nothing_to_read_at_all() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path();
    fifo(&at.join("pipe"));
    symlink("loop", at.join("loop")).expect("a link");
    let failures = |metrics: &berth_metrics::SourceMetrics| metrics.failures.with_label_values(&["file"]).get();
    for name in ["pipe", "loop"] {
        let mut house = Fixture::of_path(&at.join(name), OFTEN);
        house.counted("the refusal", failures, 1).await;
        fs::remove_file(at.join(name)).expect("removed");
        assert_eq!(house.next_operation().await, "Add", "no set was sent before");
        house.stop().await;
    }
}

#[tokio::test]
async fn the_list_finds_what_the_watch_cannot_see() {
    let (dir, elsewhere) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    put(elsewhere.path(), "t.yaml", manifest("one"));
    symlink(elsewhere.path().join("t.yaml"), dir.path().join("l.yaml")).expect("a link");
    let mut house = Fixture::of_path(dir.path(), OFTEN);
    assert_eq!(house.next_operation().await, "Add one-node-a");
    place(elsewhere.path(), "t.yaml", &manifest("two"));
    assert_eq!(house.next_operation().await, "Remove one-node-a");
    assert_eq!(house.next_operation().await, "Add two-node-a");
    house.stop().await;
}
