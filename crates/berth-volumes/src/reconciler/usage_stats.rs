//! Usage statistics of mounted volumes, queried from plugins independently of the owner tasks.
//!
//! Implements spec 07 §15.

use std::{
    panic::AssertUnwindSafe,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use futures::FutureExt;
use tokio::{sync::Semaphore, time::timeout};

use super::{
    registry::{DesiredVolume, ReconcilerRegistry},
    state::MountPresence,
};
use crate::{
    attachable::{AttachableVolumePlugin, OpError, Usage},
    claims,
    operation::Operation,
};
use berth_ports::{ClaimedVolume, EventRecord, VolumeStats};
use berth_sys::panics::panic_message;
use berth_types::PodUid;

/// Timeout of one measurement.
const LIMIT: Duration = Duration::from_secs(10);

/// Published volume whose usage can be queried.
struct Measurable {
    plugin: Arc<dyn AttachableVolumePlugin>,
    desire: Arc<DesiredVolume>,
    path: PathBuf,
    /// Permit of the one measurement at a time.
    turn: Arc<Semaphore>,
}

impl ReconcilerRegistry {
    /// Returns the pod's published volumes that belong to claims.
    pub fn claimed(&self, pod: &PodUid) -> Vec<ClaimedVolume> {
        let there = self.there(|desire| desire.usage.pod.uid() == pod);
        there.into_iter().filter_map(|one| claimed(&one.desire)).collect()
    }

    /// Returns the usage statistics of the volume with that target path.
    ///
    /// # Errors
    /// If the volume is not published, the plugin fails, or the timeout passes.
    pub async fn fullness(&self, target: &Path) -> Result<VolumeStats, String> {
        let Some(volume) = self.there(|desire| desire.usage.target == target).pop() else {
            return Err("the volume is not mounted".to_owned());
        };
        let Ok(turn) = volume.turn.try_acquire_owned() else {
            return Err("the previous stats request for the volume has not returned".to_owned());
        };
        let operation = Operation::new(turn, self.measurement_deps());
        let usage = Usage { operation, ..volume.desire.usage.clone() };
        let asked = AssertUnwindSafe(volume.plugin.fullness(&usage, &volume.path)).catch_unwind();
        match timeout(LIMIT, asked).await {
            Ok(Ok(stats)) => {
                let stats = stats.map_err(|error: OpError| error.text)?;
                self.record_condition(&volume.desire, &stats);
                Ok(stats)
            }
            Ok(Err(panic)) => Err(panic_message(&*panic)),
            Err(_) => Err("context deadline exceeded".to_owned()),
        }
    }

    /// Records an event on the pod of a volume in abnormal condition. Spec 07 §12.8.
    fn record_condition(&self, desire: &DesiredVolume, stats: &VolumeStats) {
        let Some(condition) = stats.condition.as_ref().filter(|condition| condition.is_abnormal) else { return };
        let name = claimed(desire).map_or_else(|| desire.usage.spec.name.clone(), |own| own.volume);
        let text = format!("Volume {name}: {}", condition.message);
        self.deps.events.record(EventRecord::warning(desire.usage.pod.id(), "VolumeConditionAbnormal", text));
    }

    fn there(&self, is_asked: impl Fn(&DesiredVolume) -> bool) -> Vec<Measurable> {
        let slots = self.slots();
        let mut found = Vec::new();
        for slot in slots.values() {
            let (desires, shown) = (slot.desires.borrow(), slot.shown.borrow());
            for desire in desires.values().flatten().filter(|desire| is_asked(desire)) {
                let own = shown.pods.get(desire.usage.pod.uid());
                let own = own.filter(|own| own.presence == MountPresence::Present);
                let Some(published) = own.and_then(|own| own.published.as_ref()) else { continue };
                found.push(Measurable {
                    plugin: slot.plugin.clone(),
                    desire: desire.clone(),
                    path: published.path.clone(),
                    turn: slot.measuring.clone(),
                });
            }
        }
        found
    }
}

/// Maps the volume to its claim and the name that the pod gives it.
fn claimed(desire: &DesiredVolume) -> Option<ClaimedVolume> {
    let (namespace, claim) = desire.usage.spec.claim()?;
    let pod = &desire.usage.pod;
    let own = pod.spec().volumes().find(|volume| claims::reference(pod, volume).is_some_and(|of| of.name == claim))?;
    Some(ClaimedVolume {
        volume: own.name.clone(),
        claim: (namespace.to_owned(), claim.to_owned()),
        path: desire.usage.target.clone(),
    })
}
