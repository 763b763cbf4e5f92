//! The atomic writer on real directories.

use super::*;
use proptest::prelude::*;

#[cfg(test)]
mod crashes;

fn payload(files: &[(&str, &str)]) -> Payload {
    let content = |data: &str| FileProjection { data: data.into(), mode: 0o640, owner: None };
    files.iter().map(|(path, data)| ((*path).to_owned(), content(data))).collect()
}

fn put(dir: &Path, files: &[(&str, &str)]) -> Result<WriteOutcome, String> {
    write(dir, &payload(files), |_| Ok(()), Timestamp::UNIX_EPOCH).map_err(|e| e.to_string())
}

/// Names in the volume, without the version directories.
fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .expect("readable")
        .map(|e| e.expect("entry").file_name().into_string().expect("UTF-8"))
        .collect();
    names.sort();
    names
}

fn versions(dir: &Path) -> usize {
    names(dir).iter().filter(|name| name.starts_with("..1970")).count()
}

#[test]
fn files_are_links_into_one_version() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path();
    assert_eq!(put(at, &[("a", "1"), ("sub/b", "2"), ("sub//./c", "3")]), Ok(WriteOutcome::Published));
    let version = current(at).expect("a version");
    let name = version.to_str().expect("UTF-8");
    assert!(name.starts_with("..1970_01_01_00_00_00.") && name.len() == 32, "{name}");
    assert_eq!(fs::read_link(at.join("a")).expect("a link"), Path::new("..data/a"));
    assert_eq!(fs::read_link(at.join("sub")).expect("a link"), Path::new("..data/sub"));
    assert_eq!(fs::read_to_string(at.join("sub/c")).expect("readable"), "3");
    let mode = fs::metadata(at.join("a")).expect("metadata").permissions().mode();
    assert_eq!(mode & 0o7777, 0o640);
    let mode = fs::metadata(at.join("..data")).expect("metadata").permissions().mode();
    assert_eq!(mode & 0o7777, 0o755);
}

#[test]
fn a_change_replaces_the_version_and_nothing_else_does() {
    // AC-07-5
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path();
    put(at, &[("a", "1"), ("b", "2"), ("d/e", "3")]).expect("written");
    let first = current(at);
    assert_eq!(put(at, &[("a", "1"), ("b", "2"), ("d/e", "3")]), Ok(WriteOutcome::Unchanged));
    assert_eq!(current(at), first);
    assert_eq!(put(at, &[("a", "new"), ("b", "2")]), Ok(WriteOutcome::Published));
    assert_ne!(current(at), first);
    assert_eq!(fs::read_to_string(at.join("a")).expect("readable"), "new");
    assert_eq!((names(at).len(), versions(at)), (4, 1), "a, b, ..data and one version: {:?}", names(at));
}

#[test]
fn an_empty_payload_has_a_version() {
    let dir = tempfile::tempdir().expect("a directory");
    assert_eq!(put(dir.path(), &[]), Ok(WriteOutcome::Published));
    assert_eq!(put(dir.path(), &[]), Ok(WriteOutcome::Unchanged));
    assert_eq!(names(dir.path()).len(), 2);
}

#[test]
fn paths_that_lead_elsewhere_publish_nothing() {
    // AC-07-7
    let dir = tempfile::tempdir().expect("a directory");
    for (path, text) in [
        ("", "invalid path: must not be empty: \"\""),
        ("/a", "invalid path: must be relative path: /a"),
        ("a/../b", "invalid path: must not contain '..': a/../b"),
        ("..foo", "invalid path: must not start with '..': ..foo"),
        ("./..foo", "invalid path: must not start with '..': ./..foo"),
        (&"x".repeat(256), "invalid path: filenames must be less than or equal to 255 characters"),
        (&"x/".repeat(2049), "invalid path: must be less than or equal to 4096 characters"),
    ] {
        assert_eq!(put(dir.path(), &[("good", "1"), (path, "2")]), Err(text.to_owned()));
    }
    assert_eq!(names(dir.path()), Vec::<String>::new());
}

#[test]
fn the_rest_of_a_crash_is_repaired() {
    // AC-07-8
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path();
    put(at, &[("a", "1")]).expect("written");
    symlink("..2026_nowhere", at.join("..data_tmp")).expect("a link");
    fs::create_dir(at.join("..2026_01_01_00_00_00.1")).expect("a directory");
    fs::remove_file(at.join("a")).expect("removed");
    assert_eq!(put(at, &[("a", "1")]), Ok(WriteOutcome::Unchanged));
    assert_eq!(fs::read_to_string(at.join("a")).expect("the link is back"), "1");
    assert_eq!(put(at, &[("a", "2")]), Ok(WriteOutcome::Published));
    assert_eq!((names(at).len(), versions(at)), (3, 1), "{:?}", names(at));
}

#[test]
fn a_failed_write_keeps_the_old_version() {
    // AC-07-9: whatever the system rejects, such as a full disk or a path below a file.
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path();
    put(at, &[("a", "1")]).expect("written");
    let before = names(at);
    assert!(put(at, &[("a", "2"), ("a/b", "3")]).is_err());
    let refuse = |_: &Path| Err(io::Error::other("no"));
    assert!(write(at, &payload(&[("a", "2")]), refuse, Timestamp::UNIX_EPOCH).is_err());
    assert_eq!(names(at), before);
    assert_eq!(fs::read_to_string(at.join("a")).expect("readable"), "1");
}

#[test]
fn what_is_not_ours_stays() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path();
    fs::create_dir(at.join("nested")).expect("a directory");
    put(at, &[("a", "1")]).expect("written");
    put(at, &[("b", "1")]).expect("written");
    assert!(at.join("nested").is_dir() && !at.join("a").exists());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn after_any_sequence_the_volume_holds_the_last_payload(
        all in prop::collection::vec(prop::collection::btree_map("[ab](/[cd]){0,2}", "[xy]{0,2}", 0..4), 1..5)
    ) {
        let dir = tempfile::tempdir().expect("a directory");
        let mut last: Option<Payload> = None;
        for files in all {
            let next: Payload =
                files.iter().map(|(p, d)| (p.clone(), FileProjection { data: d.clone().into(), mode: 0o644, owner: None })).collect();
            match write(dir.path(), &next, |_| Ok(()), Timestamp::UNIX_EPOCH) {
                Ok(_) => last = Some(next),
                // A path cannot be a file and a directory.
                Err(WriteError::Io { .. }) => {}
                Err(e) => panic!("{e}"),
            }
        }
        for (path, content) in last.iter().flatten() {
            prop_assert_eq!(&fs::read(dir.path().join(path)).expect("readable"), &content.data);
        }
        let links: BTreeSet<String> = names(dir.path()).into_iter().filter(|name| !name.starts_with("..")).collect();
        let first = |path: &String| path.split('/').next().unwrap_or_default().to_owned();
        let wanted: BTreeSet<String> = last.iter().flatten().map(|(path, _)| first(path)).collect();
        prop_assert_eq!(links, wanted);
        prop_assert!(versions(dir.path()) <= 1);
    }
}
