//! The stats summary as values instead of JSON, for eviction decisions. Implements spec 05 §3.4-3.5.

use std::{collections::HashMap, time::Duration};

use super::{
    provider::StatsProvider,
    reading::Depth,
    snapshot::PodUsage,
    summary::{Form, StatsSummary},
    summary_builder,
};
use berth_types::PodUid;

impl StatsProvider {
    /// Returns the content of `/stats/summary`.
    ///
    /// # Errors
    /// See [`StatsProvider::summary`].
    pub async fn values(&self, form: Form) -> Result<StatsSummary, String> {
        self.inner.clone().summarise(form).await.map(|(_, summary)| summary)
    }

    /// Returns the full summary from fresh measurements: directories whose measurement is older than `age` are
    /// measured first, within a short timeout.
    ///
    /// # Errors
    /// See [`StatsProvider::summary`].
    pub async fn values_now(&self, age: Duration) -> Result<StatsSummary, String> {
        self.inner.remeasure(age).await;
        self.values(Form::Full).await
    }

    /// Number of processes of each pod, by UID. Does not wait for disk usage or runtime statistics of containers.
    ///
    /// # Errors
    /// See [`StatsProvider::summary`].
    pub async fn processes(&self) -> Result<HashMap<PodUid, Option<u64>>, String> {
        let (_, snapshot) = self.inner.sample(Depth::Summary).await?;
        let runtime_pods = self.inner.runtime_pod_stats().await?;
        let count = |seen: &PodUsage| summary_builder::processes(seen, runtime_pods.get(&seen.pod.sandbox));
        let pods = snapshot.pods.iter().filter(|seen| !seen.pod.containers.is_empty());
        Ok(pods.map(|seen| (seen.pod.id.uid.clone(), count(seen))).collect())
    }
}
