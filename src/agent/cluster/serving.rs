//! The pair we serve with, signed by the cluster (`serverTLSBootstrap`, spec 01 §11.6).

use std::path::PathBuf;

use k8s_openapi::api::core::v1::NodeAddress;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{super::build::Base, Cluster};
use crate::{
    config::Loaded,
    kube::{
        Store,
        certificates::{NamesNeeded, ServingCertificates, ServingSetup},
    },
    metrics::CertificateMetrics,
    pod::api,
};

impl Cluster {
    /// Has the cluster sign it, from now on.
    pub(super) async fn keep_serving_pair(&self, loaded: &Loaded, base: &Base) {
        let config = &loaded.config;
        let given = !config.tls_cert_file.is_empty() && !config.tls_private_key_file.is_empty();
        let clock = base.clock.clone();
        let setup = ServingSetup {
            directory: PathBuf::from(&loaded.flags.cert_dir),
            node: self.name.clone(),
            configured: given
                .then(|| (PathBuf::from(&config.tls_cert_file), PathBuf::from(&config.tls_private_key_file))),
            api: self.api.clone(),
            addresses: self.addresses(base),
            needed: if loaded.gates.enabled("AllowDNSOnlyNodeCSR") { NamesNeeded::Any } else { NamesNeeded::Ip },
            clock: base.clock.clone(),
            metrics: CertificateMetrics::serving(&base.registry, move || clock.now().as_second()),
            events: base.events.clone(),
        };
        // The server follows the file; metrics and events tell the rest.
        let _ = ServingCertificates::start(setup, &base.tasks, base.stop.child_token()).await;
    }

    /// The addresses in the node's status, as they are told.
    fn addresses(&self, base: &Base) -> watch::Receiver<Vec<NodeAddress>> {
        let (told, addresses) = watch::channel(Vec::new());
        base.tasks.spawn(follow_addresses(self.nodes.clone(), self.name.clone(), told, base.stop.child_token()));
        addresses
    }
}

async fn follow_addresses(
    mut nodes: Store<api::Node>,
    name: String,
    told: watch::Sender<Vec<NodeAddress>>,
    stop: CancellationToken,
) {
    loop {
        let node = nodes.get("", &name);
        let addresses = node.and_then(|node| node.status.clone()?.addresses).unwrap_or_default();
        told.send_if_modified(|known| {
            let moved = *known != addresses;
            *known = addresses;
            moved
        });
        tokio::select! {
            () = stop.cancelled() => return,
            () = nodes.changed() => {}
        }
    }
}
