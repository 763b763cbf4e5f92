//! Tests of malicious and malformed layers. Owners and devices need root.

use std::{
    fs,
    io::Write,
    os::unix::fs::{FileTypeExt, MetadataExt},
};

use super::*;
use crate::images::unpacker::LayerLimits;

/// An entry of a test layer.
enum Item<'a> {
    File(&'a str, &'a str),
    Folder(&'a str),
    Link(&'a str, &'a str),
    Hard(&'a str, &'a str),
    Device(&'a str, u32, u32),
    Fifo(&'a str),
}
use Item::{Device, Fifo, File as Regular, Folder, Hard, Link};

fn header(name: &str, kind: tar::EntryType, size: u64) -> tar::Header {
    let mut header = tar::Header::new_ustar();
    // The crate rejects malicious names.
    header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
    header.set_entry_type(kind);
    header.set_size(size);
    header.set_mode(0o755);
    header.set_mtime(1_000_000);
    header
}

fn archive(items: &[Item<'_>]) -> Vec<u8> {
    use tar::EntryType;
    let mut out = Vec::new();
    for item in items {
        let (mut header, content) = match item {
            Regular(name, content) => (header(name, EntryType::Regular, content.len() as u64), *content),
            Folder(name) => (header(name, EntryType::Directory, 0), ""),
            Fifo(name) => (header(name, EntryType::Fifo, 0), ""),
            Link(name, target) | Hard(name, target) => {
                let kind = if matches!(item, Link(..)) { EntryType::Symlink } else { EntryType::Link };
                let mut header = header(name, kind, 0);
                header.as_mut_bytes()[157..157 + target.len()].copy_from_slice(target.as_bytes());
                (header, "")
            }
            Device(name, major, minor) => {
                let mut header = header(name, EntryType::Char, 0);
                header.set_device_major(*major).expect("ustar");
                header.set_device_minor(*minor).expect("ustar");
                (header, "")
            }
        };
        header.set_cksum();
        out.extend_from_slice(header.as_bytes());
        out.extend_from_slice(content.as_bytes());
        out.resize(out.len().next_multiple_of(512), 0);
    }
    out.resize(out.len() + 1024, 0);
    out
}

fn pax(records: &[(&str, &[u8])]) -> Vec<u8> {
    let mut body = Vec::new();
    for (key, value) in records {
        let rest = key.len() + value.len() + 3;
        let length = (rest..rest + 9).find(|length| length - rest == length.to_string().len()).expect("short");
        body.extend_from_slice(format!("{length} {key}=").as_bytes());
        body.extend_from_slice(value);
        body.push(b'\n');
    }
    let mut header = header("pax", tar::EntryType::XHeader, body.len() as u64);
    header.set_cksum();
    let mut out = [header.as_bytes().to_vec(), body].concat();
    out.resize(out.len().next_multiple_of(512), 0);
    out
}

fn policy(form: LayerFormat) -> UnpackPolicy {
    UnpackPolicy { bounds: LayerLimits::default(), form, keep_free: 0 }
}

const OVERLAY: LayerFormat = LayerFormat::Overlay { userxattr: false };

/// A target directory next to files that must not change; `None` if not root.
fn place() -> Option<(tempfile::TempDir, std::path::PathBuf)> {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: needs root");
        return None;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let root = dir.path().join("d");
    fs::create_dir(&root).expect("makeable");
    fs::write(dir.path().join("outside"), "untouched").expect("writable");
    Some((dir, root))
}

fn apply_items(root: &Path, items: &[Item<'_>], form: LayerFormat) -> Result<LayerSummary, ImageError> {
    apply(&archive(items)[..], root, &policy(form))
}

fn opaque(path: &Path) -> bool {
    let mut value = [0u8; 8];
    rustix::fs::lgetxattr(path, "trusted.overlay.opaque", &mut value[..]).is_ok()
}

fn is_removed(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|stat| stat.file_type().is_char_device() && stat.rdev() == 0)
}

#[test]
fn nothing_leaves_the_layers_root() {
    // AC-09b-I3
    let Some((dir, root)) = place() else { return };
    let outside = dir.path().join("outside").to_string_lossy().into_owned();
    let items = [
        Regular("../../etc/x", "1"),
        Regular("/abs", "2"),
        Folder("etc"),
        Link("a", "/etc"),
        Regular("a/y", "3"),
        Link("up", "../../../.."),
        Regular("up/z", "4"),
        Link("out", &outside),
        Regular("out", "5"),
        Link("dangling", "/nowhere/at/all"),
        Regular("././b//c", "6"),
    ];
    apply_items(&root, &items, OVERLAY).expect("unpacks");
    for (path, content) in [("etc/x", "1"), ("abs", "2"), ("etc/y", "3"), ("z", "4"), ("out", "5"), ("b/c", "6")] {
        assert_eq!(fs::read_to_string(root.join(path)).expect(path), content, "{path}");
    }
    assert_eq!(fs::read_to_string(&outside).expect("there"), "untouched");
    assert_eq!(fs::read_dir(dir.path()).expect("listable").count(), 2);
    assert!(fs::symlink_metadata(root.join("out")).expect("there").is_file(), "the link was replaced, not followed");
}

#[test]
fn what_cannot_be_is_refused() {
    let outside = "/proc/self/exe";
    for (what, items, expected) in [
        ("a file as parent", &[Regular("f", ""), Regular("f/x", "")][..], "parent is not a directory"),
        ("hard link to nothing", &[Hard("h", "none")], "hardlink target not found"),
        ("hard link out", &[Hard("h", "../../outside")], "hardlink target not found"),
        ("hard link to the host", &[Hard("h", outside)], "hardlink target not found"),
        ("hard link through a link", &[Link("l", "/proc/self"), Hard("h", "l/exe")], "hardlink target not found"),
        ("hard link to a directory", &[Folder("d"), Hard("h", "d")], "hardlink target is a directory"),
        ("hard link to a deletion", &[Regular(".wh.x", ""), Hard("h", "x")], "hardlink target not found"),
        ("the root as a file", &[Regular("./", "x")], "root is not a directory"),
    ] {
        let Some((dir, root)) = place() else { return };
        let error = apply_items(&root, items, OVERLAY).expect_err(what);
        assert!(error.text.contains(expected) || what == "the root as a file", "{what}: {error}");
        assert_eq!(fs::read_to_string(dir.path().join("outside")).expect("there"), "untouched", "{what}");
    }
}

#[test]
fn links_in_a_loop_end() {
    let Some((_dir, root)) = place() else { return };
    let error = apply_items(&root, &[Link("a", "b"), Link("b", "a"), Regular("a/x", "")], OVERLAY).expect_err("a loop");
    assert!(error.text.contains("open parent directory"), "{error}");
}

#[test]
fn deletions_mean_lower_layers_in_any_order() {
    let orders: [(&str, &[Item<'_>]); 2] = [
        (
            "deletion first",
            &[Regular(".wh.f", ""), Regular("f", "new"), Regular(".wh.d", ""), Folder("d"), Regular("d/x", "new")],
        ),
        (
            "deletion last",
            &[Regular("f", "new"), Regular(".wh.f", ""), Folder("d"), Regular("d/x", "new"), Regular(".wh.d", "")],
        ),
    ];
    for (what, items) in orders {
        let Some((_dir, root)) = place() else { return };
        apply_items(&root, items, OVERLAY).expect(what);
        assert_eq!(fs::read_to_string(root.join("f")).expect(what), "new", "{what}");
        assert_eq!(fs::read_to_string(root.join("d/x")).expect(what), "new", "{what}");
        assert!(opaque(&root.join("d")), "{what}");
        // A merged tree with files of lower layers.
        let Some((_dir, root)) = place() else { return };
        fs::create_dir(root.join("d")).expect("makeable");
        fs::write(root.join("d/old"), "").expect("writable");
        fs::write(root.join("f"), "old").expect("writable");
        apply_items(&root, items, LayerFormat::Merged).expect(what);
        assert_eq!(fs::read_to_string(root.join("f")).expect(what), "new", "{what}");
        assert!(root.join("d/x").exists() && !root.join("d/old").exists() && !opaque(&root.join("d")), "{what}");
    }
    let Some((_dir, root)) = place() else { return };
    let items = [
        Regular("p/.wh.gone", ""),
        Regular("o/.wh..wh..opq", ""),
        Regular("o/kept", ""),
        Regular(".wh..wh.plnk", ""),
        Regular(".wh.implied", ""),
        Regular("implied/x", ""),
        Regular(".wh...", ""),
    ];
    apply_items(&root, &items, OVERLAY).expect("unpacks");
    assert!(is_removed(&root.join("p/gone")) && opaque(&root.join("o")) && root.join("o/kept").exists());
    assert!(opaque(&root.join("implied")) && root.join("implied/x").exists());
    assert!(!root.join(".wh..wh.plnk").exists() && !root.join("plnk").exists());
}

#[test]
fn kinds_replace_each_other_and_directories_keep_their_times() {
    let Some((_dir, root)) = place() else { return };
    let items = [
        Folder("x"),
        Regular("x/deep", ""),
        Regular("x", "a file now"),
        Regular("y", "a file"),
        Folder("y"),
        Regular("y/z", ""),
        Link("l", "y"),
        Folder("l"),
        Regular("h1", "content"),
        Hard("h2", "h1"),
        Hard("h1", "h2"),
        Fifo("p"),
        Device("null", 1, 3),
        Device("zero", 0, 0),
    ];
    apply_items(&root, &items, OVERLAY).expect("unpacks");
    assert_eq!(fs::read_to_string(root.join("x")).expect("a file"), "a file now");
    assert_eq!(fs::metadata(root.join("y")).expect("there").mtime(), 1_000_000);
    assert!(fs::symlink_metadata(root.join("l")).expect("there").is_dir());
    let link = fs::metadata(root.join("h2")).expect("there");
    assert_eq!((link.ino(), link.nlink()), (fs::metadata(root.join("h1")).expect("there").ino(), 2));
    assert_eq!(fs::read_to_string(root.join("h1")).expect("there"), "content", "a link to itself loses nothing");
    assert!(fs::metadata(root.join("p")).expect("there").file_type().is_fifo());
    assert_eq!(fs::metadata(root.join("null")).map_or(259, |stat| stat.rdev()), 259);
    assert!(!root.join("zero").exists(), "it would delete");
}

#[test]
fn setuid_survives_the_owner_and_attributes_are_chosen() {
    // AC-09b-I10
    let Some((_dir, root)) = place() else { return };
    let mut capability = vec![1, 0, 0, 2];
    capability.resize(20, 0);
    let mut bytes = pax(&[
        ("SCHILY.xattr.trusted.overlay.redirect", b"/etc"),
        ("SCHILY.xattr.user.overlay.opaque", b"y"),
        ("SCHILY.xattr.user.note", b"kept"),
        ("SCHILY.xattr.security.capability", &capability),
        ("mtime", b"5.25"),
    ]);
    let mut file = header("su", tar::EntryType::Regular, 0);
    file.set_mode(0o4755);
    file.set_uid(1234);
    file.set_gid(4321);
    file.set_cksum();
    bytes.extend_from_slice(file.as_bytes());
    let mut global = pax(&[("path", b"elsewhere")]);
    global[156] = b'g';
    let mut fixed = tar::Header::from_byte_slice(&global[..512]).clone();
    fixed.set_cksum();
    global[..512].copy_from_slice(fixed.as_bytes());
    bytes.extend(global);
    bytes.extend(archive(&[Regular("plain", "")]));
    apply(&bytes[..], &root, &policy(OVERLAY)).expect("unpacks");
    let stat = fs::metadata(root.join("su")).expect("there");
    assert_eq!((stat.mode() & 0o7777, stat.uid(), stat.gid()), (0o4755, 1234, 4321));
    assert_eq!((stat.mtime(), stat.mtime_nsec()), (5, 250_000_000));
    let mut list = [0u8; 4096];
    let length = rustix::fs::llistxattr(root.join("su"), &mut list[..]).expect("listable");
    let list = String::from_utf8_lossy(&list[..length]).into_owned();
    assert!(
        list.contains("user.note") && list.contains("security.capability") && !list.contains("overlay"),
        "{list:?}"
    );
    assert!(root.join("plain").exists(), "what is said of all entries is ignored");
}

#[test]
fn owners_out_of_range_are_refused() {
    let Some((_dir, root)) = place() else { return };
    let mut bytes = pax(&[("uid", b"2147483648")]);
    bytes.extend(archive(&[Regular("x", "")]));
    assert!(apply(&bytes[..], &root, &policy(OVERLAY)).expect_err("too large").text.contains("out of range"));
}

#[test]
fn files_with_holes_have_them() {
    let Some((_dir, root)) = place() else { return };
    let mut bytes = pax(&[
        ("GNU.sparse.major", b"1"),
        ("GNU.sparse.minor", b"0"),
        ("GNU.sparse.name", b"holes"),
        ("GNU.sparse.realsize", b"10000000"),
    ]);
    let mut map = b"2\n0\n3\n9999997\n3\n".to_vec();
    map.resize(512, 0);
    map.extend_from_slice(b"abcxyz");
    let mut file = header("GNUSparseFile.0/holes", tar::EntryType::Regular, map.len() as u64);
    file.set_cksum();
    bytes.extend_from_slice(file.as_bytes());
    bytes.extend(map);
    bytes.resize(bytes.len().next_multiple_of(512) + 1024, 0);
    apply(&bytes[..], &root, &policy(OVERLAY)).expect("unpacks");
    let content = fs::read(root.join("holes")).expect("there");
    assert_eq!((content.len(), &content[..3], &content[9_999_997..]), (10_000_000, &b"abc"[..], &b"xyz"[..]));
    assert!(fs::metadata(root.join("holes")).expect("there").blocks() < 100);
}

#[test]
fn bombs_are_refused_by_what_they_claim_or_by_what_comes() {
    // AC-09b-I4
    let Some((_dir, root)) = place() else { return };
    let zeros = |size: u64, sends: u64| {
        let mut file = header("zeros", tar::EntryType::Regular, size);
        file.set_cksum();
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        encoder.write_all(file.as_bytes()).expect("in memory");
        io::copy(&mut io::repeat(0).take(sends), &mut encoder).expect("in memory");
        encoder.finish().expect("in memory")
    };
    let small = |bytes, entries| UnpackPolicy { bounds: LayerLimits { bytes, entries, ratio: 100 }, ..policy(OVERLAY) };
    let many: Vec<Item<'_>> = (0..50).map(|_| Folder("d")).collect();
    let long_tail = [archive(&[Regular("a", "")]), vec![0; 200 << 20]].concat();
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(&long_tail).expect("in memory");
    let tail = encoder.finish().expect("in memory");
    for (what, bytes, policy, expected) in [
        ("ratio", zeros(10 << 30, 200 << 20), small(64 << 30, 10), "compression ratio above 100"),
        ("claim", zeros(65 << 30, 1024), policy(OVERLAY), "more than 68719476736 bytes"),
        ("entries", archive(&many), small(1 << 30, 40), "more than 40 entries"),
        ("behind the end", tail, small(64 << 30, 10), "compression ratio above 100"),
        ("disk", zeros(80 << 20, 80 << 20), UnpackPolicy { keep_free: u64::MAX, ..small(1 << 40, 10) }, "limits"),
    ] {
        let error = apply(&bytes[..], &root, &policy).expect_err(what);
        assert!(error.text.contains(expected), "{what}: {error}");
        assert_eq!(error.kind, crate::images::error::ImageErrorKind::ResourceExhausted, "{what}");
    }
}

#[test]
fn cut_and_changed_streams_are_errors() {
    let Some((_dir, root)) = place() else { return };
    let plain = archive(&[Regular("a", &"x".repeat(5000)), Regular("b", "y")]);
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(&plain).expect("in memory");
    let gzip = encoder.finish().expect("in memory");
    let zstd = zstd::encode_all(&plain[..], 1).expect("in memory");
    for (what, bytes) in [("gzip", gzip), ("zstd", zstd)] {
        for length in [bytes.len() / 3, bytes.len() / 2, bytes.len() - 9, bytes.len() - 1] {
            assert!(apply(&bytes[..length], &root, &policy(OVERLAY)).is_err(), "{what} cut at {length}");
        }
    }
    assert!(apply(&plain[..3000], &root, &policy(OVERLAY)).is_err(), "plain, cut");
    let nothing = apply(&[][..], &root, &policy(OVERLAY)).expect("an empty layer");
    assert_eq!(nothing.diff_id, Digest::of(b""));
}
