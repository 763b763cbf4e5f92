//! Private `docker-registry` (Debian's package), images to push, and a proxy that cuts connections.

use std::{
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use berth_runtime::images::{
    digest::Digest,
    model::{Descriptor, OCI_CONFIG, OCI_INDEX, OCI_MANIFEST},
    platform,
};
use berth_testkit::reservation::free_ports;
use flate2::{Compression, write::GzEncoder};
use serde_json::{Value, json};

/// htpasswd hash of `secret`.
const SECRET: &str = "$2b$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

/// Reason why this machine cannot run it; `None` if it can.
pub fn obstacle() -> Option<&'static str> {
    if !nix::unistd::geteuid().is_root() {
        return Some("needs root: layers are unpacked");
    }
    let found = Command::new("docker-registry").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    found.is_err().then_some("needs docker-registry")
}

/// Transport and authentication of the registry.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum RegistryTransport {
    Plain,
    /// User `user` with password `secret`.
    BasicAuth,
    /// TLS certificate of a CA that is written to `ca.crt` beside the storage.
    Tls,
    /// Like `Tls`; clients must present a certificate of that CA: `client.cert` with `client.key`.
    Mutual,
}

/// A running registry; killed when dropped. Its storage is below the directory and outlives it.
pub struct Registry {
    process: Child,
    pub port: u16,
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Registry {
    pub fn start(place: &Path, transport: RegistryTransport) -> Self {
        let port = free_ports::<1>()[0];
        let mut http = json!({"addr": format!("127.0.0.1:{port}")});
        if matches!(transport, RegistryTransport::Tls | RegistryTransport::Mutual) {
            let (certificate, key) = certificates(place);
            http["tls"] = json!({"certificate": certificate, "key": key});
            if transport == RegistryTransport::Mutual {
                http["tls"]["clientcas"] = json!([place.join("ca.crt")]);
            }
        }
        let mut config = json!({
            "version": 0.1,
            "log": {"level": "error"},
            "storage": {"filesystem": {"rootdirectory": place.join("storage")}},
            "http": http,
        });
        if transport == RegistryTransport::BasicAuth {
            let users = place.join("users");
            fs::write(&users, format!("user:{SECRET}\n")).expect("writable");
            config["auth"] = json!({"htpasswd": {"realm": "tests", "path": users}});
        }
        let file = place.join(format!("registry-{port}.yml"));
        fs::write(&file, config.to_string()).expect("writable");
        let log = fs::File::create(place.join("registry.log")).expect("makeable");
        let process = Command::new("docker-registry")
            .arg("serve")
            .arg(&file)
            .env("OTEL_TRACES_EXPORTER", "none")
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("starts");
        let registry = Self { process, port };
        let begun = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", fs::read_to_string(place.join("registry.log")));
            thread::sleep(Duration::from_millis(20));
        }
        registry
    }

    pub fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    fn ask(&self, method: &str, path: &str, kind: &str, body: &[u8]) -> (u16, String) {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("connects");
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body)).expect("sent");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("answered");
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        let location = answer.lines().find_map(|line| line.strip_prefix("Location: "));
        (status, location.unwrap_or_default().trim().to_owned())
    }

    fn push_blob(&self, repository: &str, bytes: &[u8]) {
        let (_, location) = self.ask("POST", &format!("/v2/{repository}/blobs/uploads/"), "x/y", b"");
        let path = location
            .split_once("://")
            .map_or(location.as_str(), |(_, rest)| rest.find('/').map_or("", |at| &rest[at..]));
        let separator = if path.contains('?') { '&' } else { '?' };
        let path = format!("{path}{separator}digest={}", Digest::of(bytes));
        let (status, _) = self.ask("PUT", &path, "application/octet-stream", bytes);
        assert_eq!(status, 201, "{path}");
    }

    fn push_manifest(&self, repository: &str, tag: &str, kind: &str, manifest: &Value) -> Descriptor {
        let bytes = manifest.to_string().into_bytes();
        let (status, _) = self.ask("PUT", &format!("/v2/{repository}/manifests/{tag}"), kind, &bytes);
        assert_eq!(status, 201, "{repository}:{tag}");
        Descriptor::of(kind, &bytes)
    }

    /// Pushes an image of these layers for an architecture.
    pub fn push(&self, repository: &str, tag: &str, architecture: &str, layers: &[Vec<u8>]) -> Descriptor {
        self.push_with(repository, tag, json!({"Cmd": [architecture]}), (architecture, layers))
    }

    /// Like [`Registry::push`], with the container configuration of the image.
    pub fn push_with(
        &self,
        repository: &str,
        tag: &str,
        inherited: Value,
        (architecture, layers): (&str, &[Vec<u8>]),
    ) -> Descriptor {
        let packed: Vec<Vec<u8>> = layers.iter().map(|layer| gzip(layer)).collect();
        let diff_ids: Vec<Digest> = layers.iter().map(|layer| Digest::of(layer)).collect();
        let config = json!({
            "architecture": architecture, "os": "linux", "config": inherited,
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        });
        let config = config.to_string().into_bytes();
        packed.iter().chain([&config]).for_each(|bytes| self.push_blob(repository, bytes));
        let manifest = json!({
            "schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": Descriptor::of(OCI_CONFIG, &config),
            "layers": packed.iter().map(|layer| Descriptor::of(LAYER, layer)).collect::<Vec<_>>(),
        });
        self.push_manifest(repository, tag, OCI_MANIFEST, &manifest)
    }

    /// Pushes an index with an image for another architecture and one for this.
    pub fn push_for_all(&self, repository: &str, tag: &str) -> Descriptor {
        let own = platform::host().architecture;
        let other = if own == "s390x" { "amd64" } else { "s390x" };
        let entry = |architecture: &str| {
            let layers = [layer("for", architecture.as_bytes())];
            let image = self.push(repository, &format!("{tag}-{architecture}"), architecture, &layers);
            let mut entry = json!(image);
            entry["platform"] = json!({"os": "linux", "architecture": architecture});
            entry
        };
        let index = json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry(other), entry(&own)]});
        self.push_manifest(repository, tag, OCI_INDEX, &index)
    }
}

