//! From a kubeconfig to a client (spec 01 §10.1).

use std::path::Path;

use ::kube::{
    Client, Config,
    client::ClientBuilder,
    config::{AuthInfo, KubeConfigOptions, Kubeconfig},
};

use super::{
    counted::Counted,
    paced::{Paced, Rate},
};
use crate::metrics::{Registry, RestClientMetrics};

/// There is no client.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The file cannot be read.
    #[error("invalid kubeconfig: stat {path}: {cause}")]
    Missing {
        /// The file.
        path: String,
        /// Why.
        cause: String,
    },
    /// It says nothing that could be used.
    #[error("invalid configuration: {0}")]
    Invalid(String),
}

/// A client whose requests nobody counts; else as [`connect_counted`].
///
/// # Errors
/// What is wrong with the file or with what it names.
pub async fn connect(path: &Path) -> Result<Client, ConnectError> {
    connect_counted(path, RestClientMetrics::new(&Registry::new()), Rate::default()).await
}

/// A client for the API server a kubeconfig names; it connects when it is first used.
///
/// Retries are the callers': each knows what may be asked twice. Needs a tokio runtime.
///
/// # Errors
/// What is wrong with the file or with what it names.
pub async fn connect_counted(path: &Path, metrics: RestClientMetrics, rate: Rate) -> Result<Client, ConnectError> {
    if let Err(error) = tokio::fs::metadata(path).await {
        let cause = match error.kind() {
            std::io::ErrorKind::NotFound => "no such file or directory".to_owned(),
            _ => error.to_string(),
        };
        return Err(ConnectError::Missing { path: path.display().to_string(), cause });
    }
    let invalid = |cause: String| ConnectError::Invalid(cause);
    let kubeconfig = Kubeconfig::read_from(path).map_err(|e| invalid(e.to_string()))?;
    check(&kubeconfig).map_err(invalid)?;
    let options = KubeConfigOptions::default();
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &options).await.map_err(|e| invalid(chain(&e)))?;
    config.default_retry = false;
    let host = config.cluster_url.authority().map(|authority| authority.as_str().to_owned()).unwrap_or_default();
    let builder = ClientBuilder::try_from(config).map_err(|e| invalid(chain(&e)))?;
    // Outermost: what waits for its turn is not asked yet, and not counted.
    Ok(builder.with_layer(&Counted::new(metrics, &host)).with_layer(&Paced(rate)).build())
}

/// What the reference tells in words of its own.
fn check(kubeconfig: &Kubeconfig) -> Result<(), String> {
    let Some(name) = kubeconfig.current_context.as_deref().filter(|name| !name.is_empty()) else {
        return Err("no configuration has been provided: current-context is not set".to_owned());
    };
    let named = kubeconfig.contexts.iter().find(|context| context.name == name);
    let Some(context) = named.and_then(|named| named.context.as_ref()) else {
        return Err(format!("context was not found for specified context: {name}"));
    };
    let cluster = kubeconfig.clusters.iter().find(|cluster| cluster.name == context.cluster);
    let server = cluster.and_then(|named| named.cluster.as_ref()).and_then(|cluster| cluster.server.as_deref());
    if server.is_none_or(str::is_empty) {
        return Err(format!("no server found for cluster \"{}\"", context.cluster));
    }
    let Some(user) = &context.user else { return Ok(()) };
    let info = kubeconfig.auth_infos.iter().find(|info| info.name == *user).and_then(|named| named.auth_info.as_ref());
    info.map_or(Ok(()), |info| check_user(user, info))
}

fn check_user(user: &str, info: &AuthInfo) -> Result<(), String> {
    let has_certificate = info.client_certificate.is_some() || info.client_certificate_data.is_some();
    let has_key = info.client_key.is_some() || info.client_key_data.is_some();
    if has_certificate && !has_key {
        return Err(format!(
            "client-key-data or client-key must be specified for {user} to use the clientCert authentication method."
        ));
    }
    let files = [("client-cert", &info.client_certificate), ("client-key", &info.client_key)];
    for (what, file) in files {
        let Some(file) = file else { continue };
        if let Err(error) = std::fs::File::open(file) {
            return Err(format!("unable to read {what} {file} for {user} due to {error}"));
        }
    }
    Ok(())
}

/// An error with its causes, each once.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn told(content: &str) -> String {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("kubeconfig");
        std::fs::write(&path, content).expect("written");
        match connect(&path).await {
            Ok(_) => String::new(),
            Err(error) => error.to_string(),
        }
    }

    const HEAD: &str = "apiVersion: v1\nkind: Config\ncurrent-context: c\n";

    #[tokio::test]
    async fn what_is_wrong_with_a_kubeconfig_is_told() {
        let missing = connect(Path::new("/nonexistent/kubeconfig")).await.map(drop).expect_err("missing").to_string();
        assert_eq!(missing, "invalid kubeconfig: stat /nonexistent/kubeconfig: no such file or directory");
        let context = format!("{HEAD}contexts: [{{name: c, context: {{cluster: k, user: u}}}}]\n");
        let cluster = format!("{context}clusters: [{{name: k, cluster: {{server: 'https://127.0.0.1:1'}}}}]\n");
        for (content, expected) in [
            (HEAD.to_owned(), "context was not found for specified context: c"),
            ("apiVersion: v1\nkind: Config\n".to_owned(), "no configuration has been provided"),
            (context.clone(), "no server found for cluster \"k\""),
            (
                format!("{cluster}users: [{{name: u, user: {{client-certificate-data: eA==}}}}]\n"),
                "client-key-data or client-key must be specified for u to use the clientCert authentication method.",
            ),
            (
                format!("{cluster}users: [{{name: u, user: {{client-certificate: /no/c, client-key: /no/k}}}}]\n"),
                "unable to read client-cert /no/c for u due to No such file or directory",
            ),
            ("{".to_owned(), ""),
        ] {
            let told = told(&content).await;
            assert!(told.starts_with(&format!("invalid configuration: {expected}")), "{content}: {told}");
        }
        assert_eq!(told(&format!("{cluster}users: [{{name: u, user: {{token: t}}}}]\n")).await, "");
    }
}
