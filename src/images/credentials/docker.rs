//! Docker credential files: parsing, and keyring lookup by image (spec 03b §2.2). Pure.

use std::{collections::BTreeMap, fmt};

use base64::{
    Engine,
    alphabet::STANDARD,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use serde::Deserialize;

use super::glob::matches;

/// User name and password for a registry. Never printed.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Login {
    /// User name.
    pub username: String,
    /// Password or token in plain text; may be empty.
    pub password: String,
    /// E-mail address; only part of the hash.
    pub email: String,
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Login(…)")
    }
}

/// Why a document cannot be parsed; never contains any of its content.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DockerConfigError {
    /// The document is not JSON of the expected form.
    #[error("invalid docker configuration at line {line} column {column}")]
    Syntax {
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
    },
    /// `auth` is not valid base64.
    #[error("illegal base64 data in auth field")]
    Base64,
    /// `auth` has no colon.
    #[error("unable to parse auth field, must be formatted as base64(username:password)")]
    NoColon,
}

impl From<serde_json::Error> for DockerConfigError {
    fn from(error: serde_json::Error) -> Self {
        Self::Syntax { line: error.line(), column: error.column() }
    }
}

#[derive(Deserialize, Default)]
struct DockerConfigEntry {
    #[serde(default)]
    username: Option<String>,
    #[serde(default)]
    password: Option<String>,
    #[serde(default)]
    email: Option<String>,
    #[serde(default)]
    auth: Option<String>,
}

#[derive(Deserialize)]
struct ConfigJson {
    #[serde(default)]
    auths: Option<BTreeMap<String, DockerConfigEntry>>,
}

/// Logins by registry, as written.
pub type DockerConfig = BTreeMap<String, Login>;

/// Parses a `config.json`: `{"auths": {…}}`.
///
/// # Errors
/// The document is malformed; one invalid entry invalidates all of it.
pub fn parse_config_json(data: &[u8]) -> Result<DockerConfig, DockerConfigError> {
    let config: Option<ConfigJson> = serde_json::from_slice(data)?;
    logins(config.and_then(|c| c.auths).unwrap_or_default())
}

/// Parses a `.dockercfg`: the entries themselves.
///
/// # Errors
/// The document is malformed; one invalid entry invalidates all of it.
pub fn parse_dockercfg(data: &[u8]) -> Result<DockerConfig, DockerConfigError> {
    let entries: Option<BTreeMap<String, DockerConfigEntry>> = serde_json::from_slice(data)?;
    logins(entries.unwrap_or_default())
}

fn logins(entries: BTreeMap<String, DockerConfigEntry>) -> Result<DockerConfig, DockerConfigError> {
    entries.into_iter().map(|(registry, entry)| Ok((registry, login(entry)?))).collect()
}

fn login(entry: DockerConfigEntry) -> Result<Login, DockerConfigError> {
    let email = entry.email.unwrap_or_default();
    let auth = entry.auth.unwrap_or_default();
    if auth.is_empty() {
        let (username, password) = (entry.username.unwrap_or_default(), entry.password.unwrap_or_default());
        return Ok(Login { username, password, email });
    }
    let lenient = GeneralPurpose::new(
        &STANDARD,
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
    );
    let decoded = lenient.decode(auth.trim()).map_err(|_| DockerConfigError::Base64)?;
    let decoded = String::from_utf8(decoded).map_err(|_| DockerConfigError::Base64)?;
    let (username, password) = decoded.split_once(':').ok_or(DockerConfigError::NoColon)?;
    Ok(Login { username: username.to_owned(), password: password.to_owned(), email })
}

/// Key of the credentials for the default registry, used if no other key matches.
const DEFAULT_REGISTRY: &str = "index.docker.io";

/// Logins by index key, each with its source.
#[derive(Debug, Clone)]
pub struct Keyring<S> {
    keys: BTreeMap<String, Vec<usize>>,
    entries: Vec<(Login, S)>,
}

impl<S> Default for Keyring<S> {
    fn default() -> Self {
        Self { keys: BTreeMap::new(), entries: Vec::new() }
    }
}

impl<S: Clone> Keyring<S> {
    /// Adds a document from `source`.
    pub fn add(&mut self, config: &DockerConfig, source: &S) {
        for (registry, login) in config {
            let place = self.entries.len();
            self.entries.push((login.clone(), source.clone()));
            self.keys.entry(index_key(registry)).or_default().push(place);
        }
    }

    /// All logins for a normalized repository, longer paths first.
    pub fn find(&self, image: &str) -> Vec<(Login, S)> {
        let places = |set: &Vec<usize>| set.iter().filter_map(|&at| self.entries.get(at).cloned()).collect();
        let found: Vec<(Login, S)> = self
            .keys
            .iter()
            .rev()
            .filter(|(key, _)| matches(key, image))
            .flat_map(|(_, set)| -> Vec<(Login, S)> { places(set) })
            .collect();
        if !found.is_empty() || !is_default_registry(image) {
            return found;
        }
        self.keys.get(DEFAULT_REGISTRY).map(places).unwrap_or_default()
    }
}

