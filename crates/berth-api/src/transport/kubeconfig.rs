//! Kubeconfig parser: server, trust, and credentials of the current context (spec 01 §10.1).

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::Deserialize;
use serde_json::Value;

/// Largest file that is read, in bytes.
const LIMIT: u64 = 4 << 20;
/// Timeout of a read, so that a hung file system does not block the start.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why no client can be configured.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The file cannot be read.
    #[error("invalid kubeconfig: stat {path}: {cause}")]
    Missing {
        /// Path of the file.
        path: String,
        /// Reason why `stat` of the file failed.
        cause: String,
    },
    /// The file has no usable configuration.
    #[error("invalid configuration: {0}")]
    Invalid(String),
}

/// Content that is inline or in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InlineOrFile {
    /// Inline content, decoded.
    Text(Vec<u8>),
    /// Path of the file.
    File(PathBuf),
}

/// Cluster entry: the server and how it is verified.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cluster {
    /// Name of the entry.
    pub name: String,
    /// URL: `https://host:port/prefix`.
    pub server: String,
    /// Host name for certificate verification; empty: the URL's.
    pub tls_server_name: String,
    /// Disables certificate verification.
    pub insecure_skip_tls_verify: bool,
    /// CA bundle; `None`: the system's.
    pub authorities: Option<InlineOrFile>,
    /// URL of a proxy: `http`, `https` or `socks5`.
    pub proxy_url: String,
    /// Disables response compression.
    pub disable_compression: bool,
    /// Cluster configuration for exec plugins.
    pub exec_config: Option<Value>,
}

/// User entry: the credentials.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct User {
    /// Name of the entry.
    pub name: String,
    /// Client certificate and key.
    pub pair: Option<(InlineOrFile, InlineOrFile)>,
    /// Bearer token; empty: none.
    pub token: String,
    /// Token file, which is reread periodically.
    pub token_file: Option<PathBuf>,
    /// User name and password.
    pub basic: Option<(String, String)>,
    /// Impersonation.
    pub acting: Impersonation,
    /// Exec credential plugin.
    pub exec: Option<Exec>,
}

/// Impersonation: the identity to act as.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Impersonation {
    /// `as`.
    pub user: String,
    /// `as-uid`.
    pub uid: String,
    /// `as-groups`.
    pub groups: Vec<String>,
    /// `as-user-extra`.
    pub extra: BTreeMap<String, Vec<String>>,
}

/// Exec credential plugin.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Exec {
    /// Program.
    pub command: String,
    /// Arguments.
    pub args: Option<Vec<String>>,
    /// Additional environment variables.
    pub env: Option<Vec<ExecVariable>>,
    /// `client.authentication.k8s.io/v1` or `v1beta1`.
    pub api_version: String,
    /// Whether the cluster information is passed to the plugin.
    pub provide_cluster_info: bool,
    /// `Never`, `IfAvailable` or `Always`; required in v1.
    pub interactive_mode: Option<String>,
    /// Hint for users if the program is missing.
    pub install_hint: Option<String>,
}

/// Environment variable.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ExecVariable {
    /// Name of the variable.
    pub name: String,
    /// Value of the variable.
    pub value: String,
}

/// Resolved current context.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kubeconfig {
    /// Cluster of the context.
    pub cluster: Cluster,
    /// User of the context.
    pub user: User,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "kebab-case")]
