//! Image pulls of the embedded runtime from Debian's `docker-registry`.
//!
//! Behavior: spec 09b §4. Misbehaving registries are covered by the tests of `berth_runtime::images::store::pull`. Each test
//! needs root and that package, and reports its name where it is skipped.

pub mod registry;
mod unpack_process;

use std::{
    fs,
    path::Path,
    sync::{Arc, atomic::Ordering},
};

use berth_runtime::images::{
    ImageErrorKind, ImageStore, ImageStoreSettings, RegistryCredentials,
    commands::{self, CommandResponse, ImageCommand},
    layers::UnpackHelpers,
    platform,
    record::ImageRecord,
};
use serde_json::json;

use registry::{Registry, RegistryTransport, cut_line, layer, obstacle};

fn skips(test: &str) -> bool {
    let why = obstacle();
    if let Some(why) = why {
        assert!(std::env::var_os("CI").is_none(), "{test} may not be skipped on CI: {why}");
        println!("skipped {test}: {why}");
    }
    why.is_some()
}

async fn store(place: &Path) -> ImageStore {
    let helpers = UnpackHelpers { unpacker: Some(env!("CARGO_BIN_EXE_berth").into()), unpacks: None };
    let registries = vec![place.join("certs.d")];
    ImageStore::open(ImageStoreSettings { registries, helpers, ..ImageStoreSettings::new(place.join("root")) })
        .await
        .expect("opens")
}

fn hosts(place: &Path, host: &str, text: &str) {
    let folder = place.join("certs.d").join(host);
    fs::create_dir_all(&folder).expect("makeable");
    fs::write(folder.join("hosts.toml"), text).expect("writable");
}

async fn pull(store: &ImageStore, name: &str) -> Arc<ImageRecord> {
    store.pull(name, &RegistryCredentials::default()).await.expect(name)
}

fn user(password: &str) -> RegistryCredentials {
    RegistryCredentials { username: "user".into(), password: password.into(), ..RegistryCredentials::default() }
}

#[tokio::test]
async fn images_are_pulled_by_tag_and_digest_for_this_machine() {
    // AC-09b-I2, AC-09b-I15
    if skips("images_are_pulled_by_tag_and_digest_for_this_machine") {
        return;
    }
    let place = tempfile::tempdir().expect("a directory");
    let registry = Registry::start(place.path(), RegistryTransport::Plain);
    let (host, index) = (registry.host(), registry.push_for_all("a/b", "1"));
    let store = store(place.path()).await;
    let by_digest = pull(&store, &format!("{host}/a/b@{}", index.digest)).await;
    assert_eq!(
        (by_digest.repo_tags(), by_digest.repo_digests()),
        (vec![], vec![format!("{host}/a/b@{}", index.digest)])
    );
    let image = pull(&store, &format!("{host}/a/b:1")).await;
    assert_eq!(image.repo_tags(), [format!("{host}/a/b:1")]);
    assert_eq!((image.id, &image.config.cmd), (by_digest.id, &vec![platform::host().architecture]));
    let content = fs::read_to_string(place.path().join(format!("root/layers/{}/d/for", image.layers[0])));
    assert_eq!(content.expect("there"), platform::host().architecture);
    let missing = store.pull(&format!("{host}/a/b:2"), &RegistryCredentials::default()).await.expect_err("no such tag");
    assert_eq!(missing.kind, ImageErrorKind::NotFound);
}

#[tokio::test]
async fn a_guarded_registry_wants_the_right_password() {
    // AC-09b-I7
    if skips("a_guarded_registry_wants_the_right_password") {
        return;
    }
    let place = tempfile::tempdir().expect("a directory");
    Registry::start(place.path(), RegistryTransport::Plain).push(
        "p",
        "1",
        &platform::host().architecture,
        &[layer("f", b"x")],
    );
    let registry = Registry::start(place.path(), RegistryTransport::BasicAuth);
    let (store, name) = (store(place.path()).await, format!("{}/p:1", registry.host()));
    let (good, bad, anonymous) = (user("secret"), user("guess"), RegistryCredentials::default());
    let (good, bad, anonymous) =
        futures::join!(store.pull(&name, &good), store.pull(&name, &bad), store.pull(&name, &anonymous));
    assert_eq!(good.expect("the password").repo_tags(), [name]);
    for refused in [bad, anonymous] {
        let refused = refused.expect_err("no password");
        assert!(refused.text.contains("pull access denied, repository does not exist"), "{refused}");
    }
}

