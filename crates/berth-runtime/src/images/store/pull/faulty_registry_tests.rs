//! Tests of pulls from faulty registries (stalls, loops, denials, wrong content), and of a full disk.

use std::{
    fs,
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
    time::Instant,
};

use super::{
    super::{
        ImageStore, ImageStoreSettings,
        tests::{gzip, is_root, layer, numbers, oci, opened},
    },
    tests::{Registry, anonymous, store},
    *,
};

/// Long incompressible content.
fn noise() -> String {
    (0..10_000).map(|_| format!("{:x}", rand::random::<u64>())).collect()
}

fn is_clean(root: &Path, store: &ImageStore) -> bool {
    store.list("").expect("a list").is_empty() && numbers(root).is_empty()
}

#[tokio::test]
async fn a_registry_that_stops_in_the_middle_is_given_up() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let mut registry = Registry { hangs_at: Some(10_000), ..Registry::default() };
    registry.image("a", "1", &[("f", &noise())]);
    let (host, _registry) = registry.start();
    let settings = ImageStoreSettings {
        idle_timeout: Duration::from_millis(300),
        ..ImageStoreSettings::new(dir.path().join("root"))
    };
    let store = ImageStore::open(settings).await.expect("opens");
    let begun = Instant::now();
    let error = store.pull(&format!("{host}/a:1"), &anonymous()).await.expect_err("it hangs");
    assert_eq!(error.kind, ImageErrorKind::DeadlineExceeded);
    assert!(error.text.ends_with("no progress in 0m0s"), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(20) && is_clean(&dir.path().join("root"), &store));
    let parts = fs::read_dir(dir.path().join("root/content/ingest")).expect("listable").count();
    assert_eq!(parts, 1, "what came is kept for the next attempt");
}

#[tokio::test]
async fn retry_after_is_honored_up_to_a_limit() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let throttled = |times, after: &str| {
        let mut registry = Registry { throttles: (AtomicUsize::new(times), after.to_owned()), ..Registry::default() };
        registry.image("a", "1", &[("f", "x")]);
        registry.start()
    };
    let store = store(dir.path()).await;
    let (busy, _b) = throttled(1_000_000, "3600");
    let begun = Instant::now();
    let error = store.pull(&format!("{busy}/a:1"), &anonymous()).await.expect_err("an hour is too long");
    assert!(error.kind == ImageErrorKind::Unavailable && error.text.contains("429"), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    let (calm, registry) = throttled(1, "1");
    let begun = Instant::now();
    store.pull(&format!("{calm}/a:1"), &anonymous()).await.expect("a second later");
    assert!(begun.elapsed() >= Duration::from_secs(1), "not before it is time");
    assert!(registry.requests.load(Ordering::Relaxed) < 10);
}

#[tokio::test]
async fn what_registries_lead_to_is_not_followed_everywhere() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let root = dir.path().join("root");
    let store = store(dir.path()).await;
    let mut cases = Vec::new();
    for to in ["file:///etc/passwd", "ftp://127.0.0.1/x", "x"] {
        cases.push((Registry { redirect: Some(to.to_owned()), ..Registry::default() }, "is refused"));
    }
    // Every token is rejected.
    let never = Some("Bearer another".to_owned());
    cases.push((Registry { wants: never, ..Registry::default() }, "pull access denied"));
    cases.push((
        Registry { breaks_at: Some(20_000), always_breaks: true, ..Registry::default() },
        "download interrupted",
    ));
    let known = RegistryCredentials { username: "u".into(), password: "p".into(), ..RegistryCredentials::default() };
    for (mut registry, expected) in cases {
        registry.image("a", "1", &[("f", &noise())]);
        let (host, registry) = registry.start();
        let error = store.pull(&format!("{host}/a:1"), &known).await.expect_err(expected);
        assert!(error.text.contains(expected), "{expected}: {error}");
        assert!(registry.requests.load(Ordering::Relaxed) < 60, "{expected}");
        assert!(is_clean(&root, &store), "{expected}");
    }
}

#[tokio::test]
async fn indexes_of_indexes_end() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let mut registry = Registry::default();
    let mut inner = Descriptor::of(model::OCI_INDEX, b"nothing");
    for depth in 0..6 {
        let index = serde_json::json!({"schemaVersion": 2, "mediaType": model::OCI_INDEX, "manifests": [inner]});
        let bytes = index.to_string().into_bytes();
        inner = Descriptor::of(model::OCI_INDEX, &bytes);
        registry.put(format!("deep/manifests/{}", inner.digest), model::OCI_INDEX, &bytes);
        registry.put(format!("deep/manifests/{depth}"), model::OCI_INDEX, &bytes);
    }
    // An index that contains itself: by digest it cannot match.
    let circle = Descriptor::new(model::OCI_INDEX, inner.digest, inner.size);
    let circle = serde_json::json!({"schemaVersion": 2, "mediaType": model::OCI_INDEX, "manifests": [circle]});
    registry.put("deep/manifests/circle".into(), model::OCI_INDEX, circle.to_string().as_bytes());
    let (host, _registry) = registry.start();
    let store = store(dir.path()).await;
    for tag in ["5", "circle"] {
        let error = store.pull(&format!("{host}/deep:{tag}"), &anonymous()).await.expect_err(tag);
        assert!(error.text.ends_with("indexes are nested too deeply"), "{tag}: {error}");
    }
}

/// A mount that is unmounted on drop.
struct MountGuard(std::path::PathBuf);

impl Drop for MountGuard {
    fn drop(&mut self) {
        let _ = nix::mount::umount2(&self.0, nix::mount::MntFlags::MNT_DETACH);
    }
}

#[tokio::test]
async fn a_disk_that_fills_up_in_the_middle_leaves_nothing_half() {
    // AC-09-E10, for images
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let root = dir.path().join("root");
    fs::create_dir(&root).expect("makeable");
    let mount = |options: &str, flags| {
        nix::mount::mount(Some("tmpfs"), &root, Some("tmpfs"), flags, Some(options)).expect("mounted");
    };
    mount("size=1m", nix::mount::MsFlags::empty());
    let _mounted = MountGuard(root.clone());
    let store = opened(&root).await;
    let content = noise();
    let files: Vec<String> = (0..12).map(|number| format!("f{number}")).collect();
    let files: Vec<(&str, &str)> = files.iter().map(|name| (name.as_str(), content.as_str())).collect();
    let archive = dir.path().join("archive.tar");
    fs::write(&archive, gzip(&oci("x.tld/a:1", &[layer(&[("small", "s")]), layer(&files)], ""))).expect("writable");
    // A compressed archive is first unpacked into a scratch file, an uncompressed one read in place.
    let error = store.import(&archive, None).await.expect_err("no room");
    assert_eq!(error.kind, ImageErrorKind::ResourceExhausted, "{error}");
    fs::write(&archive, oci("x.tld/a:1", &[layer(&[("small", "s")]), layer(&files)], "")).expect("writable");
    let error = store.import(&archive, None).await.expect_err("no room");
    assert_eq!(error.kind, ImageErrorKind::ResourceExhausted, "{error}");
    store.collect().await.expect("collected");
    assert!(is_clean(&root, &store));
    let left = fs::read_dir(root.join("content/ingest")).expect("listable").count();
    assert_eq!(left, 0);
    mount("size=32m", nix::mount::MsFlags::MS_REMOUNT);
    store.import(&archive, None).await.expect("there is room now");
    assert_eq!(store.list("").expect("a list").len(), 1);
}
