//! Tests of the store's public API on a real disk. Unpacking sets owners, so they need root.

use std::{fs, io::Write as _};

use super::*;
use crate::images::{
    error::ImageErrorKind,
    platform::{self, PlatformSelection},
    registry::RegistryCredentials,
};

pub(super) fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("skipped: needs root");
    }
    root
}

/// Tar stream of a layer with these files.
pub(super) fn layer(files: &[(&str, &str)]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, content.as_bytes()).expect("in memory");
    }
    builder.into_inner().expect("in memory")
}

pub(super) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).expect("in memory");
    encoder.finish().expect("in memory")
}

/// An OCI archive with one image of these layers.
pub(super) fn oci(name: &str, layers: &[Vec<u8>], user: &str) -> Vec<u8> {
    let (mut entry, blobs) = image(&platform::host().architecture, layers, user);
    entry["annotations"] = serde_json::json!({"io.containerd.image.name": name});
    layout(&entry, &blobs)
}

/// An OCI archive with an index of images for these architectures.
fn for_many(name: &str, architectures: &[&str]) -> Vec<u8> {
    let (mut entries, mut all) = (Vec::new(), Vec::new());
    for architecture in architectures {
        let (mut entry, blobs) = image(architecture, &[layer(&[("for", architecture)])], "");
        entry["platform"] = serde_json::json!({"os": "linux", "architecture": architecture});
        entries.push(entry);
        all.extend(blobs);
    }
    // An entry without content in the archive is no error.
    entries.push(serde_json::json!(model::Descriptor::of(model::OCI_MANIFEST, b"elsewhere")));
    let index = serde_json::json!({"schemaVersion": 2, "mediaType": model::OCI_INDEX, "manifests": entries});
    let index = index.to_string().into_bytes();
    let mut entry = serde_json::json!(model::Descriptor::of(model::OCI_INDEX, &index));
    entry["annotations"] = serde_json::json!({"io.containerd.image.name": name});
    all.push(index);
    layout(&entry, &all)
}

/// An image: its descriptor, and its manifest, configuration, and layers.
fn image(architecture: &str, layers: &[Vec<u8>], user: &str) -> (serde_json::Value, Vec<Vec<u8>>) {
    let diff_ids: Vec<Digest> = layers.iter().map(|layer| Digest::of(layer)).collect();
    let mut blobs: Vec<Vec<u8>> = layers.iter().map(|layer| gzip(layer)).collect();
    let config = serde_json::json!({
        "architecture": architecture, "os": "linux", "config": {"User": user, "Cmd": ["sh"]},
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    });
    let config = config.to_string().into_bytes();
    let descriptor = |kind: &str, bytes: &[u8]| serde_json::json!(model::Descriptor::of(kind, bytes));
    let kind = "application/vnd.oci.image.layer.v1.tar+gzip";
    let manifest = serde_json::json!({
        "schemaVersion": 2, "mediaType": model::OCI_MANIFEST, "config": descriptor(model::OCI_CONFIG, &config),
        "layers": blobs.iter().map(|layer| descriptor(kind, layer)).collect::<Vec<_>>(),
    });
    let manifest = manifest.to_string().into_bytes();
    let entry = descriptor(model::OCI_MANIFEST, &manifest);
    blobs.extend([config, manifest]);
    (entry, blobs)
}

fn layout(entry: &serde_json::Value, blobs: &[Vec<u8>]) -> Vec<u8> {
    let index = serde_json::json!({"schemaVersion": 2, "manifests": [entry]}).to_string();
    let mut builder = tar::Builder::new(Vec::new());
    let mut add = |name: &str, bytes: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, bytes).expect("in memory");
    };
    add("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#);
    add("index.json", index.as_bytes());
    for bytes in blobs {
        add(&format!("blobs/sha256/{}", Digest::of(bytes).hex()), bytes);
    }
    builder.into_inner().expect("in memory")
}

pub(super) async fn opened(root: &Path) -> ImageStore {
    ImageStore::open(ImageStoreSettings::new(root)).await.expect("opens")
}

