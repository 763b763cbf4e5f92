//! Labels of SELinux for volumes, on a node that has it: decided by `selinux.rs`, held against what other pods of the
//! volume want, and counted. Behaviour: spec 07 §11.

use super::{
    device::{Traits, Usage},
    owner::Board,
    selinux::{self, Label, Odds, Policy, Refusal},
};
use berth_metrics::{LabelOdds, SelinuxMetrics};

/// Who decides on labels. A node without SELinux has nobody.
#[derive(Clone, Debug)]
pub struct Labels {
    policy: Policy,
    metrics: SelinuxMetrics,
}

impl Labels {
    /// By the node's policy.
    pub fn new(policy: Policy, metrics: SelinuxMetrics) -> Self {
        Self { policy, metrics }
    }

    /// The label of a volume, by its name in the pod, whose plugin mounts with labels.
    ///
    /// # Errors
    /// The pod cannot have it, in the reference's words.
    pub fn of(&self, board: &Board, usage: &Usage, volume: &str, traits: &Traits) -> Result<Label, String> {
        let (pod, spec) = (&usage.pod, &usage.spec);
        let decided = self.policy.decide(pod, volume, spec);
        if board.has_volume(pod.uid(), &usage.unique) {
            // It was held against the others when it came; what is there serves on.
            return Ok(decided.unwrap_or_default());
        }
        let mode = selinux::access_mode(spec);
        let plugin = traits.label.replacen(':', "/", 1);
        let count = |refusal: &Refusal| {
            let odds = match refusal.odds {
                Odds::Container => LabelOdds::Container,
                Odds::Pod => LabelOdds::Pod,
                Odds::Volume => LabelOdds::Volume,
            };
            self.metrics.at_odds(odds, refusal.is_binding, &plugin, mode);
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
        if there != label.asked {
            let text = selinux::conflict(&spec.name, there.as_deref(), label.asked.as_deref());
            let refusal = Refusal { odds: Odds::Volume, text, is_binding: self.policy.is_binding(spec) };
            count(&refusal);
            if refusal.is_binding {
                return Err(refusal.text);
            }
        }
        Ok(label)
    }
}
