//! Capacity and allocatable setter, and machine identity. Pure. Implements spec 05 §4.3 rows 2, 2b.

use std::collections::BTreeMap;

use super::StatusBuilder;
use crate::node::facts::{allocatable, capacity};
use berth_ports::EventRecord;
use berth_types::{
    api,
    resources::{Amounts, Quantities, amounts, is_extended, zero},
};

pub(super) fn set(work: &mut StatusBuilder<'_>) {
    machine(work);
    let devices = work.known.devices.clone();
    let before = work.status.capacity.take().unwrap_or_default();
    let mut has = amounts(Some(&before));
    has.extend(capacity(&work.settings.node, &work.settings.machine));
    has.extend(devices.capacity.clone());
    has.extend(devices.removed.iter().map(|name| (name.clone(), zero())));

    let reported = work.status.allocatable.take().unwrap_or_default();
    let mut gives = amounts(Some(&reported));
    gives.retain(|name, _| has.contains_key(name) || !is_extended(name));
    gives.extend(allocatable(&has, &work.settings.reserved));
    gives.extend(devices.allocatable.clone());

    work.status.capacity = Some(written(has, &before));
    work.status.allocatable = Some(written(gives, &reported));
}

/// Quantities to write; equal amounts keep their previous text, so that they do not cause a patch.
fn written(amounts: Amounts, before: &Quantities) -> Quantities {
    let same = |name: &String, amount| {
        before.get(name).filter(|quantity| berth_types::quantity::Amount::try_from(*quantity).ok() == Some(amount))
    };
    let quantities = amounts.into_iter().map(|(name, amount)| {
        let quantity = same(&name, amount).cloned().unwrap_or_else(|| amount.into());
        (name, quantity)
    });
    quantities.collect::<BTreeMap<_, _>>()
}

fn machine(work: &mut StatusBuilder<'_>) {
    let machine = &work.settings.machine;
    let info = work.status.node_info.get_or_insert_default();
    let is_new_boot = !info.boot_id.is_empty() && info.boot_id != machine.boot_id;
    info.machine_id.clone_from(&machine.machine_id);
    info.system_uuid.clone_from(&machine.system_uuid);
    info.boot_id.clone_from(&machine.boot_id);
    let swap = i64::try_from(machine.swap).unwrap_or(i64::MAX);
    info.swap = (swap > 0).then_some(api::NodeSwapStatus { capacity: Some(swap) });
    if is_new_boot && !work.memory.reboot_reported {
        work.memory.reboot_reported = true;
        let text = format!("Node {} has been rebooted, boot id: {}", work.settings.name, machine.boot_id);
        work.events.push(EventRecord::node_warning("Rebooted", text));
    }
}