/// Index key of a registry as written: host and path; `/v1/` and `/v2/` belong to the API, not to the
/// path.
fn index_key(registry: &str) -> String {
    let bare = registry.strip_prefix("https://").or_else(|| registry.strip_prefix("http://")).unwrap_or(registry);
    let at = bare.find('/').unwrap_or(bare.len());
    let (host, path) = bare.split_at(at);
    // query and fragment are not part of the path
    let path = path.split(['?', '#']).next().unwrap_or_default();
    let path = if path.starts_with("/v1/") || path.starts_with("/v2/") { path.get(3..).unwrap_or("") } else { path };
    if path == "/" { host.to_owned() } else { format!("{host}{path}") }
}

/// Whether an image is in Docker Hub.
fn is_default_registry(image: &str) -> bool {
    if image.is_empty() {
        return false;
    }
    match image.split_once('/') {
        None => true,
        Some(("docker.io" | DEFAULT_REGISTRY, _)) => true,
        Some((first, _)) => !first.contains(['.', ':']),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn users(keyring: &Keyring<()>, image: &str) -> Vec<String> {
        keyring.find(image).into_iter().map(|(login, ())| login.username).collect()
    }

    fn keyring(registries: &[&str]) -> Keyring<()> {
        let mut keyring = Keyring::default();
        for registry in registries {
            let login = Login { username: (*registry).to_owned(), ..Default::default() };
            keyring.add(&[((*registry).to_owned(), login)].into(), &());
        }
        keyring
    }

    #[test]
    fn entries_are_decoded() {
        let parse = |entry: &str| {
            parse_config_json(format!("{{\"auths\":{{\"r.io\":{entry}}}}}").as_bytes())
                .map(|c| c.get("r.io").map(|l| (l.username.clone(), l.password.clone())).unwrap_or_default())
                .map_err(|e| e.to_string())
        };
        let pair = |u: &str, p: &str| Ok::<_, String>((u.to_owned(), p.to_owned()));
        assert_eq!(parse(r#"{"username":"ada","password":"x"}"#), pair("ada", "x"));
        assert_eq!(parse(r#"{"username":"ada","password":"x","auth":"dXNlcjpwYTpzcw=="}"#), pair("user", "pa:ss"));
        assert_eq!(parse(r#"{"auth":"dXNlcjpwYTpzcw"}"#), pair("user", "pa:ss"));
        assert_eq!(parse(r#"{"identitytoken":"t"}"#), pair("", ""));
        // AC-03b-12
        let no_colon = "unable to parse auth field, must be formatted as base64(username:password)";
        assert_eq!(parse(r#"{"auth":"dXNlcg=="}"#), Err(no_colon.to_owned()));
        assert_eq!(parse(r#"{"auth":"%%"}"#), Err("illegal base64 data in auth field".to_owned()));
        let bad = parse_config_json(b"{\"auths\": secret").expect_err("junk").to_string();
        assert_eq!(bad, "invalid docker configuration at line 1 column 11");
        assert_eq!(parse_config_json(b"{}"), Ok(DockerConfig::new()));
        assert_eq!(parse_dockercfg(br#"{"r.io":{"username":"a"}}"#).map(|c| c.len()), Ok(1));
    }

    #[test]
    fn keys_are_hosts_with_paths() {
        let rows = [
            ("r.io", "r.io"),
            ("https://r.io", "r.io"),
            ("http://r.io/", "r.io"),
            ("https://index.docker.io/v1/", "index.docker.io"),
            ("r.io/v2/team", "r.io/team"),
            ("r.io/v2", "r.io/v2"),
            ("r.io:5000/team", "r.io:5000/team"),
        ];
        for (registry, key) in rows {
            assert_eq!(index_key(registry), key, "{registry}");
        }
    }

    #[test]
    fn longer_paths_come_first() {
        let keys = keyring(&["r.io", "r.io/team", "r.io/team/app", "other.io"]);
        assert_eq!(users(&keys, "r.io/team/app"), ["r.io/team/app", "r.io/team", "r.io"]);
        assert_eq!(users(&keys, "r.io/x"), ["r.io"]);
        assert!(users(&keys, "docker.io/library/redis").is_empty());
    }

    #[test]
    fn docker_hub_has_a_key_of_its_own() {
        // AC-03b-11
        let keys = keyring(&["https://index.docker.io/v1/"]);
        assert_eq!(users(&keys, "docker.io/library/redis"), ["https://index.docker.io/v1/"]);
        assert!(users(&keys, "quay.io/x").is_empty());
        let rows = [
            ("redis", true),
            ("me/app", true),
            ("docker.io/x", true),
            ("r.io/x", false),
            ("h:1/x", false),
            ("", false),
        ];
        for (image, expected) in rows {
            assert_eq!(is_default_registry(image), expected, "{image}");
        }
    }

    #[test]
    fn debug_output_has_no_password() {
        let login = Login { password: "hunter2".into(), ..Default::default() };
        assert!(!format!("{login:?}").contains("hunter2"));
    }
}
