//! API server client, and everything the agent reads from and writes to the API server.
//!
//! Input: a kubeconfig. Output: responses, stores that reflect objects, status, events, and mirror pods. `api/` is the
//! seam: requests and errors without connections.
//!
//! Implements spec 10, spec 01 §10-11, spec 04 §6.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests remove what they have made themselves"))]

pub mod api;
pub mod certificates;
mod events;
mod mirrors;
mod objects;
mod offline;
mod pod_certificates;
pub mod reflector;
mod review_retry;
mod reviews;
mod start_latency;
mod status_writer;
mod storage;
mod store;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod tokens;
pub mod transport;
mod versions;

pub use events::{EventDeps, EventRecorder, EventSender, recorder as event_recorder};
pub use mirrors::{MirrorDeps, MirrorWriter, Mirrors, mirrors};
pub use objects::{ApiObjects, ChangedPods, NodeCertificates, ObjectsConfig, ObjectsDeps, Strategy};
pub use offline::{Offline, OfflineConfig, OfflineObjects, SealError};
pub use reflector::{ReflectorDeps, Selection, reflect};
pub use reviews::{ReviewFailure, Reviews};
pub use start_latency::{StartTimes, TimedEvents};
pub use status_writer::{OnWritten, StatusWriter, StatusWriterDeps};
pub use storage::ApiStorage;
pub use store::{ReflectorStore, Snapshot};
pub use transport::{
    CertifiedPair, ClientIdentity, ConnectError, IdentityError, Rate, RateLimitScope, Rates, Transport,
    TransportConfig, TransportDeps, user_agent,
};

/// Back-off of one object's writes after consecutive failures: 200 ms, doubling up to 10 s (spec 10 §7).
fn backoff(failures: u32) -> std::time::Duration {
    use std::time::Duration;
    berth_sys::backoff::Backoff::new(Duration::from_millis(200), Duration::from_secs(10))
        .nth(failures.saturating_sub(1))
}

/// Sleeps until `at`; forever without a time.
async fn sleep_until(at: Option<tokio::time::Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn delays_double_up_to_ten_seconds() {
        let millis: Vec<u128> = [1, 2, 3, 6, 7, 40].map(|n| super::backoff(n).as_millis()).to_vec();
        assert_eq!(millis, [200, 400, 800, 6400, 10_000, 10_000]);
    }
}
