//! Settings of the test API server's rules, and the keys of the cluster.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use berth::certificates::CertificatePair;
use jiff::SignedDuration;

use super::{
    authentication::CertificateCache,
    authorizer::{Grant, first_grants},
};

/// Bearer token of the administrator.
pub const ADMIN_TOKEN: &str = "administrator-of-the-test";

/// Settings of the rules, and keys. A controller is disabled if its delay is `None`.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Lag of the Node authorizer's graph.
    pub graph_lag: Duration,
    /// Certificate authority of clients and of this server.
    pub authority: CertificatePair,
    /// Signing key of service account tokens: PEM, P-256.
    pub token_key: String,
    /// Maximum lifetime of service account tokens, in seconds, whatever is requested. No real server has less than an
    /// hour.
    pub token_seconds: Option<i64>,
    /// Static bearer tokens: user and groups by token.
    pub tokens: BTreeMap<String, (String, Vec<String>)>,
    /// Whether requests without credentials are `system:anonymous`; otherwise 401.
    pub anonymous: bool,
    /// Permissions beside the Node authorizer.
    pub grants: Vec<Grant>,
    /// `namespace/name` of pods that a disruption budget protects from the eviction API.
    pub protected: BTreeSet<String>,
    /// Delay of the approver of kubelet client certificates.
    pub approver: Option<Duration>,
    /// Delay of the signer of approved certificate signing requests.
    pub signer: Option<Duration>,
    /// Lifetime of signed certificates from now on, whatever is requested.
    pub certificates_live: Option<SignedDuration>,
    /// Failure message of the signer; `None` if it works.
    pub signer_fails: Option<String>,
    /// Delay of the garbage collector.
    pub collector: Option<Duration>,
    /// Delay of the controller that gives namespaces the root CA config map and the default service account.
    pub publisher: Option<Duration>,
    /// Whether to keep fields that v1.36 does not know, as a newer server does.
    pub is_newer: bool,
    /// Cache of verified client certificates.
    pub verified: Arc<Mutex<CertificateCache>>,
    /// Node to which the scheduler binds pods; `None` disables it.
    pub scheduler: Option<String>,
}

impl Rules {
    /// Settings of a new cluster, with a new token key.
    ///
    /// # Panics
    /// The key cannot be generated.
    pub fn new(authority: CertificatePair) -> Self {
        let key = rcgen::KeyPair::generate().expect("random numbers");
        let admin = ("admin".to_owned(), vec!["system:masters".to_owned()]);
        Self {
            graph_lag: Duration::from_millis(20),
            authority,
            token_key: key.serialize_pem(),
            token_seconds: None,
            tokens: BTreeMap::from([(ADMIN_TOKEN.to_owned(), admin)]),
            anonymous: true,
            grants: first_grants(),
            protected: BTreeSet::new(),
            approver: Some(Duration::ZERO),
            signer: Some(Duration::ZERO),
            certificates_live: None,
            signer_fails: None,
            collector: Some(Duration::from_secs(1)),
            publisher: Some(Duration::ZERO),
            is_newer: false,
            verified: Arc::default(),
            scheduler: None,
        }
    }
}
