//! The summary as values, for who decides by them. Behaviour: spec 05 §3.4-3.5.

use std::{collections::HashMap, time::Duration};

use super::{
    provider::StatsProvider,
    reading::Depth,
    snapshot::PodSeen,
    summarise,
    summary::{Form, Summary},
};
use berth_types::PodUid;

impl StatsProvider {
    /// What the document of `/stats/summary` tells.
    ///
    /// # Errors
    /// As of [`StatsProvider::summary`].
    pub async fn values(&self, form: Form) -> Result<Summary, String> {
        self.inner.clone().summarise(form).await.map(|(_, summary)| summary)
    }

    /// The same as it is now: directories that were measured longer ago than some `age` are measured before, as far as
    /// they take no longer than a moment.
    ///
    /// # Errors
    /// As of [`StatsProvider::summary`].
    pub async fn values_now(&self, age: Duration) -> Result<Summary, String> {
        self.inner.remeasure(age).await;
        self.values(Form::Full).await
    }

    /// How many processes each pod has. What else there is to tell of pods is not waited for.
    ///
    /// # Errors
    /// As of [`StatsProvider::summary`].
    pub async fn processes(&self) -> Result<HashMap<PodUid, Option<u64>>, String> {
        let (_, snapshot) = self.inner.sample(Depth::Summary).await?;
        let told = self.inner.told_of_pods().await?;
        let count = |seen: &PodSeen| summarise::processes(seen, told.get(&seen.pod.sandbox));
        let pods = snapshot.pods.iter().filter(|seen| !seen.pod.containers.is_empty());
        Ok(pods.map(|seen| (seen.pod.id.uid.clone(), count(seen))).collect())
    }
}