#[tokio::test]
async fn certificates_are_checked_against_the_authorities_of_the_registry() {
    if skips("certificates_are_checked_against_the_authorities_of_the_registry") {
        return;
    }
    let place = tempfile::tempdir().expect("a directory");
    let plain = Registry::start(place.path(), RegistryTransport::Plain);
    plain.push("p", "1", &platform::host().architecture, &[layer("f", b"x")]);
    drop(plain);
    let registry = Registry::start(place.path(), RegistryTransport::Tls);
    let (store, url) = (store(place.path()).await, format!("https://{}", registry.host()));
    let authority = place.path().join("ca.crt");
    // Unresolvable names: only their mirrors are used.
    for (host, settings, expected) in [
        ("unknown.test", String::new(), None),
        ("known.test", format!("ca = {authority:?}"), Some(())),
        ("unchecked.test", "skip_verify = true".to_owned(), Some(())),
    ] {
        hosts(place.path(), host, &format!("server = {url:?}\n{settings}\n"));
        let pulled = store.pull(&format!("{host}/p:1"), &RegistryCredentials::default()).await;
        assert_eq!(pulled.as_ref().ok().map(|_| ()), expected, "{host}: {pulled:?}");
    }
    // Docker's layout: a CA file in the registry's directory.
    let folder = place.path().join("certs.d").join(format!("127.0.0.1_{}_", registry.port));
    fs::create_dir_all(&folder).expect("makeable");
    fs::copy(&authority, folder.join("ca.crt")).expect("copied");
    pull(&store, &format!("{}/p:1", registry.host())).await;
}

#[tokio::test]
async fn certificates_are_shown_to_registries_that_want_one() {
    if skips("certificates_are_shown_to_registries_that_want_one") {
        return;
    }
    let place = tempfile::tempdir().expect("a directory");
    let plain = Registry::start(place.path(), RegistryTransport::Plain);
    plain.push("p", "1", &platform::host().architecture, &[layer("f", b"x")]);
    drop(plain);
    let registry = Registry::start(place.path(), RegistryTransport::Mutual);
    let (store, url) = (store(place.path()).await, format!("https://{}", registry.host()));
    let read = |name: &str| fs::read_to_string(place.path().join(name)).expect("there");
    fs::write(place.path().join("both.pem"), read("client.cert") + &read("client.key")).expect("writable");
    let (own, both) = (place.path().join("client"), place.path().join("both.pem"));
    let (certificate, key) = (own.with_extension("cert"), own.with_extension("key"));
    // Unresolvable names: only their mirrors are used. A client certificate of another CA does not interfere.
    let another = rcgen::generate_simple_self_signed(vec!["x".to_owned()]).expect("made");
    let foreign = place.path().join("foreign.pem");
    fs::write(&foreign, another.cert.pem() + &another.signing_key.serialize_pem()).expect("writable");
    for (host, client, expected) in [
        ("nobody.test", String::new(), None),
        ("pair.test", format!("client = [{certificate:?}, {key:?}]"), Some(())),
        ("pairs.test", format!("client = [[{foreign:?}, {foreign:?}], [{certificate:?}, {key:?}]]"), Some(())),
        ("both.test", format!("client = {both:?}"), Some(())),
        ("foreign.test", format!("client = {foreign:?}"), None),
        ("missing.test", "client = \"/nowhere.pem\"".to_owned(), None),
    ] {
        let authority = place.path().join("ca.crt");
        hosts(place.path(), host, &format!("server = {url:?}\nca = {authority:?}\n{client}\n"));
        let pulled = store.pull(&format!("{host}/p:1"), &RegistryCredentials::default()).await;
        assert_eq!(pulled.as_ref().ok().map(|_| ()), expected, "{host}: {pulled:?}");
    }
    // Docker's layout: CA, client certificate, and key in the registry's directory.
    let folder = place.path().join("certs.d").join(registry.host());
    fs::create_dir_all(&folder).expect("makeable");
    for name in ["ca.crt", "client.cert", "client.key"] {
        fs::copy(place.path().join(name), folder.join(name)).expect("copied");
    }
    pull(&store, &format!("{}/p:1", registry.host())).await;
}

