//! The order of the handlers, and what they are given. Pure. Behaviour: spec 02a §6.1.

use std::{collections::HashSet, sync::Arc};

use super::{
    Refusal, apparmor, declared_features, eviction, pod_level, predicates, resize, shutdown, sysctls,
    sysctls::Allowlist,
};
use crate::engine::allocation::resize::ResizeRules;
use berth_ports::NodeFacts;
use berth_types::{Pod, PodUid};

/// Why a pod is looked at.
#[derive(Clone, Copy, Debug)]
pub enum Purpose<'a> {
    /// It is new on this node.
    New,
    /// It was admitted before the agent restarted, and its containers run: what it holds is not
    /// allocated again, so it cannot be refused for want of it (spec 02a §14).
    Restored,
    /// It runs and wants other resources.
    Resize {
        /// The same pod with the resources it holds now.
        allocated: &'a Pod,
    },
}

/// What admission needs to know of configuration and machine; fixed at start.
#[derive(Clone, Debug, Default)]
pub struct AdmissionRules {
    /// Sysctls pods may set.
    pub sysctls: Allowlist,
    /// Whether the machine enforces AppArmor profiles.
    pub apparmor_enabled: bool,
    /// Gate `PodLevelResources`.
    pub pod_level_resources: bool,
    /// Gate `NodeDeclaredFeatures`.
    pub node_declared_features: bool,
    /// When a resize can never be granted.
    pub resize: ResizeRules,
}

/// One question.
#[derive(Clone, Copy, Debug)]
pub struct AdmitInput<'a> {
    /// The candidate: for a new pod with its stored allocation, if any; for a resize as desired.
    pub pod: &'a Arc<Pod>,
    /// Why it is looked at.
    pub purpose: Purpose<'a>,
    /// The active pods, with the resources they hold. The candidate itself is ignored here.
    pub active: &'a [Arc<Pod>],
    /// Pods refused already: they hold nothing (spec 02a §14).
    pub rejected: &'a HashSet<PodUid>,
    /// The node.
    pub node: &'a NodeFacts,
    /// Configuration and machine.
    pub rules: &'a AdmissionRules,
}

impl<'a> AdmitInput<'a> {
    /// The other pods that hold resources.
    pub fn others(&self) -> impl Iterator<Item = &'a Arc<Pod>> + use<'a> {
        let (own, rejected) = (self.pod.uid(), self.rejected);
        self.active.iter().filter(move |other| other.uid() != own && !rejected.contains(other.uid()))
    }
}

/// The pod may run, once the victims are gone.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Admitted {
    /// Pods to kill first, in this order; mostly none (spec 02a §6.3).
    pub victims: Vec<Arc<Pod>>,
    /// The first resource that was short: label `preemption_signal`.
    pub signal: String,
}

type Handler = fn(&AdmitInput<'_>, &mut Admitted) -> Result<(), Refusal>;

/// The handlers in order; the first refusal wins. Resource managers come in before the
/// predicates: what they allocate is taken before the fit test (spec 02a §6.1 note).
const HANDLERS: &[Handler] = &[
    resize::check,
    eviction::check,
    sysctls::check,
    predicates::check,
    apparmor::check,
    pod_level::check,
    declared_features::check,
    shutdown::check,
];

/// Asks all handlers.
///
/// # Errors
/// The first refusal.
pub fn admit(input: &AdmitInput<'_>) -> Result<Admitted, Refusal> {
    let mut admitted = Admitted::default();
    for handler in HANDLERS {
        handler(input, &mut admitted)?;
    }
    Ok(admitted)
}
