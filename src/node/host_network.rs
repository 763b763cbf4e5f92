//! Host network observation: interface addresses, default routes, name resolution, change events.
//!
//! Implements spec 05 §4.4, §4.7. The kernel reports address changes by rtnetlink; observers then read the addresses
//! again. Names are resolved at most once per interval, and a good answer is kept while the resolver fails: a flapping
//! resolver must not change the node's address (spec 05 §4.7).

use std::{io, net::IpAddr, sync::Arc, time::Duration};

use async_trait::async_trait;
use nix::{ifaddrs::getifaddrs, net::if_::InterfaceFlags};
use tokio::{
    io::unix::AsyncFd,
    sync::Mutex,
    time::{Instant, timeout},
};
use tracing::{debug, warn};

use super::{
    routes::{default_v4, default_v6},
    status::addresses::{HostNetworkState, InterfaceAddress},
};
use berth_sys::netlink::{NetlinkFamily, Socket};

/// rtnetlink multicast groups of IPv4 and IPv6 address changes, as a bit mask.
const ADDRESS_NEWS: u32 = 0x10 | 0x100;
/// Timeout of a name resolution.
const NAME_LIMIT: Duration = Duration::from_secs(3);
/// Timeout of reading the interfaces: the kernel answers at once, but blocking threads may be exhausted.
const READ_LIMIT: Duration = Duration::from_secs(5);
/// Minimum time between two resolutions of the name.
const NAME_AGE: Duration = Duration::from_secs(10);

/// Source of the machine's addresses and routes.
#[async_trait]
pub trait HostNetwork: Send + Sync + 'static {
    /// Reads current addresses and default routes; resolves no name.
    ///
    /// # Errors
    /// The error of the kernel, or a timeout.
    async fn observe(&self) -> io::Result<HostNetworkState>;

    /// Resolves a name to addresses.
    ///
    /// # Errors
    /// The error of the resolver.
    async fn resolve(&self, name: &str) -> io::Result<Vec<IpAddr>>;

    /// Waits until addresses have changed. Cancel-safe.
    async fn changed(&self);
}

/// [`HostNetwork`] of this machine.
#[derive(Default)]
pub struct KernelNetwork {
    news: Mutex<Option<AsyncFd<Socket>>>,
}

#[async_trait]
impl HostNetwork for KernelNetwork {
    async fn observe(&self) -> io::Result<HostNetworkState> {
        let read = timeout(READ_LIMIT, tokio::task::spawn_blocking(read)).await;
        read.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?.map_err(io::Error::other)?
    }

    async fn resolve(&self, name: &str) -> io::Result<Vec<IpAddr>> {
        Ok(tokio::net::lookup_host((name, 0)).await?.map(|found| found.ip().to_canonical()).collect())
    }

    async fn changed(&self) {
        let mut news = self.news.lock().await;
        if news.is_none() {
            *news = Socket::subscribe(NetlinkFamily::Route, ADDRESS_NEWS).and_then(Socket::into_async).ok();
        }
        let Some(socket) = news.as_ref() else { return std::future::pending().await };
        let result = socket.readable().await;
        match result {
            Ok(mut ready) => {
                // The content is not needed: addresses are read again. Lost notifications (an error) count as a change,
                // too.
                while let Ok(Some(_)) = ready.get_inner().receive_notifications() {}
                ready.clear_ready();
            }
            Err(err) => {
                debug!(%err, "Failed to watch host network addresses");
                std::future::pending::<()>().await;
            }
        }
    }
}

fn read() -> io::Result<HostNetworkState> {
    let addresses = getifaddrs()?.filter_map(|found| {
        let address = found.address?;
        let v4 = address.as_sockaddr_in().map(|a| IpAddr::V4(a.ip()));
        let ip = v4.or_else(|| address.as_sockaddr_in6().map(|a| IpAddr::V6(a.ip())))?;
        let is_up = found.flags.contains(InterfaceFlags::IFF_UP);
        Some(InterfaceAddress { interface: found.interface_name, ip, is_up })
    });
    // A kernel without one of the IP versions has no file for it.
    let table = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    Ok(HostNetworkState {
        addresses: addresses.collect(),
        default_v4: default_v4(&table("/proc/net/route")),
        default_v6: default_v6(&table("/proc/net/ipv6_route")),
        resolved: Vec::new(),
    })
}

/// Network observer that keeps the last good observation.
pub(super) struct NetworkObserver {
    pub(super) network: Arc<dyn HostNetwork>,
    last: HostNetworkState,
    /// When the name was last resolved.
    asked: Option<Instant>,
}

impl NetworkObserver {
    pub(super) fn new(network: Arc<dyn HostNetwork>) -> Self {
        Self { network, last: HostNetworkState::default(), asked: None }
    }

    /// Observes the network; resolves `name` if given.
    pub(super) async fn observe(&mut self, name: Option<&str>) -> HostNetworkState {
        match self.network.observe().await {
            Ok(seen) => self.last = HostNetworkState { resolved: std::mem::take(&mut self.last.resolved), ..seen },
            Err(err) => warn!(%err, "Failed to read host network addresses"),
        }
        if let Some(name) = name {
            self.resolve(name).await;
        }
        self.last.clone()
    }

    async fn resolve(&mut self, name: &str) {
        if self.asked.is_some_and(|asked| asked.elapsed() < NAME_AGE) {
            return;
        }
        match timeout(NAME_LIMIT, self.network.resolve(name)).await {
            Ok(Ok(found)) if !found.is_empty() => self.last.resolved = found,
            Ok(Ok(_)) => debug!(node = name, "Node name resolves to no address"),
            Ok(Err(err)) => debug!(node = name, %err, "Failed to resolve node name"),
            Err(_) => debug!(node = name, "Timed out resolving node name"),
        }
        self.asked = Some(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::fixture::FakeNetwork;

    #[tokio::test(start_paused = true)]
    async fn a_good_answer_stays_while_the_resolver_fails() {
        let fake = Arc::new(FakeNetwork::default());
        let mut watched = NetworkObserver::new(fake.clone());
        let ip: IpAddr = "10.0.0.2".parse().expect("an address");
        fake.set(HostNetworkState { resolved: vec![ip], ..HostNetworkState::default() });
        assert_eq!(watched.observe(None).await.resolved, Vec::<IpAddr>::new());
        assert_eq!(watched.observe(Some("n")).await.resolved, [ip]);
        fake.set(HostNetworkState::default());
        tokio::time::advance(NAME_AGE * 2).await;
        assert_eq!(watched.observe(Some("n")).await.resolved, [ip]);
    }

    #[tokio::test]
    async fn a_real_machine_has_an_address_that_is_its_own() {
        let network = KernelNetwork::default().observe().await.expect("readable");
        let loopback: IpAddr = "127.0.0.1".parse().expect("an address");
        assert!(network.addresses.iter().any(|own| own.ip == loopback), "{network:?}");
    }
}