/// Settings of a store whose built-in images are made from a dummy program.
pub(super) fn with_program(dir: &Path) -> ImageStoreSettings {
    let program = dir.join("program");
    fs::write(&program, "#!not really\n").expect("writable");
    ImageStoreSettings { program: Some(program), ..ImageStoreSettings::new(dir.join("root")) }
}

pub(super) async fn imported(store: &ImageStore, folder: &Path, bytes: &[u8]) -> Vec<Arc<ImageRecord>> {
    let path = folder.join("archive.tar");
    fs::write(&path, bytes).expect("writable");
    store.import(&path, None).await.expect("imports")
}

pub(super) fn numbers(root: &Path) -> Vec<String> {
    let mut out: Vec<String> = fs::read_dir(root.join("layers"))
        .expect("listable")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    out.sort();
    out
}

#[tokio::test]
async fn an_imported_image_is_found_used_and_removed() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let root = dir.path().join("root");
    let store = opened(&root).await;
    let base = layer(&[("etc/passwd", "root:x:0:0::/:/bin/sh\n"), ("bin/sh", "x")]);
    let top = layer(&[("etc/group", "root:x:0:\n")]);
    let one = imported(&store, dir.path(), &oci("docker.io/library/a:1", &[base.clone(), top], "1000:7")).await;
    let two = imported(&store, dir.path(), &oci("docker.io/library/b:1", &[base], "www")).await;
    assert_eq!(numbers(&root), ["1", "2"], "layers are shared");
    assert_eq!(store.list("").expect("a list").len(), 2);
    for (filter, count) in [("a:1", 1), ("a", 1), ("docker.io/library/b", 1), ("a:2", 0), ("c", 0), ("library", 0)] {
        assert_eq!(store.list(filter).expect("a list").len(), count, "{filter}");
    }
    let (record, image) = store.image("a:1").expect("there");
    assert_eq!((image.config.user.as_str(), image.group.as_slice()), ("1000:7", &b"root:x:0:\n"[..]));
    assert_eq!(record.user(), super::super::record::User::Id(1000));
    assert_eq!(two[0].user(), super::super::record::User::Name("www".into()));
    assert!(image.passwd.starts_with(b"root:x:0:0"));

    let kind = store.prepare_root("c1", &record.id()).await.expect("made");
    let RootKind::Overlay { lower, .. } = &kind else { panic!("an overlay: {kind:?}") };
    assert_eq!(lower, &["2/d", "1/d"]);
    assert_eq!(store.prepare_root("c1", "a:1").await.expect_err("taken").kind, ImageErrorKind::AlreadyExists);
    assert_eq!(store.prepare_root("../c", "a:1").await.expect_err("no id").kind, ImageErrorKind::InvalidArgument);
    assert_eq!(
        store.prepare_root("c2", "nothing").await.expect_err("no image").text,
        "failed to resolve image \"nothing\": not found"
    );
    let (_, source) = store.mount_image("c1", "b:1", "").await.expect("mountable");
    assert!(matches!(source, MountKind::Layers { lower, .. } if lower == ["1/d"]));

    store.mount_image("c1", "b:1", "bin").await.expect("a directory");
    for wrong in ["bin/sh", "none", "../x"] {
        assert_eq!(store.mount_image("c1", "b:1", wrong).await.expect_err(wrong).kind, ImageErrorKind::InvalidArgument);
    }

    // Five concurrent removals, also of an absent image (critest: simultaneous RemoveImage).
    let removals = (0..5).map(|_| store.remove("a:1"));
    futures::future::join_all(removals).await.into_iter().for_each(|done| done.expect("removed"));
    assert!(store.status(&one[0].id()).expect("no error").is_none());
    store.collect().await.expect("collected");
    assert_eq!(numbers(&root), ["1", "2"], "a container still uses them");
    assert_eq!(store.root_for("c1"), Some(kind));

    // After a restart the container and its layers are known.
    drop(store);
    let store = opened(&root).await;
    assert_eq!((store.roots(), numbers(&root)), (vec!["c1".to_owned()], vec!["1".to_owned(), "2".to_owned()]));
    // AC-09b-I13, without the debounce interval
    store.release_root("c1").await.expect("released");
    store.collect().await.expect("collected");
    assert_eq!(numbers(&root), ["1"], "the other image's");
    store.remove("b:1").await.expect("removed");
    store.collect().await.expect("collected");
    assert!(numbers(&root).is_empty());
    assert!(fs::read_dir(root.join("content/blobs/sha256")).expect("listable").next().is_none());
}

