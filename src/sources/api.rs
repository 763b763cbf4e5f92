//! Hands the sets of the API server's pods to the mux.
//!
//! The feed lists and watches and is played elsewhere ([`PodSourceFeed`]); here is only the door.
//! Nothing is sent while it is disconnected. Behaviour: spec 02a §1.8.

use tokio_util::sync::CancellationToken;

use super::{mux::Door, ports::PodSourceFeed};

/// Runs until cancelled or until the feed ends.
pub async fn run(mut feed: Box<dyn PodSourceFeed>, door: Door, stop: CancellationToken) {
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
                () = door.hand_in(pods) => {}
            },
            None => return,
        }
    }
}
