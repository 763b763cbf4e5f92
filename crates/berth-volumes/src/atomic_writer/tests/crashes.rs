//! Atomic writes that crash between two steps, or fail on a full disk.

use std::collections::BTreeMap;

use super::*;
use berth_sys::mount::{self, NewFileSystem};

const OLD: [(&str, &str); 3] = [("a", "old"), ("gone", "old"), ("sub/x", "old")];
const NEW: [(&str, &str); 3] = [("a", "new"), ("fresh", "new"), ("sub/y", "new")];

/// The version that a crashed write created, in whole or in part.
const VERSION: &str = "..2026_05_04_03_02_01.1234567890";

/// Last step of spec 07 §8 that completed before the crash.
#[derive(Clone, Copy, PartialEq, PartialOrd, Debug)]
enum CrashPoint {
    MadeDirectory,
    WroteSome,
    WroteAll,
    LinkedNewData,
    Renamed,
    LinkedFirst,
    RemovedStale,
}

const ALL: [CrashPoint; 7] = [
    CrashPoint::MadeDirectory,
    CrashPoint::WroteSome,
    CrashPoint::WroteAll,
    CrashPoint::LinkedNewData,
    CrashPoint::Renamed,
    CrashPoint::LinkedFirst,
    CrashPoint::RemovedStale,
];

/// Leaves the volume as if the writer was killed after that step, while changing `OLD` to `NEW`.
fn crashed(at: &Path, done: CrashPoint, has_old: bool) {
    if has_old {
        put(at, &OLD).expect("written");
    }
    let version = at.join(VERSION);
    fs::create_dir(&version).expect("makeable");
    if done >= CrashPoint::WroteSome {
        fs::write(version.join("a"), "new").expect("writable");
    }
    if done >= CrashPoint::WroteAll {
        fs::write(version.join("fresh"), "new").expect("writable");
        fs::create_dir(version.join("sub")).expect("makeable");
        fs::write(version.join("sub/y"), "new").expect("writable");
    }
    if done >= CrashPoint::LinkedNewData {
        symlink(VERSION, at.join(NEW_DATA)).expect("makeable");
    }
    if done >= CrashPoint::Renamed {
        fs::rename(at.join(NEW_DATA), at.join(DATA)).expect("renamed");
    }
    if done >= CrashPoint::LinkedFirst {
        for name in ["a", "fresh", "sub"] {
            if !at.join(name).is_symlink() {
                symlink(Path::new(DATA).join(name), at.join(name)).expect("makeable");
            }
        }
    }
    if done >= CrashPoint::RemovedStale && has_old {
        fs::remove_file(at.join("gone")).expect("removed");
    }
}

/// What a reader reads through the symlinks.
fn shown(at: &Path) -> BTreeMap<String, String> {
    let files = ["a", "gone", "fresh", "sub/x", "sub/y"].into_iter();
    files.filter_map(|name| Some((name.to_owned(), fs::read_to_string(at.join(name)).ok()?))).collect()
}

fn of(files: &[(&str, &str)]) -> BTreeMap<String, String> {
    files.iter().map(|(path, data)| ((*path).to_owned(), (*data).to_owned())).collect()
}

#[test]
fn after_a_crash_between_any_two_steps_readers_see_one_version_and_the_next_write_repairs_it() {
    // AC-07-8 for every step
    for done in ALL {
        for has_old in [false, true] {
            for next in [&NEW[..], &OLD[..], &[("a", "third")][..], &[][..]] {
                let dir = tempfile::tempdir().expect("a directory");
                let at = dir.path();
                crashed(at, done, has_old);
                let seen = shown(at);
                let values: BTreeSet<&str> = seen.values().map(String::as_str).collect();
                assert!(values.len() <= 1, "never a mixture: {done:?} {seen:?}");
                let case = format!("{done:?}, old: {has_old}, next: {next:?}");
                put(at, next).expect(&case);
                assert_eq!(shown(at), of(next), "{case}");
                let first: BTreeSet<&str> = next.iter().filter_map(|(path, _)| path.split('/').next()).collect();
                let names = names(at);
                let others: Vec<&String> = names.iter().filter(|name| !first.contains(name.as_str())).collect();
                assert_eq!(others.len(), 2, "..data and its version, nothing else: {case}: {names:?}");
                assert_eq!(put(at, next), Ok(WriteOutcome::Unchanged), "{case}");
            }
        }
    }
}

