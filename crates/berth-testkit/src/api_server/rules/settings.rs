//! What tests set about the rules, and the keys of the cluster.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use berth::wiring::certificates::Issued;
use jiff::SignedDuration;

use super::{
    authentication::Verified,
    authorizer::{Grant, first_grants},
};

/// The bearer token of the administrator.
pub const ADMIN_TOKEN: &str = "administrator-of-the-test";

/// Settings that tests change, and keys. A controller is off where its delay is none.
#[derive(Clone, Debug)]
pub struct Rules {
    /// How far the Node authorizer is behind.
    pub graph_lag: Duration,
    /// The authority of clients and of this server.
    pub authority: Issued,
    /// Signs tokens of service accounts; PEM, P-256.
    pub token_key: String,
    /// How long tokens of service accounts live at most, in seconds, whatever is asked for. No real server goes
    /// below an hour.
    pub token_seconds: Option<i64>,
    /// Fixed bearer tokens: user and groups.
    pub tokens: BTreeMap<String, (String, Vec<String>)>,
    /// Whether somebody who shows nothing is `system:anonymous`.
    pub anonymous: bool,
    /// Who may what, beside the Node authorizer.
    pub grants: Vec<Grant>,
    /// `namespace/name` of pods that a budget protects from the eviction API.
    pub protected: BTreeSet<String>,
    /// Approves requests for certificates of kubelets as clients.
    pub approver: Option<Duration>,
    /// Signs approved requests.
    pub signer: Option<Duration>,
    /// How long certificates live that it signs, whatever was asked for, from now on.
    pub certificates_live: Option<SignedDuration>,
    /// Why the signer fails, if it does.
    pub signer_fails: Option<String>,
    /// Deletes what lost its owner.
    pub collector: Option<Duration>,
    /// Gives namespaces the authority's certificate and the default account.
    pub publisher: Option<Duration>,
    /// Keeps fields that v1.36 does not know, as a newer server does.
    pub is_newer: bool,
    /// Certificates that were verified.
    pub verified: Arc<Mutex<Verified>>,
    /// Binds pods to that node.
    pub scheduler: Option<String>,
}

impl Rules {
    /// As a cluster has them after its installation.
    ///
    /// # Panics
    /// No random numbers.
    pub fn new(authority: Issued) -> Self {
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
