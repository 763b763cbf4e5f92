//! Test certificate authority that signs requests of tests.

use std::time::Duration;

use base64::{Engine, engine::general_purpose::STANDARD};
use rcgen::{BasicConstraints, CertificateParams, CertificateSigningRequestParams, DnType, IsCa, Issuer, KeyPair};
use serde_json::{Value, json};

use super::{key::PrivateKey, pair::Pair, template::Template};

/// Seconds of a day.
pub const DAY: i64 = 86_400;

/// Certificate authority of a fake cluster.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    /// Generates an authority with a new key.
    pub fn new() -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "kubernetes");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let pem = params.self_signed(&key).expect("a certificate").pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    /// Certificate of the authority, PEM.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// Signs a request (PEM) as it is, valid between those seconds since the epoch.
    pub fn sign(&self, request: &str, from: i64, until: i64) -> String {
        let time = |at: i64| {
            rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(u64::try_from(at).expect("after the epoch"))
        };
        let mut request = CertificateSigningRequestParams::from_pem(request).expect("a request");
        (request.params.not_before, request.params.not_after) = (time(from), time(until));
        request.signed_by(&self.issuer).expect("signed").pem().replace("\r\n", "\n")
    }

    /// Client pair of a node.
    pub fn pair(&self, node: &str, from: i64, until: i64) -> Pair {
        let key = PrivateKey::generate().expect("a key");
        let request = key.request(&Template::client(node)).expect("a request");
        Pair::join(&self.sign(&request, from, until), &key.to_pem()).expect("a pair")
    }

    /// The created object, approved and signed.
    pub fn answer(&self, created: &Value, from: i64, until: i64) -> Value {
        let request = created["spec"]["request"].as_str().expect("a request");
        let request = String::from_utf8(STANDARD.decode(request).expect("base64")).expect("PEM");
        let mut answer = approved(created);
        answer["status"]["certificate"] = STANDARD.encode(self.sign(&request, from, until)).into();
        answer
    }
}

/// The created object, approved.
pub fn approved(created: &Value) -> Value {
    let mut answer = created.clone();
    answer["status"] = json!({"conditions": [{"type": "Approved", "status": "True"}]});
    answer
}

/// The object of a create call, as the server stores it.
pub fn stored(call: &crate::api::Call, uid: &str) -> Value {
    let mut object: Value = serde_json::from_slice(&call.body.as_ref().expect("a body").bytes).expect("JSON");
    object["metadata"]["uid"] = uid.into();
    object["metadata"]["resourceVersion"] = "1".into();
    object
}

/// List of these objects.
pub fn list(items: &[Value]) -> Value {
    json!({"metadata": {"resourceVersion": "5"}, "items": items})
}
