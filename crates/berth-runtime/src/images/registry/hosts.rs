//! Registry endpoints and mirrors: `hosts.toml` in the format of containerd.
//!
//! Blocking: reads small files. Implements spec 09b §4.1.

use std::{
    collections::BTreeMap,
    fs, io,
    net::{IpAddr, Ipv6Addr},
    path::{Path, PathBuf},
    time::Duration,
};

use serde::Deserialize;
use tracing::warn;

use crate::images::error::ImageError;

/// Maximum size of a configuration file, bytes.
const LONGEST: u64 = 1 << 20;

/// A client certificate and its key; both may be in one file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KeyPair {
    /// PEM file with the certificate and its chain.
    pub certificate: PathBuf,
    /// PEM file with the key.
    pub key: PathBuf,
}

/// A host that serves images of a registry.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Endpoint {
    /// `https` or `http`.
    pub scheme: String,
    /// `host` or `host:port`.
    pub authority: String,
    /// Path before the repository: `/v2`.
    pub prefix: String,
    /// Whether the host may resolve tags.
    pub resolves: bool,
    /// CA certificates trusted in addition to the system's.
    pub authorities: Vec<PathBuf>,
    /// Client certificates.
    pub pairs: Vec<KeyPair>,
    /// Connect timeout; none: the default.
    pub dial_timeout: Option<Duration>,
    /// Whether any server certificate is accepted.
    pub skips_verification: bool,
    /// Additional request headers.
    pub headers: Vec<(String, String)>,
    /// Whether plain HTTP is tried after a TLS failure: only for this machine.
    pub falls_back: bool,
}

impl Endpoint {
    /// Whether this is the plain HTTP fallback of an endpoint.
    pub fn is_fallback(&self) -> bool {
        self.falls_back && self.scheme == "http"
    }
}

#[derive(Deserialize, Default)]
struct File {
    server: Option<String>,
    #[serde(default)]
    host: toml::Table,
    #[serde(flatten)]
    own: Host,
}

#[derive(Deserialize, Default, Clone)]
struct Host {
    capabilities: Option<Vec<String>>,
    ca: Option<OneOrMany>,
    client: Option<ClientKeyPairs>,
    dial_timeout: Option<String>,
    #[serde(default)]
    skip_verify: bool,
    #[serde(default)]
    override_path: bool,
    #[serde(default)]
    header: BTreeMap<String, OneOrMany>,
}

#[derive(Deserialize, Clone)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

/// `"both.pem"`, `["own.cert", "own.key"]`, or a list of such pairs; files that contain both may be listed too, as in
/// containerd.
#[derive(Deserialize, Clone)]
#[serde(untagged)]
enum ClientKeyPairs {
    One(String),
    Many(Vec<OneOrMany>),
}

impl ClientKeyPairs {
    /// Blocking: a list of two is a pair unless the first file contains a key.
    fn pairs(&self, folder: &Path) -> Result<Vec<KeyPair>, String> {
        let pair = |certificate: &str, key: &str| {
            let key = if key.is_empty() { certificate } else { key };
            KeyPair { certificate: folder.join(certificate), key: folder.join(key) }
        };
        let own = |entry: &OneOrMany| match (entry, entry.list().as_slice()) {
            (OneOrMany::One(path), _) => Ok(pair(path, "")),
            (_, [both]) => Ok(pair(both, "")),
            (_, [certificate, key]) => Ok(pair(certificate, key)),
            (_, other) => Err(format!("client: expected a pair of certificate and key, found {other:?}")),
        };
        match self {
            Self::One(path) => Ok(vec![pair(path, "")]),
            Self::Many(list) => match list.as_slice() {
                [OneOrMany::One(first), OneOrMany::One(second)] if !holds_key(&folder.join(first)) => {
                    Ok(vec![pair(first, second)])
                }
                entries => entries.iter().map(own).collect(),
            },
        }
    }
}

fn holds_key(path: &Path) -> bool {
    read(path).is_ok_and(|text| text.contains("PRIVATE KEY-----"))
}

impl OneOrMany {
    fn list(&self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text.clone()],
            Self::Many(list) => list.clone(),
        }
    }
}

/// Endpoints for images of a registry, in the order to try; `roots` contain a directory per registry.
///
/// # Errors
/// A `hosts.toml` that is unreadable or invalid, with its path: falling back to the registry itself might be unwanted.
pub fn endpoints(host: &str, roots: &[PathBuf]) -> Result<Vec<Endpoint>, ImageError> {
    let Some(folder) = folder(host, roots) else { return Ok(vec![upstream(host)]) };
    let path = folder.join("hosts.toml");
    let broken = |error: String| ImageError::invalid(format!("{}: {error}", path.display()));
    match read(&path) {
        Ok(text) => from_toml(host, &text, &folder).map_err(broken),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(broken(error.to_string())),
        Err(_) => {
            let files = fs::read_dir(&folder).into_iter().flatten().flatten().map(|entry| entry.path());
            let mut files: Vec<PathBuf> = files.collect();
            files.sort();
            let of_kind = |kind: &'static str| {
                let is_it = move |path: &&PathBuf| path.extension().is_some_and(|extension| extension == kind);
                files.iter().filter(is_it).cloned()
            };
            let pair = |certificate: PathBuf| KeyPair { key: certificate.with_extension("key"), certificate };
            let (whole, lonely): (Vec<_>, Vec<_>) = of_kind("cert").map(pair).partition(|pair| pair.key.is_file());
            for pair in lonely {
                warn!(path = %pair.certificate.display(), "Ignoring client certificate without a key");
            }
            Ok(vec![Endpoint { authorities: of_kind("crt").collect(), pairs: whole, ..upstream(host) }])
        }
    }
}