#[tokio::test]
async fn what_a_crash_left_is_removed() {
    // AC-09b-I5
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let root = dir.path().join("root");
    let archive = oci("x.tld/a:1", &[layer(&[("f", "x")])], "");
    let store = opened(&root).await;
    imported(&store, dir.path(), &archive).await;
    drop(store);
    fs::create_dir_all(root.join("layers/7/d/half")).expect("makeable");
    fs::create_dir_all(root.join("layers/.del-3/d")).expect("makeable");
    fs::create_dir_all(root.join("snap/c9/u")).expect("makeable");
    fs::write(root.join("images/broken.json"), "{}").expect("writable");
    let store = opened(&root).await;
    assert_eq!((numbers(&root), store.roots()), (vec!["1".to_owned()], vec![]));
    assert!(!root.join("images/broken.json").exists());
    assert_eq!(store.list("").expect("a list").len(), 1);
    // Its number is not reused, and no layer is unpacked twice.
    imported(&store, dir.path(), &archive).await;
    imported(&store, dir.path(), &oci("x.tld/b:1", &[layer(&[("g", "y")])], "")).await;
    assert_eq!(numbers(&root), ["1", "8"]);
}

#[tokio::test]
async fn a_record_without_its_layers_is_no_image() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let root = dir.path().join("root");
    let store = opened(&root).await;
    imported(&store, dir.path(), &oci("x.tld/a:1", &[layer(&[("f", "x")])], "")).await;
    drop(store);
    fs::remove_file(root.join("layers/1/layer.json")).expect("removable");
    let store = opened(&root).await;
    assert!(store.list("").expect("a list").is_empty());
}

#[tokio::test]
async fn docker_archives_and_packed_archives_are_read() {
    // AC-09b-I11
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let store = opened(&dir.path().join("root")).await;
    let layer = layer(&[("bin/x", "x")]);
    let config = serde_json::json!({
        "architecture": "amd64", "os": "linux", "config": {"Entrypoint": ["/bin/x"]},
        "rootfs": {"type": "layers", "diff_ids": [Digest::of(&layer)]},
    });
    let config = config.to_string().into_bytes();
    let config_name = format!("{}.json", Digest::of(&config).hex());
    let saved =
        serde_json::json!([{"Config": config_name, "RepoTags": ["my/app:v1", "my/app:v2"], "Layers": ["1/layer.tar"]}]);
    let mut builder = tar::Builder::new(Vec::new());
    for (name, bytes) in
        [("manifest.json", saved.to_string().as_bytes()), (&config_name, &config), ("1/layer.tar", &layer)]
    {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        builder.append_data(&mut header, name, bytes).expect("in memory");
    }
    let archive = builder.into_inner().expect("in memory");
    let packed = [archive.clone(), gzip(&archive), zstd::encode_all(&archive[..], 1).expect("in memory")];
    for bytes in packed {
        let images = imported(&store, dir.path(), &bytes).await;
        assert_eq!(images[0].repo_tags(), ["docker.io/my/app:v1", "docker.io/my/app:v2"]);
        assert_eq!(images[0].config.entrypoint, ["/bin/x"]);
    }
    assert_eq!(numbers(&dir.path().join("root")), ["1"]);
    fs::write(dir.path().join("archive.tar"), &gzip(&archive)[..archive.len() / 20]).expect("writable");
    assert!(store.import(&dir.path().join("archive.tar"), None).await.is_err());
}