/// Creates a CA, a client certificate, and a certificate of 127.0.0.1; returns the paths of the latter and its key.
fn certificates(place: &Path) -> (PathBuf, PathBuf) {
    use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
    let mut authority = CertificateParams::new(Vec::new()).expect("parameters");
    authority.distinguished_name.push(DnType::CommonName, "authority of the tests");
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().expect("a key");
    fs::write(place.join("ca.crt"), authority.self_signed(&key).expect("signed").pem()).expect("writable");
    let authority = Issuer::new(authority, key);
    let write = |name: &str, mut parameters: CertificateParams, use_for: ExtendedKeyUsagePurpose| {
        let key = KeyPair::generate().expect("a key");
        parameters.extended_key_usages = vec![use_for];
        let signed = parameters.signed_by(&key, &authority).expect("signed");
        let files = (place.join(format!("{name}.cert")), place.join(format!("{name}.key")));
        fs::write(&files.0, signed.pem()).expect("writable");
        fs::write(&files.1, key.serialize_pem()).expect("writable");
        files
    };
    let parameters = |names: Vec<String>| CertificateParams::new(names).expect("parameters");
    write("client", parameters(Vec::new()), ExtendedKeyUsagePurpose::ClientAuth);
    write("server", parameters(vec!["127.0.0.1".to_owned()]), ExtendedKeyUsagePurpose::ServerAuth)
}

/// A layer with one file.
pub fn layer(name: &str, content: &[u8]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(content.len() as u64);
    header.set_mode(0o644);
    builder.append_data(&mut header, name, content).expect("in memory");
    builder.into_inner().expect("in memory")
}

/// An archive in `docker save` format, with one unnamed image.
pub fn saved(layers: &[Vec<u8>]) -> Vec<u8> {
    let diff_ids: Vec<Digest> = layers.iter().map(|layer| Digest::of(layer)).collect();
    let config = json!({"architecture": "any", "os": "linux", "rootfs": {"type": "layers", "diff_ids": diff_ids}});
    let names: Vec<String> = (0..layers.len()).map(|at| format!("{at}/layer.tar")).collect();
    let manifest = json!([{"Config": "config.json", "RepoTags": null, "Layers": names}]);
    let texts = [("config.json", config.to_string()), ("manifest.json", manifest.to_string())];
    let mut builder = tar::Builder::new(Vec::new());
    let texts = texts.iter().map(|(name, text)| (*name, text.as_bytes()));
    for (name, bytes) in texts.chain(names.iter().map(String::as_str).zip(layers.iter().map(Vec::as_slice))) {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, bytes).expect("in memory");
    }
    builder.into_inner().expect("in memory")
}

/// Compresses with gzip.
pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).expect("in memory");
    encoder.finish().expect("in memory")
}

/// A proxy to a registry that cuts one connection after that many response bytes; returns its port and the number of
/// forwarded bytes.
pub fn cut_line(port: u16, after: u64) -> (u16, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let own = listener.local_addr().expect("bound").port();
    let through = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&through);
    let is_cut = Arc::new(std::sync::atomic::AtomicBool::new(false));
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let (counted, is_cut) = (Arc::clone(&counted), Arc::clone(&is_cut));
            thread::spawn(move || -> std::io::Result<()> {
                let server = TcpStream::connect(("127.0.0.1", port))?;
                let (mut from, mut to) = (client.try_clone()?, server.try_clone()?);
                thread::spawn(move || std::io::copy(&mut from, &mut to));
                let (mut from, mut to) = (server, client);
                let mut buffer = vec![0; 16 << 10];
                loop {
                    let count = from.read(&mut buffer)?;
                    if count == 0 {
                        return to.shutdown(std::net::Shutdown::Both);
                    }
                    let sum = counted.fetch_add(count as u64, Ordering::Relaxed) + count as u64;
                    if sum > after && !is_cut.swap(true, Ordering::Relaxed) {
                        from.shutdown(std::net::Shutdown::Both)?;
                        return to.shutdown(std::net::Shutdown::Write);
                    }
                    to.write_all(&buffer[..count])?;
                }
            });
        }
    });
    (own, through)
}
