//! Watch requests of the test API server: start, initial events, bookmarks, and end.
//!
//! Implements spec 10a §5.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use bytes::Bytes;
use serde_json::{Value, json};
use tokio::{sync::mpsc, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{
    ServerState,
    core::Core,
    lists::{filter, refuse_options, too_large, version},
    resources::Kind,
    store::{Item, line},
    tables::TableFormat,
    view::{Refusal, Request, View},
};

/// Time of the last bookmark before a watch's deadline.
const LAST_BOOKMARK: Duration = Duration::from_secs(2);

/// Watch that has been started.
pub(super) struct WatchSession {
    /// Lines to send first.
    lines: VecDeque<Bytes>,
    /// Bookmark that ends the initial events, sent after them if requested.
    marker: Option<Bytes>,
    /// Resource version of the initial events.
    base: u64,
    /// Later events; `None` ends the watch.
    receiver: Option<mpsc::Receiver<Item>>,
}

impl WatchSession {
    /// Watch that sends one ERROR event and ends.
    pub fn refused(refusal: &Refusal) -> Self {
        Self { lines: VecDeque::from([line("ERROR", &refusal.status())]), marker: None, base: 0, receiver: None }
    }
}

impl Core {
    /// Starts a watch.
    ///
    /// # Errors
    /// 400, 403, 422. An invalid resource version is an ERROR event of the watch itself.
    pub(super) fn watch(&mut self, request: &Request, kind: &Kind) -> Result<WatchSession, Refusal> {
        self.admit(request, kind)?;
        refuse_options(request, true, self.switches.watch_list)?;
        let (version, current) = (version(request)?, self.store.rv());
        let (id, filter) = (kind.id, Arc::new(filter(request)));
        let sends_initial = request.query("sendInitialEvents").map(|sends| sends == "true");
        let from_now = sends_initial.unwrap_or(version.unwrap_or_default() == 0);
        if !from_now {
            let start = version.filter(|asked| *asked > 0).unwrap_or(current);
            let floor = self.store.floor(id);
            if start < floor {
                let text = format!("too old resource version: {start} ({floor})");
                return Ok(WatchSession::refused(&Refusal::new(410, "Expired", text)));
            }
            let (missed, receiver) = self.store.subscribe(id, &filter, start);
            return Ok(WatchSession { lines: missed.into(), marker: None, base: start, receiver: Some(receiver) });
        }
        if let Some(asked) = version.filter(|asked| *asked > current) {
            return Ok(WatchSession::refused(&too_large(asked, current)));
        }
        let base = self.base(id, request.query("resourceVersion"));
        let present = self.store.list_at(id, base);
        let added = present.iter().filter(|object| filter.takes(object)).map(|object| line("ADDED", object));
        let mut lines: VecDeque<Bytes> = added.collect();
        let (missed, receiver) = self.store.subscribe(id, &filter, base);
        let wants_marker = sends_initial == Some(true) && self.wants_bookmarks(request);
        let marker = wants_marker.then(|| bookmark(kind, base, true));
        lines.extend(missed);
        Ok(WatchSession { lines, marker, base, receiver: Some(receiver) })
    }

    fn wants_bookmarks(&self, request: &Request) -> bool {
        self.switches.bookmarks && matches!(request.query("allowWatchBookmarks"), Some("true" | "1"))
    }
}

fn bookmark(kind: &Kind, rv: u64, is_marker: bool) -> Bytes {
    let mut metadata = json!({"resourceVersion": rv.to_string()});
    if is_marker {
        metadata["annotations"] = json!({"k8s.io/initial-events-end": "true"});
    }
    line("BOOKMARK", &json!({"kind": kind.kind, "apiVersion": kind.api_version(), "metadata": metadata}))
}

/// Response body of a watch.
pub(super) struct Feed {
    shared: Arc<ServerState>,
    kind: &'static Kind,
    opened: WatchSession,
    /// Earliest time of the marker bookmark.
    marker_at: Instant,
    /// Time of the next bookmark; `None` without bookmarks.
    bookmark_at: Option<Instant>,
    bookmark_every: Duration,
    /// Resource version of the last bookmark.
    bookmark_version: u64,
    deadline: Instant,
    ending: CancellationToken,
    id: u64,
    end: &'static str,
    tables: Option<TableFormat>,
    is_first: bool,
}

impl Feed {
    pub fn new(
        shared: &Arc<ServerState>,
        kind: &'static Kind,
        request: &Request,
        opened: WatchSession,
        id: u64,
    ) -> Self {
        let (switches, chance, wants) = {
            let core = shared.core();
            (core.switches.clone(), core.random(), core.wants_bookmarks(request))
        };
        let asked = request.query("timeoutSeconds").and_then(|text| text.parse().ok()).filter(|s: &u64| *s > 0);
        let lasts = Duration::from_secs(asked.unwrap_or(1800 + chance % 1800));
        let (now, every) = (Instant::now(), switches.bookmark_every);
        let deadline = now + lasts;
        let first = (now + every).min(deadline.checked_sub(LAST_BOOKMARK).unwrap_or(now)).max(now);
        Self {
            shared: shared.clone(),
            kind,
            marker_at: now + switches.marker_after,
            bookmark_at: wants.then_some(first),
            bookmark_every: every,
            bookmark_version: opened.base,
            opened,
            deadline,
            ending: shared.ending(),
            id,
            end: "client",
            tables: None,
            is_first: true,
        }
    }

    /// Sends events as tables, if requested.
    pub fn with_tables(mut self, tables: Option<TableFormat>) -> Self {
        self.tables = tables;
        self
    }

    /// The next line; `None` ends the response.
    pub async fn next(&mut self) -> Option<Bytes> {
        let mut line = self.advance().await;
        if let Some(tables) = self.tables {
            let (is_first, now) = (std::mem::take(&mut self.is_first), self.shared.core().now());
            line = line.map(|line| tables.event(self.kind, line, is_first, now));
        }
        if let Some(line) = &line {
            self.shared.recorder().change(self.id, |logged| {
                logged.events += 1;
                logged.bytes += line.len();
            });
        }
        line
    }

    async fn advance(&mut self) -> Option<Bytes> {
        if let Some(line) = self.opened.lines.pop_front() {
            return Some(line);
        }
        if let Some(marker) = self.opened.marker.take() {
            tokio::time::sleep_until(self.marker_at).await;
            return Some(marker);
        }
        loop {
            let Some(receiver) = &mut self.opened.receiver else {
                self.end = "refused";
                return None;
            };
            let bookmark_at = self.bookmark_at;
            let bookmark = async {
                match bookmark_at {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = self.ending.cancelled() => return self.ended("shutdown"),
                item = receiver.recv() => match item {
                    Some(Item::Event(line)) => return Some(line),
                    Some(Item::End(why)) => return self.ended(why),
                    None => return self.ended("slow"),
                },
                () = tokio::time::sleep_until(self.deadline) => return self.ended("deadline"),
                () = bookmark => if let Some(line) = self.bookmark() { return Some(line) },
            }
        }
    }

    fn ended(&mut self, why: &'static str) -> Option<Bytes> {
        self.end = why;
        None
    }

    /// Bookmark with the resource's latest version; `None` if an event is pending, which is sent first.
    fn bookmark(&mut self) -> Option<Bytes> {
        let shared = self.shared.clone();
        let core = shared.core();
        if self.opened.receiver.as_ref().is_some_and(|receiver| !receiver.is_empty()) {
            return None;
        }
        let now = Instant::now();
        let last = self.deadline.checked_sub(LAST_BOOKMARK).unwrap_or(now);
        let next = now + self.bookmark_every;
        self.bookmark_at = (last > now).then(|| next.min(last));
        self.bookmark_version = self.bookmark_version.max(core.store.newest(self.kind.id));
        Some(bookmark(self.kind, self.bookmark_version, false))
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        let end = self.end;
        self.shared.recorder().change(self.id, |logged| {
            logged.ended = Some(Instant::now());
            logged.end.get_or_insert(end);
        });
        self.shared.notify();
    }
}

impl super::ApiServer {
    /// Ends all watches of the resource, as at their deadline.
    pub fn end_watches(&self, resource: &str) {
        self.shared.core().store.broadcast(resource, || Item::End("told"));
    }

    /// Sends a line to all watches of the resource: an ERROR, a duplicate, or garbage.
    pub fn send_to_watches(&self, resource: &str, kind: &str, object: &Value) {
        let line = line(kind, object);
        self.shared.core().store.broadcast(resource, || Item::Event(line.clone()));
    }

    /// Number of open watches of the resource.
    pub fn watches(&self, resource: &str) -> usize {
        self.shared.core().store.watches(resource)
    }

    /// Compacts the resource: older watches and continued lists get 410.
    pub fn compact(&self, resource: &str, rv: u64) {
        let mut core = self.shared.core();
        core.store.compact(resource, rv);
        core.pages.forget(resource, rv);
    }
}
