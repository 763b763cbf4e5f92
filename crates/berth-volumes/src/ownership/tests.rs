//! Ownership changes on real directory trees.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::PathBuf,
    sync::atomic::AtomicBool,
};

use super::*;

/// Group that the tests may assign to their own files.
fn own_group(dir: &Path) -> u32 {
    fs::metadata(dir).expect("metadata").gid()
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("a mode");
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).expect("metadata").mode() & 0o7777
}

#[test]
fn the_group_gets_everything_but_what_links_point_to() {
    // AC-07-28
    let dir = tempfile::tempdir().expect("a directory");
    let (root, outside) = (dir.path().join("root"), dir.path().join("outside"));
    fs::create_dir_all(root.join("sub")).expect("directories");
    for path in [root.join("sub/file"), outside.clone()] {
        fs::write(&path, "x").expect("a file");
        set_mode(&path, 0o600);
    }
    symlink(&outside, root.join("link")).expect("a link");
    symlink("/etc", root.join("sub/up")).expect("a link");
    let (before, group) = (mode(Path::new("/etc")), own_group(dir.path()));
    apply(&root, group, GroupAccess::ReadWrite).expect("applied");
    assert_eq!(mode(&root.join("sub/file")), 0o660);
    assert_eq!(mode(&root.join("sub")) & 0o2770, 0o2770);
    assert_eq!((mode(&outside), mode(Path::new("/etc"))), (0o600, before));
    set_mode(&root.join("sub/file"), 0o600);
    apply(&root, group, GroupAccess::ReadOnly).expect("applied");
    assert_eq!(mode(&root.join("sub/file")), 0o640);
}

