//! Client certificate in a kubeconfig: reads, validates, and writes the bootstrap result.
//!
//! Blocking: reads small files, at start and while a certificate is missing. Implements spec 01 §11.1-11.2.

use std::{fs, io, os::unix::fs::DirBuilderExt, path::Path};

use base64::{Engine, engine::general_purpose::STANDARD};
use jiff::Timestamp;
use serde_json::Value;

use super::{leaf, pair::Pair, plan::KubeconfigState};
use crate::transport::{self, InlineOrFile, User};
use berth_sys::atomic_file;

/// Readable by the agent's user only, because the file has credentials.
const MODE: u32 = 0o600;
/// Mode of the parent directory, if it is created.
const DIRECTORY: u32 = 0o755;

/// Error of a kubeconfig file.
#[derive(Debug, thiserror::Error)]
pub enum KubeconfigError {
    /// The file cannot be read.
    #[error("unable to load kubeconfig {path}: {cause}")]
    Read {
        /// Path of the file.
        path: String,
        /// Text of the I/O error.
        cause: String,
    },
    /// The file is no usable kubeconfig.
    #[error("invalid configuration: {0}")]
    Invalid(String),
    /// The file cannot be written.
    #[error("cannot write {path}: {cause}")]
    Write {
        /// Path of the file.
        path: String,
        /// I/O error of creating the directory or writing the file.
        cause: io::Error,
    },
}

/// Address and trust settings of the API server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cluster {
    /// URL of the server.
    pub server: String,
    /// Host name for certificate verification; empty: the URL's.
    pub tls_server_name: String,
    /// Whether certificate verification is disabled.
    pub insecure: bool,
    /// Path of the certificate authorities' file.
    pub authority: String,
    /// Certificate authorities: PEM in base64; takes precedence over the file.
    pub authority_data: String,
    /// URL of the HTTP proxy; empty: none configured.
    pub proxy: String,
}

/// Where a kubeconfig has its client certificate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CertificateOrigin {
    /// Inline.
    Data,
    /// In files that it refers to.
    Files,
}

/// Cluster and user of the current context.
#[derive(Clone, Debug)]
pub struct Kubeconfig {
    /// Address and trust settings of the API server.
    pub cluster: Cluster,
    user: User,
}

impl Kubeconfig {
    /// Reads and parses a kubeconfig.
    ///
    /// # Errors
    /// The file cannot be read, or names no server.
    pub fn read(path: &Path) -> Result<Self, KubeconfigError> {
        let read_error = |cause: String| KubeconfigError::Read { path: path.display().to_string(), cause };
        let text = fs::read_to_string(path).map_err(|e| read_error(e.to_string()))?;
        let read = transport::Kubeconfig::parse(&text, path.parent().unwrap_or(Path::new("")));
        let transport::Kubeconfig { cluster, user } = read.map_err(KubeconfigError::Invalid)?;
        Ok(Self { cluster: reach(cluster), user })
    }

    /// Client certificate and key, and where they are; `None` if there is no usable pair.
    pub fn pair(&self) -> Option<(Pair, CertificateOrigin)> {
        let (certificate, key) = self.user.pair.as_ref()?;
        let origin = if certificate.file().is_some() { CertificateOrigin::Files } else { CertificateOrigin::Data };
        let text = |source: &InlineOrFile| source.read().ok().and_then(|bytes| String::from_utf8(bytes).ok());
        Pair::join(&text(certificate)?, &text(key)?).ok().map(|pair| (pair, origin))
    }
}

/// Classifies a kubeconfig: whether it loads, and whether its client certificate is valid at `now`.
pub fn classify(path: &Path, now: Timestamp) -> KubeconfigState {
    let Ok(kubeconfig) = Kubeconfig::read(path) else { return KubeconfigState::NotValid };
    match kubeconfig.pair() {
        Some((pair, _)) if leaf::all_hold(&pair.certificate, now.as_second()) => KubeconfigState::Valid,
        _ => KubeconfigState::Unproven,
    }
}

/// Writes a kubeconfig whose client certificate and key are behind the link `pair`.
///
/// Unlike the kubelet's, it keeps the proxy and the server's name.
///
/// # Errors
/// The file or its directory cannot be written.
pub fn write(path: &Path, cluster: &Cluster, pair: &Path) -> Result<(), KubeconfigError> {
    let wrong = |cause| KubeconfigError::Write { path: path.display().to_string(), cause };
    if let Some(directory) = path.parent().filter(|directory| !directory.as_os_str().is_empty()) {
        fs::DirBuilder::new().recursive(true).mode(DIRECTORY).create(directory).map_err(wrong)?;
    }
    let pair = std::path::absolute(pair).map_err(wrong)?;
    atomic_file::replace(path, text(cluster, &pair).as_bytes(), MODE).map_err(wrong)
}

