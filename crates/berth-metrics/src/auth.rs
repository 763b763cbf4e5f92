//! Metrics of request authentication, and of delegated token and access reviews.
//!
//! Implements spec 04 §8, 08 §4.16.

use std::time::Duration;

use prometheus::{Histogram, HistogramVec, IntCounterVec, IntGauge};

use super::{Registry, Stability, buckets};

/// Result of a token cache lookup.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lookup {
    /// The cache had the result.
    Hit,
    /// A token review was required.
    Miss,
}

/// Result of a token review.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fetch {
    /// The token was accepted or rejected.
    Ok,
    /// The review failed.
    Error,
}

/// Metric handles of the server's authentication.
#[derive(Clone, Debug)]
pub struct AuthMetrics {
    certificate_left: Histogram,
    lookups: IntCounterVec,
    lookup_seconds: HistogramVec,
    fetches: IntCounterVec,
    /// Token reviews in progress.
    pub in_flight: IntGauge,
    /// Requests waiting for a token review.
    pub blocked: IntGauge,
}

impl AuthMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        let alpha = Stability::Alpha;
        let active = registry.gauges(
            alpha,
            "authentication_token_cache_active_fetch_count",
            "Token reviews under way, and requests that wait for one",
            &["status"],
        );
        Self {
            certificate_left: registry.histogram(
                alpha,
                "apiserver_client_certificate_expiration_seconds",
                "Distribution of the remaining lifetime on the certificate used to authenticate a request.",
                buckets::CERTLEFT,
            ),
            lookups: registry.counters(
                alpha,
                "authentication_token_cache_request_total",
                "Number of token lookups in the authentication cache, by status",
                &["status"],
            ),
            lookup_seconds: registry.histograms(
                alpha,
                "authentication_token_cache_request_duration_seconds",
                "Duration in seconds of token authentication, by status",
                buckets::DEF,
                &["status"],
            ),
            fetches: registry.counters(
                alpha,
                "authentication_token_cache_fetch_total",
                "Number of token reviews, by status",
                &["status"],
            ),
            in_flight: active.with_label_values(&["in_flight"]),
            blocked: active.with_label_values(&["blocked"]),
        }
    }

    /// Records the remaining lifetime of a client certificate in seconds; negative if it has expired.
    pub fn certificate_left(&self, seconds: i64) {
        self.certificate_left.observe(seconds as f64);
    }

    /// Records a lookup of a token and its duration.
    pub fn record_lookup(&self, lookup: Lookup, took: Duration) {
        let status = match lookup {
            Lookup::Hit => "hit",
            Lookup::Miss => "miss",
        };
        self.lookups.with_label_values(&[status]).inc();
        self.lookup_seconds.with_label_values(&[status]).observe(took.as_secs_f64());
    }

    /// Counts a finished token review.
    pub fn fetched(&self, fetch: Fetch) {
        let status = match fetch {
            Fetch::Ok => "ok",
            Fetch::Error => "error",
        };
        self.fetches.with_label_values(&[status]).inc();
    }
}

/// Review to count: it selects the authentication (`authn`) or authorization (`authz`) families.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReviewKind {
    /// A TokenReview.
    Token,
    /// A SubjectAccessReview.
    Access,
}

/// Metric handles of the review requests to the API server.
#[derive(Clone, Debug)]
pub struct ReviewMetrics {
    tokens: (IntCounterVec, HistogramVec),
    accesses: (IntCounterVec, HistogramVec),
}

impl ReviewMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        let pair = |total: &str, seconds: &str| {
            let help = "Number of HTTP requests partitioned by status code.";
            let counters = registry.counters(Stability::Alpha, total, help, &["code"]);
            let help = "Request latency in seconds. Broken down by status code.";
            (counters, registry.histograms(Stability::Alpha, seconds, help, buckets::AUTHN, &["code"]))
        };
        Self {
            tokens: pair(
                "apiserver_delegated_authn_request_total",
                "apiserver_delegated_authn_request_duration_seconds",
            ),
            accesses: pair(
                "apiserver_delegated_authz_request_total",
                "apiserver_delegated_authz_request_duration_seconds",
            ),
        }
    }

    /// Records one attempt; `status` is the HTTP status, `None` if there was no response.
    pub fn attempted(&self, what: ReviewKind, status: Option<u16>, took: Duration) {
        let (total, seconds) = match what {
            ReviewKind::Token => &self.tokens,
            ReviewKind::Access => &self.accesses,
        };
        let code = status.map_or_else(|| "<error>".to_owned(), |status| status.to_string());
        total.with_label_values(&[&code]).inc();
        seconds.with_label_values(&[&code]).observe(took.as_secs_f64());
    }
}