fn folder(host: &str, roots: &[PathBuf]) -> Option<PathBuf> {
    let underscored = host.split_once(':').map(|(name, port)| format!("{name}_{port}_"));
    let names: Vec<String> = underscored.into_iter().chain([host.to_owned(), "_default".to_owned()]).collect();
    let candidates = roots.iter().flat_map(|root| names.iter().map(move |name| root.join(name)));
    candidates.into_iter().find(|path| path.is_dir())
}

fn read(path: &Path) -> io::Result<String> {
    let metadata = fs::metadata(path)?;
    if !metadata.is_file() || metadata.len() > LONGEST {
        return Err(io::Error::other(format!("not a regular file of at most {LONGEST} bytes")));
    }
    fs::read_to_string(path)
}

/// The registry itself.
fn upstream(host: &str) -> Endpoint {
    let authority = if host == "docker.io" { "registry-1.docker.io" } else { host };
    Endpoint {
        scheme: "https".into(),
        authority: authority.into(),
        prefix: "/v2".into(),
        resolves: true,
        authorities: Vec::new(),
        pairs: Vec::new(),
        dial_timeout: None,
        skips_verification: false,
        headers: Vec::new(),
        falls_back: is_this_machine(authority),
    }
}

fn is_this_machine(authority: &str) -> bool {
    let name = match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => address,
        None => authority.split(':').next().unwrap_or_default(),
    };
    match name.parse::<IpAddr>() {
        Ok(IpAddr::V4(address)) => address.is_loopback(),
        Ok(IpAddr::V6(address)) => address == Ipv6Addr::LOCALHOST,
        Err(_) => name == "localhost",
    }
}

fn from_toml(host: &str, text: &str, folder: &Path) -> Result<Vec<Endpoint>, String> {
    let file: File = toml::from_str(text).map_err(|error| error.to_string())?;
    let mut out = Vec::new();
    for (url, host) in &file.host {
        let settings: Host = host.clone().try_into().map_err(|error: toml::de::Error| error.to_string())?;
        out.push(endpoint(url, &settings, folder)?);
    }
    let last = match &file.server {
        Some(server) => endpoint(server, &file.own, folder)?,
        None => upstream(host),
    };
    if !out.iter().any(|endpoint: &Endpoint| endpoint.authority == last.authority) {
        out.push(last);
    }
    Ok(out)
}

fn endpoint(url: &str, settings: &Host, folder: &Path) -> Result<Endpoint, String> {
    let (scheme, rest) = url.split_once("://").unwrap_or(("https", url));
    if !matches!(scheme, "http" | "https") {
        return Err(format!("scheme of {url:?} is neither http nor https"));
    }
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    if authority.is_empty() {
        return Err(format!("{url:?} has no host"));
    }
    let path = path.trim_end_matches('/');
    let path = if path.is_empty() { String::new() } else { format!("/{path}") };
    let has_version = settings.override_path || path.ends_with("/v2");
    let can = |what: &str| settings.capabilities.as_ref().is_none_or(|list| list.iter().any(|entry| entry == what));
    let authorities = settings.ca.iter().flat_map(OneOrMany::list).map(|path| folder.join(path));
    let headers = settings
        .header
        .iter()
        .flat_map(|(name, values)| values.list().into_iter().map(move |value| (name.clone(), value)));
    Ok(Endpoint {
        scheme: scheme.into(),
        authority: authority.into(),
        prefix: if has_version { path } else { format!("{path}/v2") },
        resolves: can("resolve"),
        authorities: authorities.collect(),
        pairs: settings.client.as_ref().map_or(Ok(Vec::new()), |client| client.pairs(folder))?,
        dial_timeout: settings.dial_timeout.as_deref().map(duration).transpose()?,
        skips_verification: settings.skip_verify,
        headers: headers.collect(),
        falls_back: false,
    })
}

