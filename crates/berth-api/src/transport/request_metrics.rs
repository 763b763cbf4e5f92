//! Request metrics guard: counts every request, including cancelled ones as errors.
//!
//! Implements spec 08 §4.15.

use http::{Method, StatusCode};
use tokio::time::Instant;

use super::request::Address;
use berth_metrics::RestClientMetrics;

/// Request to be counted; recorded when it is answered or dropped.
pub struct RequestTimer {
    metrics: RestClientMetrics,
    host: String,
    method: Method,
    begun: Instant,
    is_counted: bool,
}

impl RequestTimer {
    /// Starts the measurement of a request with a body of that length, in bytes.
    pub fn new(metrics: &RestClientMetrics, address: &Address, method: &Method, length: u64) -> Self {
        let host = address.authority.as_str().to_owned();
        metrics.sent(&host, method.as_str(), length);
        Self { metrics: metrics.clone(), host, method: method.clone(), begun: Instant::now(), is_counted: false }
    }

    /// Records the response status.
    pub fn answered(&mut self, status: StatusCode) {
        self.count(Some(status.as_u16()));
    }

    /// Records the length of the response body, in bytes.
    pub fn received(&mut self, length: usize) {
        let length = u64::try_from(length).unwrap_or(u64::MAX);
        self.metrics.received(&self.host, self.method.as_str(), length);
    }

    /// Discards the measurement: the request was not sent.
    pub fn discard(&mut self) {
        self.is_counted = true;
    }

    fn count(&mut self, status: Option<u16>) {
        if !std::mem::replace(&mut self.is_counted, true) {
            self.metrics.ended(&self.host, self.method.as_str(), status, self.begun.elapsed());
        }
    }
}

impl Drop for RequestTimer {
    fn drop(&mut self) {
        self.count(None);
    }
}
