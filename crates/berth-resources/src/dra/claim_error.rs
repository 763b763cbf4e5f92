//! Errors of preparing, using, and unpreparing claims, with the texts of the reference kubelet. Spec 06c §3.3-3.5.

use std::fmt;

use berth_types::{PodUid, fieldpath::quoted};

use super::model::ClaimKey;

/// RPC of a driver, displayed as its method name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DriverMethod {
    /// NodePrepareResources.
    Prepare,
    /// NodeUnprepareResources.
    Unprepare,
}

impl fmt::Display for DriverMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prepare => "NodePrepareResources",
            Self::Unprepare => "NodeUnprepareResources",
        })
    }
}

/// Reason why the claims of a pod cannot be prepared, used, or unprepared.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ClaimError {
    /// The pod status does not name the claim of a template yet.
    #[error("pod \"{pod}\": ResourceClaim not created yet")]
    NotCreated {
        /// Namespace and name of the pod.
        pod: String,
    },
    /// An entry of `spec.resourceClaims` names neither a claim nor a template.
    #[error("pod \"{pod}\", spec.resourceClaim {}: none of the supported fields are set", quoted(.pod_claim))]
    UnsupportedEntry {
        /// Namespace and name of the pod.
        pod: String,
        /// Name of the entry.
        pod_claim: String,
    },
    /// The pod does not own a claim that has the name of its generated claim.
    #[error("ResourceClaim {claim} was not created for Pod {pod} (Pod is not owner)")]
    NotOwner {
        /// Namespace and name of the object.
        claim: ClaimKey,
        /// Namespace and name of the pod.
        pod: String,
    },
    /// `status.reservedFor` does not list the pod.
    #[error("pod {pod} ({pod_uid}) is not allowed to use ResourceClaim {claim} ({claim_uid})")]
    NotReserved {
        /// Name of the pod.
        pod: String,
        /// `metadata.uid` of the pod.
        pod_uid: PodUid,
        /// Name of the object.
        claim: String,
        /// `metadata.uid` of the object.
        claim_uid: String,
    },
    /// The scheduler has not allocated devices.
    #[error("ResourceClaim {claim}: not allocated")]
    NotAllocated {
        /// Name of the object.
        claim: String,
    },
    /// No plugin serves a driver of the allocation.
    #[error("DRA driver {driver} is not registered")]
    DriverNotRegistered {
        /// Name of the driver.
        driver: String,
    },
    /// The claim was deleted and created again, and the devices of the former object are not unprepared yet.
    #[error(
        "old ResourceClaim with same name {claim} and different UID {uid} still exists (previous pod force-deleted?!)"
    )]
    FormerClaim {
        /// Name of both objects.
        claim: String,
        /// `metadata.uid` of the former object.
        uid: String,
    },
    /// No pod of this node has a reference to the claim.
    #[error(
        "internal error: unable to get claim info for ResourceClaim {} in namespace {}",
        .claim.name,
        .claim.namespace
    )]
    NotCached {
        /// Namespace and name of the object.
        claim: ClaimKey,
    },
    /// The RPC failed for the whole batch.
    #[error("{method}: {text}")]
    Rpc {
        /// The called method.
        method: DriverMethod,
        /// Error text of the call.
        text: String,
    },
    /// The driver returned a result for a claim that was not in the request.
    #[error("{method} returned result for unknown claim UID {uid}")]
    UnknownUid {
        /// The called method.
        method: DriverMethod,
        /// UID in the answer.
        uid: String,
    },
    /// The driver returned an error for a claim.
    #[error("{method} failed for ResourceClaim {claim}: {text}")]
    Driver {
        /// The called method.
        method: DriverMethod,
        /// Name of the object.
        claim: String,
        /// Error text of the driver.
        text: String,
    },
    /// The driver returned no result for some claims.
    #[error("{method} skipped {number} ResourceClaims")]
    Skipped {
        /// The called method.
        method: DriverMethod,
        /// Claims without a result.
        number: usize,
    },
}