#[tokio::test]
async fn a_layer_that_does_not_match_its_diff_id_is_rejected() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let root = dir.path().join("root");
    let store = opened(&root).await;
    let good = oci("x.tld/a:1", &[layer(&[("f", "right")])], "");
    let other = gzip(&layer(&[("f", "wrong")]));
    let right = gzip(&layer(&[("f", "right")]));
    let at = good.windows(right.len()).position(|window| window == right).expect("in the archive");
    let mut bad = good.clone();
    bad[at..at + right.len()].copy_from_slice(&other[..right.len()]);
    fs::write(dir.path().join("archive.tar"), bad).expect("writable");
    let error = store.import(&dir.path().join("archive.tar"), None).await.expect_err("another layer");
    assert!(error.text.contains("digest mismatch") || error.text.contains("invalid layer"), "{error}");
    assert!(numbers(&root).is_empty() && store.list("").expect("a list").is_empty());
}

#[tokio::test]
async fn built_in_images_are_made_once_and_come_back() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let root = dir.path().join("root");
    let (settings, program) = (with_program(dir.path()), dir.path().join("program"));
    let store = ImageStore::open(settings.clone()).await.expect("opens");
    let pause = store.pull("berth.local/pause", &RegistryCredentials::default()).await.expect("built in");
    assert_eq!(
        pause.id,
        store.pull("builtin.local/pause:latest", &RegistryCredentials::default()).await.expect("built in").id
    );
    assert!(pause.pinned && pause.repo_tags().len() == 4, "{:?}", pause.repo_tags());
    assert_eq!(
        store.pull("berth.local/nothing", &RegistryCredentials::default()).await.expect_err("unknown").kind,
        ImageErrorKind::NotFound
    );
    assert_eq!(store.list("").expect("a list").len(), 1);
    assert_eq!(numbers(&root), ["1"], "one layer");
    assert_eq!(fs::read_link(root.join("layers/1/d/bin/pause")).expect("a link"), Path::new("berth"));
    store.remove("berth.local/pause").await.expect("removed");
    drop(store);
    let store = ImageStore::open(settings.clone()).await.expect("opens");
    assert_eq!(store.pull("berth.local/pause", &RegistryCredentials::default()).await.expect("back").id, pause.id);
    drop(store);
    fs::write(&program, "#!another program\n").expect("writable");
    let store = ImageStore::open(settings).await.expect("opens");
    assert_ne!(store.pull("berth.local/pause", &RegistryCredentials::default()).await.expect("new").id, pause.id);
    assert_eq!((store.list("").expect("a list").len(), numbers(&root)), (1, vec!["2".to_owned()]));
}

#[tokio::test]
async fn without_overlays_roots_are_copies() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let root = dir.path().join("root");
    let store =
        ImageStore::open(ImageStoreSettings { snapshotter: Snapshotter::Copy, ..ImageStoreSettings::new(&root) })
            .await
            .expect("opens");
    let layers = [
        layer(&[("a", "1"), ("d/x", "1"), ("d/y", "1")]),
        layer(&[(".wh.a", ""), ("d/.wh..wh..opq", ""), ("d/z", "2")]),
    ];
    imported(&store, dir.path(), &oci("x.tld/a:1", &layers, "")).await;
    let RootKind::Directory(path) = store.prepare_root("c", "x.tld/a:1").await.expect("made") else { panic!("a copy") };
    assert!(!path.join("a").exists() && !path.join("d/x").exists());
    assert_eq!(fs::read_to_string(path.join("d/z")).expect("there"), "2");
}

