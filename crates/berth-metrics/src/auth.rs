//! Who was let in, and how long it took to find out (spec 04 §8, 08 §4.16).

use std::time::Duration;

use prometheus::{Histogram, HistogramVec, IntCounterVec, IntGauge};

use super::{Registry, Stability, buckets};

/// Whether an answer was remembered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lookup {
    /// It was.
    Hit,
    /// Somebody had to be asked.
    Miss,
}

/// What came of asking.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fetch {
    /// An answer, be it yes or no.
    Ok,
    /// None.
    Error,
}

/// Handles of what the server's authentication counts.
#[derive(Clone, Debug)]
pub struct AuthMetrics {
    certificate_left: Histogram,
    lookups: IntCounterVec,
    lookup_seconds: HistogramVec,
    fetches: IntCounterVec,
    /// Reviews that are under way.
    pub in_flight: IntGauge,
    /// Requests that wait for one.
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
                "Tokens looked up in the cache",
                &["status"],
            ),
            lookup_seconds: registry.histograms(
                alpha,
                "authentication_token_cache_request_duration_seconds",
                "Seconds until a token was known to be good or bad",
                buckets::DEF,
                &["status"],
            ),
            fetches: registry.counters(
                alpha,
                "authentication_token_cache_fetch_total",
                "Token reviews by what came of them",
                &["status"],
            ),
            in_flight: active.with_label_values(&["in_flight"]),
            blocked: active.with_label_values(&["blocked"]),
        }
    }

    /// A client certificate was looked at; seconds it has left, negative where it has expired.
    pub fn certificate_left(&self, seconds: i64) {
        self.certificate_left.observe(seconds as f64);
    }

    /// A token was looked up.
    pub fn looked_up(&self, lookup: Lookup, took: Duration) {
        let status = match lookup {
            Lookup::Hit => "hit",
            Lookup::Miss => "miss",
        };
        self.lookups.with_label_values(&[status]).inc();
        self.lookup_seconds.with_label_values(&[status]).observe(took.as_secs_f64());
    }

    /// A review ended.
    pub fn fetched(&self, fetch: Fetch) {
        let status = match fetch {
            Fetch::Ok => "ok",
            Fetch::Error => "error",
        };
        self.fetches.with_label_values(&[status]).inc();
    }
}

/// Which review it was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reviewed {
    /// A TokenReview.
    Token,
    /// A SubjectAccessReview.
    Access,
}

/// Handles of the requests made to the API server on behalf of the server's clients.
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

    /// One attempt ended; `status` is the HTTP status, `None` where there was none.
    pub fn attempted(&self, what: Reviewed, status: Option<u16>, took: Duration) {
        let (total, seconds) = match what {
            Reviewed::Token => &self.tokens,
            Reviewed::Access => &self.accesses,
        };
        let code = status.map_or_else(|| "<error>".to_owned(), |status| status.to_string());
        total.with_label_values(&[&code]).inc();
        seconds.with_label_values(&[&code]).observe(took.as_secs_f64());
    }
}
