//! Tests of pulls for other platforms, with compressed layers kept, and with limited concurrency.

use std::{fs, sync::atomic::Ordering, time::Duration};

use super::{
    super::{
        ImageStore, ImageStoreSettings,
        tests::{is_root, layer},
        verification::RepairMode,
    },
    tests::{Registry, anonymous, settings},
    *,
};

async fn opened(settings: ImageStoreSettings) -> ImageStore {
    ImageStore::open(settings).await.expect("opens")
}

/// Incompressible content.
fn noise(seed: u32) -> String {
    (0..2000).map(|i: u32| Digest::of(&(i ^ seed << 16).to_le_bytes()).hex()).collect()
}

async fn pulled(store: &ImageStore, name: &str, machine: Option<&str>) -> Outcome {
    let machine = machine.map(|text| platform::parse(text).expect("a platform"));
    store.pull_watched(name, &anonymous(), machine).expect("a name").0.await
}

#[tokio::test]
async fn another_machines_image_is_pulled_where_it_is_asked_for() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let own = platform::host().architecture;
    let mut registry = Registry::default();
    let entries = [
        registry.variant("a", &own, &[layer(&[("own", "x")])]),
        registry.variant("a", "mips64le", &[layer(&[("other", "x")])]),
    ];
    registry.index("a", "1", &entries);
    let only = registry.variant("b", "mips64le", &[layer(&[("only", "x")])]);
    let (kind, bytes) = registry.content[&format!("b/manifests/{}", only["digest"].as_str().expect("text"))].clone();
    registry.put("b/manifests/1".to_owned(), &kind, &bytes);
    let (host, registry) = registry.start();
    let store = opened(settings(dir.path())).await;
    let name = format!("{host}/a:1");
    let image = |of: Outcome| of.map(|image| (image.platform.architecture.clone(), image.repo_tags()));
    let expected = |architecture: &str| Ok((architecture.to_owned(), vec![name.clone()]));
    assert_eq!(image(pulled(&store, &name, None).await), expected(&own));
    assert_eq!(image(pulled(&store, &name, Some("linux/mips64le")).await), expected("mips64le"));
    let before = registry.requests.load(Ordering::Relaxed);
    assert_eq!(image(pulled(&store, &name, Some("mips64le")).await), expected("mips64le"));
    assert_eq!(image(pulled(&store, &name, None).await), expected(&own), "the tag has moved back");
    assert_eq!(registry.requests.load(Ordering::Relaxed), before + 2, "both are here");
    let missing = pulled(&store, &name, Some("s390x")).await.expect_err("there is none");
    assert_eq!(missing.kind, ImageErrorKind::NotFound);
    assert!(missing.text.ends_with("no match for platform in manifest: not found"), "{missing}");
    // A single image without an index: rejected only if a platform is requested.
    let name = format!("{host}/b:1");
    let refused = pulled(&store, &name, Some(&own)).await.expect_err("for another machine");
    assert!(refused.text.ends_with("no match for platform in manifest: not found"), "{refused}");
    pulled(&store, &name, None).await.expect("taken as it is");
    pulled(&store, &name, Some(&own)).await.expect_err("also where it is here");
    pulled(&store, &name, Some("linux/mips64le")).await.expect("for it");
}

#[tokio::test]
async fn compressed_layers_are_kept_if_configured() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let mut registry = Registry::default();
    registry.image("a", "1", &[("f", "right")]);
    let (host, registry) = registry.start();
    let keeping = ImageStoreSettings { keeps_compressed: true, ..settings(dir.path()) };
    let store = opened(keeping).await;
    let image = store.pull(&format!("{host}/a:1"), &anonymous()).await.expect("pulled");
    store.collect().await.expect("collected");
    let blobs = dir.path().join("root/content/blobs/sha256");
    let count = || fs::read_dir(&blobs).expect("listable").count();
    assert_eq!(count(), 4, "configuration, manifest, index and layer");
    // A broken layer is unpacked again from the kept blob, without a download.
    let sent = registry.sent.load(Ordering::Relaxed);
    fs::write(dir.path().join("root/layers/1/d/f"), "wrong").expect("writable");
    let verified = store.verify(RepairMode::Yes, Arc::default()).await.expect("verified");
    assert_eq!(verified.findings[0].repair, Some(Ok(())), "{verified:?}");
    let config = fs::metadata(blobs.join(image.id.hex())).expect("there").len();
    assert_eq!(registry.sent.load(Ordering::Relaxed), sent + config);
    assert_eq!(fs::read_to_string(dir.path().join("root/layers/2/d/f")).expect("there"), "right");
    // A broken compressed layer is only deleted.
    let packed = store.inner.packed(&image).remove(0).digest;
    fs::write(blobs.join(packed.hex()), "wrong").expect("writable");
    let verified = store.verify(RepairMode::Yes, Arc::default()).await.expect("verified");
    assert_eq!((verified.findings.len(), count()), (1, 3), "{verified:?}");
    let verified = store.verify(RepairMode::No, Arc::default()).await.expect("verified");
    assert_eq!(verified.findings, []);
    store.remove(&image.id()).await.expect("removed");
    store.collect().await.expect("collected");
    assert_eq!(count(), 0);
}

#[tokio::test]
async fn only_so_many_layers_are_downloaded_at_a_time() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let mut registry = Registry { hangs_at: Some(10_000), ..Registry::default() };
    let own = platform::host().architecture;
    for (at, repository) in ["a", "b", "c"].into_iter().enumerate() {
        let seed = u32::try_from(at * 10).expect("small");
        let layers: Vec<_> = (seed..seed + 5).map(|seed| layer(&[("f", &noise(seed))])).collect();
        let entry = registry.variant(repository, &own, &layers);
        registry.index(repository, "1", &[entry]);
    }
    let (host, registry) = registry.start();
    // Every layer stalls after its beginning, until the timeout.
    let hasty = ImageStoreSettings { downloads: 2, idle_timeout: Duration::from_secs(2), ..settings(dir.path()) };
    let store = opened(hasty).await;
    let asked = |repository: &str| {
        let seen = registry.seen.lock().expect("not poisoned");
        let begin = format!("/v2/{repository}/blobs/");
        // The first request is for the configuration.
        seen.iter().filter(|path| path.starts_with(&begin)).count().saturating_sub(1)
    };
    let (name, credentials) = (|repository: &str| format!("{host}/{repository}:1"), anonymous());
    let error = store.pull(&name("a"), &credentials).await.expect_err("hangs");
    assert_eq!((error.kind, asked("a")), (ImageErrorKind::DeadlineExceeded, 2), "{error}");
    let (b, c) = (name("b"), name("c"));
    let (b, c) = futures::join!(store.pull(&b, &credentials), store.pull(&c, &credentials));
    assert!(b.is_err() && c.is_err());
    assert_eq!((asked("b"), asked("c")), (2, 2), "twice as many of all");
}
