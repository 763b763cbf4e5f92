//! Network interface counters of pods, read from outside their namespaces by netlink. Blocking.
//!
//! No thread or process enters a pod's namespace.

use std::{os::fd::AsFd, path::Path};

use tracing::debug;

use berth_sys::{
    net_namespace,
    netlink::{
        NetlinkFamily, Socket,
        counters::{self, LinkCounters},
    },
};

/// Netlink client that reuses one socket for many pods.
#[derive(Debug, Default)]
pub struct LinkCounterReader(Option<Socket>);

impl LinkCounterReader {
    /// Interface counters of a network namespace file; `None` if the namespace is gone or the request fails.
    pub fn links(&mut self, netns: &Path) -> Option<Vec<LinkCounters>> {
        let asked = net_namespace::open_file(netns).and_then(|namespace| {
            let socket = match &mut self.0 {
                Some(socket) => socket,
                none => none.insert(Socket::open(NetlinkFamily::Route)?),
            };
            counters::of_namespace(socket, namespace.as_fd())
        });
        asked.inspect_err(|cause| debug!(path = %netns.display(), err = %cause, "Failed to read network interface statistics of the pod")).ok()
    }
}
