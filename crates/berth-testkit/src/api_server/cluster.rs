//! Cluster operations in tests: certificate approval, denial, and failure; bootstrap tokens.

use base64::{Engine, engine::general_purpose::STANDARD};
use jiff::SignedDuration;
use serde_json::{Map, Value, json};

use super::{
    ApiServer, Core,
    rules::controllers,
    view::{View, Write},
};

impl ApiServer {
    /// Approves a certificate signing request; the signer controller then signs it.
    pub fn approve(&self, csr: &str) {
        self.write(|core| controllers::approve(core, csr));
    }

    /// Denies a certificate signing request.
    pub fn deny(&self, csr: &str) {
        self.write(|core| controllers::deny(core, csr));
    }

    /// Marks a certificate signing request as failed, as its signer would.
    pub fn fail(&self, csr: &str, why: &str) {
        self.write(|core| controllers::fail(core, csr, why));
    }

    /// Creates a bootstrap token, `id.secret`, with a limited lifetime.
    ///
    /// # Panics
    /// The token has another format.
    pub fn bootstrap_token(&self, token: &str, lives: SignedDuration) {
        let (id, secret) = token.split_once('.').expect("id.secret");
        let expires = (self.now() + lives).strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        let fields = [
            ("token-id", id),
            ("token-secret", secret),
            ("expiration", &expires),
            ("usage-bootstrap-authentication", "true"),
            ("auth-extra-groups", "system:bootstrappers:kubeadm:default-node-token"),
        ];
        let encoded = fields.into_iter().map(|(key, value)| (key.to_owned(), STANDARD.encode(value).into()));
        let object = json!({"kind": "Secret", "apiVersion": "v1", "type": "bootstrap.kubernetes.io/token",
            "metadata": {"name": format!("bootstrap-token-{id}"), "namespace": "kube-system"},
            "data": encoded.collect::<Map<String, Value>>()});
        self.write(|_| vec![Write::Put { resource: "secrets".to_owned(), object }]);
    }

    fn write(&self, what: impl FnOnce(&dyn View) -> Vec<Write>) {
        self.with(|core: &mut Core| {
            let writes = what(core);
            core.apply(writes);
        });
    }
}
