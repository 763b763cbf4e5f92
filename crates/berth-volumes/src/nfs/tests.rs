//! The plugin on a scripted fake host, and on this host with the test's own programs.

use std::{fs, os::unix::fs::PermissionsExt, path::PathBuf};

use serde_json::{Value, json};

use super::*;
use crate::{
    attachable::Class,
    machine::ThisMachine,
    testing::{self, FakeMachine},
};
use berth_sys::mount_table;

fn inline(source: &Value) -> VolumeSpec {
    VolumeSpec::inline(&serde_json::from_value(json!({"name": "v", "nfs": source})).expect("a volume"))
}

fn persistent(volume: Value, read_only: bool) -> VolumeSpec {
    let volume = serde_json::from_value(volume).expect("a volume");
    VolumeSpec::persistent(Arc::new(volume), Arc::default(), read_only)
}

fn usage(root: &Path, spec: VolumeSpec) -> Usage {
    testing::usage(root, NAME, spec)
}

fn removal(usage: &Usage) -> Removal {
    testing::removal(usage, true)
}

#[tokio::test]
async fn a_share_is_mounted_as_it_is_asked_for() {
    let pv = |more: Value| {
        let mut volume = json!({"metadata": {"name": "v"}, "spec": {"nfs": {"server": "s", "path": "/p"}}});
        volume["spec"]["mountOptions"] = more;
        volume
    };
    for (spec, expected) in [
        (inline(&json!({"server": "s", "path": "/p"})), "-t nfs s:/p"),
        (inline(&json!({"server": "s", "path": "/p", "readOnly": true})), "-t nfs -o ro s:/p"),
        (inline(&json!({"server": "fd00::7", "path": "/p"})), "-t nfs [fd00::7]:/p"),
        (inline(&json!({"server": "10.0.0.1", "path": "/"})), "-t nfs 10.0.0.1:/"),
        (persistent(pv(json!(["nfsvers=4.1", "hard", "hard"])), false), "-t nfs -o hard,nfsvers=4.1 s:/p"),
        (persistent(pv(json!(["soft"])), true), "-t nfs -o ro,soft s:/p"),
        // Only the claim reference requests read-only.
        (
            persistent(
                json!({"metadata": {"name": "v"}, "spec": {"nfs": {"server": "s", "path": "/p", "readOnly": true}}}),
                false,
            ),
            "-t nfs s:/p",
        ),
    ] {
        let root = tempfile::tempdir().expect("a directory");
        let (fake, usage) = (FakeMachine::new(), usage(root.path(), spec));
        let plugin = NfsPlugin::new(fake.clone());
        assert!(plugin.supports(&usage.spec));
        let published = plugin.publish(&usage).await.expect("mounted");
        assert_eq!(published, PublishedVolume { path: usage.target.clone(), relabel: false });
        assert_eq!(fake.calls(), [format!("mount {expected} {}", usage.target.display())]);
        let mode = fs::metadata(&usage.target).expect("made").permissions().mode();
        assert_eq!(mode & 0o777, 0o750);
        plugin.publish(&usage).await.expect("there already");
        assert_eq!(fake.calls().len(), 1);
        plugin.unpublish(&removal(&usage)).await.expect("unmounted");
        assert!(fake.targets().is_empty() && !usage.target.exists());
    }
}

#[tokio::test]
async fn an_empty_server_or_one_that_starts_like_an_option_is_rejected() {
    let root = tempfile::tempdir().expect("a directory");
    for server in ["-obind,x", ""] {
        let fake = FakeMachine::new();
        let (plugin, spec) = (NfsPlugin::new(fake.clone()), inline(&json!({"server": server, "path": "/p"})));
        let refused = plugin.publish(&usage(root.path(), spec)).await.expect_err("refused");
        assert_eq!(refused.class, Class::Final);
        assert!(fake.calls().is_empty());
    }
}