#[test]
fn a_file_swapped_for_a_link_leads_nowhere() {
    // AC-07-28 under a race: what is changed is what was opened.
    let dir = tempfile::tempdir().expect("a directory");
    let (root, outside) = (dir.path().join("root"), dir.path().join("outside"));
    fs::create_dir(&root).expect("a directory");
    fs::write(&outside, "x").expect("a file");
    set_mode(&outside, 0o600);
    let (stop, group) = (AtomicBool::new(false), own_group(dir.path()));
    let until = Instant::now() + Duration::from_secs(30);
    thread::scope(|scope| {
        scope.spawn(|| {
            let (file, link) = (root.join("a"), root.join("b"));
            fs::write(&file, "x").expect("a file");
            symlink(&outside, &link).expect("a link");
            while !stop.load(Ordering::Relaxed) {
                set_mode_of_any(&file);
                let flags = rustix::fs::RenameFlags::EXCHANGE;
                if rustix::fs::renameat_with(CWD, &file, CWD, &link, flags).is_err() {
                    return; // a file system that cannot exchange: the plain case is tested above
                }
            }
        });
        for _ in 0..1_000 {
            apply(&root, group, GroupAccess::ReadWrite).expect("applied");
            if Instant::now() > until {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(mode(&outside), 0o600);
}

/// Makes the entry one that needs a change, unless it is a symlink right now.
fn set_mode_of_any(path: &Path) {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    if let Ok(file) = openat(CWD, path, flags, Mode::empty()) {
        let _ = fchmod(&file, Mode::from_raw_mode(0o600));
    }
}

#[test]
fn a_correct_root_skips_the_walk_only_with_on_root_mismatch() {
    // AC-07-27
    let dir = tempfile::tempdir().expect("a directory");
    let root = dir.path().join("root");
    fs::create_dir(&root).expect("a directory");
    let file = root.join("file");
    fs::write(&file, "x").expect("a file");
    let group = own_group(dir.path());
    for (policy, access, of_root, walked) in [
        (FsGroupChangePolicy::OnRootMismatch, GroupAccess::ReadWrite, 0o2770, false),
        (FsGroupChangePolicy::OnRootMismatch, GroupAccess::ReadWrite, 0o2777, false),
        // The group is right, the set-group-ID bit is missing.
        (FsGroupChangePolicy::OnRootMismatch, GroupAccess::ReadWrite, 0o770, true),
        (FsGroupChangePolicy::OnRootMismatch, GroupAccess::ReadWrite, 0o2750, true),
        (FsGroupChangePolicy::OnRootMismatch, GroupAccess::ReadOnly, 0o2550, false),
        (FsGroupChangePolicy::OnRootMismatch, GroupAccess::ReadOnly, 0o2510, true),
        (FsGroupChangePolicy::Always, GroupAccess::ReadWrite, 0o2770, true),
    ] {
        set_mode(&file, 0o600);
        set_mode(&root, of_root);
        apply_change(&root, &OwnershipChange { policy, ..OwnershipChange::whole(group, access) }).expect("applied");
        assert_eq!(mode(&file) != 0o600, walked, "{policy:?} {of_root:o}");
        assert!(!walked || mode(&root) & 0o2000 != 0, "the root is last: {policy:?} {of_root:o}");
    }
}

/// Tree large enough for several threads.
fn large(dir: &Path) -> (PathBuf, usize) {
    let root = dir.join("root");
    let mut made = 0;
    for outer in 0..30 {
        for inner in 0..20 {
            let at = root.join(format!("{outer}/{inner}"));
            fs::create_dir_all(&at).expect("directories");
            for file in 0..8 {
                fs::write(at.join(file.to_string()), "").expect("a file");
                made += 1;
            }
        }
    }
    (root, made)
}

#[test]
fn a_large_tree_is_done_whole_and_its_root_last() {
    let dir = tempfile::tempdir().expect("a directory");
    let (root, files) = large(dir.path());
    let group = own_group(dir.path());
    apply(&root, group, GroupAccess::ReadWrite).expect("applied");
    let (mut seen, mut todo) = (0, vec![root.clone()]);
    while let Some(at) = todo.pop() {
        assert_eq!(mode(&at) & 0o2770, 0o2770, "{}", at.display());
        for entry in fs::read_dir(&at).expect("listable") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                todo.push(path);
            } else {
                assert_eq!(mode(&path) & 0o660, 0o660, "{}", path.display());
                seen += 1;
            }
        }
    }
    assert_eq!(seen, files);
}

#[test]
fn a_pod_that_goes_ends_the_walk() {
    let dir = tempfile::tempdir().expect("a directory");
    let (root, _) = large(dir.path());
    set_mode(&root, 0o755);
    let checks = AtomicU64::new(0);
    let cancelled = || checks.fetch_add(1, Ordering::Relaxed) >= 3;
    let order = OwnershipChange {
        cancelled: &cancelled,
        ..OwnershipChange::whole(own_group(dir.path()), GroupAccess::ReadWrite)
    };
    let error = apply_change(&root, &order).expect_err("cancelled");
    assert!(["the ownership change was canceled", "stopped"].contains(&error.to_string().as_str()), "{error}");
    assert_eq!(mode(&root), 0o755, "the root says that this was not finished");
}

#[test]
fn a_tree_without_a_floor_is_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let root = dir.path().join("root");
    fs::create_dir(&root).expect("a directory");
    let mut at = openat(CWD, &root, OFlags::DIRECTORY, Mode::empty()).expect("there");
    for _ in 0..DEEPEST + 2 {
        rustix::fs::mkdirat(&at, "d", Mode::RWXU).expect("makeable");
        at = openat(&at, "d", OFlags::DIRECTORY, Mode::empty()).expect("there");
    }
    drop(at);
    let order = OwnershipChange::whole(own_group(dir.path()), GroupAccess::ReadWrite);
    let error = apply_change(&root, &order).expect_err("too deep");
    assert_eq!(error.raw_os_error(), Some(Errno::NAMETOOLONG.raw_os_error()));
    berth_sys::tree_removal::remove_tree(&root).expect("removable");
}

#[test]
fn what_a_pod_asks_for_is_read() {
    for (context, expected) in [
        (serde_json::json!({}), (None, FsGroupChangePolicy::Always)),
        (
            serde_json::json!({"fsGroup": 7, "fsGroupChangePolicy": "OnRootMismatch"}),
            (Some(7), FsGroupChangePolicy::OnRootMismatch),
        ),
        (serde_json::json!({"fsGroup": -1, "fsGroupChangePolicy": "Always"}), (None, FsGroupChangePolicy::Always)),
    ] {
        let object = serde_json::json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {"containers": [], "securityContext": context}
        });
        let pod = Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete");
        assert_eq!((group_of(&pod), FsGroupChangePolicy::of(&pod)), expected, "{context}");
    }
}

#[test]
fn slow_changes_are_reported_in_the_words_of_the_reference() {
    let dir = Path::new("/var/lib/kubelet/pods/u/volumes/kubernetes.io~csi/v/mount");
    assert_eq!(
        Slow::Still.message(dir),
        "Setting volume ownership for u/volumes/kubernetes.io~csi/v/mount is taking longer than expected, consider using \
         OnRootMismatch - https://kubernetes.io/docs/tasks/configure-pod-container/security-context/#configure-volume-\
         permission-and-ownership-change-policy-for-pods"
    );
    let progress = Slow::Entries(7).message(Path::new("/elsewhere/v"));
    assert_eq!(progress, "Setting volume ownership for /elsewhere/v, processed 7 files.");
}
