//! Health of claimed devices as pod status entries. Pure. Spec 06c §3.6.

use jiff::Timestamp;

use super::{
    claim_plan::named_requests,
    health::HealthTable,
    model::{Claims, PreparedDevice},
};
use berth_types::{Pod, api};

/// Entries of `allocatedResourcesStatus` of a container: one per claim or request, sorted by name and device.
pub fn statuses(
    pod: &Pod,
    container: &api::Container,
    claims: &Claims,
    health: &HealthTable,
    now: Timestamp,
    reports_messages: bool,
) -> Vec<api::ResourceStatus> {
    let mut statuses = Vec::new();
    for (name, request, key) in named_requests(pod, container) {
        let Some(claim) = claims.get(&key) else { continue };
        let mut resources: Vec<api::ResourceHealth> = Vec::new();
        for (driver, devices) in &claim.drivers {
            for device in devices.iter().filter(|device| serves(device, &request)) {
                let (state, message) = health.get(driver, &device.pool, &device.device, now);
                resources.push(api::ResourceHealth {
                    resource_id: device_id(driver, device),
                    health: Some(state.as_str().to_owned()),
                    message: message.filter(|text| reports_messages && !text.is_empty()).map(str::to_owned),
                });
            }
        }
        resources.sort_by(|a, b| a.resource_id.cmp(&b.resource_id));
        resources.dedup_by(|a, b| a.resource_id == b.resource_id);
        let entry = if request.is_empty() { format!("claim:{name}") } else { format!("claim:{name}/{request}") };
        statuses.push(api::ResourceStatus { name: entry, resources: Some(resources) });
    }
    statuses.sort_by(|a, b| a.name.cmp(&b.name));
    statuses
}

/// Whether a device satisfies a request; one of a subrequest satisfies its request.
fn serves(device: &PreparedDevice, request: &str) -> bool {
    let is_same = |own: &String| own == request || own.split_once('/').is_some_and(|(parent, _)| parent == request);
    request.is_empty() || device.requests.is_empty() || device.requests.iter().any(is_same)
}

fn device_id(driver: &str, device: &PreparedDevice) -> String {
    let name = || format!("{driver}/{}/{}", device.pool, device.device);
    device.cdi_ids.first().cloned().unwrap_or_else(name)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, time::Duration};

    use serde_json::json;

    use super::*;
    use crate::dra::{
        health::{DeviceHealth, DeviceReport},
        model::{ClaimKey, ClaimState},
    };

    fn device(name: &str, requests: &[&str], cdi: &[&str]) -> PreparedDevice {
        let texts = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect();
        PreparedDevice {
            pool: "pool".to_owned(),
            device: name.to_owned(),
            share_id: None,
            requests: texts(requests),
            cdi_ids: texts(cdi),
        }
    }

    #[test]
    fn devices_of_a_request_have_the_health_that_their_driver_reports() {
        // AC-06c-25, AC-06c-26
        let object = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {
            "resourceClaims": [{"name": "one", "resourceClaimName": "claim"}],
            "containers": [{"name": "c", "resources": {"claims": [
                {"name": "one", "request": "gpu"}, {"name": "one"}, {"name": "unknown"},
            ]}}],
        }});
        let pod = Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete");
        let devices = vec![
            device("gpu-0", &["gpu"], &["vendor/gpu=0"]),
            device("gpu-1", &["gpu/small"], &[]),
            device("nic", &["nic"], &["vendor/nic=0"]),
        ];
        let state = ClaimState { drivers: BTreeMap::from([("driver".to_owned(), devices)]), ..ClaimState::default() };
        let claims = Claims::from([(ClaimKey { namespace: "n".to_owned(), name: "claim".to_owned() }, state)]);
        let now = Timestamp::now();
        let mut health = HealthTable::default();
        let report = |device: &str, health, message: &str| DeviceReport {
            pool: "pool".to_owned(),
            device: device.to_owned(),
            health,
            timeout: Duration::ZERO,
            message: message.to_owned(),
        };
        let reports =
            vec![report("gpu-0", DeviceHealth::Unhealthy, "xid 79"), report("nic", DeviceHealth::Healthy, "")];
        let _ = health.update("driver", reports, now);
        let shown = |now, messages| -> Vec<String> {
            let entries = statuses(&pod, &pod.containers()[0], &claims, &health, now, messages);
            let line = |name: &str, resource: &api::ResourceHealth| {
                let health = resource.health.as_deref().unwrap_or_default();
                let message = resource.message.as_deref().unwrap_or_default();
                format!("{name} {} {health} {message}", resource.resource_id).trim_end().to_owned()
            };
            let lines = entries
                .iter()
                .flat_map(|entry| entry.resources.iter().flatten().map(|resource| line(&entry.name, resource)));
            lines.collect()
        };
        assert_eq!(
            shown(now, true),
            [
                "claim:one driver/pool/gpu-1 Unknown",
                "claim:one vendor/gpu=0 Unhealthy xid 79",
                "claim:one vendor/nic=0 Healthy",
                "claim:one/gpu driver/pool/gpu-1 Unknown",
                "claim:one/gpu vendor/gpu=0 Unhealthy xid 79",
            ]
        );
        assert_eq!(shown(now, false)[1], "claim:one vendor/gpu=0 Unhealthy");
        let later = now + Duration::from_secs(31);
        assert!(shown(later, true).iter().all(|line| line.ends_with("Unknown")));
    }
}