/// Parses a duration in Go's format, such as `10s`.
fn duration(text: &str) -> Result<Duration, String> {
    let parsed: Result<jiff::SignedDuration, _> = text.parse();
    let parsed =
        parsed.ok().and_then(|duration| Duration::try_from(duration).ok()).filter(|duration| !duration.is_zero());
    parsed.ok_or_else(|| format!("dial_timeout: invalid duration {text:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(endpoints: &[Endpoint]) -> Vec<String> {
        endpoints.iter().map(|e| format!("{}://{}{}", e.scheme, e.authority, e.prefix)).collect()
    }

    #[test]
    fn without_configuration_the_registry_is_asked() {
        assert_eq!(shown(&endpoints("docker.io", &[]).expect("no files")), ["https://registry-1.docker.io/v2"]);
        for (host, expected) in
            [("localhost:5000", true), ("127.0.0.2", true), ("[::1]:5000", true), ("r.tld", false), ("10.0.0.1", false)]
        {
            assert_eq!(endpoints(host, &[]).expect("no files")[0].falls_back, expected, "{host}");
        }
    }

    #[test]
    fn mirrors_come_in_their_order() {
        let dir = tempfile::tempdir().expect("a directory");
        let folder = dir.path().join("r.tld_5000_");
        fs::create_dir(&folder).expect("makeable");
        let text = r#"
            server = "https://r.tld:5000"
            [host."http://z.mirror/cache"]
              capabilities = ["pull"]
              header = { x-a = ["1", "2"] }
            [host."https://a.mirror"]
              ca = "own.crt"
              skip_verify = true
            [host."https://b.mirror/custom"]
              override_path = true
        "#;
        fs::write(folder.join("hosts.toml"), text).expect("writable");
        let roots = [PathBuf::from("/nowhere"), dir.path().to_owned()];
        let found = endpoints("r.tld:5000", &roots).expect("read");
        let expected =
            ["http://z.mirror/cache/v2", "https://a.mirror/v2", "https://b.mirror/custom", "https://r.tld:5000/v2"];
        assert_eq!(shown(&found), expected);
        assert_eq!((found[0].resolves, found[1].resolves, found[0].headers.len()), (false, true, 2));
        assert_eq!(found[1].authorities, [folder.join("own.crt")]);
    }

    /// A mistake in the file must not cause a fallback to the public registry.
    #[test]
    fn an_invalid_hosts_file_is_named_and_no_registry_is_contacted() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("bad.example/hosts.toml");
        fs::create_dir(dir.path().join("bad.example")).expect("makeable");
        let long = format!("#{}", "x".repeat(1 << 20));
        for text in ["server = http://127.0.0.1:9800", "server = 5", "server = \"ftp://x\"", "[host.\"\"]", &long] {
            fs::write(&path, text).expect("writable");
            let error = endpoints("bad.example", &[dir.path().to_owned()]).expect_err(text);
            assert!(error.text.starts_with(&path.display().to_string()), "{error}");
        }
        fs::remove_file(&path).and_then(|()| fs::create_dir(&path)).expect("a directory");
        endpoints("bad.example", &[dir.path().to_owned()]).expect_err("a directory");
    }

    #[test]
    fn client_certificates_come_in_files_and_pairs() {
        let dir = tempfile::tempdir().expect("a directory");
        let folder = dir.path().join("r.tld");
        fs::create_dir(&folder).expect("makeable");
        let key = "-----BEGIN PRIVATE KEY-----\n";
        for (name, text) in [("both.pem", key), ("other.pem", key), ("own.cert", "x"), ("own.key", key), ("b.cert", "")]
        {
            fs::write(folder.join(name), text).expect("writable");
        }
        let roots = [dir.path().to_owned()];
        let found = || -> Vec<(String, String)> {
            let name = |path: &Path| path.file_name().expect("a name").to_string_lossy().into_owned();
            let first = endpoints("r.tld", &roots).map(|all| all[0].pairs.clone()).unwrap_or_default();
            first.iter().map(|p| (name(&p.certificate), name(&p.key))).collect()
        };
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        // As in Docker: sorted by name; a certificate without its key is ignored.
        assert_eq!(found(), [pair("own.cert", "own.key")]);
        for (text, expected) in [
            (r#""both.pem""#, vec![pair("both.pem", "both.pem")]),
            (r#"["own.cert", "own.key"]"#, vec![pair("own.cert", "own.key")]),
            (r#"["both.pem", "other.pem"]"#, vec![pair("both.pem", "both.pem"), pair("other.pem", "other.pem")]),
            (
                r#"[["own.cert", "own.key"], ["both.pem", ""], "other.pem"]"#,
                vec![pair("own.cert", "own.key"), pair("both.pem", "both.pem"), pair("other.pem", "other.pem")],
            ),
            (r#"[["a", "b", "c"]]"#, vec![]),
            ("5", vec![]),
        ] {
            let text = format!("server = \"https://r.tld\"\nclient = {text}\ndial_timeout = \"3s\"\n");
            fs::write(folder.join("hosts.toml"), &text).expect("writable");
            assert_eq!(found(), expected);
            let dial = endpoints("r.tld", &roots).ok().map(|all| all[0].dial_timeout);
            assert_eq!(dial, (!expected.is_empty()).then_some(Some(Duration::from_secs(3))), "{text}");
        }
    }
}
