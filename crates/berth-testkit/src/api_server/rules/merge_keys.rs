//! List strategies and merge keys of strategic merge patch (spec 10 §5.1). Pure.
//!
//! A place is the field path below the object, without indices: `spec.containers.env`. A list that is not in the
//! table is replaced as a whole.

/// Merge strategy of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListStrategy {
    /// The patch's list replaces the old one.
    Atomic,
    /// Elements with the same value of that field merge.
    MergeBy(&'static str),
    /// Set of scalars.
    Set,
}

use ListStrategy::{Atomic, MergeBy, Set};

const METADATA: &[(&str, ListStrategy)] =
    &[("metadata.ownerReferences", MergeBy("uid")), ("metadata.finalizers", Set), ("metadata.managedFields", Atomic)];

const POD: &[(&str, ListStrategy)] = &[
    ("status.conditions", MergeBy("type")),
    ("status.podIPs", MergeBy("ip")),
    ("status.hostIPs", MergeBy("ip")),
    ("status.resourceClaimStatuses", MergeBy("name")),
    ("spec.volumes", MergeBy("name")),
    ("spec.imagePullSecrets", MergeBy("name")),
    ("spec.schedulingGates", MergeBy("name")),
    ("spec.resourceClaims", MergeBy("name")),
    ("spec.hostAliases", MergeBy("ip")),
    ("spec.topologySpreadConstraints", MergeBy("topologyKey")),
];

const CONTAINER_LISTS: &[&str] = &["spec.containers", "spec.initContainers", "spec.ephemeralContainers"];

const CONTAINER: &[(&str, ListStrategy)] = &[
    ("", MergeBy("name")),
    ("ports", MergeBy("containerPort")),
    ("env", MergeBy("name")),
    ("volumeMounts", MergeBy("mountPath")),
    ("volumeDevices", MergeBy("devicePath")),
];

const NODE: &[(&str, ListStrategy)] =
    &[("status.conditions", MergeBy("type")), ("status.addresses", MergeBy("type")), ("spec.podCIDRs", Set)];

const CONDITIONS_ONLY: &[(&str, ListStrategy)] = &[("status.conditions", MergeBy("type"))];

const SERVICE: &[(&str, ListStrategy)] = &[("spec.ports", MergeBy("port")), ("status.conditions", MergeBy("type"))];

const SERVICE_ACCOUNT: &[(&str, ListStrategy)] = &[("secrets", MergeBy("name")), ("imagePullSecrets", MergeBy("name"))];

/// Strategy of the list at that place in an object of that kind.
pub fn strategy(kind: &str, place: &str) -> ListStrategy {
    let find = |table: &[(&str, ListStrategy)], place: &str| {
        table.iter().find(|(path, _)| *path == place).map(|(_, strategy)| *strategy)
    };
    let own = match kind {
        "Pod" => find(POD, place).or_else(|| {
            CONTAINER_LISTS.iter().find_map(|list| {
                let rest = place.strip_prefix(list)?;
                find(CONTAINER, rest.strip_prefix('.').unwrap_or(rest))
            })
        }),
        "Node" => find(NODE, place),
        "PersistentVolumeClaim" | "Namespace" => find(CONDITIONS_ONLY, place),
        "Service" => find(SERVICE, place),
        "ServiceAccount" => find(SERVICE_ACCOUNT, place),
        _ => None,
    };
    own.or_else(|| find(METADATA, place)).unwrap_or(Atomic)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spec 10 §5.1.
    #[test]
    fn lists_have_the_merge_strategies_of_the_spec() {
        for (kind, place, expected) in [
            ("Pod", "status.conditions", MergeBy("type")),
            ("Pod", "status.containerStatuses", Atomic),
            ("Pod", "spec.containers", MergeBy("name")),
            ("Pod", "spec.initContainers.env", MergeBy("name")),
            ("Pod", "spec.containers.command", Atomic),
            ("Pod", "spec.tolerations", Atomic),
            ("Node", "status.addresses", MergeBy("type")),
            ("Node", "status.images", Atomic),
            ("Node", "spec.taints", Atomic),
            ("Lease", "metadata.finalizers", Set),
            ("Event", "metadata.ownerReferences", MergeBy("uid")),
        ] {
            assert_eq!(strategy(kind, place), expected, "{kind} {place}");
        }
    }
}