struct KubeconfigDocument {
    current_context: Option<String>,
    contexts: Option<Vec<NamedEntry>>,
    clusters: Option<Vec<NamedEntry>>,
    users: Option<Vec<NamedEntry>>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct NamedEntry {
    name: String,
    context: Option<RawContext>,
    cluster: Option<RawCluster>,
    user: Option<RawUser>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct RawContext {
    cluster: String,
    user: String,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "kebab-case")]
struct RawCluster {
    server: String,
    tls_server_name: String,
    insecure_skip_tls_verify: bool,
    certificate_authority: String,
    certificate_authority_data: String,
    proxy_url: String,
    disable_compression: bool,
    extensions: Option<Vec<RawExtension>>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct RawExtension {
    name: String,
    extension: Value,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "kebab-case")]
struct RawUser {
    client_certificate: String,
    client_certificate_data: String,
    client_key: String,
    client_key_data: String,
    token: String,
    #[serde(rename = "tokenFile")]
    token_file: String,
    username: String,
    password: String,
    #[serde(rename = "as")]
    acting: String,
    as_uid: String,
    as_groups: Option<Vec<String>>,
    as_user_extra: Option<BTreeMap<String, Vec<String>>>,
    exec: Option<Exec>,
    auth_provider: Option<Value>,
}

/// Name of the cluster extension that is passed to exec plugins.
const EXEC_EXTENSION: &str = "client.authentication.k8s.io/exec";

impl Kubeconfig {
    /// Reads a file and checks that the files it refers to are readable.
    ///
    /// # Errors
    /// The file, or a file it refers to, is unusable.
    pub async fn read(path: &Path) -> Result<Self, ConnectError> {
        let owned = path.to_owned();
        let reading = tokio::task::spawn_blocking(move || {
            let invalid = |cause: String| ConnectError::Invalid(format!("{cause} (kubeconfig {})", owned.display()));
            std::fs::metadata(&owned).map_err(|e| missing(&owned, &e))?;
            let text = read_limited(&owned).map_err(|e| invalid(e.to_string()))?;
            let text = String::from_utf8(text).map_err(|e| invalid(e.to_string()))?;
            let read = Self::parse(&text, owned.parent().unwrap_or(Path::new(".")));
            read.and_then(Self::found).map_err(invalid)
        });
        let late = |_| ConnectError::Invalid(format!("reading {} timed out after {PATIENCE:?}", path.display()));
        let read = tokio::time::timeout(PATIENCE, reading).await.map_err(late)?;
        read.map_err(|e| ConnectError::Invalid(e.to_string()))?
    }

    /// Checks that the files it refers to are readable.
    fn found(self) -> Result<Self, String> {
        let certificates =
            self.user.pair.as_ref().map(|(certificate, key)| [("client-cert", certificate), ("client-key", key)]);
        for (what, source) in certificates.into_iter().flatten() {
            source.readable(what, &self.user.name)?;
        }
        if let Some(source) = &self.cluster.authorities {
            source.readable("certificate-authority", &self.cluster.name)?;
        }
        Ok(self)
    }

