//! Credentials of the test API server's clients: kubeconfig files, client certificates, and the CA certificate.

use std::path::PathBuf;

use base64::{Engine, engine::general_purpose::STANDARD};
use berth::certificates::{CertificatePair, Validity};
use jiff::SignedDuration;
use serde_json::{Value, json};

use super::{ApiServer, clock};

impl ApiServer {
    /// Kubeconfig of the administrator.
    pub fn kubeconfig(&self) -> PathBuf {
        self.folder.path().join("kubeconfig")
    }

    /// Kubeconfig of a user, with a client certificate valid for thirty days.
    pub fn kubeconfig_for(&self, user: &str, groups: &[&str]) -> PathBuf {
        self.write_kubeconfig(
            &format!("kubeconfig-{}", user.replace(['/', ':'], "-")),
            &self.certificate_user(user, groups),
        )
    }

    /// Kubeconfig of the user `system:node:<node>` in the group `system:nodes`.
    pub fn node_kubeconfig(&self, node: &str) -> PathBuf {
        self.kubeconfig_for(&format!("system:node:{node}"), &["system:nodes"])
    }

    /// Kubeconfig with a bootstrap token, `id.secret`; creates its Secret with one day of lifetime if absent.
    pub fn bootstrap_kubeconfig(&self, token: &str) -> PathBuf {
        let (id, secret) = token.split_once('.').unwrap_or((token, ""));
        let name = format!("bootstrap-token-{id}");
        if self.get("secrets", "kube-system", &name).is_none() {
            let until = clock::text(self.now() + SignedDuration::from_hours(24));
            let data: serde_json::Map<String, Value> = [
                ("token-id", id),
                ("token-secret", secret),
                ("expiration", until.as_str()),
                ("usage-bootstrap-authentication", "true"),
            ]
            .into_iter()
            .map(|(key, value)| (key.to_owned(), json!(STANDARD.encode(value))))
            .collect();
            self.create(json!({"kind": "Secret", "apiVersion": "v1", "type": "bootstrap.kubernetes.io/token",
                               "metadata": {"name": name, "namespace": "kube-system"}, "data": data}));
        }
        self.token_kubeconfig(&name, token)
    }

    /// Kubeconfig with a bearer token.
    pub fn token_kubeconfig(&self, file: &str, token: &str) -> PathBuf {
        self.write_kubeconfig(file, &json!({"token": token}))
    }

    /// Client certificate that is valid for so many days on the server's clock, starting an hour ago.
    pub fn client(&self, user: &str, groups: &[&str], days: i64) -> CertificatePair {
        self.authority
            .client(user, groups, Validity::days(self.now(), days))
            .expect("failed to issue client certificate")
    }

    /// Certificate of the authority, PEM.
    pub fn authority_pem(&self) -> &str {
        &self.authority.own().certificate
    }

    /// Kubeconfig with that `user` entry.
    pub fn kubeconfig_text(&self, user: &Value) -> String {
        json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "user"}}],
            "clusters": [{"name": "test", "cluster": {
                "server": self.url,
                "certificate-authority-data": STANDARD.encode(self.authority_pem()),
            }}],
            "users": [{"name": "user", "user": user}],
        })
        .to_string()
    }

    pub(super) fn write_kubeconfig(&self, file: &str, user: &Value) -> PathBuf {
        let path = self.folder.path().join(file);
        std::fs::write(&path, self.kubeconfig_text(user)).expect("written");
        path
    }

    pub(super) fn certificate_user(&self, user: &str, groups: &[&str]) -> Value {
        let issued = self.client(user, groups, 30);
        json!({"client-certificate-data": STANDARD.encode(issued.certificate),
               "client-key-data": STANDARD.encode(issued.key)})
    }
}
