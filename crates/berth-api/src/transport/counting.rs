//! Counts what is asked, whatever came of it: an attempt that is given up counts as an error.
//! Behaviour: spec 08 §4.15.

use http::{Method, StatusCode};
use tokio::time::Instant;

use super::request::Address;
use berth_metrics::RestClientMetrics;

/// One request; counted when it is answered or dropped.
pub struct Asked {
    metrics: RestClientMetrics,
    host: String,
    method: Method,
    begun: Instant,
    is_counted: bool,
}

impl Asked {
    /// A request with a body of that length goes out now.
    pub fn new(metrics: &RestClientMetrics, address: &Address, method: &Method, length: u64) -> Self {
        let host = address.authority.as_str().to_owned();
        metrics.sent(&host, method.as_str(), length);
        Self { metrics: metrics.clone(), host, method: method.clone(), begun: Instant::now(), is_counted: false }
    }

    /// There is an answer.
    pub fn answered(&mut self, status: StatusCode) {
        self.count(Some(status.as_u16()));
    }

    /// Its body had that length.
    pub fn received(&mut self, length: usize) {
        let length = u64::try_from(length).unwrap_or(u64::MAX);
        self.metrics.received(&self.host, self.method.as_str(), length);
    }

    /// It was not made after all.
    pub fn forget(&mut self) {
        self.is_counted = true;
    }

    fn count(&mut self, status: Option<u16>) {
        if !std::mem::replace(&mut self.is_counted, true) {
            self.metrics.ended(&self.host, self.method.as_str(), status, self.begun.elapsed());
        }
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        self.count(None);
    }
}
