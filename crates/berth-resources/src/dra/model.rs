//! Claims of dynamic resource allocation that pods of this node use. Pure. Spec 06c §3.2.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use berth_types::PodUid;

/// Namespace and name of a ResourceClaim.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ClaimKey {
    /// Namespace of the object, which is that of its pods.
    pub namespace: String,
    /// Name of the object; of a claim from a template it is generated.
    pub name: String,
}

impl fmt::Display for ClaimKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A device that a driver has prepared for a claim.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct PreparedDevice {
    /// Pool of the device.
    pub pool: String,
    /// Name of the device in its pool.
    pub device: String,
    /// ID of the share, where several claims share the device.
    pub share_id: Option<String>,
    /// Requests of the claim that the device satisfies; empty for all.
    pub requests: Vec<String>,
    /// Qualified CDI device names.
    pub cdi_ids: Vec<String>,
}

/// A claim that at least one pod of this node uses.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ClaimState {
    /// UID of the claim object.
    pub uid: String,
    /// Pods that use the claim.
    pub pods: BTreeSet<PodUid>,
    /// Drivers of the claim's allocation, with the devices that each has prepared.
    pub drivers: BTreeMap<String, Vec<PreparedDevice>>,
    /// Whether all drivers have prepared the claim since the agent started; not part of the checkpoint.
    pub is_prepared: bool,
}

/// All claims by namespace and name.
pub type Claims = BTreeMap<ClaimKey, ClaimState>;