    /// Parses a kubeconfig; relative paths are resolved against `base`. The files it refers to are not checked.
    ///
    /// # Errors
    /// A text that names the defect, as client-go words it where it has a text.
    pub fn parse(text: &str, base: &Path) -> Result<Self, String> {
        // A snippet in the error could reveal secrets.
        let document: KubeconfigDocument = serde_saphyr::from_str(text).map_err(|e| e.without_snippet().to_string())?;
        let Some(name) = document.current_context.filter(|name| !name.is_empty()) else {
            return Err("no configuration has been provided: current-context is not set".to_owned());
        };
        let of = |list: Option<Vec<NamedEntry>>, name: &str| list?.into_iter().find(|named| named.name == name);
        let Some(context) = of(document.contexts, &name).and_then(|named| named.context) else {
            return Err(format!("context was not found for specified context: {name}"));
        };
        let cluster = of(document.clusters, &context.cluster).and_then(|named| named.cluster).unwrap_or_default();
        if cluster.server.is_empty() {
            return Err(format!("no server found for cluster {:?}", context.cluster));
        }
        let user = of(document.users, &context.user).and_then(|named| named.user).unwrap_or_default();
        Ok(Self { cluster: cluster.checked(&context.cluster, base)?, user: user.checked(&context.user, base)? })
    }
}

impl RawCluster {
    fn checked(self, name: &str, base: &Path) -> Result<Cluster, String> {
        let has_authorities = !self.certificate_authority.is_empty() || !self.certificate_authority_data.is_empty();
        if self.insecure_skip_tls_verify && has_authorities {
            return Err("specifying a root certificates file with the insecure flag is not allowed".to_owned());
        }
        only_one("certificate-authority", [&self.certificate_authority, &self.certificate_authority_data], name)?;
        let file = path(&self.certificate_authority, base);
        let is_exec = |extension: &RawExtension| extension.name == EXEC_EXTENSION;
        Ok(Cluster {
            name: name.to_owned(),
            server: self.server,
            tls_server_name: self.tls_server_name,
            insecure_skip_tls_verify: self.insecure_skip_tls_verify,
            authorities: source(file, &self.certificate_authority_data, "certificate-authority-data")?,
            proxy_url: self.proxy_url,
            disable_compression: self.disable_compression,
            exec_config: self.extensions.unwrap_or_default().into_iter().find(is_exec).map(|found| found.extension),
        })
    }
}

impl RawUser {
    fn checked(self, name: &str, base: &Path) -> Result<User, String> {
        if self.auth_provider.is_some() {
            return Err(format!("no Auth Provider found for the auth-provider of {name}"));
        }
        let exec = self.exec.map(|exec| check_exec(exec, name, base)).transpose()?;
        only_one("client-cert", [&self.client_certificate, &self.client_certificate_data], name)?;
        if !(self.client_certificate.is_empty() && self.client_certificate_data.is_empty()) {
            only_one("client-key", [&self.client_key, &self.client_key_data], name)?;
        }
        let certificate = source(path(&self.client_certificate, base), &self.client_certificate_data, "client-cert")?;
        let key = source(path(&self.client_key, base), &self.client_key_data, "client-key")?;
        let pair = match (certificate, key) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (Some(_), None) => {
                return Err(format!(
                    "client-key-data or client-key must be specified for {name} to use the clientCert authentication \
                     method."
                ));
            }
            (None, _) => None,
        };
        Ok(User {
            name: name.to_owned(),
            pair,
            token: self.token,
            token_file: path(&self.token_file, base),
            basic: (!self.username.is_empty()).then_some((self.username, self.password)),
            acting: Impersonation {
                user: self.acting,
                uid: self.as_uid,
                groups: self.as_groups.unwrap_or_default(),
                extra: self.as_user_extra.unwrap_or_default(),
            },
            exec,
        })
    }
}

fn check_exec(mut exec: Exec, user: &str, base: &Path) -> Result<Exec, String> {
    if exec.command.is_empty() {
        return Err(format!("command must be specified for {user} to use exec authentication plugin"));
    }
    let mode = exec.interactive_mode.as_deref();
    match (exec.api_version.as_str(), mode) {
        ("", _) => Err(format!("apiVersion must be specified for {user} to use exec authentication plugin")),
        ("client.authentication.k8s.io/v1", None) => {
            Err(format!("interactiveMode must be specified for {user} to use exec authentication plugin"))
        }
        ("client.authentication.k8s.io/v1" | "client.authentication.k8s.io/v1beta1", Some("Always")) => {
            Err(format!("interactiveMode of {user} is Always, but there is no terminal"))
        }
        (
            "client.authentication.k8s.io/v1" | "client.authentication.k8s.io/v1beta1",
            None | Some("Never" | "IfAvailable"),
        ) => {
            // As in a shell: a name without a slash is searched in `PATH`.
            if exec.command.contains('/') {
                exec.command = base.join(&exec.command).display().to_string();
            }
            Ok(exec)
        }
        (_, Some(mode)) if !matches!(mode, "Never" | "IfAvailable" | "Always") => {
            Err(format!("invalid interactiveMode for {user}: {mode:?}"))
        }
        (version, _) => Err(format!("exec plugin: invalid apiVersion {version:?}")),
    }
}

fn path(text: &str, base: &Path) -> Option<PathBuf> {
    (!text.is_empty()).then(|| base.join(text))
}

/// File and inline data together are ambiguous.
fn only_one(what: &str, [file, data]: [&str; 2], name: &str) -> Result<(), String> {
    if file.is_empty() || data.is_empty() {
        return Ok(());
    }
    let end = if what == "client-key" {
        "; client-key-data will override".to_owned()
    } else {
        format!(". {what}-data will override.")
    };
    Err(format!("{what}-data and {what} are both specified for {name}{end}"))
}

