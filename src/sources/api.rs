//! API source: forwards the pod sets of the API server to the mux.
//!
//! A [`PodSourceFeed`] lists and watches; this task only forwards. Nothing is sent while the feed is
//! disconnected. Implements spec 02a §1.8.

use tokio_util::sync::CancellationToken;

use super::{mux::SourceSender, ports::PodSourceFeed};

/// Runs until cancelled or until the feed ends.
pub async fn run(mut feed: Box<dyn PodSourceFeed>, sender: SourceSender, stop: CancellationToken) {
    loop {
        let set = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            set = feed.next_set() => set,
        };
        match set {
            Some(pods) => tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = sender.send(pods) => {}
            },
            None => return,
        }
    }
}