#[tokio::test]
async fn a_mount_that_fails_leaves_nothing() {
    let root = tempfile::tempdir().expect("a directory");
    let (fake, usage) = (FakeMachine::new(), usage(root.path(), inline(&json!({"server": "s", "path": "/p"}))));
    let plugin = NfsPlugin::new(fake.clone());
    fake.next("mount", Ok((32, "mount: bad option; you might need a /sbin/mount.<type> helper program.")));
    let error = plugin.publish(&usage).await.expect_err("failed");
    let target = usage.target.display().to_string();
    let text = format!(
        "mount failed: exit status 32\nMounting command: mount\nMounting arguments: -t nfs s:/p {target}\n\
         Output: mount: bad option; you might need a /sbin/mount.<type> helper program."
    );
    assert_eq!((error.class, error.text), (Class::Final, text));
    assert!(!usage.target.exists());

    fake.next("mount", Err(RunError::NotStarted("exec: \"mount\": executable file not found in $PATH".to_owned())));
    let error = plugin.publish(&usage).await.expect_err("failed");
    assert!(error.text.starts_with("mount failed: exec: \"mount\": executable file not found in $PATH\n"), "{error}");

    // The program timed out after it had mounted something.
    let (at, machine) = (usage.target.clone(), fake.clone());
    fake.mount("s:/p", &at);
    machine.next("umount", Ok((32, "umount: target is busy.")));
    fake.next("mount", Err(RunError::TimedOut(MOUNTING)));
    let share = Share { server: "s".to_owned(), path: "/p".to_owned() };
    let hung = mount(&Work::new(&plugin.machine, &usage.operation), &share, &[], &at).await.expect_err("hung");
    assert_eq!(hung.class, Class::Uncertain);
    plugin.unpublish(&removal(&usage)).await.expect("undone later");
    assert!(fake.targets().is_empty());
}

/// Stale handles (`ESTALE`, spec 07 §14): unmount without accessing the file system.
#[tokio::test]
async fn a_stale_share_is_unmounted_without_access() {
    let root = tempfile::tempdir().expect("a directory");
    let (fake, usage) = (FakeMachine::new(), usage(root.path(), inline(&json!({"server": "s", "path": "/p"}))));
    let plugin = NfsPlugin::new(fake.clone());
    plugin.publish(&usage).await.expect("mounted");
    let target = usage.target.clone();
    // Any access fails: a symlink to itself stands for a stale handle.
    fs::remove_dir(&target).expect("removed");
    std::os::unix::fs::symlink(&target, &target).expect("a link");
    fs::metadata(&target).expect_err("stat fails");
    let (again, place) = (Usage { was_rebuilt: true, ..usage.clone() }, target.clone());
    plugin.publish(&again).await.expect("it is mounted, and that is all that is asked");
    fake.on("umount", "", move || {
        fs::remove_file(&place).expect("removed");
        fs::create_dir(&place).expect("made");
    });
    plugin.unpublish(&removal(&usage)).await.expect("unmounted");
    assert!(fake.targets().is_empty() && target.symlink_metadata().is_err());
    let unmount = format!("umount {}", target.display());
    assert_eq!(fake.calls().last(), Some(&unmount));
}

#[tokio::test]
async fn a_program_asks_how_full_a_share_is() {
    let root = tempfile::tempdir().expect("a directory");
    let (fake, usage) = (FakeMachine::new(), usage(root.path(), inline(&json!({"server": "s", "path": "/p"}))));
    let plugin = NfsPlugin::new(fake.clone());
    fake.on("stat -f -c", "4096 100 40 30 50 20", || {});
    let stats = plugin.fullness(&usage, &usage.target).await.expect("received");
    assert_eq!((stats.capacity, stats.used), (409_600, 245_760));
    for (answer, expected) in [
        (Ok((1, "stat: cannot read file system information: Stale file handle")), "Stale file handle"),
        (Ok((0, "?")), "unexpected output of stat"),
        (Err(RunError::TimedOut(Duration::from_secs(8))), "timed out after 8s"),
    ] {
        fake.next("stat", answer);
        let error = plugin.fullness(&usage, &usage.target).await.expect_err("nothing is known");
        assert_eq!(error.class, Class::Transient);
        assert!(error.text.starts_with("statfs /") && error.text.ends_with(expected), "{error}");
    }
}

/// Unmount attempts escalate, and a failure is reported.
#[tokio::test]
async fn a_share_that_hangs_is_taken_away() {
    let root = tempfile::tempdir().expect("a directory");
    let (fake, usage) = (FakeMachine::new(), usage(root.path(), inline(&json!({"server": "s", "path": "/p"}))));
    let plugin = NfsPlugin::new(fake.clone());
    plugin.publish(&usage).await.expect("mounted");
    let hangs = || fake.next("umount", Err(RunError::TimedOut(Duration::from_secs(60))));
    (0..3).for_each(|_| hangs());
    let error = plugin.unpublish(&removal(&usage)).await.expect_err("it stays");
    assert_eq!(error.class, Class::Uncertain);
    assert!(error.text.starts_with("unmount failed: timed out after 60s\nUnmounting arguments: -l "), "{error}");
    assert!(usage.target.exists());
    (0..2).for_each(|_| hangs());
    plugin.unpublish(&removal(&usage)).await.expect("taken away");
    assert!(!usage.target.exists());
}