/// Returns inline data if there is any, else the file.
fn source(file: Option<PathBuf>, data: &str, what: &str) -> Result<Option<InlineOrFile>, String> {
    if data.is_empty() {
        return Ok(file.map(InlineOrFile::File));
    }
    let data: String = data.chars().filter(|c| !c.is_ascii_whitespace()).collect();
    STANDARD.decode(data).map(|text| Some(InlineOrFile::Text(text))).map_err(|e| format!("{what}: {e}"))
}

impl InlineOrFile {
    /// Reads the content. Blocking.
    ///
    /// # Errors
    /// The file cannot be read, or is larger than 4 MiB.
    pub fn read(&self) -> std::io::Result<Vec<u8>> {
        match self {
            Self::Text(text) => Ok(text.clone()),
            Self::File(path) => read_limited(path),
        }
    }

    fn readable(&self, what: &str, of: &str) -> Result<(), String> {
        let Self::File(path) = self else { return Ok(()) };
        let path_text = path.display();
        let failed = |e: std::io::Error| {
            format!("unable to read {what} {path_text} for {of} due to open {path_text}: {}", plain(&e))
        };
        std::fs::File::open(path).map(drop).map_err(failed)
    }

    /// Path of the file; `None` for inline content.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::Text(_) => None,
            Self::File(path) => Some(path),
        }
    }
}

fn missing(path: &Path, error: &std::io::Error) -> ConnectError {
    ConnectError::Missing { path: path.display().to_string(), cause: plain(error) }
}

/// Error text as Go words it.
fn plain(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::NotFound => "no such file or directory".to_owned(),
        _ => error.to_string(),
    }
}

