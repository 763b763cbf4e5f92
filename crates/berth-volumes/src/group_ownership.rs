//! Runs the `fsGroup` ownership change on a mounted volume, with progress and cancellation.
//!
//! Changing millions of files exceeds any operation timeout: each few hundred entries count as progress, on which the
//! owner task extends its wait. A slow change is reported on the pod, and deleting the pod cancels it. An interrupted
//! walk is completed by the next one, and the volume stays mounted. Implements spec 07 §10, §17.

use std::{io, path::PathBuf, time::Instant};

use super::{
    attachable::{FsGroup, OpError, Usage},
    operation::Operation,
    ownership::{self, FsGroupChangePolicy, GroupAccess, OwnershipChange, Slow},
};
use berth_metrics::{OperationTarget, StorageOperation};
use berth_ports::EventRecord;
use berth_types::Pod;

impl FsGroup {
    /// Returns how much of the tree to change.
    fn policy(self) -> FsGroupChangePolicy {
        if self.on_root_mismatch { FsGroupChangePolicy::OnRootMismatch } else { FsGroupChangePolicy::Always }
    }
}

/// Applies the group to the volume mounted at `root`.
///
/// # Errors
/// If the change is incomplete; uncertain, because the volume is mounted and must be torn down.
pub async fn apply_fs_group(usage: &Usage, label: &str, root: PathBuf, of: FsGroup) -> Result<(), OpError> {
    let operation = usage.operation.clone();
    let (own, pod, began) = (operation.clone(), usage.pod.clone(), Instant::now());
    let given = operation.blocking(move || {
        let walked = walk(&own, &pod, &root, of);
        walked.map_err(|error| OpError::uncertain(format!("applying fsGroup to {}: {error}", root.display())))
    });
    // Uncertain whatever the cause: the volume is mounted.
    let given = given.await.map_err(|error| OpError::uncertain(error.text).with_cause(error.trouble));
    if let Some(metrics) = &operation.deps().metrics {
        let on = OperationTarget { plugin: label, is_migrated: usage.spec.is_migrated };
        metrics.ended(on, StorageOperation::ApplyFsGroup, given.is_ok(), began.elapsed());
    }
    given
}

fn walk(operation: &Operation, pod: &Pod, root: &std::path::Path, of: FsGroup) -> io::Result<()> {
    let is_unwanted = || {
        operation.report_progress();
        operation.is_canceled()
    };
    let slow = |slow: Slow| {
        if let Some(events) = &operation.deps().events {
            events.record(EventRecord::warning(pod.id(), "VolumePermissionChangeInProgress", slow.message(root)));
        }
    };
    let order = OwnershipChange {
        group: of.group,
        access: GroupAccess::ReadWrite,
        policy: of.policy(),
        cancelled: &is_unwanted,
        slow: &slow,
    };
    ownership::apply_change(root, &order)
}