#[test]
fn a_disk_that_is_full_keeps_what_was_there() {
    // AC-07-9
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path();
    let options = ["size=65536".to_owned(), "nr_inodes=64".to_owned()];
    match mount::file_system(NewFileSystem { kind: "tmpfs", source: "tmpfs", options: &options }, at) {
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => return println!("skipped: needs root"),
        other => other.expect("mountable"),
    }
    put(at, &[("a", "1"), ("b", "2")]).expect("written");
    let (before, version) = (names(at), current(at));
    let large = "x".repeat(100_000);
    let many: Vec<String> = (0..100).map(|i| format!("f{i}")).collect();
    let inodes: Vec<(&str, &str)> = many.iter().map(|name| (name.as_str(), "")).collect();
    for payload in [&[("a", large.as_str()), ("b", "3")][..], &inodes] {
        let error = put(at, payload).expect_err("full");
        assert!(error.contains("No space left on device"), "{error}");
        assert_eq!((names(at), current(at)), (before.clone(), version.clone()), "nothing is left over");
        assert_eq!(fs::read_to_string(at.join("a")).expect("readable"), "1");
    }
    assert_eq!(put(at, &[("a", "2")]), Ok(WriteOutcome::Published), "there is room for this");
    mount::unmount(at).expect("unmounted");
}

#[test]
fn a_map_of_ten_thousand_keys_is_published_and_followed() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path();
    let value = "v".repeat(100);
    let names: Vec<String> = (0..10_000).map(|i| format!("key-{i:05}")).collect();
    let mut files: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), value.as_str())).collect();
    assert_eq!(put(at, &files), Ok(WriteOutcome::Published));
    assert_eq!(put(at, &files), Ok(WriteOutcome::Unchanged));
    files.truncate(5_000);
    files[0].1 = "changed";
    assert_eq!(put(at, &files), Ok(WriteOutcome::Published));
    assert_eq!(fs::read_to_string(at.join("key-00000")).expect("readable"), "changed");
    assert_eq!(fs::read_dir(at).expect("listable").count(), 5_002);
}

#[test]
fn what_a_container_puts_into_the_volume_deletes_nothing_of_the_host() {
    // CVE-2017-1002102: symlinks made by a container where the writer cleans up.
    let (dir, host) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    let (at, file) = (dir.path(), host.path().join("sub/file"));
    fs::create_dir(host.path().join("sub")).expect("makeable");
    fs::write(&file, "x").expect("writable");
    for hostile in ["data", "version", "first", "nested", "absolute"] {
        put(at, &[("a", "1"), ("sub/file", "2")]).expect("written");
        let version = at.join(current(at).expect("a version"));
        match hostile {
            // The link from which the published version is read.
            "data" => replace(&at.join(DATA), host.path()),
            // The version itself.
            "version" => {
                remove_tree(&version).expect("removed");
                symlink(host.path(), &version).expect("makeable");
            }
            // A top-level symlink.
            "first" => replace(&at.join("sub"), &host.path().join("sub")),
            // A directory of the version, where stale paths are listed.
            "nested" => {
                remove_tree(&version.join("sub")).expect("removed");
                symlink(host.path().join("sub"), version.join("sub")).expect("makeable");
            }
            // A name like a version that is not one.
            _ => symlink(host.path(), at.join("..2020_01_01_00_00_00.1")).expect("makeable"),
        }
        put(at, &[("a", "2")]).expect(hostile);
        put(at, &[("b", "3")]).expect(hostile);
        assert_eq!(fs::read_to_string(&file).expect(hostile), "x", "{hostile}");
        assert_eq!(fs::read_dir(host.path()).expect("listable").count(), 1, "{hostile}: nothing was written there");
        assert_eq!(fs::read_to_string(at.join("b")).expect("readable"), "3", "{hostile}");
        let _ = fs::remove_file(at.join("sub"));
    }
}

/// Replaces one symlink by another.
fn replace(link: &Path, target: &Path) {
    fs::remove_file(link).expect("removed");
    symlink(target, link).expect("makeable");
}

#[test]
fn readers_never_see_a_mixture_while_it_changes() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path();
    let version = |n: u32| n.to_string();
    put(at, &[("a", &version(0)), ("sub/b", &version(0))]).expect("written");
    let over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut seen = 0;
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                // Opens `..data` once, as a program that needs one version does; an old version may be removed
                // meanwhile.
                let Ok(one) = fs::File::open(at.join(DATA)) else { continue };
                let base = PathBuf::from(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&one)));
                let read = |name: &str| fs::read_to_string(base.join(name)).ok();
                if let (Some(a), Some(b)) = (read("a"), read("sub/b")) {
                    assert_eq!(a, b);
                    seen += 1;
                }
            }
            seen
        });
        for n in 1..300 {
            put(at, &[("a", &version(n)), ("sub/b", &version(n))]).expect("written");
        }
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(reader.join().expect("no mixture") > 0);
    });
}
