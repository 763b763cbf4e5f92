//! Devices that the containers of a pod request. Pure. Spec 06c §1.6.

use berth_types::{Pod, api, quantity::Amount, resources::units};

/// Whether a container leaves its devices to later containers of the pod.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceReuse {
    /// An init container that ends before the next container starts.
    Leaves,
    /// A sidecar or a regular container: it runs beside all later ones.
    Keeps,
}

/// Containers whose devices are allocated at admission, in order: init containers, then regular ones.
pub fn containers(pod: &Pod) -> impl Iterator<Item = (&api::Container, DeviceReuse)> {
    let reuse = |container: &api::Container| {
        if Pod::is_sidecar(container) { DeviceReuse::Keeps } else { DeviceReuse::Leaves }
    };
    let init = pod.init_containers().iter().map(move |container| (container, reuse(container)));
    init.chain(pod.containers().iter().map(|container| (container, DeviceReuse::Keeps)))
}

/// Limits of a container that a device plugin may serve: name and number, by name. Resources that the pod's claims
/// provide are left to DRA.
pub fn limits<'a>(pod: &'a Pod, container: &'a api::Container) -> impl Iterator<Item = (&'a str, usize)> {
    let claims = pod.status.as_ref().and_then(|status| status.extended_resource_claim_status.as_ref());
    let is_claimed = move |resource: &str| {
        let mut mappings = claims.iter().flat_map(|claims| &claims.request_mappings);
        mappings.any(|mapping| mapping.container_name == container.name && mapping.resource_name == resource)
    };
    let limits = container.resources.as_ref().and_then(|resources| resources.limits.as_ref());
    limits.into_iter().flatten().filter_map(move |(resource, quantity)| {
        // All names of device resources have a prefix; `cpu`, `memory`, and the like have none.
        if !resource.contains('/') || is_claimed(resource) {
            return None;
        }
        let number = units(resource, Amount::try_from(quantity).ok()?);
        Some((resource.as_str(), usize::try_from(number).ok().filter(|number| *number > 0)?))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn limits_with_a_prefix_are_requests_for_devices_unless_claims_provide_them() {
        let object = json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {
                "initContainers": [
                    {"name": "setup"},
                    {"name": "sidecar", "restartPolicy": "Always"},
                ],
                "containers": [{"name": "c", "resources": {"limits": {
                    "cpu": "1", "memory": "1Gi", "hugepages-2Mi": "2Mi",
                    "example.com/gpu": "2", "example.com/claimed": "1", "example.com/none": "0",
                }}}, {"name": "d", "resources": {"limits": {"example.com/claimed": "3"}}}],
            },
            "status": {"extendedResourceClaimStatus": {"resourceClaimName": "x", "requestMappings": [
                {"containerName": "c", "resourceName": "example.com/claimed", "requestName": "r"},
            ]}},
        });
        let pod = Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete");
        let order: Vec<(&str, DeviceReuse)> = containers(&pod).map(|(c, reuse)| (c.name.as_str(), reuse)).collect();
        let keeps = DeviceReuse::Keeps;
        assert_eq!(order, [("setup", DeviceReuse::Leaves), ("sidecar", keeps), ("c", keeps), ("d", keeps)]);
        let limits = |index: usize| limits(&pod, &pod.containers()[index]).collect::<Vec<_>>();
        assert_eq!(limits(0), [("example.com/gpu", 2)]);
        assert_eq!(limits(1), [("example.com/claimed", 3)]);
    }
}
