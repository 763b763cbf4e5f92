//! Starts the configured pod sources and the mux.

use std::{path::PathBuf, sync::Arc, time::Duration};

use tokio::{sync::mpsc, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use super::{
    api,
    file::{FileConfig, FileSource},
    http::{HttpConfig, HttpSource},
    mux::{CHANGES_CAPACITY, Mux, SourceSender, WallClock},
    ports::{PodSourceFeed, SourceEvents},
    references::ReferenceRule,
};
use berth_metrics::SourceMetrics;
use berth_types::{PodChange, PodSource};

/// Settings of the pod sources.
#[derive(Clone, Debug)]
pub struct SourcesConfig {
    /// Name of this node, for the names and UIDs of static pods.
    pub node_name: String,
    /// `staticPodPath`: a directory or file; no `file` source without it.
    pub static_pod_path: Option<PathBuf>,
    /// `fileCheckFrequency`.
    pub file_check_frequency: Duration,
    /// `staticPodURL`; no `http` source without it.
    pub static_pod_url: Option<String>,
    /// `staticPodURLHeader`: names and values in configured order, names may repeat.
    pub static_pod_url_headers: Vec<(String, String)>,
    /// `httpCheckFrequency`.
    pub http_check_frequency: Duration,
    /// Gate `PreventStaticPodAPIReferences`.
    pub prevent_api_references: bool,
}

/// Dependencies of the pod sources.
pub struct SourcesDeps {
    /// The pods of the API server; `None` in standalone mode, without an `api` source.
    pub feed: Option<Box<dyn PodSourceFeed>>,
    /// Receiver of events and observed pods.
    pub events: Arc<dyn SourceEvents>,
    /// Metrics of the sources.
    pub metrics: SourceMetrics,
    /// Returns the current wall time.
    pub now: WallClock,
}

/// Receiver of pod changes, and tasks of the started pod sources.
pub struct RunningSources {
    /// Receiver of the operations, in order.
    pub changes: mpsc::Receiver<PodChange>,
    /// The registered sources: only these count for "all sources ready" (spec 02a §2.5).
    pub registered: Vec<PodSource>,
    /// All tasks; they end when cancelled or when `changes` is dropped, and the mux when no source is
    /// left.
    pub tasks: Vec<JoinHandle<()>>,
}

/// Spawns a task per configured source and the mux.
///
/// Without any source the channel of operations closes at once.
pub fn start(config: SourcesConfig, deps: SourcesDeps, stop: &CancellationToken) -> RunningSources {
    let (sets, from_sources) = mpsc::channel(1);
    let (to_engine, changes) = mpsc::channel(CHANGES_CAPACITY);
    let (mut registered, mut tasks) = (Vec::new(), Vec::new());
    let rule = if config.prevent_api_references { ReferenceRule::RefuseAll } else { ReferenceRule::RefuseUnusable };
    let node_name: Arc<str> = config.node_name.into();
    let mut new_sender = |source| {
        registered.push(source);
        SourceSender::new(source, sets.clone())
    };
    if let Some(path) = config.static_pod_path.filter(|path| !path.as_os_str().is_empty()) {
        let period = config.file_check_frequency;
        let own = FileConfig { path, period, node_name: node_name.clone(), references: rule };
        let source = FileSource::new(own, new_sender(PodSource::File), deps.metrics.clone());
        tasks.push(tokio::spawn(source.run(stop.child_token())));
    }
    if let Some(url) = config.static_pod_url.filter(|url| !url.is_empty()) {
        let (period, headers) = (config.http_check_frequency, config.static_pod_url_headers);
        let own = HttpConfig { url, headers, period, node_name, references: rule };
        let source = HttpSource::new(own, new_sender(PodSource::Http), deps.metrics.clone());
        tasks.push(tokio::spawn(source.run(stop.child_token())));
    }
    if let Some(feed) = deps.feed {
        tasks.push(tokio::spawn(api::run(feed, new_sender(PodSource::Api), stop.child_token())));
    }
    drop(sets);
    let mux = Mux { sets: from_sources, changes: to_engine, events: deps.events, metrics: deps.metrics, now: deps.now };
    tasks.push(tokio::spawn(mux.run(stop.child_token())));
    RunningSources { changes, registered, tasks }
}
