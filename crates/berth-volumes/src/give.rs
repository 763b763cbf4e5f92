//! Gives a volume that is mounted to its pod's group, for as long as that takes. Behaviour: spec 07 §10, §17.
//!
//! Millions of files take longer than any deadline of an operation: every few hundred of them are a sign of life, by
//! which its owner goes on waiting. The pod is told that it takes long, and its deletion ends it. What a walk did not
//! get to is for the next one, and what was mounted stays mounted.

use std::{io, path::PathBuf, time::Instant};

use super::{
    device::{GroupOf, OpError, Usage},
    operation::Operation,
    ownership::{self, GroupAccess, Order, Policy, Slow},
};
use berth_metrics::{Operated, StorageOperation};
use berth_ports::Event;
use berth_types::Pod;

impl GroupOf {
    /// How much of the tree is walked.
    fn policy(self) -> Policy {
        if self.on_root_mismatch { Policy::OnRootMismatch } else { Policy::Always }
    }
}

/// Gives the volume mounted at `root` to the group.
///
/// # Errors
/// It was not given to its end. It is there, so that it has to be undone.
pub async fn give(usage: &Usage, label: &str, root: PathBuf, of: GroupOf) -> Result<(), OpError> {
    let operation = usage.operation.clone();
    let (own, pod, began) = (operation.clone(), usage.pod.clone(), Instant::now());
    let given = operation.blocking(move || {
        let walked = walk(&own, &pod, &root, of);
        walked.map_err(|error| OpError::uncertain(format!("applying the group to {}: {error}", root.display())))
    });
    // Whatever kept it from walking: what is mounted is there.
    let given = given.await.map_err(|error| OpError::uncertain(error.text).because(error.trouble));
    if let Some(metrics) = &operation.deps().metrics {
        let on = Operated { plugin: label, is_migrated: usage.spec.is_migrated };
        metrics.ended(on, StorageOperation::Give, given.is_ok(), began.elapsed());
    }
    given
}

fn walk(operation: &Operation, pod: &Pod, root: &std::path::Path, of: GroupOf) -> io::Result<()> {
    let is_unwanted = || {
        operation.is_alive();
        operation.is_unwanted()
    };
    let slow = |slow: Slow| {
        if let Some(events) = &operation.deps().events {
            events.record(Event::warning(pod.id(), "VolumePermissionChangeInProgress", slow.message(root)));
        }
    };
    let order = Order {
        group: of.group,
        access: GroupAccess::ReadWrite,
        policy: of.policy(),
        cancelled: &is_unwanted,
        slow: &slow,
    };
    ownership::carry_out(root, &order)
}
