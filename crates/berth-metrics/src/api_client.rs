//! Metrics of the connections to the API server (spec 10 §10).

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use prometheus::{
    Gauge, GaugeVec, HistogramVec, IntGaugeVec, Opts,
    core::{Collector, Desc},
    proto::MetricFamily,
};
use tokio::time::Instant;

use super::{Registry, Stability::Alpha, buckets};

/// Time of the last response from a peer; clones share it between the connection and the collector.
#[derive(Clone, Debug)]
pub struct LastContact(Arc<LastContactState>);

#[derive(Debug)]
struct LastContactState {
    begun: Instant,
    /// Milliseconds after `begun`; negative for never.
    at: AtomicI64,
}

impl Default for LastContact {
    fn default() -> Self {
        Self(Arc::new(LastContactState { begun: Instant::now(), at: AtomicI64::new(-1) }))
    }
}

impl LastContact {
    /// Records a response now.
    pub fn record(&self) {
        let at = i64::try_from(self.0.begun.elapsed().as_millis()).unwrap_or(i64::MAX);
        self.0.at.store(at, Ordering::Relaxed);
    }

    /// Time since the last response; `None` if there was none yet.
    pub fn age(&self) -> Option<Duration> {
        let at = u64::try_from(self.0.at.load(Ordering::Relaxed)).ok()?;
        Some(self.0.begun.elapsed().saturating_sub(Duration::from_millis(at)))
    }
}

/// Metric handles of the connections to the API server.
#[derive(Clone, Debug)]
pub struct ApiClientMetrics {
    connections: IntGaugeVec,
    streams: IntGaugeVec,
    waits: HistogramVec,
    contacts: Pools,
}

impl ApiClientMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        let pool = &["pool"];
        let contacts = Pools::default();
        let help = "[ALPHA] Time in seconds since the last data received from the API server";
        let family = GaugeVec::new(Opts::new("berth_api_last_contact_seconds", help), pool);
        let family = family.expect("a constant name");
        registry.collector(Contacts { pools: contacts.clone(), family });
        Self {
            connections: registry.gauges(
                Alpha,
                "berth_api_connections",
                "Number of connections to the API server",
                pool,
            ),
            streams: registry.gauges(Alpha, "berth_api_streams", "Number of requests and watches in progress", pool),
            waits: registry.histograms(
                Alpha,
                "berth_api_request_wait_seconds",
                "Duration in seconds a request waited for the rate limiter and for a free stream on a connection",
                buckets::REST,
                pool,
            ),
            contacts,
        }
    }

    /// Sets the number of connections of a pool, and of requests in progress on them.
    pub fn set_connections(&self, pool: &str, connections: usize, streams: usize) {
        let set = |family: &IntGaugeVec, number: usize| {
            family.with_label_values(&[pool]).set(i64::try_from(number).unwrap_or(i64::MAX));
        };
        set(&self.connections, connections);
        set(&self.streams, streams);
    }

    /// Records how long a request waited for the rate limiter and for a connection.
    pub fn waited(&self, pool: &str, wait: Duration) {
        self.waits.with_label_values(&[pool]).observe(wait.as_secs_f64());
    }

    /// Sets the pools whose time since the last response is computed at each scrape.
    pub fn contacts(&self, pools: Vec<(&'static str, LastContact)>) {
        *self.contacts.lock().unwrap_or_else(PoisonError::into_inner) = pools;
    }
}

type Pools = Arc<Mutex<Vec<(&'static str, LastContact)>>>;

struct Contacts {
    pools: Pools,
    family: GaugeVec,
}

impl Collector for Contacts {
    fn desc(&self) -> Vec<&Desc> {
        self.family.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let set = |gauge: Gauge, age: Duration| gauge.set(age.as_secs_f64());
        for (pool, contact) in self.pools.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            if let Some(age) = contact.age() {
                set(self.family.with_label_values(&[pool]), age);
            }
        }
        self.family.collect().into_iter().filter(|family| !family.get_metric().is_empty()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn pools_have_separate_series() {
        let registry = Registry::new();
        let metrics = ApiClientMetrics::new(&registry);
        let contact = LastContact::default();
        metrics.contacts(vec![("beat", contact.clone()), ("watch", LastContact::default())]);
        let names = || registry.gather().iter().map(|family| family.name().to_owned()).collect::<Vec<_>>();
        assert_eq!(names(), [""; 0], "no series before the first observation");
        metrics.set_connections("beat", 1, 2);
        metrics.waited("beat", Duration::from_millis(10));
        contact.record();
        tokio::time::advance(Duration::from_secs(5)).await;
        let families = registry.gather();
        assert_eq!(
            names(),
            [
                "berth_api_connections",
                "berth_api_last_contact_seconds",
                "berth_api_request_wait_seconds",
                "berth_api_streams"
            ]
        );
        let ages = families[1].get_metric();
        assert_eq!((ages.len(), ages[0].get_gauge().get_value().round()), (1, 5.0));
    }
}
