//! Pod admission: runs the admission handlers in a fixed order; the first refusal wins.
//!
//! Pure. Implements spec 02a §6.1.

use std::{collections::HashSet, sync::Arc};

use super::{
    AdmissionRejection, apparmor, declared_features, eviction, pod_level, predicates, resize, shutdown, sysctls,
    sysctls::Allowlist,
};
use crate::engine::allocation::resize::ResizeRules;
use berth_ports::NodeFacts;
use berth_types::{Pod, PodUid};

/// Why a pod is admitted.
#[derive(Clone, Copy, Debug)]
pub enum Purpose<'a> {
    /// The pod is new on this node.
    New,
    /// The pod was admitted before the agent restarted, and its containers run: its resources are not
    /// allocated again, so it cannot be refused for lack of them (spec 02a §14).
    Restored,
    /// The pod runs and requests an in-place resize.
    Resize {
        /// The same pod with its allocated resources.
        allocated: &'a Pod,
    },
}

/// Admission settings from configuration and machine; fixed at start.
#[derive(Clone, Debug, Default)]
pub struct AdmissionRules {
    /// Sysctls that pods may set.
    pub sysctls: Allowlist,
    /// Whether the machine enforces AppArmor profiles.
    pub apparmor_enabled: bool,
    /// Gate `PodLevelResources`.
    pub pod_level_resources: bool,
    /// Gate `NodeDeclaredFeatures`.
    pub node_declared_features: bool,
    /// Rules for infeasible resizes.
    pub resize: ResizeRules,
}

/// Input of one admission decision.
#[derive(Clone, Copy, Debug)]
pub struct AdmitInput<'a> {
    /// The candidate: for a new pod with its stored allocation, if any; for a resize as desired.
    pub pod: &'a Arc<Pod>,
    /// Why the candidate is admitted.
    pub purpose: Purpose<'a>,
    /// The active pods with their allocated resources. The candidate itself is ignored here.
    pub active: &'a [Arc<Pod>],
    /// UIDs of rejected pods: they have no allocation (spec 02a §14).
    pub rejected: &'a HashSet<PodUid>,
    /// Facts about the node: labels, taints, allocatable resources, pressures.
    pub node: &'a NodeFacts,
    /// Settings from configuration and machine.
    pub rules: &'a AdmissionRules,
}

impl<'a> AdmitInput<'a> {
    /// The other pods that have allocated resources.
    pub fn others(&self) -> impl Iterator<Item = &'a Arc<Pod>> + use<'a> {
        let (own, rejected) = (self.pod.uid(), self.rejected);
        self.active.iter().filter(move |other| other.uid() != own && !rejected.contains(other.uid()))
    }
}

/// A positive admission decision: the pod may run once its preemption victims are gone.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Admission {
    /// Pods to preempt first, in this order; usually empty (spec 02a §6.3).
    pub victims: Vec<Arc<Pod>>,
    /// The first insufficient resource: label `preemption_signal`. Empty without preemption.
    pub signal: String,
}

type Handler = fn(&AdmitInput<'_>, &mut Admission) -> Result<(), AdmissionRejection>;

/// The handlers in order; the first refusal wins. Devices are allocated between the sysctls and the
/// predicates (spec 02a §6.1 note).
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

/// The first handlers: they decide before devices are allocated to the pod.
const BEFORE_DEVICES: &[Handler] = &[resize::check, eviction::check, sysctls::check];

/// Runs the handlers that decide before devices are allocated.
///
/// # Errors
/// The first refusal.
pub fn precheck(input: &AdmitInput<'_>) -> Result<(), AdmissionRejection> {
    let mut admitted = Admission::default();
    BEFORE_DEVICES.iter().try_for_each(|handler| handler(input, &mut admitted))
}

/// Runs all admission handlers in order.
///
/// # Errors
/// The first refusal.
pub fn admit(input: &AdmitInput<'_>) -> Result<Admission, AdmissionRejection> {
    let mut admitted = Admission::default();
    for handler in HANDLERS {
        handler(input, &mut admitted)?;
    }
    Ok(admitted)
}