#[test]
fn what_was_left_is_known_by_its_name() {
    let plugin = NfsPlugin::new(FakeMachine::new());
    let found = |mode| FoundVolume { pod: "u".into(), name: "v".to_owned(), mode, path: PathBuf::from("/r/v") };
    let rebuilt = plugin.rebuild(&found(Mode::Filesystem)).expect("known");
    assert_eq!((rebuilt.spec.name.as_str(), rebuilt.traits.clone()), ("v", traits("v")));
    assert!(!rebuilt.traits.is_shared() && plugin.supports(&rebuilt.spec));
    plugin.rebuild(&found(Mode::Block)).expect_err("no device");
}

/// Fake `mount` and `umount` programs: a share is a tmpfs; the server `away` never answers.
fn programs(folder: &Path) -> ThisMachine {
    let write = |name: &str, text: &str| {
        let path = folder.join(name);
        fs::write(&path, format!("#!/bin/sh\n{text}")).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("a program");
    };
    write(
        "mount",
        "for target; do :; done\ncase \"$*\" in *away:*) sleep 1000;; esac\nexec /usr/bin/mount -t tmpfs tmpfs \"$target\"\n",
    );
    write("umount", "exec /usr/bin/umount \"$@\"\n");
    ThisMachine::with_path(format!("{}:/usr/bin:/bin", folder.display()))
}

#[tokio::test]
async fn a_server_that_is_away_holds_up_its_pod_only() {
    let root = tempfile::tempdir().expect("a directory");
    if !testing::may_mount() {
        return;
    }
    let top = fs::canonicalize(root.path()).expect("there");
    let plugin = Arc::new(NfsPlugin::new(Arc::new(programs(&top))));
    let away = usage(&top.join("a"), inline(&json!({"server": "away", "path": "/p"})));
    let well = usage(&top.join("b"), inline(&json!({"server": "well", "path": "/p"})));
    let (hangs, hanging) = (plugin.clone(), away.clone());
    let hung = tokio::spawn(async move { hangs.publish(&hanging).await.map(drop) });
    plugin.publish(&well).await.expect("mounted meanwhile");
    let mounted = |path: &Path| mount_table::read().expect("a table").iter().any(|mount| mount.target == path);
    assert!(mounted(&well.target) && !hung.is_finished());
    plugin.unpublish(&removal(&well)).await.expect("unmounted");
    assert!(!mounted(&well.target) && !well.target.exists());
    // The pod is deleted while its mount hangs.
    let until = std::time::Instant::now() + Duration::from_secs(60);
    while !away.target.exists() {
        assert!(std::time::Instant::now() < until, "no directory");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    hung.abort();
    plugin.unpublish(&removal(&away)).await.expect("nothing there");
    assert!(!away.target.exists());
}

/// The kernel's NFS client with a real server: `BERTH_TEST_NFS=server:/path`.
#[tokio::test]
async fn a_real_server_is_mounted() {
    let kinds = fs::read_to_string("/proc/filesystems").unwrap_or_default();
    if !kinds.lines().any(|line| line.ends_with("\tnfs4") || line.ends_with("\tnfs")) {
        return println!("skipped: no nfs in this kernel");
    }
    let Some((server, path)) = std::env::var("BERTH_TEST_NFS")
        .ok()
        .and_then(|share| share.rsplit_once(':').map(|(server, path)| (server.to_owned(), path.to_owned())))
    else {
        return println!("skipped: BERTH_TEST_NFS names no share");
    };
    let root = tempfile::tempdir().expect("a directory");
    let top = fs::canonicalize(root.path()).expect("there");
    let plugin = NfsPlugin::new(Arc::new(ThisMachine::default()));
    let usage = usage(&top, inline(&json!({"server": server, "path": path})));
    plugin.publish(&usage).await.expect("mounted");
    let table = mount_table::read().expect("a table");
    assert!(table.iter().any(|mount| mount.target == usage.target && mount.kind.starts_with("nfs")));
    plugin.unpublish(&removal(&usage)).await.expect("unmounted");
    assert!(!usage.target.exists());
}
