//! Tests of pulls from an in-process registry with configurable faults.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    thread,
};

use super::super::{
    ImageStore, ImageStoreSettings,
    tests::{gzip, is_root, layer, numbers},
};
use super::*;

/// Content by path without `/v2/`: media type and bytes.
#[derive(Default)]
pub(super) struct Registry {
    pub(super) content: BTreeMap<String, (String, Vec<u8>)>,
    /// Required `Authorization` header; none: no authentication.
    pub(super) wants: Option<String>,
    /// Status of every response, if set.
    pub(super) status: Option<u16>,
    /// The first responses for blobs break off after this many bytes.
    pub(super) breaks_at: Option<usize>,
    /// All responses for blobs break off.
    pub(super) always_breaks: bool,
    /// Responses for blobs stall after this many bytes.
    pub(super) hangs_at: Option<usize>,
    /// Redirect target for blobs.
    pub(super) redirect: Option<String>,
    /// Number of requests to reject with 429, and the value of `Retry-After`.
    pub(super) throttles: (AtomicUsize, String),
    pub(super) broken: AtomicBool,
    pub(super) sent: AtomicU64,
    pub(super) requests: AtomicUsize,
    pub(super) seen: Mutex<Vec<String>>,
    pub(super) port: u16,
}

impl Registry {
    /// Serves until the test process ends.
    pub(super) fn start(mut self) -> (String, Arc<Self>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bindable");
        self.port = listener.local_addr().expect("bound").port();
        let (host, registry) = (format!("127.0.0.1:{}", self.port), Arc::new(self));
        let serving = Arc::clone(&registry);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let registry = Arc::clone(&serving);
                thread::spawn(move || registry.answer(stream));
            }
        });
        (host, registry)
    }

    fn answer(&self, mut stream: TcpStream) -> Option<()> {
        let mut lines = BufReader::new(stream.try_clone().ok()?).lines();
        let first = lines.next()?.ok()?;
        let headers: Vec<String> = lines.map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
        let header = |name: &str| {
            let found = headers.iter().find(|line| line.to_ascii_lowercase().starts_with(&format!("{name}: ")));
            found.map(|line| line[name.len() + 2..].to_owned())
        };
        let target = first.split(' ').nth(1)?.to_owned();
        if !target.starts_with('/') || first.starts_with('\u{16}') {
            return None;
        }
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.seen.lock().ok()?.push(target.clone());
        let path = target.split('?').next()?;
        if path == "/token" {
            let good = header("authorization").is_some_and(|value| value == "Basic dTpw");
            let (status, body) = if good { (200, r#"{"token":"good"}"#) } else { (401, "{}") };
            return write!(
                stream,
                "HTTP/1.1 {status} x\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
                body.len()
            )
            .ok();
        }
        let (left, after) = &self.throttles;
        if left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok() {
            return write!(
                stream,
                "HTTP/1.1 429 x\r\nRetry-After: {after}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            )
            .ok();
        }
        if let Some(to) = self.redirect.as_ref().filter(|_| path.contains("/blobs/")) {
            return write!(
                stream,
                "HTTP/1.1 307 x\r\nLocation: {to}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            )
            .ok();
        }
        if let Some(status) = self.status {
            return write!(stream, "HTTP/1.1 {status} x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").ok();
        }
        if self.wants.is_some() && self.wants != header("authorization") {
            let challenge = format!("Bearer realm=\"http://127.0.0.1:{}/token\",service=\"s\"", self.port);
            return write!(
                stream,
                "HTTP/1.1 401 x\r\nWWW-Authenticate: {challenge}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            )
            .ok();
        }
        let Some((kind, bytes)) = self.content.get(path.strip_prefix("/v2/")?) else {
            return write!(stream, "HTTP/1.1 404 x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").ok();
        };
        let from: usize = header("range")
            .and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok())
            .unwrap_or(0);
        let rest = bytes.get(from..)?;
        let status = if from > 0 { 206 } else { 200 };
        write!(
            stream,
            "HTTP/1.1 {status} x\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nContent-Range: bytes {from}-{}/{}\r\nConnection: close\r\n\r\n",
            rest.len(),
            bytes.len().saturating_sub(1),
            bytes.len()
        )
        .ok()?;
        let breaks = self
            .breaks_at
            .filter(|at| rest.len() > *at && (!self.broken.swap(true, Ordering::Relaxed) || self.always_breaks));
        let rest = &rest[..breaks.unwrap_or(rest.len())];
        if path.contains("/blobs/") {
            self.sent.fetch_add(rest.len() as u64, Ordering::Relaxed);
        }
        if let Some(at) = self.hangs_at.filter(|at| path.contains("/blobs/") && rest.len() > *at) {
            stream.write_all(&rest[..at]).ok()?;
            // Blocks until the client closes the connection.
            let mut end = [0];
            return std::io::Read::read(&mut stream, &mut end).ok().map(drop);
        }
        stream.write_all(rest).ok()
    }

    pub(super) fn put(&mut self, path: String, kind: &str, bytes: &[u8]) {
        self.content.insert(path, (kind.to_owned(), bytes.to_vec()));
    }

    /// Adds an image; returns the digest its tag points to: an index whose first entry is an attestation.
    pub(super) fn image(&mut self, repository: &str, tag: &str, files: &[(&str, &str)]) -> Digest {
        let mut other = serde_json::json!(Descriptor::of(model::OCI_MANIFEST, b"attestation"));
        other["platform"] = serde_json::json!({"os": "unknown", "architecture": "unknown"});
        let own = self.variant(repository, &platform::host().architecture, &[layer(files)]);
        self.index(repository, tag, &[other, own])
    }

    /// Adds an image for an architecture; returns its index entry.
    pub(super) fn variant(&mut self, repository: &str, architecture: &str, layers: &[Vec<u8>]) -> serde_json::Value {
        let packed: Vec<Vec<u8>> = layers.iter().map(|layer| gzip(layer)).collect();
        let diff_ids: Vec<Digest> = layers.iter().map(|layer| Digest::of(layer)).collect();
        let config = serde_json::json!({
            "architecture": architecture, "os": "linux", "config": {"Cmd": ["x"]},
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        });
        let config = config.to_string().into_bytes();
        let descriptor = |packed: &Vec<u8>| Descriptor::of("application/vnd.oci.image.layer.v1.tar+gzip", packed);
        let manifest = serde_json::json!({
            "schemaVersion": 2, "mediaType": model::OCI_MANIFEST,
            "config": Descriptor::of(model::OCI_CONFIG, &config),
            "layers": packed.iter().map(descriptor).collect::<Vec<_>>(),
        });
        let manifest = manifest.to_string().into_bytes();
        self.put(format!("{repository}/manifests/{}", Digest::of(&manifest)), model::OCI_MANIFEST, &manifest);
        for blob in packed.iter().chain([&config]) {
            self.put(format!("{repository}/blobs/{}", Digest::of(blob)), "application/octet-stream", blob);
        }
        let mut entry = serde_json::json!(Descriptor::of(model::OCI_MANIFEST, &manifest));
        entry["platform"] = serde_json::json!({"os": "linux", "architecture": architecture});
        entry
    }

    /// Adds an index of these entries; returns its digest.
    pub(super) fn index(&mut self, repository: &str, tag: &str, entries: &[serde_json::Value]) -> Digest {
        let index = serde_json::json!({"schemaVersion": 2, "mediaType": model::OCI_INDEX, "manifests": entries});
        let index = index.to_string().into_bytes();
        let digest = Digest::of(&index);
        self.put(format!("{repository}/manifests/{tag}"), model::OCI_INDEX, &index);
        self.put(format!("{repository}/manifests/{digest}"), model::OCI_INDEX, &index);
        digest
    }
}

pub(super) fn settings(dir: &Path) -> ImageStoreSettings {
    ImageStoreSettings { registries: vec![dir.join("certs.d")], ..ImageStoreSettings::new(dir.join("root")) }
}

pub(super) async fn store(dir: &Path) -> ImageStore {
    ImageStore::open(settings(dir)).await.expect("opens")
}

pub(super) fn anonymous() -> RegistryCredentials {
    RegistryCredentials::default()
}

#[tokio::test]
async fn an_image_is_pulled_from_this_machine_over_plain_http() {
    // AC-09b-I2, AC-09b-I8, AC-09b-I15
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let mut registry = Registry::default();
    let digest = registry.image("a/b", "1", &[("etc/passwd", "root")]);
    let (host, registry) = registry.start();
    let store = store(dir.path()).await;
    let by_digest = format!("{host}/a/b@{digest}");
    let pulled = store.pull(&by_digest, &anonymous()).await.expect("pulled");
    assert_eq!((pulled.repo_tags(), pulled.repo_digests()), (vec![], vec![by_digest.clone()]));
    let blobs = registry.sent.load(Ordering::Relaxed);
    let again = store.pull(&format!("{host}/a/b:1"), &anonymous()).await.expect("here");
    assert_eq!((again.id, again.repo_tags()), (pulled.id, vec![format!("{host}/a/b:1")]));
    assert_eq!(registry.sent.load(Ordering::Relaxed), blobs, "nothing is downloaded twice");
    assert!(dir.path().join("root/layers/1/d/etc/passwd").exists());
    store.collect().await.expect("collected");
    let blobs = fs::read_dir(dir.path().join("root/content/blobs/sha256")).expect("listable").count();
    assert_eq!(blobs, 3, "configuration, manifest and index stay, packed layers go");
}

#[tokio::test]
async fn a_download_that_breaks_off_goes_on() {
    // AC-09b-I6
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let noise: String = (0..4000).map(|i: u32| Digest::of(&i.to_le_bytes()).hex()).collect();
    let mut registry = Registry { breaks_at: Some(60_000), ..Registry::default() };
    registry.image("a", "1", &[("noise", &noise)]);
    let size: u64 =
        registry.content.iter().filter(|(path, _)| path.contains("/blobs/")).map(|(_, (_, b))| b.len() as u64).sum();
    let (host, registry) = registry.start();
    let store = store(dir.path()).await;
    store.pull(&format!("{host}/a:1"), &anonymous()).await.expect("pulled");
    assert!(registry.broken.load(Ordering::Relaxed));
    let sent = registry.sent.load(Ordering::Relaxed);
    assert!(sent * 100 <= size * 105, "{sent} of {size}");
}

#[tokio::test]
async fn credentials_are_each_callers_own() {
    // AC-09b-I7
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let mut registry = Registry { wants: Some("Bearer good".into()), ..Registry::default() };
    registry.image("secret", "1", &[("f", "x")]);
    let (host, _registry) = registry.start();
    let store = store(dir.path()).await;
    let name = format!("{host}/secret:1");
    let with = |password: &str| RegistryCredentials { username: "u".into(), password: password.into(), ..anonymous() };
    let (good, bad, none) = (with("p"), with("wrong"), anonymous());
    let (good, bad, none) = futures::join!(store.pull(&name, &good), store.pull(&name, &bad), store.pull(&name, &none));
    good.expect("the right password");
    for error in [bad.expect_err("the wrong password"), none.expect_err("no password")] {
        let begin = format!(
            "failed to pull and unpack image \"{name}\": failed to resolve reference \"{name}\": failed to authorize: "
        );
        assert!(error.text.starts_with(&begin), "{error}");
        assert_eq!(error.kind, ImageErrorKind::Unknown);
    }
    store.pull(&name, &with("wrong")).await.expect_err("present, and still not theirs");
}

#[tokio::test]
async fn those_who_ask_for_the_same_share_the_work() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let mut registry = Registry::default();
    registry.image("a", "1", &[("f", "x")]);
    let (host, registry) = registry.start();
    let store = store(dir.path()).await;
    let (name, credentials) = (format!("{host}/a:1"), anonymous());
    let all = futures::future::join_all((0..10).map(|_| store.pull(&name, &credentials))).await;
    let ids: std::collections::BTreeSet<_> = all.into_iter().map(|pulled| pulled.expect("pulled").id).collect();
    assert_eq!(ids.len(), 1);
    assert_eq!(registry.requests.load(Ordering::Relaxed), 4, "index, manifest, configuration, layer");
}

#[tokio::test]
async fn mirrors_are_tried_first_with_the_registry_as_ns_parameter() {
    // AC-09b-I9
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let mut upstream = Registry::default();
    upstream.image("a", "1", &[("f", "x")]);
    let (upstream_host, upstream) = upstream.start();
    let (mirror_host, mirror) = Registry::default().start();
    let folder = dir.path().join("certs.d/r.tld");
    fs::create_dir_all(&folder).expect("makeable");
    let text = format!("server = \"http://{upstream_host}\"\n[host.\"http://{mirror_host}\"]\n");
    fs::write(folder.join("hosts.toml"), text).expect("writable");
    let store = store(dir.path()).await;
    let pulled = store.pull("r.tld/a:1", &anonymous()).await.expect("pulled");
    assert_eq!(pulled.repo_tags(), ["r.tld/a:1"]);
    let seen = mirror.seen.lock().expect("not poisoned").clone();
    assert_eq!(seen.first().map(String::as_str), Some("/v2/a/manifests/1?ns=r.tld"));
    assert!(upstream.requests.load(Ordering::Relaxed) >= 4);
}

#[tokio::test]
async fn pull_errors_have_the_texts_that_kubelets_expect() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let mut registry = Registry::default();
    let digest = registry.image("a", "1", &[("f", "x")]);
    let blob = registry.content.keys().find(|path| path.contains("/blobs/")).cloned().expect("a blob");
    registry.put(blob, "x", b"something else entirely");
    registry.put("loop/manifests/1".into(), model::OCI_INDEX, br#"{"schemaVersion":2,"manifests":[]}"#);
    registry.put(
        "old/manifests/1".into(),
        "application/vnd.docker.distribution.manifest.v1+prettyjws",
        br#"{"schemaVersion":1}"#,
    );
    registry.put("bad/manifests/1".into(), model::OCI_MANIFEST, b"<html>");
    registry.put(format!("wrong/manifests/{digest}"), model::OCI_INDEX, b"{}");
    let (host, _registry) = registry.start();
    let (forbidden, _f) = Registry { status: Some(403), ..Registry::default() }.start();
    let store = store(dir.path()).await;
    for (name, kind, text) in [
        (format!("{host}/a:1"), ImageErrorKind::DataLoss, "mismatch"),
        (format!("{host}/none:1"), ImageErrorKind::NotFound, "none:1: not found"),
        (format!("{host}/loop:1"), ImageErrorKind::NotFound, "no match for platform in manifest: not found"),
        (format!("{host}/old:1"), ImageErrorKind::Unknown, "v1+prettyjws"),
        (format!("{host}/bad:1"), ImageErrorKind::Unknown, "invalid manifest"),
        (format!("{host}/wrong@{digest}"), ImageErrorKind::DataLoss, "digest mismatch"),
        (
            format!("{forbidden}/a:1"),
            ImageErrorKind::Unknown,
            "pull access denied, repository does not exist or may require authorization: ",
        ),
        ("127.0.0.1:1/a:1".to_owned(), ImageErrorKind::Unavailable, "failed to pull and unpack image"),
        ("Not A Ref!!".to_owned(), ImageErrorKind::InvalidArgument, "invalid reference format"),
        (String::new(), ImageErrorKind::InvalidArgument, "empty"),
    ] {
        let error = store.pull(&name, &anonymous()).await.expect_err(&name);
        assert!(error.kind == kind && error.text.contains(text), "{name}: {:?}: {error}", error.kind);
    }
    assert!(store.list("").expect("a list").is_empty() && numbers(&dir.path().join("root")).is_empty());
}
