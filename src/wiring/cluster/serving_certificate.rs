//! Serving certificate signed by the cluster (`serverTLSBootstrap`, spec 01 §11.6).

use std::path::PathBuf;

use super::{super::composition_root::Base, Cluster, node_join::of_node};
use crate::node::own_node::addresses;
use berth_api::certificates::{NamesNeeded, ServingCertificates, ServingSetup};
use berth_config::LoadedConfig;
use berth_metrics::CertificateMetrics;

impl Cluster {
    /// Starts the controller that requests and rotates the serving certificate.
    pub(super) async fn start_serving_certificate(&self, loaded: &LoadedConfig, base: &Base) {
        let config = &loaded.config;
        let given = !config.tls_cert_file.is_empty() && !config.tls_private_key_file.is_empty();
        let clock = base.clock.clone();
        let setup = ServingSetup {
            directory: PathBuf::from(&loaded.flags.cert_dir),
            node: self.name.clone(),
            configured: given
                .then(|| (PathBuf::from(&config.tls_cert_file), PathBuf::from(&config.tls_private_key_file))),
            api: self.api.clone(),
            addresses: of_node(base, self.nodes.clone(), &self.name, addresses),
            needed: if loaded.gates.enabled("AllowDNSOnlyNodeCSR") { NamesNeeded::Any } else { NamesNeeded::Ip },
            clock: base.clock.clone(),
            metrics: CertificateMetrics::serving(&base.registry, move || clock.now().as_second()),
            events: base.events.clone(),
        };
        // The server watches the file; metrics and events report the state.
        let _ = ServingCertificates::start(setup, base.tasks.tracker(), base.stop.child_token()).await;
    }
}
