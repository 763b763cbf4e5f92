//! SELinux label decisions for volumes, checked against other pods of the volume and counted.
//!
//! The policy is in `selinux.rs`. Implements spec 07 §11.

use super::{
    attachable::{Usage, VolumeTraits},
    reconciler::ReconcilerRegistry,
    selinux::{self, ConflictScope, Label, LabelError, SelinuxPolicy},
};
use berth_metrics::{LabelConflict, SelinuxMetrics};

/// SELinux label decisions of a node with SELinux.
#[derive(Clone, Debug)]
pub struct LabelPolicy {
    policy: SelinuxPolicy,
    metrics: SelinuxMetrics,
}

impl LabelPolicy {
    /// Creates the decisions from the node policy.
    pub fn new(policy: SelinuxPolicy, metrics: SelinuxMetrics) -> Self {
        Self { policy, metrics }
    }

    /// Returns the label of a volume whose plugin supports mount labels; `volume` is its name in the pod.
    ///
    /// # Errors
    /// If the pod is denied the volume, with the message of the upstream kubelet.
    pub fn of(
        &self,
        board: &ReconcilerRegistry,
        usage: &Usage,
        volume: &str,
        traits: &VolumeTraits,
    ) -> Result<Label, String> {
        let (pod, spec) = (&usage.pod, &usage.spec);
        let decided = self.policy.decide(pod, volume, spec);
        if board.has_volume(pod.uid(), &usage.unique) {
            // The check ran when the pod first needed the volume; a volume in use stays usable.
            return Ok(decided.unwrap_or_default());
        }
        let mode = selinux::access_mode(spec);
        let plugin = traits.label.replacen(':', "/", 1);
        let count = |refusal: &LabelError| {
            let odds = match refusal.odds {
                ConflictScope::Container => LabelConflict::Container,
                ConflictScope::Pod => LabelConflict::Pod,
                ConflictScope::Volume => LabelConflict::Volume,
            };
            self.metrics.conflict(odds, refusal.is_binding, &plugin, mode);
        };
        let label = match decided {
            Ok(label) => label,
            Err(refusal) => {
                count(&refusal);
                if refusal.is_binding {
                    return Err(refusal.text);
                }
                Label::default()
            }
        };
        let Some(there) = board.label_of_others(pod.uid(), &usage.unique) else {
            if label.mounted.is_some() {
                self.metrics.admitted(&plugin, mode);
            }
            return Ok(label);
        };
        if there != label.original {
            let text = selinux::conflict(&spec.name, there.as_deref(), label.original.as_deref());
            let refusal = LabelError { odds: ConflictScope::Volume, text, is_binding: self.policy.is_binding(spec) };
            count(&refusal);
            if refusal.is_binding {
                return Err(refusal.text);
            }
        }
        Ok(label)
    }
}