#[tokio::test]
async fn an_image_is_shown_with_all_that_is_known_of_it() {
    if skips("an_image_is_shown_with_all_that_is_known_of_it") {
        return;
    }
    let place = tempfile::tempdir().expect("a directory");
    let registry = Registry::start(place.path(), RegistryTransport::Plain);
    let (host, index) = (registry.host(), registry.push_for_all("a/b", "1"));
    let store = store(place.path()).await;
    let image = pull(&store, &format!("{host}/a/b:1")).await;
    let order = ImageCommand::Inspect { name: format!("{host}/a/b:1") };
    let (sender, mut receiver) = tokio::sync::mpsc::channel(64);
    commands::execute(&store, order, None, &sender).await.expect("shown");
    drop(sender);
    let mut text = String::new();
    while let Some(CommandResponse::Piece(piece)) = receiver.recv().await {
        text.push_str(&piece);
    }
    let shown: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let own = platform::host().architecture;
    for (at, expected) in [
        ("/id", json!(image.id())),
        ("/repoTags/0", json!(format!("{host}/a/b:1"))),
        ("/target/digest", json!(index.digest)),
        ("/manifest/digest", json!(image.manifest.digest)),
        ("/platform/architecture", json!(own)),
        ("/layers/0/number", json!(image.layers[0])),
        ("/layers/0/diffID", shown["config"]["rootfs"]["diff_ids"][0].clone()),
        ("/layers/0/size", json!(own.len())),
        ("/config/config/Cmd/0", json!(own)),
    ] {
        assert_eq!(shown.pointer(at), Some(&expected), "{at} of {shown}");
    }
    let unknown = ImageCommand::Inspect { name: "nothing".to_owned() };
    let (sender, _receiver) = tokio::sync::mpsc::channel(64);
    let unknown = commands::execute(&store, unknown, None, &sender).await.expect_err("unknown");
    assert_eq!(unknown.kind, ImageErrorKind::NotFound);
}

#[tokio::test]
async fn mirrors_are_asked_in_their_order_over_plain_http_where_that_is_configured() {
    // AC-09b-I9
    if skips("mirrors_are_asked_in_their_order_over_plain_http_where_that_is_configured") {
        return;
    }
    let place = tempfile::tempdir().expect("a directory");
    let (first, second) = (place.path().join("first"), place.path().join("second"));
    [&first, &second].into_iter().for_each(|folder| fs::create_dir(folder).expect("makeable"));
    let (empty, full) =
        (Registry::start(&first, RegistryTransport::Plain), Registry::start(&second, RegistryTransport::Plain));
    full.push("team/p", "1", &platform::host().architecture, &[layer("f", b"x")]);
    let mirrors = format!(
        "server = \"https://nowhere.test\"\n[host.\"http://{}\"]\n[host.\"http://{}\"]\n",
        empty.host(),
        full.host()
    );
    hosts(place.path(), "registry.test", &mirrors);
    let store = store(place.path()).await;
    assert_eq!(pull(&store, "registry.test/team/p:1").await.repo_tags(), ["registry.test/team/p:1"]);
}

#[tokio::test]
async fn a_download_that_breaks_off_is_resumed() {
    // AC-09b-I6
    if skips("a_download_that_breaks_off_is_resumed") {
        return;
    }
    let place = tempfile::tempdir().expect("a directory");
    let registry = Registry::start(place.path(), RegistryTransport::Plain);
    let mut noise = vec![0u8; 8 << 20];
    rand::fill(&mut noise[..]);
    registry.push("big", "1", &platform::host().architecture, &[layer("noise", &noise)]);
    let (port, through) = cut_line(registry.port, (noise.len() * 6 / 10) as u64);
    let store = store(place.path()).await;
    let image = pull(&store, &format!("127.0.0.1:{port}/big:1")).await;
    let unpacked = fs::read(place.path().join(format!("root/layers/{}/d/noise", image.layers[0]))).expect("there");
    assert!(unpacked == noise);
    let through = through.load(Ordering::Relaxed);
    assert!(through > image.size && through < image.size * 105 / 100, "{through} bytes for {}", image.size);
}

#[tokio::test]
async fn what_is_broken_is_fetched_again() {
    if skips("what_is_broken_is_fetched_again") {
        return;
    }
    use berth_runtime::images::store::verification::RepairMode;
    let place = tempfile::tempdir().expect("a directory");
    let registry = Registry::start(place.path(), RegistryTransport::Plain);
    let layers = [layer("a", b"right"), layer("b", b"b")];
    registry.push("p", "1", &platform::host().architecture, &layers);
    let store = store(place.path()).await;
    let name = format!("{}/p:1", registry.host());
    let image = pull(&store, &name).await;
    let file = |number: u64| place.path().join(format!("root/layers/{number}/d/a"));
    fs::write(file(image.layers[0]), "wrong").expect("writable");
    let verified = store.verify(RepairMode::Yes, Arc::default()).await.expect("verified");
    assert_eq!(verified.findings.len(), 1, "{verified:?}");
    assert_eq!(verified.findings[0].repair, Some(Ok(())));
    let repaired = store.status(&name).expect("a name").expect("there");
    assert_eq!((repaired.id, repaired.layers[1], repaired.repo_tags()), (image.id, image.layers[1], image.repo_tags()));
    assert_eq!(fs::read_to_string(file(repaired.layers[0])).expect("there"), "right");
    assert!(!file(image.layers[0]).exists());
    let verified = store.verify(RepairMode::No, Arc::default()).await.expect("verified");
    assert_eq!((verified.images, verified.layers, verified.findings.len()), (1, 2, 0));
}