fn text(cluster: &Cluster, pair: &Path) -> String {
    // A JSON string is a YAML string.
    let quoted = |text: &str| Value::from(text).to_string();
    let pair = quoted(&pair.display().to_string());
    let mut reached = format!("    server: {}\n", quoted(&cluster.server));
    for (key, value) in [
        ("certificate-authority-data", &cluster.authority_data),
        ("certificate-authority", &cluster.authority),
        ("tls-server-name", &cluster.tls_server_name),
        ("proxy-url", &cluster.proxy),
    ] {
        let is_doubled = key == "certificate-authority" && !cluster.authority_data.is_empty();
        if !value.is_empty() && !is_doubled {
            reached.push_str(&format!("    {key}: {}\n", quoted(value)));
        }
    }
    if cluster.insecure {
        reached.push_str("    insecure-skip-tls-verify: true\n");
    }
    format!(
        "apiVersion: v1\nkind: Config\nclusters:\n- name: default-cluster\n  cluster:\n{reached}\
         users:\n- name: default-auth\n  user:\n    client-certificate: {pair}\n    client-key: {pair}\n\
         contexts:\n- name: default-context\n  context:\n    cluster: default-cluster\n    namespace: default\n    \
         user: default-auth\ncurrent-context: default-context\n"
    )
}

fn reach(cluster: transport::Cluster) -> Cluster {
    let (authority, authority_data) = match cluster.authorities {
        Some(InlineOrFile::File(file)) => (file.display().to_string(), String::new()),
        Some(InlineOrFile::Text(pem)) => (String::new(), STANDARD.encode(pem)),
        None => (String::new(), String::new()),
    };
    Cluster {
        server: cluster.server,
        tls_server_name: cluster.tls_server_name,
        insecure: cluster.insecure_skip_tls_verify,
        authority,
        authority_data,
        proxy: cluster.proxy_url,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::certificates::testing::{Authority, DAY};

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a time")
    }

    fn kubeconfig(user: &str) -> String {
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
             contexts: [{{name: c, context: {{cluster: k, user: u}}}}]\n\
             clusters: [{{name: k, cluster: {{server: 'https://10.0.0.1:6443', certificate-authority: ca.crt}}}}]\n\
             users: [{{name: u, user: {user}}}]\n"
        )
    }

    #[test]
    fn whether_a_kubeconfig_can_be_used() {
        let folder = tempfile::tempdir().expect("a folder");
        let pair = Authority::new().pair("n", 0, DAY);
        let file = folder.path().join("pair.pem");
        fs::write(&file, pair.text()).expect("written");
        let data = |text: &str| STANDARD.encode(text);
        let within =
            format!("{{client-certificate-data: {}, client-key-data: {}}}", data(&pair.certificate), data(&pair.key));
        let (named, text) = ("{client-certificate: pair.pem, client-key: pair.pem}", kubeconfig);
        for (content, now, expected) in [
            (text(&within), 10, KubeconfigState::Valid),
            (text(&within), DAY + 1, KubeconfigState::Unproven),
            (text(named), 10, KubeconfigState::Valid),
            (text("{client-certificate: none.pem, client-key: none.pem}"), 10, KubeconfigState::Unproven),
            (text("{token: t}"), 10, KubeconfigState::Unproven),
            (text(&within).replace("current-context: c", "current-context: x"), 10, KubeconfigState::NotValid),
            ("{".to_owned(), 10, KubeconfigState::NotValid),
            (String::new(), 10, KubeconfigState::NotValid),
        ] {
            let path = folder.path().join("kubeconfig");
            fs::write(&path, &content).expect("written");
            assert_eq!(classify(&path, at(now)), expected, "{content}");
        }
        assert_eq!(classify(&folder.path().join("none"), at(10)), KubeconfigState::NotValid);
        let path = folder.path().join("kubeconfig");
        for (content, origin) in [(text(&within), CertificateOrigin::Data), (text(named), CertificateOrigin::Files)] {
            fs::write(&path, content).expect("written");
            assert_eq!(Kubeconfig::read(&path).expect("read").pair(), Some((pair.clone(), origin)));
        }
    }

    #[test]
    fn a_bootstrap_leaves_a_kubeconfig_that_can_be_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let bootstrap = folder.path().join("bootstrap");
        fs::write(&bootstrap, kubeconfig("{token: a.b}")).expect("written");
        let cluster = Kubeconfig::read(&bootstrap).expect("read").cluster;
        assert_eq!(cluster.authority, folder.path().join("ca.crt").display().to_string());
        let (path, link) = (folder.path().join("etc/kubelet.conf"), folder.path().join("pki/current.pem"));
        let every = Cluster { tls_server_name: "api".to_owned(), proxy: "http://p: #1".to_owned(), ..cluster.clone() };
        let data = Cluster { authority: String::new(), authority_data: "UEVN".to_owned(), ..cluster.clone() };
        for cluster in [cluster.clone(), every, data] {
            write(&path, &cluster, &link).expect("written");
            let again = Kubeconfig::read(&path).expect("read");
            assert_eq!(again.cluster, cluster);
            assert_eq!(again.user.pair, Some((InlineOrFile::File(link.clone()), InlineOrFile::File(link.clone()))));
            assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
        }
        let text = fs::read_to_string(&path).expect("read");
        assert!(text.contains("\n    namespace: default\n") && text.ends_with("\ncurrent-context: default-context\n"));
        let unverified = Cluster { insecure: true, authority: String::new(), ..cluster };
        write(&path, &unverified, &link).expect("written");
        assert_eq!(Kubeconfig::read(&path).expect("read").cluster, unverified);
    }
}
