//! What pods' links counted, asked of the kernel from outside their namespaces: no thread and no process enters one. Blocking.

use std::{os::fd::AsFd, path::Path};

use tracing::debug;

use berth_sys::{
    net_namespace,
    netlink::{
        Protocol, Socket,
        counters::{self, LinkCounters},
    },
};

/// Asks for many pods over one socket.
#[derive(Debug, Default)]
pub struct Asker(Option<Socket>);

impl Asker {
    /// Links of the namespace a file names; none where it is gone.
    pub fn links(&mut self, netns: &Path) -> Option<Vec<LinkCounters>> {
        let asked = net_namespace::open_file(netns).and_then(|namespace| {
            let socket = match &mut self.0 {
                Some(socket) => socket,
                none => none.insert(Socket::open(Protocol::Route)?),
            };
            counters::of_namespace(socket, namespace.as_fd())
        });
        asked.inspect_err(|cause| debug!(path = %netns.display(), err = %cause, "Links of a pod are not told")).ok()
    }
}
