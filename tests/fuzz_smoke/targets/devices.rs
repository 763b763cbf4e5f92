//! Fuzz targets: checkpoints, device lists, and allocate responses of device plugins; state files of DRA.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use berth_proto::device_plugin::{AllocateResponse, ContainerAllocateResponse, ListAndWatchResponse};
use berth_resources::{
    devices::{DeviceAssignment, checkpoint::Checkpoint, container_options, plugin_client},
    dra::{checkpoint as dra_state, health::HealthTable},
};
use jiff::Timestamp;
use prost::Message;

/// The device manager's checkpoint, also with a wrong checksum.
pub fn device_checkpoint(data: &[u8]) {
    let decoded = Checkpoint::decode(data);
    let Ok((checkpoint, is_intact)) = Checkpoint::decode_unverified(data) else {
        assert!(decoded.is_err());
        return;
    };
    assert_eq!(decoded.is_ok(), is_intact);
    assert_eq!(Checkpoint::decode(&checkpoint.encode()), Ok(checkpoint), "written and read");
}

/// A `ListAndWatch` message of a device plugin.
pub fn device_list(data: &[u8]) {
    let Ok(message) = ListAndWatchResponse::decode(data) else { return };
    let listed = message.devices.len();
    let (devices, unnamed) = plugin_client::devices(message);
    assert!(devices.len() + unnamed <= listed);
    for (id, device) in &devices {
        assert!(!id.as_str().is_empty() && device.nodes.len() <= 128, "{id}");
        assert!(device.nodes.iter().all(|node| *node >= 0), "{id}: {:?}", device.nodes);
    }
    let ids: BTreeSet<_> = devices.keys().cloned().collect();
    assert_eq!(DeviceAssignment::new(&ids, &devices, Vec::new()).ids(), ids);
}

/// A device plugin's answer to `Allocate`, and the container options that it becomes.
pub fn allocate_response(data: &[u8]) {
    let assignment = |response: &[u8]| DeviceAssignment { response: Some(response.to_vec()), ..Default::default() };
    // A checkpoint of another agent has responses that were not validated.
    drop(container_options::merged("main", &BTreeMap::from([("a".to_owned(), assignment(data))])));
    let Ok(response) = ContainerAllocateResponse::decode(data) else { return };
    let answer = AllocateResponse { container_responses: vec![response.clone(), Default::default()] };
    let stored = match plugin_client::first_response(answer) {
        Ok(stored) => stored,
        Err(error) => {
            assert!(error.len() <= 16 << 10, "an error of {} bytes", error.len());
            return;
        }
    };
    assert_eq!(ContainerAllocateResponse::decode(stored.as_slice()), Ok(response.clone()), "written and read");
    let once = BTreeMap::from([("a".to_owned(), assignment(&stored))]);
    let twice = BTreeMap::from([("a".to_owned(), assignment(&stored)), ("b".to_owned(), assignment(&stored))]);
    let options = container_options::merged("main", &once);
    assert_eq!(container_options::merged("main", &twice), options, "the first value of a key wins");
    assert!(options.envs.len() == response.envs.len() && options.annotations.len() == response.annotations.len());
    assert!(options.envs.iter().all(|(name, _)| !name.is_empty() && !name.contains(['=', '\0'])));
    let mounts = options.mounts.iter().flat_map(|mount| [&mount.container_path, &mount.host_path]);
    let nodes = options.devices.iter().flat_map(|node| [&node.container_path, &node.host_path]);
    assert!(mounts.chain(nodes).all(|path| path.starts_with('/') && !path.contains('\0')));
    let names: BTreeSet<&str> = options.cdi_devices.iter().map(|device| device.name.as_str()).collect();
    assert_eq!(names.len(), options.cdi_devices.len(), "CDI names are unique");
}

/// The checkpoint of DRA, as a whole file and as the data of a file with a valid checksum.
pub fn dra_checkpoint(data: &[u8]) {
    for claims in [dra_state::decode(data), dra_state::decode_data(data)].into_iter().flatten() {
        assert!(claims.values().all(|claim| !claim.is_prepared), "drivers prepare claims again");
        assert_eq!(dra_state::decode(&dra_state::encode(&claims)), Ok(claims), "written and read");
    }
}

/// The state file with the health of DRA devices.
pub fn dra_health_state(data: &[u8]) {
    let Ok(mut table) = HealthTable::decode(data) else { return };
    // Keys join pool and device by a slash, so devices of foreign names may share one: only the second file is final.
    let written = table.encode();
    let again = HealthTable::decode(&written).map(|table| table.encode());
    assert_eq!(again, Ok(written), "written and read");
    let now = Timestamp::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    table.expire(now);
    assert_ne!(table.next_expiry(now), Some(Duration::ZERO), "what has expired is removed");
    assert!(table.expire(now).is_empty(), "devices expire once");
}
