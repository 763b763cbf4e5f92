//! Watches kernel and file events and repairs the pod network.
//!
//! | Event | Action |
//! |---|---|
//! | part of the nf_tables table was removed | restore the table (`nft flush ruleset`, firewalld) |
//! | the bridge was removed | recreate it and attach the links of pods |
//! | CNI configuration files changed | reload the configuration half a second after the last change |
//! | a pod's link or the file of its network namespace was removed | notify the subscribers of `disturbances` |
//!
//! A burst of events costs one check. Implements spec 09b §10, §12, §13.1.

use std::{path::Path, sync::Arc, time::Duration};

use futures::StreamExt;
use inotify::{EventMask, EventStream, Inotify, WatchMask};
use tokio::{
    task::spawn_blocking,
    time::{Instant, sleep, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::{manager::NetworkManager, mode::Mode, names};
use berth_sys::netlink::{NetlinkFamily, Socket, nf_tables, rtnetlink};

/// Debounce interval for kernel and namespace file events.
const SETTLE: Duration = Duration::from_millis(50);
/// Debounce interval for CNI configuration files.
const FILES_SETTLE: Duration = Duration::from_millis(500);
/// Delay before a retry.
const RETRY: Duration = Duration::from_secs(5);

impl NetworkManager {
    /// Runs all watchers until `stop` is cancelled.
    pub async fn run_watchers(&self, stop: CancellationToken) {
        tokio::select! {
            () = stop.cancelled() => {}
            _ = async {
                tokio::join!(
                    self.keep_filter(),
                    self.keep_bridge(),
                    self.keep_plugins(),
                    self.keep_links(),
                    self.keep_files()
                )
            } => {}
        }
    }

    async fn keep_filter(&self) {
        let table = self.inner.builtin.firewall().table();
        if !self.inner.builtin.firewall().has_filter() {
            return;
        }
        self.watch_netlink(
            NetlinkFamily::Netfilter,
            nf_tables::NEWS,
            |reply| nf_tables::removes_from(reply, &table),
            |network| network.inner.builtin.firewall().restore_if_incomplete().map(drop),
        )
        .await;
    }

    async fn keep_bridge(&self) {
        let bridge = self.inner.builtin.bridge().to_owned();
        let is_ours = |reply: &_| rtnetlink::removed_link(reply).as_deref() == Some(&bridge);
        self.watch_netlink(NetlinkFamily::Route, rtnetlink::LINK_NEWS, is_ours, |network| {
            // With CNI plugins and no leases, the bridge may be removed for good.
            let is_needed = network.mode() == Mode::Builtin || network.leased() != (0, 0);
            if is_needed { network.inner.builtin.prepare().map(drop) } else { Ok(()) }
        })
        .await;
    }

    async fn keep_links(&self) {
        let is_of_pod = |reply: &_| rtnetlink::removed_link(reply).is_some_and(|name| names::is_host_end(&name));
        self.watch_netlink(NetlinkFamily::Route, rtnetlink::LINK_NEWS, is_of_pod, |network| {
            network.notify_disturbance();
            Ok(())
        })
        .await;
    }

    async fn keep_files(&self) {
        let directory = &self.inner.namespaces;
        loop {
            let is_there = directory.is_dir();
            let mut changes = match watch(directory) {
                Ok(changes) => changes,
                Err(e) => {
                    warn!(err = %e, directory = %directory.display(), "Failed to watch network namespace files");
                    sleep(RETRY).await;
                    continue;
                }
            };
            while let Some(Ok(change)) = changes.next().await {
                if change.mask.intersects(EventMask::DELETE | EventMask::MOVED_FROM | EventMask::Q_OVERFLOW) {
                    sleep(SETTLE).await;
                    self.notify_disturbance();
                }
                // The directory may exist by now, or be gone: then the watch must move to another directory.
                if !is_there
                    || change.mask.intersects(EventMask::DELETE_SELF | EventMask::MOVE_SELF | EventMask::IGNORED)
                {
                    break;
                }
            }
        }
    }

    /// Repairs whenever an event is relevant, or events may have been lost.
    async fn watch_netlink(
        &self,
        protocol: NetlinkFamily,
        groups: u32,
        chosen: impl Fn(&berth_sys::netlink::Reply) -> bool,
        action: fn(&Self) -> Result<(), super::NetworkError>,
    ) {
        loop {
            let watched = Socket::subscribe(protocol, groups).and_then(Socket::into_async);
            let socket = match watched {
                Ok(socket) => socket,
                Err(e) => {
                    warn!(err = %e, ?protocol, "Failed to subscribe to kernel network events");
                    sleep(RETRY).await;
                    continue;
                }
            };
            while let Ok(mut ready) = socket.readable().await {
                let mut is_chosen = false;
                loop {
                    match ready.get_inner().receive_notifications() {
                        Ok(Some(news)) => is_chosen |= news.iter().any(&chosen),
                        Ok(None) => break,
                        // Events were lost: any of them may have been relevant.
                        Err(_) => is_chosen = true,
                    }
                }
                ready.clear_ready();
                if is_chosen {
                    sleep(SETTLE).await;
                    self.repair(action).await;
                }
            }
        }
    }

    async fn repair(&self, action: fn(&Self) -> Result<(), super::NetworkError>) {
        loop {
            let network = self.clone();
            match spawn_blocking(move || action(&network)).await {
                Ok(Ok(())) => return,
                Ok(Err(e)) => warn!(err = %e, "Failed to repair pod network"),
                Err(e) => warn!(err = %e, "Failed to repair pod network"),
            }
            sleep(RETRY).await;
        }
    }

    async fn keep_plugins(&self) {
        loop {
            match watch(self.inner.plugins.directory()) {
                Ok(mut changes) => {
                    // Covers changes between the last reload and the start of the watch.
                    self.reload().await;
                    if changes.next().await.is_none() {
                        continue;
                    }
                    debounce(&mut changes).await;
                    self.reload().await;
                }
                Err(e) => {
                    warn!(err = %e, directory = %self.inner.plugins.directory().display(), "Failed to watch CNI configuration directory");
                    sleep(RETRY).await;
                }
            }
        }
    }

    async fn reload(&self) {
        let inner = Arc::clone(&self.inner);
        // Fails only on a panic; the next change reloads again.
        let _ = spawn_blocking(move || inner.plugins.reload()).await;
    }
}

/// Watches a directory, or its nearest existing ancestor.
fn watch(directory: &Path) -> std::io::Result<EventStream<Vec<u8>>> {
    let inotify = Inotify::init()?;
    let mask = WatchMask::CREATE
        | WatchMask::CLOSE_WRITE
        | WatchMask::DELETE
        | WatchMask::MOVED_FROM
        | WatchMask::MOVED_TO
        | WatchMask::DELETE_SELF
        | WatchMask::MOVE_SELF;
    let mut failure = std::io::ErrorKind::NotFound.into();
    for place in directory.ancestors() {
        match inotify.watches().add(place, mask) {
            // The watch on the ancestor misses a directory that was created just before it.
            Ok(_) if place != directory && place.join(next_part(directory, place)).exists() => return watch(directory),
            Ok(_) => return inotify.into_event_stream(vec![0; 4096]),
            Err(e) => failure = e,
        }
    }
    Err(failure)
}

/// The first component of a path below an ancestor.
fn next_part<'a>(path: &'a Path, above: &Path) -> &'a Path {
    let first = path.strip_prefix(above).ok().and_then(|rest| rest.iter().next());
    first.map_or(path, Path::new)
}

async fn debounce(changes: &mut EventStream<Vec<u8>>) {
    let mut until = Instant::now() + FILES_SETTLE;
    // Files that change continuously are still reloaded at this interval.
    let latest = Instant::now() + FILES_SETTLE * 10;
    loop {
        tokio::select! {
            () = sleep_until(until.min(latest)) => return,
            change = changes.next() => match change {
                Some(_) => until = Instant::now() + FILES_SETTLE,
                None => return,
            },
        }
    }
}
