//! Address detection of a standalone node.
//!
//! Implements spec 01 §12.2. Pods read the addresses as `status.hostIP`; host network pods have them as pod IPs.

use std::{net::IpAddr, sync::Arc};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::{
    facts_publisher::dual_stack_pair,
    host_network::HostNetwork,
    status::addresses::{HostNetworkState, by_default_route},
};
use berth_ports::NodeFacts;

/// Publishes the node's addresses to its facts, at once and whenever the kernel reports a change.
pub struct StandaloneAddresses {
    /// `--node-ip`; an unspecified address selects the preferred IP version.
    pub configured: Vec<IpAddr>,
    /// Node name; if it is an IP address, it counts as configured.
    pub hostname: String,
    /// Source of the machine's addresses and routes.
    pub network: Arc<dyn HostNetwork>,
    /// Facts to update.
    pub facts: watch::Sender<Arc<NodeFacts>>,
}

impl StandaloneAddresses {
    /// Observes the network once. Keeps the known addresses if the machine has no usable one.
    pub async fn publish_once(&self) {
        match self.network.observe().await {
            Ok(network) => self.publish(&network),
            Err(err) => warn!(%err, "Failed to read host network addresses"),
        }
    }

    /// Publishes after each address change that the kernel reports, until stopped.
    pub async fn follow(self, stop: CancellationToken) {
        while stop.run_until_cancelled(self.network.changed()).await.is_some() {
            self.publish_once().await;
        }
    }

    fn publish(&self, network: &HostNetworkState) {
        let ips = chosen(&self.configured, &self.hostname, network);
        self.facts.send_if_modified(|facts| {
            let is_news = !ips.is_empty() && facts.host_ips != ips;
            if is_news {
                Arc::make_mut(facts).host_ips = ips;
            }
            is_news
        });
    }
}

/// Chooses the addresses: configured ones, else the host name, else the default route. Resolves no name: a standalone
/// node starts without waiting for a resolver.
fn chosen(configured: &[IpAddr], hostname: &str, network: &HostNetworkState) -> Vec<IpAddr> {
    let specific = configured.iter().copied().filter(|ip| !ip.is_unspecified());
    let named = || hostname.parse().ok();
    let prefers_v6 = configured.first().is_some_and(IpAddr::is_ipv6);
    let configured = dual_stack_pair(specific);
    if configured.is_empty() {
        named().or_else(|| by_default_route(network, prefers_v6)).into_iter().collect()
    } else {
        configured
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::{fixture::FakeNetwork, status::addresses::InterfaceAddress};

    fn network(ip: &str) -> HostNetworkState {
        let own = InterfaceAddress { interface: "eth0".to_owned(), ip: ip.parse().expect("an address"), is_up: true };
        HostNetworkState {
            addresses: vec![own],
            default_v4: vec!["eth0".to_owned()],
            default_v6: vec!["eth0".to_owned()],
            ..HostNetworkState::default()
        }
    }

    #[test]
    fn addresses_are_those_configured_or_that_of_the_default_route() {
        for (configured, hostname, own, expected) in [
            ("", "n", "10.0.0.2", "10.0.0.2"),
            ("", "n", "fd00::2", "fd00::2"),
            ("", "n", "169.254.0.1", ""),
            ("", "10.9.9.9", "10.0.0.2", "10.9.9.9"),
            ("10.99.0.1", "n", "10.0.0.2", "10.99.0.1"),
            ("fd00::9,10.99.0.1", "n", "10.0.0.2", "fd00::9,10.99.0.1"),
            ("0.0.0.0", "n", "10.0.0.2", "10.0.0.2"),
            ("::", "n", "10.0.0.2", "10.0.0.2"),
        ] {
            let configured: Vec<IpAddr> = configured.split(',').filter_map(|ip| ip.parse().ok()).collect();
            let addresses: Vec<String> =
                chosen(&configured, hostname, &network(own)).iter().map(IpAddr::to_string).collect();
            assert_eq!(addresses.join(","), expected, "{configured:?} {hostname} {own}");
        }
    }

    #[tokio::test]
    async fn a_lost_address_is_published_until_another_appears() {
        let fake = Arc::new(FakeNetwork::default());
        let facts = watch::Sender::new(Arc::<NodeFacts>::default());
        let own = StandaloneAddresses {
            configured: Vec::new(),
            hostname: "n".to_owned(),
            network: fake.clone(),
            facts: facts.clone(),
        };
        let published = || facts.borrow().host_ips.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(",");
        for (seen, expected) in [
            (network("10.0.0.2"), "10.0.0.2"),
            (HostNetworkState::default(), "10.0.0.2"),
            (network("10.0.0.3"), "10.0.0.3"),
        ] {
            fake.set(seen);
            own.publish_once().await;
            assert_eq!(published(), expected);
        }
    }
}