#[tokio::test]
async fn archives_that_lie_about_are_imported_once() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let (root, folder) = (dir.path().join("root"), dir.path().join("archives"));
    let store = opened(&root).await;
    assert_eq!(store.import_folder(&folder).await.expect("no directory"), 0);
    fs::create_dir(&folder).expect("makeable");
    fs::write(folder.join("a.tar.gz"), gzip(&oci("x.tld/a:1", &[layer(&[("f", "x")])], ""))).expect("writable");
    fs::write(folder.join("broken.tar"), "nothing of the kind").expect("writable");
    fs::write(folder.join("notes.txt"), "").expect("writable");
    assert_eq!(store.import_folder(&folder).await.expect("imports"), 1);
    assert!(store.status("x.tld/a:1").expect("a name").is_some());
    store.remove("x.tld/a:1").await.expect("removed");
    drop(store);
    let store = opened(&root).await;
    assert_eq!(store.import_folder(&folder).await.expect("nothing new"), 0);
    fs::write(folder.join("a.tar.gz"), oci("x.tld/b:1", &[layer(&[("f", "y")])], "")).expect("writable");
    assert_eq!(store.import_folder(&folder).await.expect("imports"), 1);
    assert_eq!(store.list("").expect("a list")[0].repo_tags(), ["x.tld/b:1"]);
}

#[tokio::test]
async fn of_an_archive_for_many_machines_those_that_are_wanted_are_imported() {
    if !is_root() {
        return;
    }
    let own = platform::host().architecture;
    let archive = for_many("x.tld/a:1", &[&own, "mips64le", "s390x"]);
    let names = |wanted: PlatformSelection| {
        let archive = archive.clone();
        async move {
            let dir = tempfile::tempdir().expect("a directory");
            let path = dir.path().join("archive.tar");
            fs::write(&path, archive).expect("writable");
            let (store, choice) =
                (opened(&dir.path().join("root")).await, ImportOptions { name: None, platforms: wanted });
            let file = fs::File::open(&path).expect("there").into();
            let images = store.import_watched(file, choice, Arc::default()).await?;
            let mut platform_tags: Vec<_> =
                images.iter().map(|i| (i.platform.architecture.clone(), i.repo_tags())).collect();
            platform_tags.sort();
            assert!(images.iter().all(|image| image.repo_digests().len() == 1), "{images:?}");
            let all = store.list("").expect("a list").len();
            assert_eq!(all, platform_tags.len());
            Ok::<_, ImageError>(platform_tags)
        }
    };
    let tagged = |architecture: &str| (architecture.to_owned(), vec!["x.tld/a:1".to_owned()]);
    let other = |architecture: &str| (architecture.to_owned(), vec![]);
    let only = |text: &str| PlatformSelection::Only(platform::parse(text).expect("a platform"));
    assert_eq!(names(PlatformSelection::Host).await, Ok(vec![tagged(&own)]));
    assert_eq!(names(only("s390x")).await, Ok(vec![tagged("s390x")]));
    let mut all = vec![tagged(&own), other("mips64le"), other("s390x")];
    all.sort();
    assert_eq!(names(PlatformSelection::All).await, Ok(all));
    assert_eq!(names(only("riscv64")).await.expect_err("there is none").kind, ImageErrorKind::NotFound);
}

#[tokio::test]
async fn an_imported_image_is_repaired_from_kept_layers() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let root = dir.path().join("root");
    let store = ImageStore::open(ImageStoreSettings { keeps_compressed: true, ..ImageStoreSettings::new(&root) })
        .await
        .expect("opens");
    let layers = [layer(&[("f", "right")]), layer(&[("g", "")])];
    let image = imported(&store, dir.path(), &oci("x.tld/a:1", &layers, "")).await.remove(0);
    store.collect().await.expect("collected");
    fs::write(root.join("layers/1/d/f"), "wrong").expect("writable");
    let verified = store.verify(verification::RepairMode::Yes, Arc::default()).await.expect("verified");
    assert_eq!(verified.findings[0].repair, Some(Ok(())), "{verified:?}");
    let repaired = store.status("x.tld/a:1").expect("a name").expect("there");
    assert_eq!((repaired.id, repaired.source, repaired.layers.clone()), (image.id, ImageOrigin::Import, vec![3, 2]));
    assert_eq!(fs::read_to_string(root.join("layers/3/d/f")).expect("there"), "right");
}
