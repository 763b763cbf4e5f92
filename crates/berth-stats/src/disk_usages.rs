//! Directories of pods to measure, and their usage on `/metrics`: volumes of claims, container logs.
//!
//! Reports known measurements only: a scrape never waits for a disk. Outdated ones are renewed in the background for
//! the next scrape. Implements spec 04b §7.2 and spec 08 §4.9.

use std::{
    collections::{HashMap, HashSet},
    path::PathBuf,
    time::Duration,
};

use rand::Rng;
use tokio_util::sync::CancellationToken;

use super::{
    disk::Usage,
    disk_measurer::{Measurement, MeasurementMethod, MeasurementTarget},
    pods::{ReportedContainer, ReportedPod},
    provider::StatsProvider,
    summary::PodPaths,
};
use berth_metrics::{ClaimUsage, DiskUsages, LogUsage};
use berth_types::{PodUid, hash::fnv1a_64};

/// Maximum age of log sizes.
pub const LOGS_AGE: Duration = Duration::from_secs(10);
/// Maximum age of the sizes of hosts files and termination messages.
const HOSTS_AGE: Duration = Duration::from_secs(60);

/// Measurement targets of a set of pods.
#[derive(Default)]
pub struct Targets {
    /// Files, and directories of files.
    pub files: Vec<MeasurementTarget>,
    /// Directory trees.
    pub trees: Vec<MeasurementTarget>,
    /// Volumes behind claims, whose drivers report the usage.
    pub claimed: Vec<MeasurementTarget>,
}

/// Returns the measurement targets of pods; without `volume_period` volumes are left out.
pub fn targets<'a>(
    pods: impl Iterator<Item = (&'a ReportedPod, &'a PodPaths)>,
    volume_period: Option<Duration>,
) -> Targets {
    let mut found = Targets::default();
    for (pod, places) in pods {
        let target = |path: PathBuf, how, period| MeasurementTarget { path, how, period };
        found.files.push(target(places.logs.clone(), MeasurementMethod::Files, LOGS_AGE));
        let names = pod.containers.iter().map(|container| places.logs.join(&*container.name));
        found.files.extend(names.map(|path| target(path, MeasurementMethod::Files, LOGS_AGE)));
        let messages =
            places.messages.iter().flat_map(|messages| pod.containers.iter().map(|c| messages.join(&*c.name)));
        found.files.extend(messages.map(|path| target(path, MeasurementMethod::Files, HOSTS_AGE)));
        found
            .files
            .extend(places.etc_hosts.iter().map(|path| target(path.clone(), MeasurementMethod::File, HOSTS_AGE)));
        if let Some(period) = volume_period {
            let period = spread(period, &pod.id.uid);
            let (claimed, trees): (Vec<_>, Vec<_>) = places.volumes.iter().partition(|volume| volume.claim.is_some());
            found.trees.extend(trees.iter().map(|volume| target(volume.path.clone(), MeasurementMethod::Tree, period)));
            found
                .claimed
                .extend(claimed.iter().map(|volume| target(volume.path.clone(), MeasurementMethod::Claimed, period)));
        }
    }
    found
}

impl StatsProvider {
    /// Queries the condition of volumes behind claims periodically until `stop` is canceled, so that a node that is
    /// never scraped notices abnormal volumes as well. Implements spec 04b §7.2, 05 §10.
    pub async fn poll_claimed_volumes(&self, stop: CancellationToken) {
        let Some(period) = self.inner.config.volume_period else { return };
        loop {
            let pause = period.mul_f64(rand::rng().random_range(1.0..2.0));
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
            let pods = self.inner.running();
            let targets = targets(pods.iter().map(|(pod, places)| (pod, places)), Some(period));
            self.inner.survey_of_claims.ask(targets.claimed);
        }
    }
}

impl DiskUsages for StatsProvider {
    fn known(&self) -> (Vec<ClaimUsage>, Vec<LogUsage>) {
        let (pods, measured) = self.inner.known_disk_usage();
        (claims(&pods, &measured), logs(&pods, &measured))
    }
}

/// Usage of volumes behind claims.
fn claims(pods: &[(ReportedPod, PodPaths)], measured: &HashMap<PathBuf, Measurement>) -> Vec<ClaimUsage> {
    let volumes = pods.iter().flat_map(|(_, places)| &places.volumes);
    let claimed = volumes.filter_map(|volume| Some((volume.claim.as_ref()?, measured.get(&volume.path)?)));
    // Of pods that share a claim, the first one reports it.
    let mut reported_claims = HashSet::new();
    let first = claimed.filter(|(claim, _)| reported_claims.insert(*claim));
    let usage = |((namespace, claim), measured): (&(String, String), &Measurement)| {
        let fs = measured.filesystem.unwrap_or_default();
        let Usage { bytes, inodes } = measured.usage;
        let numbers = [fs.capacity, fs.available, bytes, fs.inodes, fs.inodes_free, inodes];
        ClaimUsage { namespace: namespace.clone(), claim: claim.clone(), numbers, is_abnormal: measured.is_abnormal }
    };
    first.map(usage).collect()
}

/// Usage of the logs of running containers.
fn logs(pods: &[(ReportedPod, PodPaths)], measured: &HashMap<PathBuf, Measurement>) -> Vec<LogUsage> {
    let containers = pods.iter().flat_map(|(pod, places)| pod.containers.iter().map(move |c| (pod, places, c)));
    let usage = |(pod, places, container): (&ReportedPod, &PodPaths, &ReportedContainer)| {
        let measured = measured.get(&places.logs.join(&*container.name))?;
        Some(LogUsage {
            uid: pod.id.uid.to_string(),
            namespace: pod.id.namespace.to_string(),
            pod: pod.id.name.to_string(),
            container: container.name.to_string(),
            bytes: measured.usage.bytes,
        })
    };
    containers.filter_map(usage).collect()
}

/// Spreads the periods of pods between one and two times `period`, so that not all are measured at the same time.
fn spread(period: Duration, pod: &PodUid) -> Duration {
    let share = u32::try_from(fnv1a_64(pod.as_str().as_bytes()) % 1000).unwrap_or_default();
    period.saturating_add(period.saturating_mul(share) / 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn periods_are_spread() {
        let minute = Duration::from_secs(60);
        let periods: Vec<Duration> = (0..50).map(|n| spread(minute, &format!("uid-{n}").into())).collect();
        assert!(periods.iter().all(|period| (minute..2 * minute).contains(period)), "{periods:?}");
        assert!(periods.iter().any(|period| *period < minute * 5 / 4) && periods.iter().any(|p| *p > minute * 7 / 4));
    }
}