/// Reads a file of at most 4 MiB. Blocking.
pub(super) fn read_limited(path: &Path) -> std::io::Result<Vec<u8>> {
    use std::io::Read;
    let mut content = Vec::new();
    std::fs::File::open(path)?.take(LIMIT + 1).read_to_end(&mut content)?;
    if u64::try_from(content.len()).unwrap_or(u64::MAX) > LIMIT {
        return Err(std::io::Error::other(format!("{} is larger than {LIMIT} bytes", path.display())));
    }
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "apiVersion: v1\nkind: Config\ncurrent-context: c\n";

    fn parsed(text: &str) -> Result<Kubeconfig, String> {
        Kubeconfig::parse(text, Path::new("/base"))
    }

    fn found(text: &str) -> Result<Kubeconfig, String> {
        parsed(text).and_then(Kubeconfig::found)
    }

    fn with_user(user: &str) -> String {
        format!(
            "{HEAD}contexts: [{{name: c, context: {{cluster: k, user: u}}}}]\n\
             clusters: [{{name: k, cluster: {{server: 'https://127.0.0.1:1'}}}}]\nusers: [{{name: u, user: {user}}}]\n"
        )
    }

    #[tokio::test]
    async fn an_invalid_kubeconfig_is_an_error_with_its_cause() {
        let missing = Kubeconfig::read(Path::new("/nonexistent/kubeconfig")).await.expect_err("missing").to_string();
        assert_eq!(missing, "invalid kubeconfig: stat /nonexistent/kubeconfig: no such file or directory");
        let context = format!("{HEAD}contexts: [{{name: c, context: {{cluster: k, user: u}}}}]\n");
        let exec = |rest: &str| with_user(&format!("{{exec: {{command: x{rest}}}}}"));
        for (content, expected) in [
            (HEAD.to_owned(), "context was not found for specified context: c"),
            ("apiVersion: v1\nkind: Config\n".to_owned(), "no configuration has been provided"),
            (context.clone(), "no server found for cluster \"k\""),
            (
                with_user("{client-certificate-data: eA==}"),
                "client-key-data or client-key must be specified for u to use the clientCert authentication method.",
            ),
            (
                with_user("{client-certificate: /no/c, client-key: /no/k}"),
                "unable to read client-cert /no/c for u due to open /no/c: no such file or directory",
            ),
            (
                with_user("{client-certificate: /no/c, client-certificate-data: eA==, client-key: /no/k}"),
                "client-cert-data and client-cert are both specified for u. client-cert-data will override.",
            ),
            (
                with_user("{client-certificate: /no/c, client-key-data: eA==, client-key: /no/k}"),
                "client-key-data and client-key are both specified for u; client-key-data will override",
            ),
            (
                with_user("{}").replace(":1'", ":1', certificate-authority: /no/a, certificate-authority-data: eA=="),
                "certificate-authority-data and certificate-authority are both specified for k. \
                 certificate-authority-data will override.",
            ),
            (with_user("{auth-provider: {name: gcp}}"), "no Auth Provider found"),
            (exec(""), "apiVersion must be specified for u"),
            (exec(", apiVersion: client.authentication.k8s.io/v1"), "interactiveMode must be specified for u"),
            (exec(", apiVersion: client.authentication.k8s.io/v1alpha1"), "exec plugin: invalid apiVersion"),
            (
                exec(", interactiveMode: Always, apiVersion: client.authentication.k8s.io/v1"),
                "interactiveMode of u is Always",
            ),
            ("{".to_owned(), ""),
        ] {
            let message = found(&content).expect_err(expected);
            assert!(message.starts_with(expected), "{content}: {message}");
        }
        assert!(found(&with_user("{token: t}")).is_ok());
    }

    #[tokio::test]
    async fn errors_name_the_file_and_contain_no_secret() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("kubeconfig");
        for content in [with_user("{token: [s3cret}"), with_user("{token: {s3cret: 1}}"), HEAD.to_owned()] {
            std::fs::write(&path, &content).expect("written");
            let message = Kubeconfig::read(&path).await.expect_err("invalid").to_string();
            assert!(message.starts_with("invalid configuration: ") && !message.contains("s3cret"), "{message}");
            assert!(message.contains(&path.display().to_string()) && !message.contains('\n'), "{message}");
        }
    }

    #[test]
    fn all_fields_of_a_kubeconfig_are_parsed() {
        let text = format!(
            "{HEAD}contexts: [{{name: c, context: {{cluster: k, user: u}}}}]\nclusters:\n- name: other\n- name: k\n  \
             cluster:\n    server: https://api:6443/prefix\n    tls-server-name: kubernetes\n    \
             certificate-authority-data: Y2E=\n    proxy-url: http://proxy:1\n    \
             disable-compression: true\n    extensions: [{{name: client.authentication.k8s.io/exec, extension: {{a: 1}}}}]\n\
             users:\n- name: u\n  user:\n    tokenFile: token\n    token: t\n    username: n\n    password: p\n    \
             as: other\n    as-uid: '7'\n    as-groups: [g]\n    as-user-extra: {{k: [v, w]}}\n    exec:\n      \
             command: ./plugin\n      args: [x]\n      env: [{{name: A, value: B}}]\n      \
             apiVersion: client.authentication.k8s.io/v1\n      interactiveMode: Never\n      provideClusterInfo: true\n"
        );
        let Kubeconfig { cluster, user } = parsed(&text).expect("it is fine");
        assert_eq!(
            cluster,
            Cluster {
                name: "k".into(),
                server: "https://api:6443/prefix".into(),
                tls_server_name: "kubernetes".into(),
                insecure_skip_tls_verify: false,
                authorities: Some(InlineOrFile::Text(b"ca".to_vec())),
                proxy_url: "http://proxy:1".into(),
                disable_compression: true,
                exec_config: Some(serde_json::json!({"a": 1})),
            }
        );
        assert_eq!((user.token_file, user.token.as_str()), (Some(PathBuf::from("/base/token")), "t"));
        assert_eq!(user.basic, Some(("n".into(), "p".into())));
        assert_eq!((user.acting.user.as_str(), user.acting.uid.as_str()), ("other", "7"));
        assert_eq!((user.acting.groups, user.acting.extra["k"].len()), (vec!["g".to_owned()], 2));
        let exec = user.exec.expect("a plugin");
        assert_eq!((exec.command.as_str(), exec.provide_cluster_info), ("/base/./plugin", true));
    }
}
